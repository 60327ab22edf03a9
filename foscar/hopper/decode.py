"""Launching a decode: the kernels of one config on one device, and their arguments for one call."""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass

import torch

from ..common import jit
from ..common.cache import PagedKVCache
from ..common.launch import load_kernel
from ..common.plan import CombineConfig, Workspace
from . import arguments
from .config import ARCH, DecodeConfig

BUILD = f"{__package__}.build"
LSE_UNITS = {2: 1.0, "e": math.log(2.0)}


@dataclass(frozen=True)
class Tables:
    """Where the pages and lengths of the requests are, all int32 on the device.

    ``pages`` is [batch, max_pages] (dense, ``indptr`` None) or the concatenated page lists with ``indptr`` [batch + 1].
    """

    pages: torch.Tensor
    lengths: torch.Tensor
    indptr: torch.Tensor | None = None


class Buffers:
    """The workspace of launches of up to ``batch`` requests; reusable as long as launches do not overlap."""

    def __init__(self, device: torch.device, workers: int, batch: int, kv_heads: int, group: int, head_dim: int):
        size = Workspace.sizes(workers, batch, kv_heads, group, head_dim)
        self.partial_out = torch.empty(size.partial_out, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(size.partial_lse, dtype=torch.float32, device=device)
        self.splits = torch.empty(size.splits, dtype=torch.int32, device=device)


class HopperDecode:
    """Both kernels of a config on one device, ready to launch; thread-safe."""

    def __init__(self, config: DecodeConfig, device: torch.device):
        self.config, self.device = config, device
        self.ctas = torch.cuda.get_device_properties(device).multi_processor_count
        self.workers = self.ctas * config.warpgroups
        combine = CombineConfig(config.head_dim, config.q_dtype)
        if self.workers > combine.max_parts:
            raise ValueError(f"{self.workers} workers on {self.ctas} SMs, the combine takes {combine.max_parts}")
        self._launches = [
            load_kernel(jit.load_or_compile(name, c, ARCH, f"{BUILD}:{function}"), device.index).prepare(
                [0] * len(names), pdl=True
            )
            for name, c, function, names in (
                ("hopper_decode", config, "build_decode", arguments.DECODE),
                ("hopper_combine", combine, "build_combine", arguments.COMBINE),
            )
        ]
        self._lock = threading.Lock()

    def buffers(self, batch: int, kv_heads: int, group: int) -> Buffers:
        return Buffers(self.device, self.workers, batch, kv_heads, group, self.config.head_dim)

    def __call__(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        tables: Tables,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        buffers: Buffers,
        sm_scale: float,
        lse_base: int | str,
    ) -> None:
        """Launch on the device's current stream; everything is checked already (api.py)."""
        batch, heads, _ = q.shape
        group = heads // cache.num_kv_heads
        values = {
            "q": q.data_ptr(),
            "q_stride": q.stride(0),
            "q_head_stride": q.stride(1),
            "cache": cache.data.data_ptr(),
            "page_stride": cache.data.stride(0),
            "head_stride": cache.data.stride(1),
            "pages": tables.pages.data_ptr(),
            "table_stride": 0 if tables.indptr is not None else tables.pages.stride(0),
            "indptr": 0 if tables.indptr is None else tables.indptr.data_ptr(),
            "lengths": tables.lengths.data_ptr(),
            "out": out.data_ptr(),
            "out_stride": out.stride(0),
            "out_head_stride": out.stride(1),
            "lse": 0 if lse is None else lse.data_ptr(),
            "partial_out": buffers.partial_out.data_ptr(),
            "partial_lse": buffers.partial_lse.data_ptr(),
            "splits": buffers.splits.data_ptr(),
            "batch": batch,
            "kv_heads": cache.num_kv_heads,
            "group": group,
            "sm_scale_log2": sm_scale * math.log2(math.e),
            "lse_unit": LSE_UNITS[lse_base],
        }
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with self._lock:
            for launch, names, grid in zip(
                self._launches, (arguments.DECODE, arguments.COMBINE), (self.ctas, batch * heads), strict=True
            ):
                launch.update([values[name] for name in names])
                launch(grid, stream)


@functools.cache
def decoder(config: DecodeConfig, device_index: int) -> HopperDecode:
    """The kernels of ``config`` on a device, compiled and loaded once."""
    return HopperDecode(config, torch.device("cuda", device_index))
