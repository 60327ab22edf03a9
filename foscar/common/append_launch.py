"""Launching the append kernel: which appends it takes, and its arguments.

It takes appends on a GPU, with k and v of one of its types whose last dimension is contiguous, unchecked.  All others,
and those for which there is no compiled kernel and nothing to compile one with, are torch operations (append.py) that
write the same bytes.
"""

from __future__ import annotations

import functools
import logging
import threading

import torch

from . import jit
from .append_config import BUILDER, CHANNELS, DTYPES, MAX_HEADS, NAME, PARAMETERS, AppendConfig
from .errors import CompileError, MissingDependencyError, UnsupportedDeviceError
from .launch import current_stream, device_arch, load_kernel

log = logging.getLogger("foscar")
_NAMES = {getattr(torch, name): name for name in DTYPES}


def config_of(cache, k: torch.Tensor, v: torch.Tensor) -> AppendConfig | None:
    """The kernel for an append (arguments are checked), or None where it is not the kernel's."""
    name = _NAMES.get(k.dtype)
    if name is None or v.dtype != k.dtype or k.stride(2) != 1 or v.stride(2) != 1 or cache.num_kv_heads > MAX_HEADS:
        return None
    steps = k.stride(0) | k.stride(1) | v.stride(0) | v.stride(1)
    vector = steps % CHANNELS == 0 and (k.data_ptr() | v.data_ptr()) % (CHANNELS * DTYPES[name]) == 0
    return _config(cache.format, cache.head_dim, cache.page_size, name, vector)


_config = functools.cache(AppendConfig)


def launch_values(
    config: AppendConfig,
    cache,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    indptr: torch.Tensor | None,
) -> tuple[dict[str, torch.Tensor | int], tuple[int, int, int]]:
    """The kernel's parameters by name (a tensor stands for its address), and the grid."""
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    n = k.shape[0]
    values = {
        "k": k,
        "k_stride": k.stride(0),
        "k_head_stride": k.stride(1),
        "v": v,
        "v_stride": v.stride(0),
        "v_head_stride": v.stride(1),
        "cache": cache.data,
        "page_stride": cache.data.stride(0),
        "head_stride": cache.data.stride(1),
        "pages": block_table,
        "table_stride": block_table.stride(0),
        "lengths": seq_lens.contiguous(),
        "indptr": 0 if indptr is None else indptr.contiguous(),
        "n": n,
        "batch": seq_lens.shape[0],
        "max_pages": block_table.shape[1],
        "num_pages": cache.num_pages,
    }
    return values, config.grid(n, cache.num_kv_heads, values["batch"], indptr is not None)


class AppendKernel:
    """The kernel of a config on one device, ready to launch; thread-safe."""

    def __init__(self, config: AppendConfig, device: torch.device):
        self.config, self.device = config, device
        loaded = load_kernel(jit.load_or_compile(NAME, config, device_arch(device), BUILDER), device.index)
        self._launch = loaded.prepare([0] * len(PARAMETERS))
        self._lock = threading.Lock()

    def __call__(self, cache, k, v, block_table, seq_lens, indptr) -> None:
        """Launch on the device's current stream; ``k`` has rows."""
        values, grid = launch_values(self.config, cache, k, v, block_table, seq_lens, indptr)
        numbers = [x if isinstance(x, int) else x.data_ptr() for x in map(values.__getitem__, PARAMETERS)]
        stream = current_stream(self.device)
        with self._lock:
            self._launch.update(numbers)
            self._launch(grid, stream)


@functools.cache
def kernel(config: AppendConfig, device: torch.device) -> AppendKernel | None:
    """The kernel of ``config`` on a device, compiled and loaded once; None where there is none to be had."""
    try:
        return AppendKernel(config, device)
    except (CompileError, MissingDependencyError, UnsupportedDeviceError) as e:
        log.warning("appending by torch operations, which is slow: %s", e)
        return None


def launch(cache, k, v, block_table, seq_lens, indptr) -> bool:
    """Append by one launch (arguments are checked); False where it is not the kernel's, and nothing was done.

    Rows whose position is negative or beyond the block table, or whose page id is outside the cache, are skipped; per
    channel, with all new rows of their token group.
    """
    config = config_of(cache, k, v)
    ready = None if config is None else kernel(config, cache.device)
    if ready is None:
        return False
    if k.shape[0] and cache.num_pages:
        ready(cache, k, v, block_table, seq_lens, indptr)
    return True
