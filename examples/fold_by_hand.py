"""The four folds by hand: where scale and bias go, so that no element of K or V is ever dequantized.

    python examples/fold_by_hand.py

First on four tokens of four channels with every number shown, then on a whole 16-token page of a real record.
Plain Python floats; no GPU.
"""

from __future__ import annotations

import torch

from foscar import KVFormat, PagedKVCache
from foscar.common import fold
from foscar.common.reference import folded_output, folded_scores

TOKENS = CHANNELS = 4
CODES = [[3, 0, 1, 2], [0, 2, 3, 1], [1, 3, 0, 0], [2, 1, 2, 3]]  # [token][channel], 2 bits
SCALE, BIAS = [0.5, 0.25, 1.0, 0.125], [-0.75, 0.5, -1.0, 0.25]  # one pair per token, or one per channel
Q = [1.0, -2.0, 0.5, 3.0]  # the query, one number per channel
P = [0.5, 0.125, 0.25, 0.125]  # softmax weights, one number per token


def row(name: str, values: list[float]) -> None:
    print(f"  {name:<34}" + " ".join(f"{x:8.4f}" for x in values))


def compare(direct: list[float], folded: list[float]) -> None:
    row("dequantize, then multiply", direct)
    row("multiply codes, then fold", folded)
    row("difference", [a - b for a, b in zip(direct, folded, strict=True)])
    print()


def dot(a, b) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def dequantized(axis: str) -> list[list[float]]:
    """[token][channel]: scale * code + bias."""
    return [
        [SCALE[i] * CODES[t][c] + BIAS[i] for c in range(CHANNELS) for i in [t if axis == "token" else c]]
        for t in range(TOKENS)
    ]


def column(rows: list[list], c: int) -> list:
    return [r[c] for r in rows]


def k_per_token() -> None:
    print("1. K per token: S[t] = scale[t] * (Q . code[t]) + bias[t] * sum(Q)")
    row("Q . code", [dot(Q, CODES[t]) for t in range(TOKENS)])
    row("sum(Q), once", [sum(Q)])
    folded = [fold.k_token_score(dot(Q, CODES[t]), sum(Q), SCALE[t], BIAS[t]) for t in range(TOKENS)]
    compare([dot(Q, k) for k in dequantized("token")], folded)


def k_per_channel() -> None:
    print("2. K per channel: Q'[c] = Q[c] * scale[c], and one constant sum(Q[c] * bias[c]) for all tokens of the group")
    query = [fold.k_channel_query(Q[c], SCALE[c]) for c in range(CHANNELS)]
    offset = 0.0
    for c in range(CHANNELS):
        offset = fold.k_channel_offset(offset, Q[c], BIAS[c])
    row("Q'", query)
    row("constant", [offset])
    compare([dot(Q, k) for k in dequantized("channel")], [dot(query, CODES[t]) + offset for t in range(TOKENS)])


def v_per_token() -> None:
    print("3. V per token: P'[t] = P[t] * scale[t], and one constant sum(P[t] * bias[t]) for all channels of the group")
    weight = [fold.v_token_weight(P[t], SCALE[t]) for t in range(TOKENS)]
    offset = 0.0
    for t in range(TOKENS):
        offset = fold.v_token_offset(offset, P[t], BIAS[t])
    row("P'", weight)
    row("constant", [offset])
    direct = [dot(P, column(dequantized("token"), c)) for c in range(CHANNELS)]
    compare(direct, [dot(weight, column(CODES, c)) + offset for c in range(CHANNELS)])


def v_per_channel() -> None:
    print("4. V per channel: O[c] = scale[c] * (P . code[:, c]) + bias[c] * sum(P over the token group)")
    row("P . code", [dot(P, column(CODES, c)) for c in range(CHANNELS)])
    row("sum(P), once", [sum(P)])
    direct = [dot(P, column(dequantized("channel"), c)) for c in range(CHANNELS)]
    folded = [fold.v_channel_output(dot(P, column(CODES, c)), sum(P), SCALE[c], BIAS[c]) for c in range(CHANNELS)]
    compare(direct, folded)


def whole_page() -> None:
    print("The same on a page of 16 tokens, 64 channels, quantized from random values (largest difference, float64):")
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(16, 1, 64, generator=generator) + 1 for _ in range(2))
    q = torch.randn(1, 2, 64, generator=generator).double()
    p = torch.softmax(torch.randn(1, 2, 16, generator=generator).double(), -1)
    page = torch.tensor([0], dtype=torch.int32)
    for bits in (2, 4):
        for axis, group in (("token", 32), ("channel", 16)):
            form = KVFormat.make(bits, k_axis=axis, v_axis=axis, k_group=group, v_group=group)
            cache = PagedKVCache(1, 16, 1, 64, form)
            cache.append(k, v, page[None], page, torch.tensor([0, 16], dtype=torch.int32))
            k_codes, v_codes = cache.read_tokens(page, 0, 16)
            k_values, v_values = (x[:, 0] for x in cache.dequantize_request(page, 16))
            s = folded_scores(q, k_codes, form.k, group)[0] - q[0] @ k_values.T
            o = folded_output(p, v_codes, form.v, group)[0] - p[0] @ v_values
            print(f"  INT{bits} per {axis:<8} (groups of {group})  Q K^T {s.abs().max():.1e}   P V {o.abs().max():.1e}")


if __name__ == "__main__":
    print("codes [token][channel]:", CODES, " scale:", SCALE, " bias:", BIAS)
    print("Q:", Q, " P:", P, "\n")
    k_per_token()
    k_per_channel()
    v_per_token()
    v_per_channel()
    whole_page()
