"""The torch operators: schemas, fake kernels, refusals."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_equal
from support.decode_checks import assert_contract
from support.inputs import POISON, indptr_of, int32, random_values, shuffled_table
from support.op_cases import (
    HEAD_DIM,
    HEADS,
    PAGE,
    case_of,
    empty_cache,
    new_tokens,
    shape_of,
    tensors_of,
    windowed_tensors,
)
from support.window_checks import KIVI, WindowCase, make_inputs

import foscar
from foscar import AttentionOptions, KVFormat, WindowConfig

ops = torch.ops.foscar


# ---------------------------------------------------------------------------------------------- the operators
DECODES = {
    "plain": {},
    "base e": {"lse_base": "e", "sm_scale": 0.3},
    "options": {"window": 7, "soft_cap": 20.0, "out_scale": 0.5},
    "sinks": {"sinks": torch.linspace(-1, 2, HEADS)},
    "checked": {"check": True, "backend": "torch"},
}


@pytest.mark.parametrize("named", DECODES.values(), ids=DECODES)
def test_opcheck_of_decode(named):
    case = case_of([40, 0, 17], KVFormat.make(4, 2, k_axis="channel"))
    torch.library.opcheck(ops.decode_attention.default, tensors_of(case), named)


def test_opcheck_of_decode_of_drafts():
    case = case_of([40, 20], q=random_values((5, HEADS, HEAD_DIM), 9, torch.float16))
    torch.library.opcheck(
        ops.decode_attention.default, tensors_of(case), {"q_indptr": int32([0, 4, 5]), "max_q_len": 4}
    )


def test_opcheck_of_decode_into():
    case = case_of([40, 20], q=random_values((5, HEADS, HEAD_DIM), 9, torch.float16))
    arguments = (torch.full_like(case.q, 5), *tensors_of(case))
    named = {"q_indptr": int32([0, 4, 5]), "max_q_len": 4}
    torch.library.opcheck(ops.decode_attention_into.default, arguments, named)


@pytest.mark.parametrize("named", DECODES.values(), ids=DECODES)
@pytest.mark.parametrize("into", [False, True])
def test_opcheck_of_decode_windowed(named, into):
    named = {name: x for name, x in named.items() if name not in ("window", "check")}
    given = make_inputs(WindowCase(KIVI, WindowConfig(5, 20), (70, 0, 17), head_dim=HEAD_DIM, page_size=PAGE))
    arguments = (*windowed_tensors(given), *given.cache.operator_shape)
    if into:
        out = torch.full_like(given.q, 5)
        torch.library.opcheck(ops.decode_windowed_into.default, (out, *arguments), named)
    else:
        torch.library.opcheck(ops.decode_windowed.default, arguments, named)


def test_the_windowed_operator_is_the_function():
    q_lens = {"lengths": (70, 6, 17), "q_lens": (4, 0, 2)}
    given = make_inputs(WindowCase(KIVI, WindowConfig(5, 20, "float16"), **q_lens))
    named = {"sm_scale": 0.2, "max_q_len": 4, "q_indptr": given.q_indptr, "sinks": random_values((1, 6), 5)[0]}
    options = {"soft_cap": 20.0, "out_scale": 0.5}
    want = given.decode(options=AttentionOptions(**options), lse_base="e", **named)
    arguments = (*windowed_tensors(given), *given.cache.operator_shape)
    got = foscar.ops.decode_windowed(*arguments, lse_base="e", **named, **options)
    out = torch.full_like(given.q, torch.nan)
    lse = foscar.ops.decode_windowed_into(out, *arguments, lse_base="e", **named, **options)
    for found in (got, (out, lse)):
        for a, b in zip(found, want, strict=True):
            assert_equal(a, b)


def test_refused_storage():
    given = make_inputs(WindowCase(KIVI, WindowConfig(5, 20), (70, 6, 17)))
    q, storage, *tables = windowed_tensors(given)
    shape = given.cache.operator_shape
    for change, message in (
        (storage[:5], "^storage must be the tensors records, sink_k, .*, not 5"),
        ([storage[0][0], *storage[1:]], "^records must have 3 dimensions and a spare entry"),
        ([*storage[:2], storage[2].half(), *storage[3:]], "^sink_v must be contiguous torch.bfloat16"),
        ([*storage[:5], storage[5][:-1]], r"^packed_lens must be contiguous torch.int32 \[6\]"),
        ([*storage[:4], storage[4][:, :, :32], storage[5]], "^recent_v must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.decode_windowed(q, change, *tables, *shape)
    with pytest.raises(ValueError, match="^recent_k must be contiguous"):
        ops.decode_windowed(q, storage, *tables, *shape[:3], 99)
    with pytest.raises(ValueError, match="^decode_windowed takes no sliding window"):
        ops.decode_windowed(q, storage, *tables, *shape, window=9)


@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("fmt", ["int2", "k4c16v2-bf16"])
def test_opcheck_of_append(chunk, fmt):
    cache = empty_cache(fmt=KVFormat.parse(fmt))
    lengths = int32([0, 16, 32])
    table = shuffled_table([60, 60, 60], PAGE, 20, seed=1)
    rows = [16, 0, 17] if chunk else [1, 1, 1]
    indptr = indptr_of(rows) if chunk else None
    k, v = new_tokens(sum(rows), 2)
    torch.library.opcheck(ops.append.default, (cache.data, k, v, table, lengths, indptr, *shape_of(cache)))


def test_the_operators_are_the_functions():
    case = case_of([40, 0, 17], KVFormat.parse("k2v4-bf16"), dtype=torch.float16)
    out, lse = ops.decode_attention(*tensors_of(case))
    assert_contract(out, lse, case)
    options = AttentionOptions(window=7, soft_cap=20.0, out_scale=0.5)
    sinks = random_values((1, HEADS), 5)[0]
    want = foscar.decode_attention(
        case.q, *case.tables, options=options, sinks=sinks, sm_scale=0.2, return_lse=True, lse_base="e"
    )
    got = foscar.ops.decode_attention(
        *tensors_of(case), sinks=sinks, sm_scale=0.2, lse_base="e", window=7, soft_cap=20.0, out_scale=0.5
    )
    for a, b in zip(got, want, strict=True):
        assert_equal(a, b)
    ours, theirs = empty_cache(), empty_cache()
    table, (k, v) = shuffled_table([60, 60], PAGE, 20, seed=1), new_tokens(2, 6)
    foscar.ops.append(ours.data, k, v, table, int32([5, 0]), None, *shape_of(ours))
    theirs.append(k, v, table, int32([5, 0]))
    assert_equal(ours.data, theirs.data)
    assert (ours.data != POISON).any()


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({4: "int3"}, foscar.FormatError, "^bits must be one of"),
        ({5: 8}, foscar.FormatError, "^page_size must be one of"),
        ({6: 128}, ValueError, "^data must be uint8"),
        ({1: torch.zeros(4, dtype=torch.uint8)}, ValueError, "^cache_data must be uint8"),
        ({2: torch.zeros(3, 4)}, ValueError, "^block_table must be int32"),
    ],
)
def test_refusals(change, error, match):
    arguments = list(tensors_of(case_of([40, 0, 17])))
    for i, value in change.items():
        arguments[i] = value
    with pytest.raises(error, match=match):
        ops.decode_attention(*arguments)


def test_refused_lse_base():
    with pytest.raises(ValueError, match="^lse_base must be '2' or 'e', not '10'$"):
        ops.decode_attention(*tensors_of(case_of([4])), lse_base="10")
