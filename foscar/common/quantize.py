"""Floats -> unsigned codes of 2 or 4 bits with one (scale, bias) pair per group: ``x ~ scale * code + bias``.

Min/max quantization: ``bias`` is the group's minimum and ``scale = (max - min) / max_code``, both rounded to the
16-bit parameter type *before* the codes are chosen, so that the codes are the nearest ones under the parameters that
the decoder sees.  The guarantee, in exact arithmetic, for every group of unequal values whose parameters fit their
type::

    |x - (scale * code + bias)| <= scale / 2,     scale > 0

Rounding could break it where a group's range is small beside its values or beside the smallest subnormal: there the
bias is rounded down instead of to nearest, and the scale up.

A group of equal values is (scale CONSTANT_SCALE, bias = the value, codes 0): exact where the parameter type holds the
value, rounded to it elsewhere.  The scale multiplies nothing, but it must be small: the kernel rounds P times V's scale
to 16 bits relative to the largest in a tile, which a constant row of much mass and scale 1 would be.
A group with NaN or inf, or whose parameters overflow their type, is an error, or, unchecked, gets bias NaN, so that
it and nothing else decodes to NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from foscar.common.formats import TensorFormat

CONSTANT_SCALE = 2.0**-24  # the smallest that float16 holds
_CHUNK_ELEMENTS = 1 << 24  # bounds the float temporaries, not the result


@dataclass(frozen=True)
class Quantized:
    """K or V in codes.

    Attributes:
        codes: uint8 [tokens, heads, head_dim], each 0 .. max_code.
        scale: parameter type, > 0; axis "token": [tokens, heads, channel groups];
            axis "channel": [token groups, heads, head_dim] (the last group may be partial).
        bias: same type and shape as scale; NaN marks a group that could not be represented.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor


def param_dtype(params: str | torch.dtype) -> torch.dtype:
    """The torch type of ``KVFormat.params``.

    Raises:
        ValueError: neither float16 nor bfloat16.
    """
    dtype = getattr(torch, params, None) if isinstance(params, str) else params
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"parameters must be float16 or bfloat16, not {params}")
    return dtype


def resolve_group(tensor_format: TensorFormat, group: int | None, head_dim: int) -> int:
    """``group``, or the format's own, or (axis "token") ``head_dim``.

    Raises:
        ValueError: no group is known (axis "channel", whose default is the page size), or it does not divide head_dim.
    """
    group = tensor_format.group if group is None else group
    if tensor_format.axis == "token":
        group = head_dim if group is None else group
        if head_dim % group:
            raise ValueError(f"a group of {group} channels does not divide head_dim {head_dim}")
    elif group is None:
        raise ValueError("axis 'channel': pass group=, the number of tokens per pair (by default the page size)")
    return group


