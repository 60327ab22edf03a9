"""Affine folding: where scale and bias of a quantized operand go, so that no element is ever dequantized.

With ``x ~ scale * code + bias`` the two products of attention become products with the codes alone:

====================  =========================================  ==================================================
quantization          scale goes to                              bias becomes
====================  =========================================  ==================================================
K per token, G        S[h,t] = sum_G scale[t,G] (Q_G . code_G)   + sum_G bias[t,G] sum_{c in G} Q[h,c]
K per channel, T      Q'[h,c] = Q[h,c] scale[c], once per T      + sum_c Q[h,c] bias[c], one constant per (h, T)
V per token, G        P'[h,t] = P[h,t] scale[t,G]                + sum_t P[h,t] bias[t,G], for every channel of G
V per channel, T      the partial O of T, per channel            + (sum_{t in T} P[h,t]) bias[c]
====================  =========================================  ==================================================

G is a group of channels, T a group of tokens: there is one (scale, bias) pair per token and G, or per channel and T.
The softmax denominator uses the unscaled P.  The fourth row holds for each token group's partial O, so it is applied
before partial results are added.

The functions use ``*`` and ``+`` only: the same ones serve numbers, numpy and torch arrays (broadcasting as the caller
arranges) and values inside a kernel, which passes its fused multiply-add as ``fma``.
"""

from __future__ import annotations


def multiply_add(a, b, c):
    """``a * b + c``; a kernel passes its fused instruction instead."""
    return a * b + c


def k_token_score(dot, q_sum, scale, bias, fma=multiply_add):
    """Row 1: one channel group's part of S from ``dot = Q_G . code_G`` and ``q_sum = sum_{c in G} Q[h,c]``."""
    return fma(scale, dot, bias * q_sum)


def k_channel_query(q, scale):
    """Row 2: the query ``Q'`` that is multiplied with the codes of one token group."""
    return q * scale


def k_channel_offset(offset, q, bias, fma=multiply_add):
    """Row 2: one channel's term added to the constant that a token group's scores get: ``offset + q * bias``."""
    return fma(q, bias, offset)


def v_token_weight(p, scale):
    """Row 3: the weight ``P'`` that multiplies the codes of one token and channel group."""
    return p * scale


def v_token_offset(offset, p, bias, fma=multiply_add):
    """Row 3: one token's term added to the constant of a channel group of O: ``offset + p * bias``."""
    return fma(p, bias, offset)


def v_channel_output(partial, p_sum, scale, bias, fma=multiply_add):
    """Row 4: a token group's part of O from ``partial = P . code`` and ``p_sum`` = the sum of P over the group."""
    return fma(scale, partial, p_sum * bias)
