"""How K or V alone is quantized, and the channels that records have for a head_dim."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import FormatError

BITS = (2, 4)
AXES = ("token", "channel")
PADDED_HEAD_DIMS = (64, 128, 256)  # of records and kernels


def padded_dim(head_dim: int) -> int:
    """The channels that a record has for ``head_dim``: the smallest of ``PADDED_HEAD_DIMS`` that holds them."""
    return min((d for d in PADDED_HEAD_DIMS if d >= head_dim), default=head_dim)


def require_format(ok: bool, message: str) -> None:
    if not ok:
        raise FormatError(message)


@dataclass(frozen=True)
class TensorFormat:
    """How K or V alone is quantized.

    Args:
        bits: 2 or 4.
        axis: "token" (each token has its own parameters, one pair per group of channels) or "channel" (each channel
            has its own parameters, one pair per group of tokens).
        group: axis "token": channels per pair (None: head_dim, else a multiple of 32 that divides the padded head_dim;
            where it does not divide head_dim, the last group is what is left).
            Axis "channel": tokens per pair (a multiple of 16 that divides or is a multiple of the page size;
            None: the page size).
    """

    bits: int = 2
    axis: str = "token"
    group: int | None = None

    def __post_init__(self) -> None:
        require_format(type(self.bits) is int and self.bits in BITS, f"bits must be one of {BITS}, not {self.bits!r}")
        require_format(self.axis in AXES, f"axis must be one of {AXES}, not {self.axis!r}")
        unit = 32 if self.axis == "token" else 16
        ok = self.group is None or (isinstance(self.group, int) and self.group > 0 and self.group % unit == 0)
        require_format(ok, f"group along axis {self.axis!r} must be a positive multiple of {unit}, not {self.group!r}")

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def positions(self) -> int:
        """Codes per byte."""
        return 8 // self.bits

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one token's codes."""
        return head_dim * self.bits // 8

    def resolved_group(self, head_dim: int, page_size: int) -> int:
        """The group size in a record: None replaced by its default, a group of all channels by the padded ones."""
        if self.axis == "channel":
            return page_size if self.group is None else self.group
        return padded_dim(head_dim) if self.group in (None, head_dim) else self.group