def quantize(
    x: torch.Tensor,
    tensor_format: TensorFormat,
    *,
    group: int | None = None,
    params: str | torch.dtype = torch.float16,
    check: bool = True,
    name: str = "x",
) -> Quantized:
    """Quantize ``x`` [tokens, heads, head_dim] of any float type, device and strides.

    The arithmetic is float32 (float64 for float64 input).  Token groups (axis "channel") count from token 0 of ``x``.

    Args:
        group: channels (axis "token") or tokens (axis "channel") per pair; None takes the format's.
        params: type of scale and bias.
        check: raise for groups that cannot be represented.  False: such a group gets bias NaN, codes 0 and scale
            CONSTANT_SCALE, and the host never waits for the device.
        name: what the error message calls ``x``.

    Raises:
        ValueError: shape, type or group not supported; with ``check``, a group with NaN or inf or with parameters
            that overflow ``params``: the message says where.
    """
    if x.ndim != 3 or not x.is_floating_point() or x.element_size() < 2:
        raise ValueError(
            f"{name} must be a 16-, 32- or 64-bit float tensor [tokens, heads, head_dim], not "
            f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        )
    dtype = param_dtype(params)
    tokens, heads, head_dim = x.shape
    group = resolve_group(tensor_format, group, head_dim)
    unit = 1 if tensor_format.axis == "token" else group
    step = max(1, _CHUNK_ELEMENTS // max(1, heads * head_dim * unit)) * unit
    parts = []
    for start in range(0, max(tokens, 1), step):
        block = x[start : start + step]
        codes, scale, bias, bad = _quantize_block(block, tensor_format, group, dtype)
        if check and bool(bad.any()):
            raise ValueError(_explain(block, bad, tensor_format, group, dtype, start, name))
        parts.append(Quantized(codes, scale, bias))
    if len(parts) == 1:
        return parts[0]
    return Quantized(*(torch.cat([getattr(p, f) for p in parts]) for f in ("codes", "scale", "bias")))


def quantize_padded(
    x: torch.Tensor,
    tensor_format: TensorFormat,
    padded: int,
    *,
    group: int,
    params: str | torch.dtype = torch.float16,
    check: bool = True,
    name: str = "x",
) -> Quantized:
    """:func:`quantize` with the result padded to ``padded`` channels, of which only x's are quantized.

    ``group`` (axis "token") divides ``padded``; the last group that holds channels of x may hold fewer than that many.
    """
    head_dim = x.shape[-1] if x.ndim == 3 else 0
    if tensor_format.axis == "token" and head_dim % group:  # repeats of one value change no minimum or maximum
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], -head_dim % group)], dim=-1)
    q = quantize(x, tensor_format, group=group, params=params, check=check, name=name)
    q = Quantized(q.codes[..., :head_dim], q.scale, q.bias)
    return pad_channels(q, padded, padded // group if tensor_format.axis == "token" else padded)


def pad_channels(x: Quantized, padded: int, pairs: int) -> Quantized:
    """``x`` with padding up to ``padded`` channels (codes 0) and ``pairs`` parameter pairs (CONSTANT_SCALE, bias 0)."""
    if x.codes.shape[-1] == padded:
        return x
    more = pairs - x.scale.shape[-1]
    codes = F.pad(x.codes, (0, padded - x.codes.shape[-1]))
    return Quantized(codes, F.pad(x.scale, (0, more), value=CONSTANT_SCALE), F.pad(x.bias, (0, more)))


def dequantize(
    quantized: Quantized,
    tensor_format: TensorFormat,
    *,
    group: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``scale * code + bias`` as ``dtype`` [tokens, heads, head_dim]; float64 is exact up to one rounding."""
    codes = quantized.codes
    tokens, _, head_dim = codes.shape
    group = resolve_group(tensor_format, group, head_dim)
    grouped, dim = _grouped(codes.to(dtype), tensor_format.axis, group)
    scale, bias = (p.to(dtype).unsqueeze(dim) for p in (quantized.scale, quantized.bias))
    return (grouped * scale + bias).reshape(-1, *codes.shape[1:])[:tokens]


def _grouped(x: torch.Tensor, axis: str, group: int) -> tuple[torch.Tensor, int]:
    """View [tokens, heads, head_dim] with the group's elements as a dimension of their own, and which one it is.

    A partial last token group is filled by repeating the last token, which changes no minimum or maximum.
    """
    tokens, heads, head_dim = x.shape
    if axis == "token":
        return x.reshape(tokens, heads, head_dim // group, group), 3
    if tokens % group:
        x = torch.cat([x, x[-1:].expand(-tokens % group, heads, head_dim)])
    return x.reshape(-1, group, heads, head_dim), 1


def _quantize_block(x, tensor_format, group, dtype):
    tokens = x.shape[0]
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    grouped, dim = _grouped(x, tensor_format.axis, group)
    lo, hi = grouped.amin(dim, keepdim=True) + 0.0, grouped.amax(dim, keepdim=True)  # -0 is 0: of both, amin takes any
    scale, bias, bad = fit_parameters(lo, hi, tensor_format.max_code, dtype)
    codes = nearest_codes(grouped, scale, bias, tensor_format.max_code)
    codes.masked_fill_(bad | (lo == hi), 0)
    codes = codes.reshape(-1, *x.shape[1:])[:tokens]
    return codes, scale.squeeze(dim), bias.squeeze(dim), bad.squeeze(dim)


def nearest_codes(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, max_code: int) -> torch.Tensor:
    """uint8 codes nearest to ``x`` (float) under parameters that broadcast with it; a NaN gives code 0."""
    q = (x - bias.to(x.dtype)).div_(scale.to(x.dtype))
    return q.round_().nan_to_num_(nan=0.0).clamp_(0, max_code).to(torch.uint8)


def fit_parameters(
    lo: torch.Tensor, hi: torch.Tensor, max_code: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scale, bias) of type ``dtype`` for groups of minimum ``lo`` and maximum ``hi``, and where there are none.

    The codes reach half a step beyond ``bias`` and ``bias + scale * max_code``, so rounding may move the ends by that
    much.  Where ``near`` moves the lower end up by more, the value below it is taken; where the upper end falls
    short, the scale above.

    Returns:
        scale, bias, bad (bool; there scale is CONSTANT_SCALE and bias NaN), each of lo's shape.
    """
    near = lo.to(dtype)
    steps = lo.new_full((), max_code)  # a tensor: by a number, CUDA would multiply with its rounded reciprocal
    step = ((hi - near.to(lo.dtype)) / steps).to(dtype).to(lo.dtype)
    bias = torch.where(near.to(lo.dtype) - lo > step / 2, _below(near), near)
    scale = ((hi - bias.to(lo.dtype)) / steps).to(dtype)
    short = scale.to(lo.dtype) * (max_code + 0.5) < hi - bias.to(lo.dtype)
    scale = torch.where(short, _above(scale), scale)
    constant = lo == hi
    bias = torch.where(constant, near, bias)
    bad = ~torch.isfinite(near) | ~(torch.isfinite(scale) | constant)
    scale = scale.masked_fill(constant | bad, CONSTANT_SCALE)
    return scale, bias.masked_fill(bad, float("nan")), bad


def _above(x: torch.Tensor) -> torch.Tensor:
    """The next larger value of a 16-bit float x >= 0."""
    return (x.abs().view(torch.int16) + 1).view(x.dtype)


def _below(x: torch.Tensor) -> torch.Tensor:
    """The next smaller value of a finite 16-bit float."""
    bits = x.view(torch.int16)
    smallest = torch.full_like(bits, -0x7FFF)  # the bits 0x8001: below both zeros
    return torch.where(bits > 0, bits - 1, torch.where(bits == 0, smallest, bits + 1)).view(x.dtype)


def _explain(x, bad, tensor_format, group, dtype, start, name) -> str:
    """The error line for the first group of ``bad`` [groups as in scale]."""
    i, head, j = bad.nonzero()[0].tolist()
    if tensor_format.axis == "token":
        values = x[i, head, j * group : (j + 1) * group]
        where = f"token {start + i}, head {head}, channels {j * group}:{(j + 1) * group}"
    else:
        values = x[i * group : (i + 1) * group, head, j]
        first = start + i * group
        where = f"tokens {first}:{first + len(values)}, head {head}, channel {j}"
    return explain_bad_group(values, f"{name}[{where}]", dtype)


def explain_bad_group(values: torch.Tensor, where: str, dtype: torch.dtype) -> str:
    """One line on why the ``values`` of one group have no parameters of type ``dtype``."""
    if not bool(torch.isfinite(values).all()):
        return f"{where} holds NaN or inf, which a quantized cache cannot represent"
    lo, hi = values.min().item(), values.max().item()
    kind = str(dtype).removeprefix("torch.")
    hint = "; use bfloat16 parameters (params='bfloat16')" if dtype == torch.float16 else ""
    return f"{where} spans {lo:.6g} .. {hi:.6g}, which overflows {kind} parameters{hint}"
