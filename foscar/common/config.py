"""What the decode kernels of every architecture refuse alike: a cache or a query that none of them takes."""

from __future__ import annotations

from dataclasses import fields

from .errors import FormatError
from .plan import MAX_ROWS

MAX_HEADS = MAX_ROWS  # query heads per KV head
Q_DTYPES = ("bfloat16", "float16")


class ConfigError(ValueError):
    """A tile configuration that does not fit the machine; the message holds the arithmetic."""


def check_problem(kernel: str, config, head_dims: tuple[int, ...] = (64, 128), folds: bool = False) -> None:
    """Raise :class:`FormatError` where ``config`` (a DecodeConfig) asks ``kernel`` ("Hopper") for what it has not.

    Args:
        head_dims: those that it takes.
        folds: whether it takes every fold of common/fold.py; else K and V per token with one group only.
    """
    if config.head_dim not in head_dims:
        *most, last = head_dims
        raise FormatError(f"the {kernel} kernel takes head_dim {', '.join(map(str, most))} and {last}, "
                          f"not {config.head_dim}")  # fmt: skip
    config.format.layout(config.head_dim, config.page_size)
    for name, f in (("K", config.format.k), ("V", config.format.v)):
        group = f.resolved_group(config.head_dim, config.page_size)
        if not folds and (f.axis != "token" or group != config.head_dim):
            raise FormatError(
                f"the {kernel} kernel takes {name} quantized per token with one group of head_dim channels, "
                f"not axis {f.axis!r} with groups of {group}"
            )
    if config.heads not in range(4, MAX_HEADS + 1, 4):
        raise FormatError(f"heads must be 4, 8, 12 or 16 (query heads per KV head, rounded up), not {config.heads}")
    if config.q_dtype not in Q_DTYPES:
        raise FormatError(f"q_dtype must be one of {Q_DTYPES}, not {config.q_dtype!r}")


def check_tile_fields(tile) -> None:
    """Raise :class:`ConfigError` where a knob of a TileConfig is neither a whole number nor its default None."""
    for f in fields(tile):
        value = getattr(tile, f.name)
        if type(value) is not int and not (value is None and f.default is None):
            raise ConfigError(f"{f.name} must be a whole number, not {value!r}")
