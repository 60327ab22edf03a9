"""Small PTX modules written by hand, for the emulator's own tests."""

from __future__ import annotations

import numpy as np

from .decode import DTYPE
from .launch import Launch
from .lowfloat import DECODE, f32_to_bf16

KIND_SIZE = {"f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "u8": 1, "s8": 1, "e2m1": 1}

_CLASS = {1: ("p", "pred"), 8: ("h", "b8"), 16: ("h", "b16"), 32: ("r", "b32"), 64: ("q", "b64")}


def module(
    body: str, params: str = ".param .u64 out", *, shared: int = 0, target: str = "sm_90a", name: str = "k"
) -> str:
    """A module with one kernel. Registers %p, %h, %r, %f and %q (1, 16, 32, 32 and 64 bits) are declared."""
    static = f".shared .align 1024 .b8 smem[{shared}];" if shared else ".extern .shared .align 1024 .b8 smem[];"
    return f""".version 8.8
.target {target}
.address_size 64
{static}
.visible .entry {name}({params})
{{
.reg .pred %p<16>;
.reg .b16 %h<16>;
.reg .b32 %r<64>;
.reg .f32 %f<64>;
.reg .b64 %q<32>;
{body}
ret;
}}
"""


def evaluate(instruction: str, result: str, **inputs) -> np.ndarray:
    """Executes one instruction per lane and returns the 32 results of type `result`.

    Inputs are named by the operand they stand for, with their type: `a=("s32", [..])`; shorter lists are repeated.
    In the instruction text `d` is the destination and the input names are the sources, e.g. "add.s32 d, a, b".
    """
    prefix, class_ = _CLASS[8 * DTYPE[result].itemsize if result != "pred" else 1]
    lines = ["mov.u32 %r60, %tid.x;", "ld.param.u64 %q30, [out];"]
    params, args, names = [".param .u64 out"], [], {"d": f"%{prefix}0"}
    for i, (name, (type_, values)) in enumerate(inputs.items(), 1):
        size = 1 if type_ == "pred" else DTYPE[type_].itemsize
        data = np.resize(np.asarray(values).astype(DTYPE[type_] if type_ != "pred" else np.uint8), 32).copy()
        params.append(f".param .u64 in{i}")
        args.append(data)
        letter = "h" if type_ == "pred" else _CLASS[8 * size][0]
        names[name] = f"%{letter}{i}"
        lines += [
            f"ld.param.u64 %q29, [in{i}];",
            f"mad.wide.u32 %q28, %r60, {size}, %q29;",
            f"ld.global.b{8 * size} %{letter}{i}, [%q28];",
        ]
        if type_ == "pred":
            lines.append(f"setp.ne.b16 %p{i}, %h{i}, 0;")
            names[name] = f"%p{i}"
    opcode, _, operands = instruction.partition(" ")
    words = [names.get(w, w) for w in operands.replace(",", " , ").replace("|", " | ").split()]
    lines.append(f"{opcode} {' '.join(words)};")
    if result == "pred":
        lines.append("selp.b32 %r0, 1, 0, %p0;")
        prefix, class_ = "r", "b32"
    size = int(class_[1:]) // 8 if DTYPE[result].itemsize != 1 or result == "pred" else 1
    lines += [f"mad.wide.u32 %q28, %r60, {size}, %q30;", f"st.global.b{8 * size} [%q28], %{prefix}0;"]
    out = np.zeros(32, np.uint32 if result == "pred" else DTYPE[result])
    Launch(module("\n".join(lines), ", ".join(params)), 1, 32, [out, *args]).run()
    return out.astype(bool) if result == "pred" else out


def operand(rng, kind: str, rows: int, k: int):
    """Random bit patterns [rows, k] and their values, small enough for sums to be exact."""
    if kind == "f16":
        x = rng.integers(-8, 9, (rows, k)).astype(np.float16)
        return x.view(np.uint16), x.astype(np.float64)
    if kind == "bf16":
        x = rng.integers(-8, 9, (rows, k)).astype(np.float32)
        return f32_to_bf16(x).reshape(rows, k), x.astype(np.float64)
    raw = rng.integers(0, 256, (rows, k)).astype(np.uint8)
    if kind == "e2m1":
        return raw & 15, DECODE[kind][raw & 15]
    if kind in DECODE:
        raw = raw & 0x80 | 0x38 | raw & 0x0C  # +-1, 1.5, 2, 3: sums of 32 products stay exact
        return raw, DECODE[kind][raw]
    return raw, raw.view(np.int8).astype(np.int64) if kind == "s8" else raw.astype(np.int64)


def place(raw: np.ndarray, k_major: bool, swizzle: int):
    """A matrix [rows, k] in its canonical layout, element by element: (bytes, leading, stride offsets)."""
    size, (rows, k) = raw.itemsize, raw.shape
    wide = swizzle or 16
    image, end = np.zeros(rows * k * size * 8 + 4096, np.uint8), 0
    along, across = (k, rows) if k_major else (rows, k)  # along: the contiguous direction
    panels = -(-along * size // wide)
    if k_major:
        leading, stride = (128, 128 * panels) if swizzle == 0 else (0, 8 * wide)
    else:
        leading, stride = (128 * -(-across // 8), 128) if swizzle == 0 else (8 * wide * -(-across // 8), 8 * wide)
    if not k_major and swizzle == 0:
        leading, stride = stride, leading  # without swizzle, MN-major: leading steps over k, stride over mn
    for r in range(rows):
        for c in range(k):
            a, b = (c, r) if k_major else (r, c)
            panel, inside = divmod(a * size, wide)
            row = b % 8
            chunk = inside // 16 ^ {128: row, 64: row // 2, 32: row // 4, 0: 0}[swizzle]
            if k_major:
                base = panel * leading + b // 8 * stride if swizzle == 0 else b // 8 * stride
                assert swizzle == 0 or panel == 0
            elif swizzle == 0:
                base = b // 8 * leading + panel * stride
            else:
                base = panel * leading + b // 8 * stride
            at = base + row * wide + chunk * 16 + inside % 16
            image[at : at + size] = raw[r : r + 1, c].view(np.uint8)
            end = max(end, at + size)
    return image[:end], leading, stride
