"""Small PTX modules written by hand, for the emulator's own tests."""

from __future__ import annotations

import numpy as np

from .decode import DTYPE
from .launch import Launch

_CLASS = {1: ("p", "pred"), 8: ("h", "b8"), 16: ("h", "b16"), 32: ("r", "b32"), 64: ("q", "b64")}


def module(body: str, params: str = ".param .u64 out", *, shared: int = 0, threads: int = 0, name: str = "k") -> str:
    """A module with one kernel. Registers %p, %h, %r, %f, %q (pred, 16, 32, 32, 64 bits) and %acc, %qd are declared."""
    static = f".shared .align 1024 .b8 smem[{shared}];" if shared else ".extern .shared .align 1024 .b8 smem[];"
    required = f".reqntid {threads}, 1, 1" if threads else ""
    return f""".version 8.8
.target sm_90a
.address_size 64
{static}
.visible .entry {name}({params}) {required}
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
        lines += [f"ld.param.u64 %q29, [in{i}];", f"mad.wide.u32 %q28, %r60, {size}, %q29;",
                  f"ld.global.b{8 * size} %{letter}{i}, [%q28];"]
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
