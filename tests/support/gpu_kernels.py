"""The kernels that the GPU tests use, in one table: tests draw their configs from it, and the export compiles it.

    python tests/support/gpu_kernels.py FOLDER

fills FOLDER (for ``FOSCAR_KERNEL_PATH`` on a GPU machine without the DSL); needs no GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from foscar import aot
from foscar.common import append_config
from foscar.common.append_config import AppendConfig
from foscar.common.cache import PagedKVCache
from foscar.common.formats import KVFormat
from foscar.common.options import Variant
from foscar.common.plan import KernelOptions, rows_of_item
from foscar.hopper.config import ARCH, DecodeConfig, TileConfig
from foscar.hopper.decode import kernels, options_of

BF16, FP16, FP32 = "bfloat16", "float16", "float32"


def _config(k_bits, v_bits, head_dim, page_size, heads, q_dtype, params=FP16, options="", **tile) -> DecodeConfig:
    fmt = KVFormat.make(k_bits, v_bits, params=params)
    return DecodeConfig(fmt, head_dim, page_size, heads, q_dtype, TileConfig(**tile), KernelOptions.parse(options))


# Both bit widths at every head_dim and page size, that is every way in which codes lie in a record.  Heads, types of q
# and of the parameters vary along, so that each value of each is there several times.
LAYOUTS = (
    _config(2, 2, 64, 16, 16, FP16),
    _config(2, 2, 64, 32, 8, BF16, BF16),
    _config(2, 2, 64, 64, 4, FP16),
    _config(2, 2, 64, 128, 12, BF16),
    _config(2, 2, 128, 16, 12, FP16),
    _config(2, 2, 128, 32, 8, BF16, BF16),
    _config(2, 2, 128, 64, 4, BF16),  # examples/bench_decode.py uses this one too
    _config(2, 2, 128, 128, 16, BF16),
    _config(4, 4, 64, 16, 4, BF16),
    _config(4, 4, 64, 32, 12, FP16, BF16),
    _config(4, 4, 64, 64, 16, BF16),
    _config(4, 4, 64, 128, 8, FP16),
    _config(4, 4, 128, 16, 8, BF16, BF16),
    _config(4, 4, 128, 32, 16, FP16),
    _config(4, 4, 128, 64, 4, BF16),  # likewise
    _config(4, 4, 128, 128, 4, FP16),
)
MIXED = (
    _config(2, 4, 128, 64, 4, BF16),  # likewise
    _config(4, 2, 128, 64, 8, FP16, BF16),
    _config(2, 4, 64, 16, 8, FP16),
    _config(4, 2, 64, 128, 4, BF16),
)
TILES = (
    _config(2, 2, 128, 64, 8, BF16, math_warpgroups=1),
    _config(2, 2, 128, 64, 8, BF16, math_warpgroups=2, kv_stages=3),
    _config(4, 4, 128, 64, 8, BF16, math_warpgroups=3, kv_stages=2),
)


def _fold(name, head_dim, page_size, heads, q_dtype) -> DecodeConfig:
    return DecodeConfig(KVFormat.parse(name), head_dim, page_size, heads, q_dtype)


# Every fold: each of K's with each of V's kind, groups of tokens within a warp, a tile, larger than a page or a tile,
# straddling tiles; channel groups of one and of two products; head_dim 256.
FOLDS = (
    _fold("k2c128v2", 128, 64, 4, FP16),  # KIVI
    _fold("k2v2c128", 128, 64, 4, FP16),
    _fold("k2c128v2c128-bf16", 128, 128, 8, BF16),
    _fold("k4c64v4c64", 128, 64, 8, FP16),
    _fold("k2c32v4c32", 128, 32, 16, FP16),
    _fold("k4c16v2c16", 64, 16, 12, BF16),
    _fold("k2c48v2c48", 128, 16, 4, FP16),
    _fold("k4c256v2c256", 64, 32, 8, FP16),
    _fold("k2t32v2t32", 128, 64, 4, FP16),
    _fold("k4t64v4t64", 128, 16, 16, BF16),
    _fold("k2t32v4t32-bf16", 64, 64, 8, BF16),
    _fold("k2c64v2t32", 128, 128, 4, FP16),
    _fold("k4t64v2c32", 128, 64, 12, BF16),
    _fold("k4v4", 256, 64, 4, FP16),
    _fold("k2v2", 256, 16, 16, BF16),
    _fold("k2c128v2t64", 256, 64, 8, FP16),
    _fold("k4t32v4c64", 256, 128, 4, FP16),
)
INT2, INT4 = _config(2, 2, 128, 64, 4, BF16), _config(4, 4, 128, 64, 4, BF16)
# An output whose rounding hides little; examples/quickstart.py uses these too.
INT2_FP16, INT4_FP16 = _config(2, 2, 128, 64, 4, FP16), _config(4, 4, 128, 64, 4, FP16)
LONG = (INT2_FP16, INT4_FP16, MIXED[1], INT4)
KERNELS = tuple(dict.fromkeys((*LAYOUTS, *MIXED, *TILES, INT2, INT4, *LONG, *FOLDS)))
# What test_options_kernel.py runs: see the table there.
ALL = "window,soft_cap,sinks,out_scale,rows"
OPTIONS = (
    *(_config(2, 2, 64, 16, 4, BF16, options=o) for o in ("window", "soft_cap", "sinks", "out_scale")),
    *(_config(4, 4, 64, 32, 4, FP16, options=o) for o in ("window", "soft_cap", "sinks", "out_scale")),
    _config(2, 2, 64, 16, 4, FP16, options="soft_cap,wide_cap"),
    *(_config(2, 2, 64, 16, 16, BF16, options=o) for o in ("rows", "window,rows", "sinks,rows", ALL)),
    *(_config(4, 4, 128, 64, 16, FP16, options=o) for o in ("rows", ALL)),
    _config(2, 4, 128, 128, 8, BF16, options="window,rows"),
    _config(2, 2, 64, 16, 12, BF16, options="rows"),
    _config(4, 4, 256, 32, 4, BF16, options="window"),
    *(
        DecodeConfig(KVFormat.parse(name), 64, page, 4, FP16, options=KernelOptions(window=True))
        for name, page in (
            ("k2c64v2", 16),
            ("k2c128v2t32", 16),
            ("k4v4c64", 16),
            ("k4c32v2c32", 32),
            ("k2c128v2c128", 16),
            ("k2t32v2c32", 16),
        )
    ),
    DecodeConfig(KVFormat.parse("k2c32v2c64"), 64, 16, 16, FP16, options=KernelOptions(window=True, rows=True)),
)

# What test_windows_kernel.py and test_windows_gpu.py run.
EXACT_F16 = "exact,exact_f16"
WINDOWED = (
    _config(2, 2, 64, 16, 4, BF16, options="exact"),
    _config(2, 2, 64, 16, 4, BF16, options=EXACT_F16),
    _config(4, 4, 64, 16, 4, FP16, options="exact"),
    _config(4, 2, 64, 16, 8, FP16, options=EXACT_F16),
    _config(2, 2, 128, 64, 4, BF16, options="exact"),
    _config(4, 4, 256, 16, 12, BF16, options="exact"),
    _config(2, 2, 64, 16, 4, BF16, options="soft_cap,sinks,out_scale,exact"),
    _config(2, 2, 64, 16, 16, BF16, options="rows,exact"),
    _config(4, 4, 64, 16, 16, FP16, options="soft_cap,sinks,out_scale,rows," + EXACT_F16),
    DecodeConfig(KVFormat.parse("k2c32v2t32"), 64, 16, 4, FP16, options=KernelOptions.parse(EXACT_F16)),
)


def _append(k_bits, v_bits, head_dim, page_size, dtype, k_group=None, v_group=None, params=FP16, vector=True):
    fmt = KVFormat.make(k_bits, v_bits, k_group=k_group, v_group=v_group, params=params)
    return AppendConfig(fmt, head_dim, page_size, dtype, vector)


# Every head_dim with every number of bits and every group, every page size, dtype and type of the parameters.
APPENDS = (
    _append(2, 2, 64, 16, BF16),
    _append(4, 2, 64, 32, FP16, 32, 64, BF16),
    _append(2, 4, 64, 128, FP32, 32, 32),
    _append(2, 2, 128, 64, BF16),
    _append(4, 4, 128, 64, BF16),
    _append(2, 4, 128, 16, FP16, 32, 64),
    _append(4, 2, 128, 32, FP32, 64, 32, BF16),
    _append(4, 4, 128, 128, BF16, 32, 64, FP16, False),
    _append(2, 2, 128, 64, FP32, 64, 128, BF16, False),
    _append(2, 2, 256, 64, BF16),
    _append(4, 2, 256, 16, FP32, 32, 64),
    _append(2, 4, 256, 32, FP16, 128, 32, BF16),
    _append(4, 4, 256, 128, BF16, 64, 256, BF16),
    _append(2, 4, 80, 16, BF16),
    _append(4, 2, 80, 64, FP16, 32, 64, BF16),
    _append(2, 2, 96, 32, BF16, 32, 64),
    _append(4, 4, 96, 64, FP32, 64, 96, FP16, False),
    _append(2, 4, 112, 64, FP16, 64, 32, FP16, False),
    _append(4, 2, 112, 128, BF16, 32, None, BF16),
)


def _groups(name, head_dim, page_size, dtype, vector=True):
    return AppendConfig(KVFormat.parse(name), head_dim, page_size, dtype, vector)


# Per channel, on either side and both: groups below, of and beyond a page, every head_dim, type and number of lanes.
CHANNEL_APPENDS = (
    _groups("k2c32v2t32", 64, 16, BF16),
    _groups("k2c64v2", 128, 64, BF16),
    _groups("k4c16v2c32", 64, 16, BF16),
    _groups("k4c32v2c32", 64, 16, BF16),
    _groups("k2cv4c-bf16", 128, 32, FP16),
    _groups("k4c128v4c16", 256, 64, FP32),
    _groups("k2v4c32", 96, 32, FP16, False),
    _groups("k4c32v2c48-bf16", 80, 16, BF16),
    _groups("k2c16v2c128", 112, 128, FP32),
)

Q_TYPES = {BF16: torch.bfloat16, FP16: torch.float16}


def name_of(config: DecodeConfig) -> str:
    """Such as ``k2v2-d128-p64-h4-bfloat16``; what differs from the default tile follows."""
    changed = "".join(
        f"-{key}{value}" for key, value in vars(config.tile).items() if value != getattr(TileConfig(), key)
    )
    changed += f"-{config.options.name}" if config.options.name else ""
    return f"{config.format.name}-d{config.head_dim}-p{config.page_size}-h{config.heads}-{config.q_dtype}{changed}"


def config_of(
    q: torch.Tensor, cache: PagedKVCache, tile: TileConfig | None = None, variant: Variant | None = None
) -> DecodeConfig:
    """The config that a call needs.

    Raises:
        LookupError: it is not in the table, so a machine without the DSL would not have it.
    """
    dtype = {t: name for name, t in Q_TYPES.items()}[q.dtype]
    variant, group = variant or Variant(), q.shape[1] // cache.num_kv_heads
    heads = rows_of_item(group, 1 if variant.q_indptr is None else variant.max_q_len)
    shape = (cache.format, cache.head_dim, cache.page_size, heads, dtype)
    config = DecodeConfig(*shape, tile or TileConfig(), options_of(variant, group))
    if config not in (*KERNELS, *OPTIONS, *WINDOWED):
        raise LookupError(f"{name_of(config)} is not in tests/support/gpu_kernels.py")
    return config


def with_heads(group: int) -> DecodeConfig:
    """A kernel of the table for ``group`` query heads per KV head, of head_dim 128."""
    heads = -(-group // 4) * 4
    return next(c for c in KERNELS if c.heads == heads and c.head_dim == 128)


def appends() -> list[AppendConfig]:
    """APPENDS, and what the caches of the decode tests are filled with."""
    made = (*KERNELS, *OPTIONS)
    decode = (AppendConfig(c.format, c.head_dim, c.page_size, dtype) for c in made for dtype in Q_TYPES)
    return list(dict.fromkeys((*APPENDS, *CHANNEL_APPENDS, *decode)))


def jobs() -> list[tuple[str, object, str]]:
    """(name, config, builder) of every kernel: decode, combine, append, the stages' probes, the tests' tiny one."""
    from support import probes, tiny_kernel

    found = dict.fromkeys(job[:3] for c in (*KERNELS, *OPTIONS, *WINDOWED) for job in kernels(c))
    found |= dict.fromkeys((append_config.NAME, c, append_config.BUILDER) for c in appends())
    found |= dict.fromkeys((f"probe_{p.stage}", p, probes.BUILDER) for p in probes.PROBES)
    return [*found, (tiny_kernel.NAME, tiny_kernel.TinyConfig(), tiny_kernel.BUILDER)]


def main(folder: str) -> None:
    work = [aot.Job(name, config, ARCH, builder) for name, config, builder in jobs()]
    print(f"{folder}: {aot.build(folder, work, len(os.sched_getaffinity(0)), lambda line: print(line, flush=True))}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    sys.path.insert(0, str(Path(__file__).parents[1]))  # "support", as pytest's pythonpath has it
    main(sys.argv[1])
