"""Merging attention states: parts of a request's keys, decoded apart, against the whole."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support.compare import assert_equal
from support.decode_checks import assert_contract
from support.inputs import int32, make_case, random_values

from foscar import AttentionOptions, KVFormat, decode_attention, merge_states, merge_states_list

POWER = {2: lambda x: x * math.log(2.0), "e": lambda x: x}
PAGE = 16


def dense_merge(outs, lses, base):
    """float64, by the definition: unnormalized sums added up; parts that hold nothing left out."""
    shape = outs[0].shape
    total, acc = torch.zeros(shape[:2], dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    top = torch.stack([POWER[base](x.double()) for x in lses]).clamp(min=-1e300).amax(0)
    for out, lse in zip(outs, lses, strict=True):
        z = (POWER[base](lse.double()) - top).exp()
        total += z
        acc += torch.where(z[..., None] > 0, z[..., None] * out.double(), 0.0)
    lse = (top + total.log()) / POWER[base](1.0)
    return torch.where(total[..., None] > 0, acc / total[..., None], 0.0), torch.where(total > 0, lse, -math.inf)


def states(count: int, dtype, seed: int = 0, shape=(7, 4, 64)):
    """Random states; every part of row 0, and one part of each of the next rows, holds nothing (its out: NaN)."""
    outs = [random_values(shape, seed + i, dtype) for i in range(count)]
    lses = [4 * random_values(shape[:2], seed + 50 + i) for i in range(count)]
    for i in range(count):
        for row in (0, i + 1):
            outs[i][row], lses[i][row] = math.nan, -math.inf
    return outs, lses


@pytest.mark.parametrize("base", [2, "e"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_states_of_every_type(count, dtype, base):
    outs, lses = states(count, dtype)
    want, want_lse = dense_merge(outs, lses, base)
    forms = [
        merge_states_list(outs, lses, lse_base=base),
        merge_states_list(torch.stack(outs), torch.stack(lses), lse_base=base),
        merge_states_list(torch.stack(outs, 1).transpose(0, 1), torch.stack(lses, 1).transpose(0, 1), lse_base=base),
    ]
    if count == 2:
        forms.append(merge_states(outs[0], lses[0], outs[1], lses[1], lse_base=base))
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-21}[dtype]
    for out, lse in forms:
        assert out.dtype == dtype and lse.dtype == torch.float32
        torch.testing.assert_close(out.double(), want, rtol=unit, atol=unit)
        torch.testing.assert_close(lse, want_lse.float())
        assert bool((out[0] == 0).all()) and bool((lse[0] == -math.inf).all())
        assert_equal(out, forms[0][0])
        assert_equal(lse, forms[0][1])


def test_the_default_is_base_2_and_the_order_does_not_matter():
    outs, lses = states(2, torch.float32)
    out, lse = merge_states(outs[0], lses[0], outs[1], lses[1])
    want = merge_states(outs[1], lses[1], outs[0], lses[0], lse_base=2)
    for got, expected in zip((out, lse), want, strict=True):
        torch.testing.assert_close(got, expected)
    assert not torch.equal(lse, merge_states(outs[0], lses[0], outs[1], lses[1], lse_base="e")[1])


def test_far_apart_and_large_lses():
    """exp of either would overflow or vanish."""
    outs = [torch.full((1, 1, 64), x) for x in (3.0, 5.0)]
    for first, second, want, want_lse in (
        (1e4, 1e4, 4.0, 1e4 + 1),
        (-1e4, -1e4, 4.0, -1e4 + 1),
        (900.0, -900.0, 3.0, 900.0),
    ):
        out, lse = merge_states(outs[0], torch.full((1, 1), first), outs[1], torch.full((1, 1), second))
        assert_equal(out, torch.full_like(out, want))
        assert_equal(lse, torch.full_like(lse, want_lse))


@pytest.mark.parametrize("base", [2, "e"])
def test_the_ends_of_float32(base):
    """Outputs and LSEs near the largest number, and LSEs of +inf: they count alone."""
    big, inf = 3.3e38, math.inf
    for values, lses, want, want_lse in (
        ((big, big, big), (0.0, 0.0, 0.0), big, None),
        ((-big, -big, 1.0), (2.0, 2.0, -inf), -big, None),
        ((3.0, 5.0, 1.0), (big, big, -big), 4.0, big),
        ((3.0, 5.0, 1.0), (-big, -big, -inf), 4.0, -big),
        ((3.0, 5.0, 1.0), (inf, 7.0, -inf), 3.0, inf),
        ((3.0, 5.0, 1.0), (inf, inf, big), 4.0, inf),
        ((math.nan, 5.0, math.nan), (-inf, inf, -inf), 5.0, inf),
    ):
        outs, sums = ([torch.full((1, 2, 64)[:n], x) for x in given] for n, given in ((3, values), (2, lses)))
        out, lse = merge_states_list(outs, sums, lse_base=base)
        torch.testing.assert_close(out, torch.full_like(out, want))
        if want_lse is not None:
            assert_equal(lse, torch.full_like(lse, want_lse))


def test_nan_stays_in_its_row_and_head():
    outs, lses = (torch.stack(x)[:, 3:] for x in states(2, torch.float32))
    want, want_lse = merge_states_list(outs, lses)
    bad_out, bad_lse = outs.clone(), lses.clone()
    bad_out[0, 1, 2], bad_lse[1, 2, 3] = math.nan, math.nan
    out, lse = merge_states_list(bad_out, bad_lse)
    bad = torch.zeros(4, 4, dtype=torch.bool)
    bad[2, 3] = True
    assert torch.equal(lse.isnan(), bad) and torch.equal(lse[~bad], want_lse[~bad])
    bad[1, 2] = True
    assert torch.equal(out.isnan().all(-1), bad) and torch.equal(out[~bad], want[~bad])


# ---------------------------------------------------------------------------------------------- decodes
def parts_of(case, cuts):
    """(block table, lengths) of each part of the requests' tokens; ``cuts``: whole pages at which to cut."""
    lengths = case.seq_lens.tolist()
    found = []
    for first, last in zip((0, *cuts), (*cuts, 10**6), strict=True):
        counts = [min(max(0, n - first * PAGE), (last - first) * PAGE) for n in lengths]
        width = max(1, max(-(-n // PAGE) for n in counts))
        table = torch.full((len(lengths), width), -1, dtype=torch.int32)
        for b, n in enumerate(counts):
            pages = -(-n // PAGE)
            table[b, :pages] = case.block_table[b, first : first + pages]
        found.append((table, int32(counts)))
    return found


@pytest.mark.parametrize("base", [2, "e"])
@pytest.mark.parametrize("cuts", [(2,), (1, 2, 4)], ids=["two", "four"])
@pytest.mark.parametrize("fmt", [KVFormat.int2(), KVFormat.make(4, 2, k_axis="channel")], ids=["token", "channel"])
def test_parts_of_requests_are_the_whole(fmt, cuts, base):
    """Public report 12; requests that end before a cut, and an empty one, have parts without tokens."""
    case = make_case([100, 33, 64, 0, 5], fmt=fmt, page_size=PAGE, dtype=torch.float16)
    states = [
        decode_attention(case.q, case.cache, *part, return_lse=True, lse_base=base) for part in parts_of(case, cuts)
    ]
    assert bool((states[-1][1] == -math.inf).any()) and bool((states[0][1] > -math.inf).any())
    outs, lses = ([state[i] for state in states] for i in (0, 1))
    merged = merge_states_list(outs, lses, lse_base=base)
    assert_contract(*merged, case, lse_base=base)
    whole = decode_attention(case.q, *case.tables, return_lse=True, lse_base=base)
    torch.testing.assert_close(merged[0], whole[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(merged[1], whole[1])
    if len(cuts) == 1:
        for got, want in zip(merge_states(outs[0], lses[0], outs[1], lses[1], lse_base=base), merged, strict=True):
            assert_equal(got, want)


@pytest.mark.parametrize("base", [2, "e"])
def test_options_and_sinks_in_parts(base):
    """Soft-cap and output scale in every part, the sinks in one."""
    case = make_case([100, 33, 20], page_size=PAGE, dtype=torch.float16)
    sinks = random_values((1, 8), 5, mean=2.0)[0] + 4
    shared = {"options": AttentionOptions(soft_cap=6.0, out_scale=0.5), "return_lse": True, "lse_base": base}
    whole, whole_lse = decode_attention(case.q, *case.tables, sinks=sinks, **shared)
    first, second = parts_of(case, (2,))
    a = decode_attention(case.q, case.cache, *first, **shared)
    b = decode_attention(case.q, case.cache, *second, sinks=sinks, **shared)
    out, lse = merge_states(*a, *b, lse_base=base)
    torch.testing.assert_close(out, whole, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, whole_lse)
    twice = decode_attention(case.q, case.cache, *first, sinks=sinks, **shared)
    assert bool((merge_states(*twice, *b, lse_base=base)[1] > whole_lse).all())


def test_a_shared_prefix_under_drafts():
    """Every draft row sees all of the prefix: rows of their own there, drafts of the rest."""
    prefix, lengths, q_lens = 2, [70, 45], [3, 5]
    case = make_case(lengths, page_size=PAGE, dtype=torch.float16)
    case.block_table[1, :prefix] = case.block_table[0, :prefix]
    q = random_values((sum(q_lens), 8, 128), 9, torch.float16, mean=0.5)
    q_indptr, rest = int32([0, 3, 8]), case.block_table[:, prefix:]
    whole, whole_lse = decode_attention(q, *case.tables, q_indptr=q_indptr, return_lse=True)
    a = decode_attention(q, case.cache, case.block_table[:1, :prefix].expand(8, -1), int32([prefix * PAGE] * 8),
                         return_lse=True)  # fmt: skip
    b = decode_attention(q, case.cache, rest, case.seq_lens - prefix * PAGE, q_indptr=q_indptr, return_lse=True)
    out, lse = merge_states(*a, *b)
    torch.testing.assert_close(out, whole, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, whole_lse)


# ---------------------------------------------------------------------------------------------- refusals
ERRORS = {
    "no tensor": ({"out_a": [1.0]}, TypeError, "outs must hold tensors, not list"),
    "no LSE": ({"lse_b": None}, TypeError, "lses must hold tensors, not NoneType"),
    "base": ({"lse_base": 10}, ValueError, "lse_base must be 2 or 'e', not 10"),
    "base kind": ({"lse_base": None}, TypeError, "lse_base must be 2 or 'e', not a NoneType"),
    "rank": ({"out_a": torch.zeros(4, 64)}, ValueError, r"outputs must be \[tokens, heads, head_dim\] of .*\[4, 64\]"),
    "type": ({"out_a": torch.zeros(7, 4, 64).double()}, ValueError, "outputs must be .* not torch.float64"),
    "types": ({"out_b": torch.zeros(7, 4, 64).half()}, ValueError, "outputs must all be torch.float32 .*float16"),
    "shapes": ({"out_b": torch.zeros(7, 4, 128)}, ValueError, r"outputs must all be .* \[7, 4, 128\] on cpu"),
    "LSE type": ({"lse_a": torch.zeros(7, 4).double()}, ValueError, "LSEs must all be torch.float32 .*torch.float64"),
    "LSE shape": ({"lse_b": torch.zeros(4, 7)}, ValueError, r"LSEs must all be torch.float32 \[7, 4\] .* \[4, 7\]"),
    "devices": ({"lse_b": torch.zeros(7, 4, device="meta")}, ValueError, "on cpu, not .* on meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_refused(name):
    change, error, match = ERRORS[name]
    given = {"out_a": torch.zeros(7, 4, 64), "lse_a": torch.zeros(7, 4)}
    given = given | {"out_b": given["out_a"], "lse_b": given["lse_a"]} | change
    with pytest.raises(error, match=match) as info:
        merge_states(**given)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "outs, lses, error, match",
    [
        ([], [], ValueError, "0 outputs and 0 LSEs: as many are needed, one or more"),
        (torch.zeros(3, 7, 4, 64), torch.zeros(2, 7, 4), ValueError, "3 outputs and 2 LSEs: as many are needed"),
        (None, [], TypeError, "outs must be a tensor or a sequence of tensors, not NoneType"),
    ],
)
def test_refused_lists(outs, lses, error, match):
    with pytest.raises(error, match=match):
        merge_states_list(outs, lses)


def test_states_that_want_gradients():
    case = make_case([9], page_size=PAGE)
    state = decode_attention(case.q, *case.tables, return_lse=True)
    case = dataclasses.replace(case, q=case.q.requires_grad_())
    assert not merge_states(case.q, state[1], *state)[0].requires_grad
