"""Where a decode check runs: the same call on the CPU backend, on a GPU or in the emulator, CPU tensors in and out."""

from __future__ import annotations

import math
from typing import Protocol

import torch

import foscar
from foscar.api import _readable as readable
from foscar.common import jit
from foscar.common.cache import PagedKVCache
from foscar.common.plan import CombineConfig, Workspace
from foscar.hopper import arguments
from foscar.hopper.config import ARCH, TileConfig
from foscar.hopper.decode import BUILD, LSE_UNITS, Tables

from .gpu_kernels import config_of


class Runner(Protocol):
    """What the checks of :mod:`support.decode_checks` need.

    Attributes:
        unit: (sm_scale, lse_base) with which the LSE of a single token is ``q . k`` itself, without a rounding.
    """

    unit: tuple[float, int | str]

    def workers(self, config) -> int:
        """How many workers of a kernel share the tiles of a launch."""

    def decode(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        tables: Tables,
        *,
        tile: TileConfig | None = None,
        sm_scale: float | None = None,
        lse_base: int | str = 2,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of tensors on the CPU, whose strides are kept; ``out`` is written in place, where given."""


def call(q, cache, tables: Tables, *, tile, sm_scale, lse_base, out, backend) -> tuple[torch.Tensor, torch.Tensor]:
    """The public API on tensors of any device: dense tables by decode_attention, compressed ones by the wrapper."""
    options = {"sm_scale": sm_scale, "lse_base": lse_base, "backend": backend, "tile": tile}
    if tables.indptr is None:
        return foscar.decode_attention(q, cache, tables.pages, tables.lengths, out=out, return_lse=True, **options)
    wrapper = foscar.BatchDecodeWithPagedKVCacheWrapper()
    last = tables.lengths - (tables.indptr.diff() - 1).clamp(min=0) * cache.page_size
    wrapper.plan(
        tables.indptr, tables.pages, last, q.shape[1], cache.num_kv_heads, cache.head_dim, cache.page_size,
        format=cache.format, q_data_type=q.dtype, **options,
    )  # fmt: skip
    return wrapper.run(q, cache, out=out, return_lse=True)


class TorchRunner:
    """The folded CPU backend: what a check must accept, and what it can be tried on where there is no GPU."""

    unit = (1.0, "e")

    def workers(self, config) -> int:
        return 7

    def decode(self, q, cache, tables, *, tile=None, sm_scale=None, lse_base=2, out=None):
        config_of(q, cache, tile)
        return call(q, cache, tables, tile=tile, sm_scale=sm_scale, lse_base=lse_base, out=out, backend="torch")


class GpuRunner:
    """The kernels on a GPU."""

    unit = (1 / math.log2(math.e), 2)

    def __init__(self, device: str = "cuda"):
        self.device = torch.device(device)

    def workers(self, config) -> int:
        return config.warpgroups * torch.cuda.get_device_properties(self.device).multi_processor_count

    def decode(self, q, cache, tables, *, tile=None, sm_scale=None, lse_base=2, out=None):
        config_of(q, cache, tile)
        there = mirror_cache(cache, self.device)
        tables = Tables(*(None if x is None else x.to(self.device) for x in vars(tables).values()))
        target = None if out is None else mirror(out, self.device)
        result, lse = call(mirror(q, self.device), there, tables, tile=tile, sm_scale=sm_scale, lse_base=lse_base,
                           out=target, backend="cuda")  # fmt: skip
        if out is None:
            return result.cpu(), lse.cpu()
        storage(out).copy_(storage(result))
        return out, lse.cpu()


class EmulatorRunner:
    """The kernels' PTX on this machine, by :mod:`ptx_emulator`: small sizes only.

    Args:
        ctas: of the decode kernel, as many as a GPU would have SMs.
        options: of ``ptx_emulator.Launch``, such as ``seed`` or ``schedule``.
    """

    unit = GpuRunner.unit

    def __init__(self, ctas: int = 1, **options):
        self.ctas, self.options = ctas, options

    def workers(self, config) -> int:
        return config.warpgroups * self.ctas

    def decode(self, q, cache, tables, *, tile=None, sm_scale=None, lse_base=2, out=None):
        from ptx_emulator import Launch, Memory

        config = config_of(q, cache, tile)
        batch, heads, head_dim = q.shape
        kv_heads, group = cache.num_kv_heads, heads // cache.num_kv_heads
        out = torch.full(q.shape, math.nan, dtype=q.dtype) if out is None else out
        lse = torch.full((batch, heads), math.nan)
        room = Workspace.sizes(self.workers(config), batch, kv_heads, group, head_dim)
        q = readable(q)
        values = {
            "q": q, "q_stride": q.stride(0), "q_head_stride": q.stride(1),
            "cache": cache.data, "page_stride": cache.data.stride(0), "head_stride": cache.data.stride(1),
            "pages": tables.pages, "table_stride": tables.pages.stride(0) if tables.indptr is None else 0,
            "indptr": 0 if tables.indptr is None else tables.indptr, "lengths": tables.lengths,
            "out": out, "out_stride": out.stride(0), "out_head_stride": out.stride(1), "lse": lse,
            "partial_out": torch.full((room.partial_out,), math.nan),
            "partial_lse": torch.full((room.partial_lse,), math.nan),
            "splits": torch.full((room.splits,), -1, dtype=torch.int32),
            "batch": batch, "kv_heads": kv_heads, "group": group, "lse_unit": LSE_UNITS[lse_base],
            "sm_scale_log2": (1 / math.sqrt(head_dim) if sm_scale is None else sm_scale) * math.log2(math.e),
        }  # fmt: skip
        memory = Memory()
        for kernel, names, grid in (
            (jit.load_or_compile("hopper_decode", config, ARCH, f"{BUILD}:build_decode"), arguments.DECODE, self.ctas),
            (jit.load_or_compile("hopper_combine", CombineConfig(head_dim, config.q_dtype), ARCH,
                                 f"{BUILD}:build_combine"), arguments.COMBINE, batch * heads),
        ):  # fmt: skip
            given = [values[name] for name in names]
            Launch(kernel.ptx, grid, kernel.block, given, smem=kernel.smem, memory=memory, **self.options).run()
        return out, lse


def storage(x: torch.Tensor) -> torch.Tensor:
    """The whole memory that ``x`` is a view of, as a flat tensor of its type."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def mirror(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``x`` on another device with its strides and offset, and with all that lies between its elements."""
    return storage(x).to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())


def mirror_cache(cache: PagedKVCache, device: torch.device) -> PagedKVCache:
    shape = (cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim)
    return PagedKVCache(*shape, cache.format, data=mirror(cache.data, device))


def why_no_gpu() -> str | None:
    """Why the kernels cannot run here, or None."""
    if not torch.cuda.is_available():
        return "needs a Hopper GPU: no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"needs a Hopper GPU, not {torch.cuda.get_device_name()}"
    return None
