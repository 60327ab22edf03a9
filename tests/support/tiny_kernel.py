"""The smallest kernel that has what matters to compiling and launching: pointers, integers, a float, shared memory."""

import os
from dataclasses import dataclass, field

NAME, BUILDER = "tiny_scale", "support.tiny_kernel:build"


@dataclass(frozen=True)
class Shape:
    threads: int = 128
    rows: int = 3  # of shared memory, one float per thread each


@dataclass(frozen=True)
class TinyConfig:
    shape: Shape = field(default_factory=Shape)
    reverse: bool = True  # each block's values in reverse order
    starved: bool = False  # asks for registers in a way that ptxas cannot grant (its note C7508)


def make_host():
    """The DSL functions, made on demand so that importing this module does not import the DSL."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Int64

    @cute.kernel
    def scale_kernel(p_x: Int64, n: Int32, p_y: Int64, a: Float32, offset: Int32, cfg: cutlass.Constexpr):
        threads = cfg.shape.threads
        tid = cute.arch.thread_idx()[0]
        i = cute.arch.block_idx()[0] * threads + tid
        smem = cutlass.memory.SmemAllocator()
        rows = smem.allocate_tensor(Float32, cute.make_layout((threads, cfg.shape.rows)), byte_alignment=1024)
        x = cute.make_tensor(cute.make_ptr(Float32, p_x, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(n))
        y = cute.make_tensor(cute.make_ptr(Float32, p_y, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(n))
        last = cfg.shape.rows - 1
        if cutlass.const_expr(cfg.starved):
            cute.arch.setmaxregister_decrease(24)
        if i < n:
            rows[tid, last] = x[i] * a + Float32(offset)
        cute.arch.sync_threads()
        if i < n:
            source = threads - 1 - tid if cutlass.const_expr(cfg.reverse) else tid
            y[i] = rows[source, last]

    @cute.jit
    def host(p_x: Int64, n: Int32, p_y: Int64, a: Float32, offset: Int32, grid: Int32, cfg: cutlass.Constexpr, stream):
        granted = {} if cutlass.const_expr(cfg.starved) else {"min_blocks_per_mp": 1}
        scale_kernel(p_x, n, p_y, a, offset, cfg).launch(
            grid=[grid, 1, 1], block=[cfg.shape.threads, 1, 1], stream=stream, **granted
        )

    return host


def build(config, arch):
    """Compile; notes each call in the file that FOSCAR_TEST_COMPILES names."""
    from cutlass import Float32, Int32, Int64

    from foscar.common.jit import compile_jit

    if path := os.environ.get("FOSCAR_TEST_COMPILES"):
        with open(path, "a") as f:
            f.write(f"{os.getpid()}\n")
    zero = Int64(0)
    return compile_jit(make_host(), zero, Int32(1), zero, Float32(1), Int32(0), Int32(1), config, arch=arch)
