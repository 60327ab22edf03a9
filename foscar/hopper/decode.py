"""Launching a decode: the kernels of one config on one device, and their arguments for one call."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..common import jit
from ..common.cache import PagedKVCache
from ..common.launch import current_stream, load_kernel
from ..common.options import FLOAT32_MAX, AttentionOptions, ExactTokens, Variant
from ..common.plan import MAX_ROWS, WIDE_CAP, CombineConfig, KernelOptions, Workspace, combine_grid, inverse_of
from ..common.window_config import WindowKernelConfig
from . import arguments
from .config import ARCH, DecodeConfig

BUILD = f"{__package__}.build"
# What differs between the calls of one plan: the second ones with KernelOptions.exact.
ADDRESSES = ("q", "cache", "out", "lse", "sinks")
WINDOW_ADDRESSES = ("packed_lens", "sink_k", "sink_v", "recent_k", "recent_v")
LSE_UNITS = {2: 1.0, "e": math.log(2.0)}
MAX_WINDOW = 2**30  # to a kernel, whose positions are int32 and less
PLAIN_CALL = Variant()
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Tables:
    """Where the pages and lengths of the requests are, all int32 on the device.

    ``pages`` is [batch, max_pages] (dense, ``indptr`` None) or the concatenated page lists with ``indptr`` [batch + 1].
    """

    pages: torch.Tensor
    lengths: torch.Tensor
    indptr: torch.Tensor | None = None


def options_of(variant: Variant, group: int) -> KernelOptions:
    """What the kernels of a call need to have, with ``group`` query heads per KV head."""
    options, plain = variant.options, AttentionOptions()
    return KernelOptions(
        window=options.window != plain.window,
        soft_cap=options.soft_cap != plain.soft_cap,
        wide_cap=options.soft_cap > WIDE_CAP,
        sinks=variant.sinks is not None,
        out_scale=options.out_scale != plain.out_scale,
        rows=variant.q_indptr is not None or group > MAX_ROWS,
        exact=variant.exact is not None,
        exact_f16=variant.exact is not None and variant.exact.sink_k.dtype == torch.float16,
    )


def option_values(
    config: DecodeConfig, variant: Variant, group: int, q_rows: int
) -> dict[str, torch.Tensor | int | float]:
    """The values of arguments.py's further parameters, of options that the kernel has; q has ``q_rows`` rows."""
    options = variant.options
    rows = group * (1 if variant.q_indptr is None else min(q_rows, variant.q_limit or q_rows))
    return {
        "q_indptr": 0 if variant.q_indptr is None else variant.q_indptr,
        "window": min(options.window or MAX_WINDOW, MAX_WINDOW),
        "soft_cap_log2": min(options.soft_cap * math.log2(math.e), FLOAT32_MAX),
        "sinks": 0 if variant.sinks is None else variant.sinks,
        "out_scale": options.out_scale,
        "rows": config.heads,
        "chunks": -(-rows // config.heads) if config.options.rows else 1,
    }


def exact_values(exact: ExactTokens | None) -> dict[str, torch.Tensor | int]:
    """The values of arguments.py's parameters of KernelOptions.exact."""
    if exact is None:
        return {}
    return {
        "slots": exact.slots,
        "packed_lens": exact.packed_lens,
        "n_sink": exact.sink_k.shape[2],
        "capacity": exact.recent_k.shape[2],
        "sink_k": exact.sink_k,
        "sink_v": exact.sink_v,
        "recent_k": exact.recent_k,
        "recent_v": exact.recent_v,
        "exact_out": exact.out,
        "exact_lse": exact.lse,
    }


class Buffers:
    """The workspace of a launch, of any batch; reusable as long as launches do not overlap."""

    def __init__(self, device: torch.device, workers: int, group: int, head_dim: int):
        size = Workspace.sizes(workers, group, head_dim)
        self.partial_out = torch.empty(size.partial_out, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(size.partial_lse, dtype=torch.float32, device=device)


def launch_values(
    config: DecodeConfig,
    ctas: int,
    q: torch.Tensor,
    cache: PagedKVCache,
    tables: Tables,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    buffers: Buffers,
    sm_scale: float,
    lse_base: int | str,
    variant: Variant = PLAIN_CALL,
) -> tuple[dict[str, torch.Tensor | int | float], tuple[int | Grid, ...]]:
    """The kernels' parameters by name (a tensor stands for its address), and their grids, with ``ctas`` SMs."""
    batch, heads = tables.lengths.shape[0], q.shape[1]
    kv_heads, group = cache.num_kv_heads, heads // cache.num_kv_heads
    workers = ctas * config.warpgroups
    more = option_values(config, variant, group, q.shape[0])
    items = kv_heads * more.pop("chunks")
    item_rows = config.heads if config.options.rows else group
    combine = combine_grid(batch, items, workers, item_rows, config.head_dim, ctas)
    scale_log2 = sm_scale * math.log2(math.e)
    if config.options.soft_cap:
        scale_log2 = min(scale_log2 * 2 / variant.options.soft_cap, FLOAT32_MAX)
    values = {
        "q": q,
        "q_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "cache": cache.data,
        "page_stride": cache.data.stride(0),
        "head_stride": cache.data.stride(1),
        "pages": tables.pages,
        "table_stride": 0 if tables.indptr is not None else tables.pages.stride(0),
        "indptr": 0 if tables.indptr is None else tables.indptr,
        "lengths": tables.lengths,
        "out": out,
        "out_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "lse": 0 if lse is None else lse,
        "partial_out": buffers.partial_out,
        "partial_lse": buffers.partial_lse,
        "batch": batch,
        "kv_heads": kv_heads,
        "kv_heads_inverse": inverse_of(kv_heads),
        "group": group,
        "workers_inverse": inverse_of(workers),
        "sm_scale_log2": scale_log2,
        "lse_unit": LSE_UNITS[lse_base],
        "workers": workers,
        "by_item": combine.by_item,
        "column_bits": combine.column_bits,
        "lane_bits": combine.lane_bits,
        "items_per_request": items,
        **more,
        **exact_values(variant.exact),
    }
    grids = (ctas, combine.grid)
    return values, (batch * items, *grids) if config.options.exact else grids


KernelConfig = DecodeConfig | CombineConfig | WindowKernelConfig


def kernels(config: DecodeConfig) -> tuple[tuple[str, KernelConfig, str, dict[str, str]], ...]:
    """(name, config, builder, parameters) of the kernels in the order of their launches, for jit.load_or_compile: the
    decode kernel and its combine, before them with KernelOptions.exact the one over the tokens in 16 bits."""
    first = ()
    if config.options.exact:
        options = dataclasses.replace(config.options, sinks=False, out_scale=False)
        window = WindowKernelConfig(config.head_dim, config.heads, config.q_dtype, options)
        first = (("window_attention", window, f"{BUILD}:build_window", arguments.window(options)),)
        config = dataclasses.replace(config, options=dataclasses.replace(config.options, exact_f16=False))
    combine = CombineConfig.of(config)
    return (
        *first,
        ("hopper_decode", config, f"{BUILD}:build_decode", arguments.decode(config.options)),
        ("hopper_combine", combine, f"{BUILD}:build_combine", arguments.combine(combine.options)),
    )


class Bound:
    """One call's launches: every parameter but a few addresses is fixed."""

    def __init__(
        self,
        owner: HopperDecode,
        values: dict[str, torch.Tensor | int | float],
        grids: tuple[int | Grid, ...],
    ):
        numbers = {k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        self._owner, self._keep = owner, values
        self._launches = []
        for (launch, parameters), grid in zip(owner.launches, grids, strict=True):
            changing = enumerate((*ADDRESSES, *WINDOW_ADDRESSES))
            places = [(parameters.index(name), i) for i, name in changing if name in parameters]
            self._launches.append((launch, grid, [numbers[name] for name in parameters], places))

    def __call__(
        self,
        q: torch.Tensor,
        data: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        windows: Sequence[torch.Tensor] = (),
    ) -> None:
        """Launch on the device's current stream; ``data`` is the cache's storage, ``windows`` are WINDOW_ADDRESSES."""
        addresses = [0 if x is None else x.data_ptr() for x in (q, data, out, lse, sinks, *windows)]
        stream = current_stream(self._owner.device)
        with self._owner.lock:
            for launch, grid, numbers, places in self._launches:
                for place, i in places:
                    numbers[place] = addresses[i]
                launch.update(numbers)
                launch(grid, stream)


class HopperDecode:
    """The kernels of a config on one device, ready to launch; thread-safe."""

    kernels = staticmethod(kernels)

    def __init__(self, config: DecodeConfig, device: torch.device, arch: str = ARCH):
        self.config, self.device = config, device
        self.ctas = torch.cuda.get_device_properties(device).multi_processor_count
        self.launches = []
        for name, part, builder, parameters in self.kernels(config):
            loaded = load_kernel(jit.load_or_compile(name, part, arch, builder), device.index)
            self.launches.append((loaded.prepare([0] * len(parameters), pdl=True), list(parameters)))
        self.lock = threading.Lock()  # the launches' parameter buffers are shared

    def buffers(self, group: int) -> Buffers:
        """A workspace for ``group`` query heads per KV head."""
        rows = self.config.heads if self.config.options.rows else group
        return Buffers(self.device, self.ctas * self.config.warpgroups, rows, self.config.head_dim)

    def bind(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        tables: Tables,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        buffers: Buffers,
        sm_scale: float,
        lse_base: int | str,
        variant: Variant = PLAIN_CALL,
    ) -> Bound:
        """The launches of a call whose arguments are checked already (api.py)."""
        values, grids = launch_values(
            self.config, self.ctas, q, cache, tables, out, lse, buffers, sm_scale, lse_base, variant
        )
        return Bound(self, values, grids)


@functools.cache
def decoder(config: DecodeConfig, device_index: int) -> HopperDecode:
    """The kernels of ``config`` on a device, compiled and loaded once."""
    return HopperDecode(config, torch.device("cuda", device_index))
