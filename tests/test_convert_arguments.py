"""Malformed arguments of the converters: each ends in one line of a ValueError or TypeError, none in wrong values."""

from __future__ import annotations

import re

import pytest
import torch
from support.compare import assert_equal
from support.foreign import kivi_words, random_codes, random_params

from foscar import KVFormat
from foscar.convert import (
    Dense,
    add_kivi_residual,
    from_bitdecoding_codes,
    from_kivi,
    from_oscar,
    from_qserve,
    from_quantized,
)


def kivi() -> dict:
    """32 tokens of 2 KV heads of 64, one group per channel and two per token."""
    words = torch.zeros(1, 2, 64, 2, dtype=torch.int32), torch.zeros(1, 2, 32, 4, dtype=torch.int32)
    return {"k_codes": words[0], "k_scale": torch.ones(1, 2, 64, 1), "k_min": torch.ones(1, 2, 64, 1),
            "v_codes": words[1], "v_scale": torch.ones(1, 2, 32, 2), "v_min": torch.ones(1, 2, 32, 2)}  # fmt: skip


def residual() -> dict:
    tail = torch.zeros(1, 2, 5, 64)
    return {"converted": from_kivi(**kivi()), "k_tail": tail, "v_tail": tail}


def oscar() -> dict:
    codes, pairs = torch.zeros(4, 2, 16, dtype=torch.uint8), torch.ones(4, 2, 2)
    at = {"kv_indptr": torch.tensor([0, 2, 3]), "kv_indices": torch.tensor([3, 1, 0])}
    return {"k_codes": codes, "k_scales_zeros": pairs, "v_codes": codes, "v_scales_zeros": pairs} | at


def qserve() -> dict:
    blocks = torch.zeros(3, 2 * 16 * 32 + 4 * 2 * 16, dtype=torch.int8)
    tables = {"block_table": torch.tensor([[0, 2]], dtype=torch.int32), "seq_lens": torch.tensor([17])}
    return {"k_blocks": blocks, "v_blocks": blocks} | tables | {"num_kv_heads": 2, "head_dim": 64, "block_size": 16}


def quantized() -> dict:
    side = Dense(torch.zeros(4, 1, 64, dtype=torch.uint8), torch.ones(4, 1, 1), torch.ones(4, 1, 1))
    return {"k": side, "v": side, "lengths": [1, 3], "format": KVFormat.int2()}


def bitdecoding() -> dict:
    codes = torch.zeros(2, 32, 1, 64, dtype=torch.uint8)
    k, v = torch.ones(2, 1, 1, 64), torch.ones(2, 1, 1, 32)
    return {"k_codes": codes, "k_scale": k, "k_min": k, "v_codes": codes, "v_scale": v, "v_min": v}


CONVERTERS = [(from_bitdecoding_codes, bitdecoding), (from_kivi, kivi), (add_kivi_residual, residual),
              (from_oscar, oscar), (from_qserve, qserve), (from_quantized, quantized)]  # fmt: skip
CASES = [(call, make, name) for call, make in CONVERTERS for name in make()]


def refused(call, arguments: dict) -> str:
    """The message of the refusal, one line."""
    with pytest.raises((ValueError, TypeError)) as error:
        call(**arguments)
    raised = error.traceback[-1].path
    assert "foscar" in str(raised), f"raised in {raised}"
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    return str(error.value)


@pytest.mark.parametrize("call, make, name", CASES, ids=[f"{call.__name__}-{name}" for call, _, name in CASES])
def test_arguments_of_another_kind(call, make, name):
    good = make()
    call(**good)
    x = good[name]
    wrong = [None, "a", 1.5, object(), [[1]]]
    if isinstance(x, torch.Tensor):
        wrong += [x[0], x[None], x.tolist(), x.numpy(), x.bool(), x.to(torch.complex64), x.to("meta")]
        wrong.append(x.float() if not x.is_floating_point() else x.int())
        if name not in ("k_tail", "v_tail"):  # their lengths are free
            wrong += [x[:0], x[..., :0]]
    if isinstance(x, (int, list)):
        wrong += [-1, 0, True, [-1, 5], [1.0, 3.0], torch.tensor([1, 3])]
    for value in wrong:
        refused(call, good | {name: value})


