"""Keeping torch.autocast out of computations that have their own types."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def without_autocast(compute: Callable) -> Callable:
    """``compute`` with torch.autocast off on the device of its first argument, a tensor or a cache."""

    @functools.wraps(compute)
    def run(first, *arguments, **options):
        kind = first.device.type
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return compute(first, *arguments, **options)
        with torch.autocast(kind, enabled=False):
            return compute(first, *arguments, **options)

    return run
