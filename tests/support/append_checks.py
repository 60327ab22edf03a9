"""Where an append by the kernel runs, and rows that are hard to quantize."""

from __future__ import annotations

from collections.abc import Callable

import torch
from ptx_emulator import Launch

from foscar.common import append_launch, jit
from foscar.common.append_config import BUILDER, NAME, PARAMETERS, AppendConfig
from foscar.common.cache import PagedKVCache
from foscar.hopper.config import ARCH

from .inputs import random_values
from .runners import mirror, mirror_cache, storage


class EmulatedAppend:
    """The kernel's PTX, on CPU tensors."""

    def __init__(self, mutate: Callable[[str], str] = lambda ptx: ptx, **options):
        self.mutate, self.options = mutate, options  # of ptx_emulator.Launch

    def __call__(self, config: AppendConfig, cache, k, v, block_table, seq_lens, indptr=None) -> None:
        """:meth:`PagedKVCache.append`, into a cache on the CPU, by the kernel of ``config``."""
        assert append_launch.config_of(cache, k, v) == config
        kernel = jit.load_or_compile(NAME, config, ARCH, BUILDER)
        values, grid = append_launch.launch_values(config, cache, k, v, block_table, seq_lens, indptr)
        arguments = [values[name] for name in PARAMETERS]
        Launch(self.mutate(kernel.ptx), grid, kernel.block, arguments, smem=kernel.smem, **self.options).run()


class GpuAppend:
    """The same on a GPU, through the public call."""

    device = torch.device("cuda", 0)

    def __call__(self, config: AppendConfig, cache, k, v, block_table, seq_lens, indptr=None) -> None:
        tensors = (None if x is None else mirror(x, self.device) for x in (k, v, block_table, seq_lens, indptr))
        there, (k, v, *tables) = mirror_cache(cache, self.device), tensors
        assert append_launch.config_of(there, k, v) == config
        assert append_launch.kernel(config, self.device) is not None
        torch.cuda.set_sync_debug_mode("error")
        try:
            there.append(k, v, *tables)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        storage(cache.data).copy_(storage(there.data))


def cache_of(config: AppendConfig, num_pages: int, kv_heads: int = 2, seed: int = 0) -> PagedKVCache:
    """A cache of random bytes."""
    cache = PagedKVCache(num_pages, config.page_size, kv_heads, config.head_dim, config.format)
    gen = torch.Generator().manual_seed(seed)
    cache.data.copy_(torch.randint(0, 256, cache.data.shape, generator=gen, dtype=torch.uint8))
    return cache


def hard_rows(n: int, heads: int, head_dim: int, seed: int) -> torch.Tensor:
    """float32 [n, heads, head_dim]: magnitudes 1e-6 .. 6e4, and rows with something special, in one head each."""
    gen = torch.Generator().manual_seed(seed)
    x = random_values((n, heads, head_dim), seed)
    x = x * torch.logspace(-6, 4.2, n * heads)[torch.randperm(n * heads, generator=gen)].view(n, heads, 1)
    x = x.clamp(-6e4, 6e4)
    half, nan, inf = head_dim // 2, float("nan"), float("inf")

    def special(row: int) -> torch.Tensor:
        return x[row % n, row % heads]

    special(0)[5] = nan
    special(1)[head_dim - 1] = inf
    special(2)[0] = -inf
    special(3).fill_(0.7)
    special(4)[:half] = -3e38  # no parameters hold its range
    special(5).fill_(-0.0)
    special(6).abs_()[::3] = -0.0
    special(7)[::2] = 6e4
    special(8).mul_(1e-36)
    special(9).copy_(random_values((1, head_dim), seed + 1)[0] * 1e-3 + 100)
    special(10)[half:] = 0.0
    special(11).fill_(1e-9)
    special(12).clamp_(-1, 1).round_()
    for row, top in ((13, 3), (14, 15)):  # scale 1 of 2 or 4 bits: values halfway between codes
        special(row).copy_((x[0, 0].nan_to_num(0.0, 0.0, 0.0) * 1e6 % (2 * top + 1)).floor() / 2)
        special(row)[::32], special(row)[1::32] = 0, top
        special(row + 2).fill_(0.0)[::31] = (top + 0.5) * 2.0**-24  # half a step beyond the last code
    return x


def rows_of(config: AppendConfig, n: int, heads: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v) of the config's dtype and alignment: views of one tensor [n, q + k + v heads, head_dim] or, unaligned, of
    one with a column more."""
    values = [hard_rows(n, heads, config.head_dim, seed + i).to(getattr(torch, config.dtype)) for i in (0, 1)]
    fused = torch.full((n, 3 * heads, config.head_dim + (0 if config.vector else 3)), 7.0, dtype=values[0].dtype)
    found = []
    for i, x in enumerate(values):
        view = fused[:, (i + 1) * heads : (i + 2) * heads, fused.shape[2] - config.head_dim :]
        found.append(view.copy_(x))
    return tuple(found)
