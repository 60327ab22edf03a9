"""Attention options: what is refused, by the options themselves, by calls and plans, and by the kernels."""

from __future__ import annotations

import math

import pytest
import torch
from support.inputs import int32, make_case

import foscar
from foscar import AttentionOptions, decode_attention


@pytest.mark.parametrize(
    "given, error, match",
    [
        ({"window": 0}, ValueError, "window must be 1 .. 2147483647 tokens or None, not 0"),
        ({"window": -1}, ValueError, "not -1"),
        ({"window": 2**31}, ValueError, "not 2147483648"),
        ({"window": 2.0}, TypeError, "window must be a whole number or None, not 2.0"),
        ({"window": True}, TypeError, "window must be a whole number or None, not True"),
        ({"soft_cap": -1.0}, ValueError, "soft_cap must be positive and finite, not -1.0"),
        ({"soft_cap": math.inf}, ValueError, "soft_cap must be positive and finite, not inf"),
        ({"soft_cap": math.nan}, ValueError, "soft_cap must be positive and finite, not nan"),
        ({"soft_cap": 1e-40}, ValueError, "soft_cap must be a normal number of float32, not 1e-40"),
        ({"soft_cap": None}, TypeError, "soft_cap must be a real number, not NoneType"),
        ({"soft_cap": False}, TypeError, "soft_cap must be a real number, not bool"),
        ({"out_scale": 0}, ValueError, "out_scale must be positive and finite, not 0.0"),
        ({"out_scale": 10**400}, ValueError, "out_scale must be positive and finite, not inf"),
        ({"out_scale": 1e39}, ValueError, "out_scale must be a normal number of float32, not 1e.39"),
        ({"out_scale": "1"}, TypeError, "out_scale must be a real number, not str"),
    ],
)
def test_options_that_are_refused(given, error, match):
    with pytest.raises(error, match=match) as info:
        AttentionOptions(**given)
    assert "\n" not in str(info.value)


def test_equal_options_are_one_key():
    assert (
        AttentionOptions() == AttentionOptions(None, 0, 1)
        and len({AttentionOptions(soft_cap=30), AttentionOptions(soft_cap=30.0)}) == 1
    )
    assert type(AttentionOptions(soft_cap=30, out_scale=1).soft_cap) is float


CALL_ERRORS = {
    "options": ({"options": {"window": 3}}, TypeError, "options must be foscar.AttentionOptions or None, not dict"),
    "sinks as a list": ({"sinks": [0.0] * 8}, TypeError, "sinks must be a torch.Tensor, not list"),
    "sinks dtype": ({"sinks": torch.zeros(8).bfloat16()}, ValueError, r"sinks must be float32 \[8\], .*bfloat16"),
    "sinks shape": ({"sinks": torch.zeros(2)}, ValueError, r"sinks must be float32 \[8\], a logit per .* \[2\]"),
    "sinks elsewhere": ({"sinks": torch.zeros(8, device="meta")}, ValueError, "sinks is on meta, the cache on cpu"),
    "max_q_len": ({"max_q_len": 0}, ValueError, "max_q_len must be 1 or more, not 0"),
    "max_q_len float": ({"max_q_len": 2.0}, TypeError, "max_q_len must be a whole number, not 2.0"),
    "q_indptr as a list": ({"q_indptr": [0, 1, 2]}, TypeError, "q_indptr must be a torch.Tensor, not list"),
    "q_indptr dtype": ({"q_indptr": torch.tensor([0, 1, 2])}, ValueError, "q_indptr must be int32 with 1 dimension, "),
    "q_indptr rank": ({"q_indptr": int32([[0, 1, 2]])}, ValueError, "q_indptr must be int32 with 1 dimension, "),
    "q_indptr count": ({"q_indptr": int32([0, 2])}, ValueError, "q_indptr has 2 entries for 2 requests; it needs one"),
    "q_indptr elsewhere": ({"q_indptr": int32([0, 1, 2], "meta")}, ValueError, "q_indptr is on meta, not on cpu"),
    "q_indptr start": ({"q_indptr": int32([1, 1, 2])}, ValueError, "q_indptr must ascend from 0 within the 2 rows"),
    "q_indptr down": ({"q_indptr": int32([0, 2, 1])}, ValueError, "q_indptr must ascend from 0 within the 2 rows"),
    "q_indptr stop": ({"q_indptr": int32([0, 1, 3])}, ValueError, "q_indptr must ascend from 0 within the 2 rows"),
    "too many rows": ({"q_indptr": int32([0, 2, 2]), "max_q_len": 1}, ValueError,
                      "request 0 has 2 query tokens; max_q_len is 1"),
    "rank of q": ({"q": torch.zeros(2, 128).half(), "q_indptr": int32([0, 1, 2])}, ValueError,
                  r"q must be \[query tokens, query heads, head_dim\] = \[\*, \*, 128\], not \[2, 128\]"),
    "rows without q_indptr": ({"q": torch.zeros(3, 8, 128).half()}, ValueError, r"= \[2, \*, 128\], not \[3, 8, 128\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALL_ERRORS)
@pytest.mark.parametrize("planned", [False, True], ids=["call", "wrapper"])
def test_refused_calls(name, planned):
    change, error, match = CALL_ERRORS[name]
    case = make_case([5, 9], page_size=16)
    out = torch.full_like(case.q, math.nan)
    given = {"q": case.q, "out": out} | change

    def through_wrapper(q, out, sinks=None, **options):
        wrapper = foscar.BatchDecodeWithPagedKVCacheWrapper()
        wrapper.plan(block_table=case.block_table, seq_lens=case.seq_lens, num_qo_heads=8, num_kv_heads=2,
                     head_dim=128, page_size=16, **options)  # fmt: skip
        wrapper.run(q, case.cache, out=out, sinks=sinks)

    def by_call(q, **options):
        decode_attention(q, *case.tables, **options)

    with pytest.raises(error, match=match) as info:
        (through_wrapper if planned else by_call)(**given)
    assert "\n" not in str(info.value) and bool(out.isnan().all())


def test_a_plan_keeps_contiguous_query_rows():
    case = make_case([5, 9], page_size=16)
    with pytest.raises(ValueError, match="plan keeps q_indptr: it must be contiguous"):
        foscar.BatchDecodeWithPagedKVCacheWrapper().plan(
            block_table=case.block_table, seq_lens=case.seq_lens, num_qo_heads=8, num_kv_heads=2, head_dim=128,
            page_size=16, q_indptr=int32([0, 9, 1, 9, 2, 9])[::2],
        )  # fmt: skip
