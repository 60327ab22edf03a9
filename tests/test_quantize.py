"""Quantization: the half-step bound, exact cases, extreme magnitudes, and values that cannot be represented."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_equal
from support.inputs import random_values

from foscar.common.formats import TensorFormat
from foscar.common.quantize import CONSTANT_SCALE, Quantized, dequantize, quantize

PARAMS = (torch.float16, torch.bfloat16)
GROUPS = (("token", None), ("token", 32), ("channel", 16))
FORMATS = [TensorFormat(bits, axis, group) for bits in (2, 4) for axis, group in GROUPS]
TINY = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}


def per_element(q: Quantized, values: torch.Tensor, f: TensorFormat) -> torch.Tensor:
    """A parameter spread over the elements of its group, float64."""
    return dequantize(Quantized(torch.zeros_like(q.codes), values, values), f, dtype=torch.float64)


def assert_half_step(x: torch.Tensor, f: TensorFormat, params: torch.dtype, slack: float = 1e-5) -> Quantized:
    """The guarantee for groups of unequal values, and rounding to the parameter type for constant ones."""
    q = quantize(x, f, params=params)
    y = dequantize(q, f, dtype=torch.float64)
    assert bool((q.scale > 0).all()) and bool(q.scale.isfinite().all()) and bool(q.bias.isfinite().all())
    assert int(q.codes.max()) <= f.max_code
    x64, scale = x.double(), per_element(q, q.scale, f)
    if f.axis == "token":
        groups = x64.unflatten(-1, (-1, f.group or x.shape[-1]))
        constant = (groups == groups[..., :1]).all(-1, keepdim=True).expand_as(groups).flatten(-2)
    else:
        parts = [p == p[:1] for p in x64.split(f.group)]
        constant = torch.cat([p.all(0, keepdim=True).expand_as(p) for p in parts])
    allowed = torch.where(constant, (x64.to(params).double() - x64).abs(), scale * (0.5 * (1 + slack)))
    excess = (x64 - y).abs() - allowed
    assert bool((excess <= 0).all()), f"beyond half a step by {excess.max().item():.3e}, scale {scale.max().item():.3e}"
    return q


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("f", FORMATS, ids=str)
@pytest.mark.parametrize("size", [1, 1e-4, 1e-7, 1e-9, 1e-30, 1e4])
@pytest.mark.parametrize("offset", [0, 1, 100, 6e4, -6e4])
def test_half_step_bound_at_all_magnitudes(f, params, size, offset):
    x = (random_values((37, 2, 64), 5).clamp(-2, 2) * size + offset).clamp(-65504, 65504)
    for dtype in (torch.float32, torch.float64):
        assert_half_step(x.to(dtype), f, params)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(-6e4, 6e4, width=32), min_size=2, max_size=32),
    st.sampled_from(FORMATS),
    st.sampled_from(PARAMS),
)
def test_half_step_bound(values, f, params):
    x = torch.tensor(values, dtype=torch.float32)[torch.arange(2 * 64 * 3) % len(values)].view(3, 2, 64)
    assert_half_step(x, f, params)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(FORMATS),
    st.sampled_from(PARAMS),
    st.integers(-12, 4),
)
def test_values_on_a_grid_are_exact(seed, f, params, exponent):
    """What a decoder can hold comes back bit for bit, so quantizing again changes nothing."""
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, f.max_code + 1, (32, 2, 64), generator=gen)
    codes[0], codes[1], codes[16], codes[17] = 0, f.max_code, 0, f.max_code  # every channel group spans the range
    codes[..., ::32], codes[..., 1::32] = 0, f.max_code  # every token group too
    step, base = 2.0**exponent, 2.0**exponent * int(torch.randint(-8, 8, (1,), generator=gen))
    x = codes * step + base
    q = quantize(x, f, params=params)
    assert_equal(dequantize(q, f, dtype=torch.float64), x.double(), ("token", "head", "channel"))
    again = quantize(dequantize(q, f), f, params=params)
    assert torch.equal(again.codes, q.codes) and torch.equal(again.scale, q.scale) and torch.equal(again.bias, q.bias)


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("f", FORMATS, ids=str)
@pytest.mark.parametrize("value", [0.0, -0.0, 100.0, -1.5, 2.0**-20, 57344.0])
def test_constant_groups_are_exact(f, params, value):
    q = quantize(torch.full((20, 2, 64), value), f, params=params)
    assert bool((q.codes == 0).all()) and bool((q.scale == CONSTANT_SCALE).all())
    assert_equal(dequantize(q, f), torch.full((20, 2, 64), value))


@pytest.mark.parametrize("f", FORMATS, ids=str)
def test_constant_groups_that_the_parameters_cannot_hold_are_rounded(f):
    q = quantize(torch.full((20, 2, 64), 60010.0), f)
    assert bool((q.codes == 0).all()) and bool((q.scale == CONSTANT_SCALE).all()) and bool((q.bias == 60000).all())


def test_one_constant_row_among_others():
    x = random_values((8, 2, 64), 1)
    x[3, 1] = 100.0
    q = assert_half_step(x, FORMATS[0], torch.float16)
    assert_equal(dequantize(q, FORMATS[0])[3, 1], torch.full((64,), 100.0))


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_scale_is_never_zero(params):
    x = torch.zeros(4, 1, 64)
    x[0, 0, 0], x[1, 0, 5], x[2, 0, :] = 1e-40, -1e-38, torch.linspace(1e-12, 3e-12, 64)
    q = quantize(x, FORMATS[0], params=params)
    assert float(q.scale.float().min()) >= TINY[params]
    assert bool(dequantize(q, FORMATS[0]).isfinite().all())


@pytest.mark.parametrize("bits", [2, 4])
def test_codes_are_the_nearest_under_the_rounded_parameters(bits):
    f = TensorFormat(bits)
    x = random_values((50, 2, 64), 9, torch.float64)
    q = quantize(x, f)
    every = torch.arange(f.max_code + 1, dtype=torch.float64)
    decoded = q.scale.double()[..., None] * every + q.bias.double()[..., None]
    best = (x[..., None] - decoded).abs().amin(-1)
    assert torch.allclose((x - dequantize(q, f, dtype=torch.float64)).abs(), best, rtol=0, atol=1e-12)


@pytest.mark.parametrize("f", FORMATS, ids=str)
def test_groups_do_not_see_each_other(f):
    x = random_values((32, 2, 64), 3)
    changed = x.clone()
    changed[20, 1, 40] += 50
    a, b = (dequantize(quantize(y, f), f) for y in (x, changed))
    differs = (a != b).nonzero()
    assert len(differs)
    token, head, channel = differs.T
    assert set(head.tolist()) == {1}
    if f.axis == "token":
        group = f.group or 64
        assert set(token.tolist()) == {20} and set((channel // group).tolist()) == {40 // group}
    else:
        assert set(channel.tolist()) == {40} and set((token // f.group).tolist()) == {20 // f.group}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("f", FORMATS, ids=str)
def test_unrepresentable_values(f, value):
    x = random_values((32, 2, 64), 4)
    clean = quantize(x, f)
    x[20, 1, 40] = value
    where = {
        "token": r"x\[token 20, head 1, channels (0:64|32:64)\]",
        "channel": r"x\[tokens 16:32, head 1, channel 40\]",
    }[f.axis]
    with pytest.raises(ValueError, match=where + r".*NaN or inf"):
        quantize(x, f)
    q = quantize(x, f, check=False)
    y, want = dequantize(q, f), dequantize(clean, f)
    bad = y.isnan()
    assert bad[20, 1, 40] and bool((q.scale > 0).all()) and bool(q.scale.isfinite().all())
    assert int(bad.sum()) == (f.group or 64)
    assert bool((q.codes[bad] == 0).all())
    assert_equal(y[~bad], want[~bad])


@pytest.mark.parametrize("big", [7e4, -7e4, 3e38])
def test_overflowing_parameters(big):
    x = random_values((4, 2, 64), 4)
    x[2, 1] = torch.linspace(big * 0.99, big, 64)
    with pytest.raises(ValueError, match=r"keys\[token 2, head 1, channels 0:64\].*overflows float16.*bfloat16"):
        quantize(x, FORMATS[0], name="keys")
    unchecked = dequantize(quantize(x, FORMATS[0], check=False), FORMATS[0])
    assert bool(unchecked[2, 1].isnan().all()) and int(unchecked.isnan().sum()) == 64
    assert_half_step(x, FORMATS[0], torch.bfloat16)


def test_largest_float16_magnitudes_round_trip():
    x = torch.linspace(-6e4, 6e4, 16).repeat(4).view(1, 1, 64)
    q = assert_half_step(x, TensorFormat(4), torch.float16)
    y = dequantize(q, TensorFormat(4))
    assert bool(y.isfinite().all()) and (y - x).abs().max() <= 0.01 * 8000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_strided_input(dtype):
    fused = random_values((24, 6, 128), 2).to(dtype)
    for x in (fused[:, 2:4, ::2], fused.transpose(0, 1)[1:3].transpose(0, 1)[..., :64], fused[::3, :2, 64:]):
        assert not x.is_contiguous()
        for f in FORMATS:
            a, b = quantize(x, f), quantize(x.contiguous(), f)
            assert torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale) and torch.equal(a.bias, b.bias)


def test_shapes_partial_groups_and_no_tokens():
    f = TensorFormat(2, "channel", 16)
    q = quantize(random_values((37, 3, 64), 0), f)
    assert q.codes.shape == (37, 3, 64) and q.scale.shape == q.bias.shape == (3, 3, 64)
    q = quantize(random_values((37, 3, 64), 0), TensorFormat(2, "token", 32))
    assert q.scale.shape == (37, 3, 2)
    for f in FORMATS:
        q = quantize(torch.zeros(0, 2, 64), f)
        assert dequantize(q, f).shape == (0, 2, 64)


def test_large_inputs_in_blocks_equal_small_ones(monkeypatch):
    x = random_values((100, 2, 64), 6)
    whole = [quantize(x, f) for f in FORMATS]
    monkeypatch.setattr("foscar.common.quantize._CHUNK_ELEMENTS", 5000)
    for f, a in zip(FORMATS, whole, strict=True):
        b = quantize(x, f)
        assert torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale) and torch.equal(a.bias, b.bias)
    x[77, 1, 3] = float("nan")
    with pytest.raises(ValueError, match="token 77, head 1"):
        quantize(x, FORMATS[0])
    with pytest.raises(ValueError, match="tokens 64:80, head 1, channel 3"):
        quantize(x, FORMATS[2])


@pytest.mark.parametrize(
    "x, kwargs, word",
    [
        (torch.zeros(4, 64), {}, "heads"),
        (torch.zeros(4, 1, 64, dtype=torch.int32), {}, "float"),
        (torch.zeros(4, 1, 64), {"group": 48}, "48"),
        (torch.zeros(4, 1, 64), {"params": torch.float32}, "float16 or bfloat16"),
    ],
)
def test_argument_errors(x, kwargs, word):
    with pytest.raises(ValueError, match=word):
        quantize(x, TensorFormat(2), **kwargs)


def test_channel_axis_needs_a_group():
    with pytest.raises(ValueError, match="group="):
        quantize(torch.zeros(4, 1, 64), TensorFormat(2, "channel"))