@pytest.mark.parametrize("call, change, message", [
    (from_kivi, {"k_bits": 3}, "k_bits must be one of"),
    (from_kivi, {"k_bits": "2"}, "k_bits must be a whole number"),
    (from_kivi, {"v_bits": 0}, "v_bits must be one of"),
    (from_kivi, {"page_size": 0}, "page_size must be one of"),
    (from_kivi, {"page_size": None}, "page_size must be a whole number"),
    (from_kivi, {"params": "float8"}, "params must be one of"),
    (from_kivi, {"k_codes": torch.zeros(1, 2, 64, 2, dtype=torch.int8)}, "k_codes must be integers of 32 bits"),
    (from_kivi, {"k_scale": torch.ones(1, 2, 64, 0), "k_min": torch.ones(1, 2, 64, 0)}, "0 parameter pairs"),
    (add_kivi_residual, {"residual_length": -1}, "residual_length must be 0 or more"),
    (add_kivi_residual, {"residual_length": 4}, "the tails must be"),
    (add_kivi_residual, {"v_tail": torch.full((1, 2, 5, 64), 7e4)}, "not finite in float16"),
    (from_oscar, {"kv_indices": torch.tensor([3, -1, 0])}, "kv_indices holds .-1.; the pool's slots are 0 .. 3"),
    (from_oscar, {"kv_indices": torch.tensor([3, 4, 0])}, "kv_indices holds .4."),
    (from_oscar, {"kv_indptr": torch.tensor([0, 2, 1])}, "kv_indptr must ascend"),
    (from_oscar, {"kv_indptr": torch.tensor([-2, 2, 3])}, "kv_indptr must ascend"),
    (from_oscar, {"kv_indptr": torch.tensor([0, 2, 4])}, "kv_indptr must ascend within the 3 entries"),
    (from_oscar, {"k_scales_zeros": torch.ones(4, 2, 3)}, "K: 3 scales and zeros are no pairs"),
    (from_oscar, {"page_size": 8}, "page_size must be one of"),
    (from_qserve, {"num_kv_heads": 0}, "num_kv_heads must be 1 or more"),
    (from_qserve, {"block_size": 0}, "block_size must be 1 or more"),
    (from_qserve, {"page_size": 0}, "page_size must be 1 or more"),
    (from_qserve, {"head_dim": 0}, "head_dim must be 1 or more"),
    (from_qserve, {"head_dim": 63}, "head_dim must be one of"),
    (from_qserve, {"seq_lens": torch.tensor([-1])}, "seq_lens must be 0 or more"),
    (from_qserve, {"seq_lens": torch.tensor([1, 1])}, "does not hold the blocks of"),
    (from_qserve, {"block_table": torch.tensor([[0, -1]])}, "block_table holds .-1."),
    (from_bitdecoding_codes, {"lengths": [32]}, "lengths must be 2 numbers up to 32"),
    (from_bitdecoding_codes, {"lengths": [33, 1]}, "lengths must be 2 numbers up to 32"),
    (from_bitdecoding_codes, {"num_bits": 8}, "num_bits must be one of"),
    (from_bitdecoding_codes, {"quant_mode": "v"}, "quant_mode must be one of"),
    (from_bitdecoding_codes, {"group_size": 0}, "group_size must be 1 or more"),
    (from_bitdecoding_codes, {"quant_mode": "k-tensor"}, r"k_scale must be .2, 1, 1, 32."),
    (from_quantized, {"lengths": [5, -1]}, r"lengths.1. must be 0 or more, not -1"),
    (from_quantized, {"lengths": [4.0]}, "must be a whole number"),
    (from_quantized, {"page_size": 17}, "page_size must be one of"),
])  # fmt: skip
def test_arguments_that_do_not_fit(call, change, message):
    text = refused(call, dict(CONVERTERS)[call]() | change)
    assert re.search(message, text), text


def test_parts_of_dense():
    good = quantized()["k"]
    for name in ("codes", "scale", "bias"):
        x = getattr(good, name)
        for value in (None, x.tolist(), x[0], x[:3], x.to("meta"), x.to(torch.complex64)):
            parts = {"codes": good.codes, "scale": good.scale, "bias": good.bias} | {name: value}
            for side in ("k", "v"):
                refused(from_quantized, quantized() | {side: Dense(**parts)})


def test_nothing_to_convert():
    """No requests, and requests without tokens."""
    whole = from_oscar(**oscar() | {"kv_indptr": torch.tensor([0]), "kv_indices": torch.tensor([], dtype=torch.int64)})
    assert whole.seq_lens.tolist() == [] and whole.cache.num_pages == 0
    tables = {"block_table": torch.zeros(1, 0, dtype=torch.int32), "seq_lens": torch.tensor([0])}
    assert from_qserve(**qserve() | tables).seq_lens.tolist() == [0]
    none = {"block_table": torch.zeros(0, 2, dtype=torch.int32), "seq_lens": torch.tensor([], dtype=torch.int32)}
    assert from_qserve(**qserve() | none).cache.num_pages == 0
    per_token = from_oscar(**oscar())
    tail = torch.zeros(2, 2, 0, 64)
    assert add_kivi_residual(per_token, tail, tail, residual_length=0).seq_lens.tolist() == [2, 1]


@pytest.mark.parametrize("head_dim", [80, 96, 112])
def test_kivi_with_one_v_group_of_all_channels(head_dim):
    """A group of head_dim channels, also where that is no multiple of the unit of groups."""
    k, v = random_codes((1, 1, head_dim, 32), 2, 0), random_codes((1, 1, 32, head_dim), 2, 1)
    k_pair, v_pair = random_params((1, 1, head_dim, 1), 2), random_params((1, 1, 32, 1), 3)
    converted = from_kivi(kivi_words(k, 2, 3), *k_pair, kivi_words(v, 2, 3), *v_pair)
    got = converted.cache.dequantize_request(converted.block_table[0], 32)
    assert_equal(got[1], (v.double() * v_pair[0].double() + v_pair[1].double())[0].transpose(0, 1))
    assert_equal(got[0], (k.double() * k_pair[0].double() + k_pair[1].double())[0].permute(2, 0, 1))
