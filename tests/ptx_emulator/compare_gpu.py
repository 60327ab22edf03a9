"""The same kernels and inputs on a GPU and in the emulator, compared bit for bit. Needs a Hopper GPU and cuda-python:

    cd tests && python -m ptx_emulator.compare_gpu [LOG]

Opcodes (approximations aside), copies and matrix products, of exact sums and of random operands over a wide range, must
agree in every bit. Exits with 1 if something does not.
"""

from __future__ import annotations

import sys

import numpy as np

from . import handmade, ring, test_opcodes, test_wgmma
from .launch import Launch
from .lowfloat import DECODE, bf16_to_f32
from .memory import Ptr, as_bytes

_CTYPES = {f"{kind}{bits}": f"c_{'int' if kind == 's' else 'uint'}{bits}" for kind in "usb" for bits in (32, 64)}
_CTYPES["f32"] = "c_float"


def _check(result):
    if int(result[0]):
        raise RuntimeError(f"CUDA error: {result[0]}")
    return result[1] if len(result) == 2 else result[1:]


class GpuLaunch:
    """`Launch` on a GPU: the driver compiles the PTX text; arrays are copied there and back."""

    context = None

    def __init__(self, ptx: str, grid, block, args=(), *, smem: int = 0, **emulator_options):
        self.emulated = Launch(ptx, grid, block, args, smem=smem)  # for its checks and parameter types
        self.text, self.args, self.smem = ptx, args, smem

    def run(self) -> None:
        import ctypes

        from cuda.bindings import driver as cu

        if GpuLaunch.context is None:
            _check(cu.cuInit(0))
            GpuLaunch.context = _check(cu.cuDevicePrimaryCtxRetain(_check(cu.cuDeviceGet(0))))
            _check(cu.cuCtxSetCurrent(GpuLaunch.context))
        module = _check(cu.cuModuleLoadData(self.text.encode() + b"\0"))
        program = self.emulated.program
        function = _check(cu.cuModuleGetFunction(module, program.name.encode()))
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(cu.cuFuncSetAttribute(function, attribute, self.smem))
        buffers: dict = {}
        values, types = [], []
        for p, a in zip(program.kernel.params, self.args, strict=True):
            types.append(getattr(ctypes, _CTYPES[p.type]))
            values.append(self._pointer(cu, buffers, a) if isinstance(a, (Ptr, np.ndarray)) else a)
        stream, grid, block = 0, self.emulated.grid, self.emulated.block
        _check(cu.cuLaunchKernel(function, *grid, *block, self.smem, stream, (tuple(values), tuple(types)), 0))
        _check(cu.cuCtxSynchronize())
        for data, pointer in buffers.values():
            _check(cu.cuMemcpyDtoH(data.ctypes.data, pointer, data.size))
            _check(cu.cuMemFree(pointer))
        _check(cu.cuModuleUnload(module))

    @staticmethod
    def _pointer(cu, buffers: dict, argument) -> int:
        array, offset = (argument.array, argument.offset) if isinstance(argument, Ptr) else (argument, 0)
        data, first = as_bytes(array)
        key = (data.ctypes.data, data.size)
        if key not in buffers:
            pointer = _check(cu.cuMemAlloc(max(data.size, 1)))
            _check(cu.cuMemcpyHtoD(pointer, data.ctypes.data, data.size))
            buffers[key] = data, pointer
        return int(buffers[key][1]) + first + offset


def on_both(modules, run) -> list:
    """[result in the emulator, result on the GPU] of a function that launches through `modules`' name Launch."""
    results = []
    for cls in (Launch, GpuLaunch):
        for m in modules:
            m.Launch = cls
        try:
            results.append(run())
        finally:
            for m in modules:
                m.Launch = Launch
    return results


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes() or bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


def opcodes(log) -> bool:
    good = True
    for text, result, inputs, _ in test_opcodes.INTEGER + test_opcodes.FLOAT + test_opcodes.CONVERT:
        a, b = on_both([handmade], lambda t=text, r=result, i=inputs: handmade.evaluate(t, r, **i))
        approximate = ".approx" in text
        if not same(a, b):
            log(f"{'differs (an approximation)' if approximate else 'DIFFERS'}: {text}: {a[:4]} and {b[:4]}")
            good &= approximate
    return good


def _any_operand(rng, kind: str, rows: int, k: int):
    """Random bit patterns, finite, over the whole range of 8-bit types and a wide one of 16-bit types."""
    if kind == "f16":
        x = (rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-12, 4, (rows, k))).astype(np.float16)
        return x.view(np.uint16), x.astype(np.float64)
    if kind == "bf16":
        raw = rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-12, 4, (rows, k))
        raw = (raw.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return raw, bf16_to_f32(raw).astype(np.float64)
    raw = rng.integers(0, 256, (rows, k)).astype(np.uint8)
    if kind in DECODE:
        raw = np.where(np.isfinite(DECODE[kind][raw]), raw, 0).astype(np.uint8)
        return raw, DECODE[kind][raw]
    return raw, raw.view(np.int8).astype(np.int64) if kind == "s8" else raw.astype(np.int64)


def products(log, exact: bool) -> bool:
    good = True
    original = test_wgmma.operand
    for kinds in (("f16", "f16"), ("bf16", "bf16"), ("e4m3", "e4m3"), ("u8", "u8"), ("u8", "s8"), ("s8", "u8")):
        for n in (8, 16, 24, 32):

            def run(kinds=kinds, n=n):
                test_wgmma.RNG = np.random.default_rng(n)
                test_wgmma.operand = original if exact else _any_operand
                try:
                    return test_wgmma.run(*kinds, n, regs=n != 16)[0]
                finally:
                    test_wgmma.operand = original

            a, b = on_both([test_wgmma], run)
            if not same(a, b):
                log(f"DIFFERS: wgmma {kinds} N {n}: {(a != b).sum()} of {a.size}")
                good = False
    return good


def main(path: str | None) -> int:
    lines: list[str] = []

    def log(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    a, b = on_both([ring], ring.run)
    good = same(a, b)
    log(f"ring of bulk copies with wgmma: {'equal' if good else 'DIFFERS'}")
    for name, run in (
        ("opcodes", lambda: opcodes(log)),
        ("exact matrix products", lambda: products(log, True)),
        ("random matrix products", lambda: products(log, False)),
    ):
        fine = run()
        good &= fine
        log(f"{name}: {'equal' if fine else 'NOT EQUAL'}")
    if path:
        with open(path, "w") as f:
            f.write("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
