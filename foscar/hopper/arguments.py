"""The kernels' parameters, by name and kind, in the order of their signatures (no DSL import).

Addresses and strides are 64-bit; strides of q and out count elements, of the cache bytes, of the table entries.
"""

from __future__ import annotations

from ..common.plan import PLAIN, KernelOptions

DECODE: dict[str, str] = {
    "q": "i64",
    "q_stride": "i64",
    "q_head_stride": "i64",
    "cache": "i64",
    "page_stride": "i64",
    "head_stride": "i64",
    "pages": "i64",
    "table_stride": "i64",
    "indptr": "i64",
    "lengths": "i64",
    "out": "i64",
    "out_stride": "i64",
    "out_head_stride": "i64",
    "lse": "i64",
    "partial_out": "i64",
    "partial_lse": "i64",
    "batch": "i32",
    "kv_heads": "i32",
    "kv_heads_inverse": "i32",
    "group": "i32",
    "workers_inverse": "i32",
    "sm_scale_log2": "f32",
    "lse_unit": "f32",
}

_COMBINE_NAMES = (
    "out", "out_stride", "out_head_stride", "lse", "partial_out", "partial_lse", "lengths", "batch", "kv_heads",
    "kv_heads_inverse", "group", "lse_unit", "workers_inverse",
)  # fmt: skip
COMBINE: dict[str, str] = {name: DECODE[name] for name in _COMBINE_NAMES}
COMBINE |= {"workers": "i32", "by_item": "i32", "column_bits": "i32", "lane_bits": "i32"}

# Parameters that come with an option: of both kernels, of the decode kernel, of the combine.
_BOTH = {
    "rows": {"q_indptr": "i64"},
    "window": {"window": "i32"},
    "sinks": {"sinks": "i64"},
    "out_scale": {"out_scale": "f32"},
    "exact": {"slots": "i64", "packed_lens": "i64", "n_sink": "i32", "exact_out": "i64", "exact_lse": "i64"},
}
_DECODE_ONLY = {"soft_cap": {"soft_cap_log2": "f32"}}
_COMBINE_ONLY = {"rows": {"rows": "i32"}}

# The kernel over the tokens in 16 bits (common/window_kernel.py).
_WINDOW_NAMES = (
    "q", "q_stride", "q_head_stride", "lengths", "batch", "kv_heads", "group", "sm_scale_log2",
)  # fmt: skip
WINDOW: dict[str, str] = {name: DECODE[name] for name in _WINDOW_NAMES}
WINDOW |= _BOTH["exact"] | {"capacity": "i32", "items_per_request": "i32"}
WINDOW |= dict.fromkeys(("sink_k", "sink_v", "recent_k", "recent_v"), "i64")


def _with_options(plain: dict[str, str], options: KernelOptions, *tables: dict[str, dict[str, str]]) -> dict[str, str]:
    found = dict(plain)
    for table in tables:
        for option, parameters in table.items():
            if getattr(options, option):
                found |= parameters
    return found


def decode(options: KernelOptions = PLAIN) -> dict[str, str]:
    """The decode kernel's parameters."""
    return _with_options(DECODE, options, _BOTH, _DECODE_ONLY)


def combine(options: KernelOptions = PLAIN) -> dict[str, str]:
    """The combine kernel's."""
    return _with_options(COMBINE, options, _BOTH, _COMBINE_ONLY)


def window(options: KernelOptions) -> dict[str, str]:
    """The window kernel's."""
    return _with_options(WINDOW, options, {"rows": _BOTH["rows"]}, _DECODE_ONLY)
