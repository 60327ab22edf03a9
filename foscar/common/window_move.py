"""Windows of tokens in 16 bits: their sizes, and how an append moves them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foscar.common.append import request_positions
from foscar.common.formats import check_whole
from foscar.common.quantize import param_dtype
from foscar.common.tensor_checks import check_kinds


@dataclass(frozen=True)
class WindowConfig:
    """How many tokens of a request stay in 16 bits.

    Args:
        n_sink, n_recent: the first and the last ones.
        dtype: "bfloat16" or "float16".
    """

    n_sink: int = 0
    n_recent: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("n_sink", "n_recent"):
            value = check_whole(name, getattr(self, name))
            if value < 0:
                raise ValueError(f"{name} must be at least 0, not {value}")
            object.__setattr__(self, name, value)
        param_dtype(self.dtype)

    @classmethod
    def oscar(cls) -> WindowConfig:
        """arXiv 2605.17757: the first 64 tokens and the last 256."""
        return cls(64, 256)

    @classmethod
    def kivi(cls) -> WindowConfig:
        """arXiv 2402.02750: a residual of 128 tokens."""
        return cls(0, 128, "float16")

    @classmethod
    def none(cls) -> WindowConfig:
        """No window; per channel, only the tokens of a group that is not whole yet."""
        return cls()


@dataclass(frozen=True)
class Move:
    """How an append moves the windows, int64 on the device.

    Attributes:
        slots: [batch], max_batch (the spare one) for requests that store nothing.
        start: [batch], positions before the append; ``first_row``: [batch], of the new rows.
        old_end, new_end: [batch], the position behind the history, before and after.
        request, position: [n], of the new rows.
    """

    slots: torch.Tensor
    start: torch.Tensor
    first_row: torch.Tensor
    old_end: torch.Tensor
    new_end: torch.Tensor
    request: torch.Tensor
    position: torch.Tensor

    @classmethod
    def make(cls, cache, seq_lens: torch.Tensor, slot_ids: torch.Tensor, indptr: torch.Tensor | None, n: int) -> Move:
        """Of ``n`` new rows for ``cache``, a WindowedKVCache; the other arguments as of its append."""
        slots, start, window = cache.storage_slots(slot_ids), seq_lens.long(), cache.window
        request, position = request_positions(seq_lens, indptr, n)
        rows = torch.arange(len(start) + 1, device=start.device) if indptr is None else indptr.long()
        length = start + rows[1:] - rows[:-1]
        old_end = window.n_sink + cache.history_lens(seq_lens, slot_ids).long()
        due = (length - window.n_sink - window.n_recent).clamp(min=0) // cache.unit * cache.unit
        new_end = torch.maximum(old_end, window.n_sink + due)
        return cls(slots, start, rows[:-1], old_end, new_end, request, position)


def check_slot_ids(slot_ids: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Raise TypeError or ValueError where ``slot_ids`` are not of the kind and shape of slots of ``seq_lens``."""
    check_kinds(slot_ids=slot_ids)
    if slot_ids.dtype != torch.int32 or slot_ids.shape != seq_lens.shape or slot_ids.device != seq_lens.device:
        raise ValueError(f"slot_ids must be int32 {list(seq_lens.shape)} on {seq_lens.device}, "
                         f"not {slot_ids.dtype} {list(slot_ids.shape)} on {slot_ids.device}")  # fmt: skip


def check_slots(slot_ids: torch.Tensor, seq_lens: torch.Tensor, max_batch: int) -> None:
    """Raise TypeError or ValueError where ``slot_ids`` are no window slots for ``seq_lens``' requests."""
    check_slot_ids(slot_ids, seq_lens)
    if slot_ids.device.type == "cpu":
        used = [s for s in slot_ids.tolist() if s != -1]
        if len(set(used)) != len(used) or any(not 0 <= s < max_batch for s in used):
            raise ValueError(f"slot_ids must be different slots of 0 .. {max_batch - 1} or -1, not {used[:8]}")


def check_lengths(cache, seq_lens: torch.Tensor, slot_ids: torch.Tensor, *, read: bool = False) -> None:
    """Raise ValueError where a slot of ``cache``, a WindowedKVCache on the CPU, cannot hold a request of that length.

    That is a length below 0, or one with more tokens behind the slot's history than are ever recent.  Slot -1 holds
    nothing, which matters where it is ``read``.
    """
    if cache.device.type != "cpu":
        return
    recent = cache.window.n_recent + cache.unit - 1
    held = torch.where(slot_ids < 0, 0, cache.window.n_sink + cache.history_lens(seq_lens, slot_ids) + recent)
    bad = (seq_lens < 0) | (seq_lens > held)
    for b in (bad if read else bad & (slot_ids >= 0)).nonzero()[:1, 0].tolist():
        where = f"slot {int(slot_ids[b])} holds 0 .. {int(held[b])}"
        raise ValueError(f"request {b} has {int(seq_lens[b])} tokens; {where}")


def check_finite(cache, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError for new values that a window or the parameters of ``cache``, a WindowedKVCache, cannot hold."""
    for dtype in {param_dtype(cache.window.dtype), param_dtype(cache.packed.format.params)}:
        for name, x in (("k", k), ("v", v)):
            bad = ~x.to(dtype).isfinite()
            if bool(bad.any()):
                i, head, channel = bad.nonzero()[0].tolist()
                kind = str(dtype).removeprefix("torch.")
                raise ValueError(f"{name}[token {i}, head {head}, channel {channel}] is "
                                 f"{float(x[i, head, channel])}, which is not finite in {kind}")  # fmt: skip
