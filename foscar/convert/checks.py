"""The checks of converters' arguments: one line that names the argument and what it must be."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from foscar.checks import require
from foscar.common.errors import FormatError
from foscar.common.formats import check_whole
from foscar.common.tensor_checks import check_tensors
from foscar.common.tensor_format import BITS

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_KINDS = {
    "uint8": lambda dtype: dtype == torch.uint8,
    "bytes": lambda dtype: dtype in (torch.uint8, torch.int8),
    "integers": lambda dtype: dtype in _INTEGERS,
    "integers of 32 bits": lambda dtype: dtype in (torch.int32, torch.int64),
    "floats": lambda dtype: dtype.is_floating_point,
}


def check_part(name: str, x: torch.Tensor, kind: str, dims: str, like: torch.Tensor | None = None) -> None:
    """A tensor of a ``kind`` with the dimensions that ``dims`` lists, "slots, kv heads, head_dim"; beside ``like``.

    Raises:
        TypeError: no tensor.
        ValueError: another type, number of dimensions or device.
    """
    check_tensors(**{name: x})
    require(
        _KINDS[kind](x.dtype) and x.ndim == dims.count(",") + 1,
        f"{name} must be {kind} [{dims}], not {x.dtype} {list(x.shape)}",
    )
    require(x.device.type != "meta", f"{name} is on the meta device and holds nothing")
    require(like is None or x.device == like.device, f"{name} must be on the device of the codes, not on {x.device}")


def check_shape(name: str, x: torch.Tensor, shape: Sequence[int]) -> None:
    require(tuple(x.shape) == tuple(shape), f"{name} must be {list(shape)}, not {list(x.shape)}")


def check_count(name: str, value: int, least: int = 1) -> int:
    """A whole number of ``least`` or more, as a plain int."""
    value = check_whole(name, value)
    require(value >= least, f"{name} must be {least} or more, not {value}")
    return value


def check_bits(name: str, bits: int) -> None:
    if check_whole(name, bits) not in BITS:
        raise FormatError(f"{name} must be one of {BITS}, not {bits}")


def check_lengths(name: str, lengths: Iterable[int]) -> list[int]:
    """Tokens of each request, 0 or more."""
    if isinstance(lengths, (torch.Tensor, str)) or not isinstance(lengths, Iterable):
        raise TypeError(f"{name} must be a list of whole numbers, not {type(lengths).__name__}")
    return [check_count(f"{name}[{b}]", n, 0) for b, n in enumerate(lengths)]


def check_ranges(name: str, ends: Sequence[int], of: str, size: int) -> None:
    """The bounds of the requests' ranges in the ``size`` entries of ``of``."""
    ok = len(ends) > 0 and 0 <= ends[0] and ends[-1] <= size and all(a <= b for a, b in itertools.pairwise(ends))
    require(ok, f"{name} must ascend within the {size} entries of {of}, not {list(ends[:8])}")


def check_ids(name: str, ids: torch.Tensor, size: int, of: str) -> None:
    """Indices of ``size`` things."""
    bad = ids[(ids < 0) | (ids >= size)]
    require(len(bad) == 0, f"{name} holds {bad[:1].tolist()}; {of} are 0 .. {size - 1}")
