"""tcgen05 as the CuTe DSL emits it, with its own layouts and descriptors: compiled for sm_100a, executed here."""

import functools

import numpy as np
import pytest

from ptx_emulator import Launch

torch = pytest.importorskip("torch")
cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
import cutlass.utils.blackwell_helpers as sm100  # noqa: E402
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr  # noqa: E402
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05  # noqa: E402
from cutlass.cute.runtime import make_fake_stream  # noqa: E402

M, N, K = 128, 16, 64
A_COLUMN, COLUMNS = 32, 128  # where A lies in tensor memory; what is allocated


def make_mma(dtype, source):
    one, k_major = tcgen05.CtaGroup.ONE, OperandMajorMode.K
    if dtype.width == 8:
        op = tcgen05.MmaF8F6F4Op(dtype, dtype, Float32, (M, N, 32), one, source, k_major, k_major)
    else:
        op = tcgen05.MmaF16BF16Op(dtype, Float32, (M, N, 16), one, source, k_major, k_major)
    return cute.make_tiled_mma(op)


def allocate(smem, layout, dtype):
    return smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def view(dtype, address, rows, columns):
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((rows, columns), stride=(columns, 1)))


@cute.jit
def to_tensor_memory(pointer: cute.Pointer, words: cute.Tensor, thread: Int32, count: cutlass.Constexpr):
    """Row `thread` of a matrix of words -> lane `thread`."""
    target = cute.make_tensor(pointer + A_COLUMN, cute.make_layout((M, count), stride=(65536, 1)))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(count)), Float32), target)
    mine = copy.get_slice(thread)
    source = mine.partition_S(words)
    registers = cute.make_rmem_tensor(source.shape, Float32)
    cute.autovec_copy(source, registers)
    cute.copy(copy, registers, mine.partition_D(target))
    cute.arch.fence_view_async_tmem_store()


@cute.kernel
def kernel(a: Int64, b: Int64, c: Int64, dtype: cutlass.Constexpr, source: cutlass.Constexpr):
    """C = A B^T of one tile; A goes to shared or to tensor memory."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    mma = make_mma(dtype, source)
    a_layout = sm100.make_smem_layout_a(mma, (M, N, K), dtype, 1)
    smem = cutlass.memory.SmemAllocator()
    shared_a = allocate(smem, a_layout, dtype)
    shared_b = allocate(smem, sm100.make_smem_layout_b(mma, (M, N, K), dtype, 1), dtype)
    done, address = smem.allocate_array(Int64, 1), smem.allocate_array(Int32, 1)
    k_step, words = 256 // dtype.width, K * dtype.width // 32
    for k in cutlass.range(K, unroll_full=True):
        shared_a[(thread, k % k_step), 0, k // k_step, 0] = view(dtype, a, M, K)[thread, k]
    if thread < N:
        for k in cutlass.range(K, unroll_full=True):
            shared_b[(thread, k % k_step), 0, k // k_step, 0] = view(dtype, b, N, K)[thread, k]
    if warp == 0:
        cute.arch.alloc_tmem(COLUMNS, address)
        cute.arch.relinquish_tmem_alloc_permit()
    if thread == 0:
        cute.arch.mbarrier_init(done, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    pointer = cute.arch.retrieve_tmem_ptr(Float32, alignment=16, ptr_to_buffer_holding_addr=address)
    fragment_b = mma.make_fragment_B(shared_b)
    if const_expr(source == tcgen05.OperandSource.TMEM):
        to_tensor_memory(pointer, view(Float32, a, M, words), thread, words)
        cute.arch.sync_threads()
        layout = mma.make_fragment_A(a_layout.outer.shape).layout
        fragment_a = cute.make_tensor(cute.recast_ptr(pointer + A_COLUMN, dtype=dtype), layout)
    else:
        fragment_a = mma.make_fragment_A(shared_a)
    sums = cute.make_tensor(pointer, mma.make_fragment_C(mma.partition_shape_C((M, N))).layout)
    if warp == 0:
        for k in range_constexpr(K // k_step):
            mma.set(tcgen05.Field.ACCUMULATE, k > 0)
            cute.gemm(mma, sums, fragment_a[None, None, k, 0], fragment_b[None, None, k, 0], sums)
        with cute.arch.elect_one():
            tcgen05.commit(done)
    cute.arch.mbarrier_wait(done, 0)
    tile = sums[(None, None), 0, 0]
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x16), Float32), tile)
    mine = copy.get_slice(thread)
    target = mine.partition_D(view(Float32, c, M, N))
    registers = cute.make_rmem_tensor(target.shape, Float32)
    cute.copy(copy, mine.partition_S(tile), registers)
    cute.arch.fence_view_async_tmem_load()
    cute.autovec_copy(registers, target)
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.dealloc_tmem(pointer, COLUMNS)


@cute.jit
def host(a: Int64, b: Int64, c: Int64, dtype: cutlass.Constexpr, source: cutlass.Constexpr, stream):
    kernel(a, b, c, dtype, source).launch(grid=[1, 1, 1], block=[M, 1, 1], stream=stream)


@functools.cache
def compiled(dtype, source, folder: str) -> str:
    zero = Int64(0)
    options = f"--gpu-arch sm_100a --keep-ptx --keep-cubin --dump-dir {folder}"
    return cute.compile(host, zero, zero, zero, dtype, source, make_fake_stream(), options=options).artifacts.PTX


@pytest.mark.parametrize("source", ["SMEM", "TMEM"])
@pytest.mark.parametrize("dtype", ["Float16", "BFloat16", "Float8E4M3FN"])
def test_multiplication(dtype, source, tmp_path):
    text = compiled(getattr(cutlass, dtype), getattr(tcgen05.OperandSource, source), str(tmp_path))
    assert "tcgen05.mma" in text
    kind = {"Float16": torch.float16, "BFloat16": torch.bfloat16, "Float8E4M3FN": torch.float8_e4m3fn}[dtype]
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randint(-4, 5, (rows, K), generator=generator).float().to(kind) for rows in (M, N))
    for options in ({}, {"schedule": "late"}, {"seed": 1}, {"seed": 2}):
        c = torch.zeros(M, N)
        Launch(text, 1, M, [a, b, c], smem=64 * 1024, **options).run()
        np.testing.assert_array_equal(c, a.float() @ b.float().T)
