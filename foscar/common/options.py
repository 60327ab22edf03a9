"""What a decode computes beside plain attention: the options of a call, and the numbers that they allow.

For query head ``h`` at position ``p`` of a request (in natural logarithms, in this order)::

    x[t] = sm_scale q . k[t]
    s[t] = soft_cap tanh(x[t] / soft_cap)                     if soft_cap > 0, else x[t]
    t    in 0 .. p, and t > p - window                        if there is a window
    Z    = sum_t exp(s[t]) + exp(sinks[h])                    the last term only with sinks
    out  = out_scale sum_t exp(s[t]) v[t] / Z                 lse = log Z

Sources: soft-cap, FlashInfer's ``logits_soft_cap`` and Gemma 2 (arXiv 2408.00118, section 2); sinks, gpt-oss, whose
learned logit per head is one more column of the softmax, dropped afterwards; window, Mistral (arXiv 2310.06825).
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers
MAX_WINDOW = 2**31 - 1  # positions are int32
DEFAULT_Q_LEN = 16  # query tokens per request of a ragged batch: a speculative draft


def check_real(name: str, value: float, kind: str = "a real number") -> float:
    """A number that a caller gave, as a positive and finite float.

    Raises:
        TypeError: not a real number; the message asks for ``kind``.
        ValueError: not positive, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {kind}, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:  # torch.compile traces comparisons of its symbolic numbers, math.isfinite not
        raise ValueError(f"{name} must be positive and finite, not {number}")
    return number


def _check_normal(name: str, value: float) -> float:
    number = check_real(name, value)
    if not FLOAT32_MIN <= number <= FLOAT32_MAX:
        raise ValueError(f"{name} must be a normal number of float32, not {number}")
    return number


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a decode; the defaults are plain attention.

    Args:
        window: a query at position p sees the ``window`` keys k with ``p - window < k <= p``, itself included; None:
            all of 0 .. p.  FlashInfer's ``window_left`` is ``window - 1``, its -1 is None; transformers' and vLLM's
            ``sliding_window`` is ``window``.  Pages wholly before the windows of a request's queries are never read:
            their entries in the block table may hold anything.
        soft_cap: logits become ``soft_cap * tanh(sm_scale q . k / soft_cap)``, before the mask; 0: they stay.
        out_scale: the output is multiplied by it, the LSE is not.

    Raises:
        TypeError: not a number of that kind.
        ValueError: a window below 1, a soft-cap below 0, an output scale of 0 or below, or one that float32 does not
            hold as a normal number.
    """

    window: int | None = None
    soft_cap: float = 0.0
    out_scale: float = 1.0

    def __post_init__(self):
        if self.window is not None:
            if isinstance(self.window, bool) or not isinstance(self.window, numbers.Integral):
                raise TypeError(f"window must be a whole number or None, not {self.window!r}")
            if not 1 <= self.window <= MAX_WINDOW:
                raise ValueError(f"window must be 1 .. {MAX_WINDOW} tokens or None, not {self.window}")
            object.__setattr__(self, "window", int(self.window))
        no_cap = isinstance(self.soft_cap, numbers.Real) and not isinstance(self.soft_cap, bool) and self.soft_cap == 0
        object.__setattr__(self, "soft_cap", 0.0 if no_cap else _check_normal("soft_cap", self.soft_cap))
        object.__setattr__(self, "out_scale", _check_normal("out_scale", self.out_scale))


@dataclass(frozen=True, eq=False)
class ExactTokens:
    """The tokens in 16 bits that a decode attends over beside the packed ones (foscar.common.windows has the layout).

    Attributes:
        slots: int32 [batch], the requests' window slots; -1: a request without tokens.
        packed_lens: int32 [slots], tokens of each slot's history.
        sink_k, sink_v: [slots, kv heads, n_sink, padded_head_dim], contiguous, bfloat16 or float16.
        recent_k, recent_v: [slots, kv heads, capacity, padded_head_dim], likewise.
        out: float32 [query rows, query heads, padded_head_dim], workspace.
        lse: float32 [query rows, query heads], workspace.
    """

    slots: torch.Tensor
    packed_lens: torch.Tensor
    sink_k: torch.Tensor
    sink_v: torch.Tensor
    recent_k: torch.Tensor
    recent_v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def windows(self) -> tuple[torch.Tensor, ...]:
        """What differs between the layers of a model."""
        return self.packed_lens, self.sink_k, self.sink_v, self.recent_k, self.recent_v


@dataclass(frozen=True, eq=False)
class Variant:
    """Everything that makes a call other than plain attention of one query token per request.

    Attributes:
        options: see :class:`AttentionOptions`.
        sinks: float32 [query heads], a logit in natural-log units per head, or None.
        q_indptr: int32 [batch + 1], where each request's query rows begin, or None: one row per request.
        max_q_len: query rows per request that the kernel is chosen for; requests may have more.
        q_limit: what no request has more query rows than, as far as the host knows; None: than q has.
        exact: tokens in 16 bits, or None; lengths count them too, block tables do not.
    """

    options: AttentionOptions = AttentionOptions()
    sinks: torch.Tensor | None = None
    q_indptr: torch.Tensor | None = None
    max_q_len: int = DEFAULT_Q_LEN
    q_limit: int | None = None
    exact: ExactTokens | None = None
