"""Which tokens each query row sees: causal among the rows of a request, and a sliding window to the left.

A request of ``length`` tokens has ``n`` query rows, for its last ``n`` tokens: row ``j`` is at position
``length - n + j`` and sees the tokens up to there.  A row before position 0 sees nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Span:
    """The rows of a request that see something, and the tokens that any of them sees.

    Attributes:
        request: its index in the batch.
        row, row_stop: its rows of q, those that see nothing left out; at least one.
        first, stop: the tokens; ``stop`` is the request's length, and the last row is at position ``stop - 1``.
        window: keys that a row sees, itself included, or None.
    """

    request: int
    row: int
    row_stop: int
    first: int
    stop: int
    window: int | None = None

    @property
    def rows(self) -> int:
        return self.row_stop - self.row

    def visible(self, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """bool [rows, stop - start]: which of the tokens ``start:stop`` each row sees; None: every row all of them."""
        earliest = self.stop - self.rows
        if stop <= earliest + 1 and (self.window is None or start > self.stop - 1 - self.window):
            return None
        position = torch.arange(earliest, self.stop, device=device)[:, None]
        token = torch.arange(start, stop, device=device)[None]
        seen = token <= position
        return seen if self.window is None else seen & (token > position - self.window)


def spans(lengths: Sequence[int], q_indptr: Sequence[int] | None = None, window: int | None = None) -> list[Span]:
    """One span for each request that has a row that sees something, in order.

    Args:
        lengths: tokens per request, its query tokens included.
        q_indptr: request b has rows ``q_indptr[b] : q_indptr[b + 1]``; None: row b.
        window: see :class:`foscar.common.options.AttentionOptions`.
    """
    bounds = range(len(lengths) + 1) if q_indptr is None else q_indptr
    found = []
    for b, length in enumerate(lengths):
        rows = min(bounds[b + 1] - bounds[b], length)
        if rows > 0:
            first = 0 if window is None else max(0, length - rows + 1 - window)
            found.append(Span(b, bounds[b + 1] - rows, bounds[b + 1], first, length, window))
    return found
