"""Merging attention states: one softmax over several parts of the keys, from each part's output and LSE.

The state of a part is ``out = sum_t exp(s[t]) v[t] / Z`` and ``lse = log Z``.  Those of disjoint parts combine to that
of their union::

    lse = log(sum_i exp(lse_i))        out = sum_i exp(lse_i - lse) out_i

with powers of 2 instead of e for LSEs in base 2.  Sources: the online softmax (Milakov and Gimelshein, arXiv
1805.02867); "attention states" and their merge operator, FlashInfer's documentation of ``merge_state`` and
``merge_states`` (arXiv 2501.01005, section 2.2).

For a shared prefix or a cascade: decode the prefix and the rest apart, with ``return_lse=True``, and merge.  Every part
must be computed alike (sm_scale, soft-cap, output scale, LSE base); sinks belong to exactly one part, or they count
more than once.  Query tokens of drafts see all of a prefix: there, pass each as a request of its own.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
POWERS = {2: (torch.exp2, torch.log2), "e": (torch.exp, torch.log)}


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, *, lse_base: int | str = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state of two disjoint parts of the keys together.

    Args:
        out_a, out_b: [tokens, query heads, head_dim], bfloat16, float16 or float32, both alike; any strides.
        lse_a, lse_b: float32 [tokens, query heads], in base ``lse_base``: 2 (as of :func:`foscar.decode_attention`
            without ``lse_base``) or "e".

    Returns:
        (out, lse) of the same types, computed in float32.  A side whose LSE is -inf counts nothing, whatever its out
        holds; both sides: zeros and -inf.  A side whose LSE is +inf counts alone; both sides: their mean.

    Raises:
        TypeError: an argument that is no tensor, a base of another kind.
        ValueError: types, shapes or devices that do not fit each other, another base.
    """
    return merge_states_list((out_a, out_b), (lse_a, lse_b), lse_base=lse_base)


@torch.no_grad()
def merge_states_list(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    *,
    lse_base: int | str = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state of n >= 1 disjoint parts of the keys together.

    Args:
        outs: [n, tokens, query heads, head_dim], or n tensors [tokens, query heads, head_dim].  (FlashInfer's
            ``merge_states`` has the states in dimension 1: transpose, no copy is needed.)
        lses: float32 [n, tokens, query heads], or n tensors [tokens, query heads].

    Returns, raises: as :func:`merge_states`, which also describes ``lse_base``.
    """
    _check(outs, lses, lse_base)
    exp, log = POWERS[lse_base]
    lse = torch.stack(tuple(lses))
    top = lse.amax(0)
    weight = exp(lse - top.masked_fill(top == -math.inf, 0.0)).masked_fill((lse == top) & (top == math.inf), 1.0)
    total = weight.sum(0)
    weight /= total.masked_fill(total == 0, 1.0)  # before the sum of products, which may overflow without it
    acc = torch.zeros(outs[0].shape, dtype=torch.float32, device=lse.device)
    for out, w, log_sum in zip(outs, weight, lse, strict=True):
        acc += torch.where((log_sum == -math.inf)[..., None], 0.0, out.float() * w[..., None])
    return acc.to(outs[0].dtype), top + log(total)


def _check(outs, lses, lse_base) -> None:
    if not isinstance(lse_base, (numbers.Real, str)):
        raise TypeError(f"lse_base must be 2 or 'e', not a {type(lse_base).__name__}")
    _require(lse_base in POWERS, f"lse_base must be 2 or 'e', not {lse_base!r}")
    for name, given in (("outs", outs), ("lses", lses)):
        if not isinstance(given, (torch.Tensor, list, tuple)):
            raise TypeError(f"{name} must be a tensor or a sequence of tensors, not {type(given).__name__}")
        for x in given:
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name} must hold tensors, not {type(x).__name__}")
            _require(x.layout is torch.strided, f"{name} must be dense and strided, not {x.layout}")
    _require(len(outs) == len(lses) > 0, f"{len(outs)} outputs and {len(lses)} LSEs: as many are needed, one or more")
    first = outs[0]
    _require(
        first.ndim == 3 and first.dtype in OUT_DTYPES,
        f"outputs must be [tokens, heads, head_dim] of bfloat16, float16 or float32, not {first.dtype} "
        f"{list(first.shape)}",
    )
    for name, given, dtype, shape in (
        ("outputs", outs, first.dtype, first.shape),
        ("LSEs", lses, torch.float32, first.shape[:2]),
    ):
        for x in given:
            _require(
                x.dtype == dtype and x.shape == shape and x.device == first.device,
                f"{name} must all be {dtype} {list(shape)} on {first.device}, "
                f"not {x.dtype} {list(x.shape)} on {x.device}",
            )


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)
