"""Whether arguments are tensors at all, and such as the library computes with."""

from __future__ import annotations

import torch


def check_kinds(**tensors: torch.Tensor) -> None:
    """Raise TypeError, with its name, for what is no tensor."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")


def check_tensors(**tensors: torch.Tensor) -> None:
    """:func:`check_kinds`; raise ValueError for a sparse or nested tensor."""
    for name, x in tensors.items():
        check_kinds(**{name: x})
        if x.layout is not torch.strided or x.is_nested:
            raise ValueError(f"{name} must be dense and strided, not {x.layout}")
