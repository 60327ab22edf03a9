"""The four folds, exactly: rational arithmetic leaves no room for a tolerance."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foscar.common import fold

numbers = st.fractions(min_value=-8, max_value=8, max_denominator=16)
TOKENS, CHANNELS = 4, 6


def lists(element, *shape):
    for n in reversed(shape):
        element = st.lists(element, min_size=n, max_size=n)
    return element


codes = lists(st.integers(0, 15), TOKENS, CHANNELS)


@settings(max_examples=60, deadline=None)
@given(lists(numbers, CHANNELS), codes, lists(numbers, TOKENS, 2), lists(numbers, TOKENS, 2))
def test_k_per_token(q, code, scale, bias):
    """Two channel groups of three channels."""
    for t in range(TOKENS):
        want = sum(q[c] * (scale[t][c // 3] * code[t][c] + bias[t][c // 3]) for c in range(CHANNELS))
        got = sum(
            fold.k_token_score(sum(q[c] * code[t][c] for c in group), sum(q[c] for c in group), scale[t][g], bias[t][g])
            for g, group in enumerate((range(3), range(3, 6)))
        )
        assert got == want


@settings(max_examples=60, deadline=None)
@given(lists(numbers, CHANNELS), codes, lists(numbers, CHANNELS), lists(numbers, CHANNELS))
def test_k_per_channel(q, code, scale, bias):
    query = [fold.k_channel_query(q[c], scale[c]) for c in range(CHANNELS)]
    offset = Fraction(0)
    for c in range(CHANNELS):
        offset = fold.k_channel_offset(offset, q[c], bias[c])
    for t in range(TOKENS):
        want = sum(q[c] * (scale[c] * code[t][c] + bias[c]) for c in range(CHANNELS))
        assert sum(query[c] * code[t][c] for c in range(CHANNELS)) + offset == want


@settings(max_examples=60, deadline=None)
@given(lists(numbers, TOKENS), codes, lists(numbers, TOKENS, 2), lists(numbers, TOKENS, 2))
def test_v_per_token(p, code, scale, bias):
    offset = [Fraction(0)] * 2
    for t in range(TOKENS):
        offset = [fold.v_token_offset(offset[g], p[t], bias[t][g]) for g in range(2)]
    for c in range(CHANNELS):
        g = c // 3
        want = sum(p[t] * (scale[t][g] * code[t][c] + bias[t][g]) for t in range(TOKENS))
        got = sum(fold.v_token_weight(p[t], scale[t][g]) * code[t][c] for t in range(TOKENS)) + offset[g]
        assert got == want


@settings(max_examples=60, deadline=None)
@given(lists(numbers, TOKENS), codes, lists(numbers, 2, CHANNELS), lists(numbers, 2, CHANNELS))
def test_v_per_channel(p, code, scale, bias):
    """Two token groups of two tokens: the fold belongs to each group's partial result."""
    for c in range(CHANNELS):
        want = sum(p[t] * (scale[t // 2][c] * code[t][c] + bias[t // 2][c]) for t in range(TOKENS))
        got = sum(
            fold.v_channel_output(
                sum(p[t] * code[t][c] for t in group), sum(p[t] for t in group), scale[i][c], bias[i][c]
            )
            for i, group in enumerate((range(2), range(2, 4)))
        )
        assert got == want


@pytest.mark.parametrize(
    "call, want",
    [
        (lambda fma: fold.k_token_score(3, 5, 7, 11, fma), 3 * 7 + 5 * 11),
        (lambda fma: fold.k_channel_offset(3, 5, 7, fma), 3 + 5 * 7),
        (lambda fma: fold.v_token_offset(3, 5, 7, fma), 3 + 5 * 7),
        (lambda fma: fold.v_channel_output(3, 5, 7, 11, fma), 3 * 7 + 5 * 11),
    ],
)
def test_the_callers_fma_does_the_additions(call, want):
    calls = []

    def fma(a, b, c):
        calls.append((a, b, c))
        return a * b + c

    assert call(fma) == want and len(calls) == 1


def test_module_imports_neither_torch_nor_the_dsl():
    probe = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('fold', sys.argv[1]); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); "
        "print([n for n in ('torch', 'numpy', 'cutlass') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe, fold.__file__], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
