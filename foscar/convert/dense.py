"""Codes and parameters of any project -> pages of a foscar cache: the one way in that all converters share.

A converter brings its project's tensors to this form, :class:`Dense`: codes in token order with the scale and bias of
``x ~ scale * code + bias``.  A zero point, ``x ~ (code - zero) * scale``, has ``bias = -zero * scale``; a minimum is
the bias.  Parameters are rounded to the cache's 16-bit type, codes are taken as they are: nothing is quantized again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from foscar.common.cache import PagedKVCache
from foscar.common.formats import KVFormat, TensorFormat, check_whole
from foscar.common.pack import pack_record
from foscar.common.quantize import CONSTANT_SCALE, Quantized, param_dtype

from .checks import check_lengths, check_part


@dataclass(frozen=True)
class Dense:
    """K or V of all requests, one behind the other.

    Attributes:
        codes: uint8 [sum of lengths, kv heads, head_dim].
        scale, bias: any float type; axis "token": [sum of lengths, kv heads, channel groups]; axis "channel":
            [sum of the requests' token groups, kv heads, head_dim], each request's groups counted from its token 0 and
            the last perhaps partial.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor

    def check(self, name: str, like: torch.Tensor) -> None:
        """Kinds, dimensions and devices; shapes depend on the requests."""
        check_part(f"{name}: codes", self.codes, "uint8", "tokens, kv heads, head_dim", like)
        for what, x in (("scale", self.scale), ("bias", self.bias)):
            check_part(f"{name}: {what}", x, "floats", "tokens or groups, kv heads, groups or head_dim", like)


@dataclass(frozen=True)
class Converted:
    """What a converter returns: what :func:`foscar.decode_attention` takes.

    Attributes:
        cache: a new PagedKVCache with just enough pages.
        block_table: int32 [batch, max_pages], -1 beyond a request's pages.
        seq_lens: int32 [batch].
    """

    cache: PagedKVCache
    block_table: torch.Tensor
    seq_lens: torch.Tensor


def from_quantized(k: Dense, v: Dense, lengths: list[int], format: KVFormat, page_size: int = 64) -> Converted:
    """A cache that holds exactly the given codes.

    A group whose scale is 0 (in the cache's parameter type) holds one value, its bias: whatever its codes, it is stored
    with codes 0.

    Args:
        k, v: on one device, which becomes the cache's.
        lengths: tokens of each request.
        format: what the codes and parameters are.

    Raises:
        TypeError: an argument of another kind.
        FormatError: a head_dim, group or page size that the cache does not take.
        ValueError: codes that are not uint8 or too large, lengths below 0, shapes and devices that do not fit each
            other, or parameters that are negative scales, NaN, or overflow the cache's type.
    """
    for name, x in (("K", k), ("V", v)):
        if not isinstance(x, Dense):
            raise TypeError(f"{name} must be a foscar.convert.Dense, not {type(x).__name__}")
        x.check(name, k.codes)
    if not isinstance(format, KVFormat):
        raise TypeError(f"format must be a foscar.KVFormat such as foscar.KVFormat.int2(), not {format!r}")
    lengths, page_size = check_lengths("lengths", lengths), check_whole("page_size", page_size)
    tokens, heads, head_dim = k.codes.shape
    if tokens != sum(lengths) or v.codes.shape != k.codes.shape:
        raise ValueError(f"codes must be [{sum(lengths)}, kv heads, head_dim] for the requests' tokens, K and V alike, "
                         f"not {list(k.codes.shape)} and {list(v.codes.shape)}")  # fmt: skip
    layout = format.layout(head_dim, page_size)
    pages = [-(-n // page_size) for n in lengths]
    cache = PagedKVCache(sum(pages), page_size, heads, head_dim, format, k.codes.device)
    table = torch.full((len(lengths), max(pages, default=0)), -1, dtype=torch.int32)
    sides = [
        _Side.make(name, x, f, group, param_dtype(format.params), lengths)
        for name, x, f, group in (("K", k, format.k, layout.k_group), ("V", v, format.v, layout.v_group))
    ]
    first = 0
    for b, n in enumerate(pages):
        table[b, :n] = torch.arange(first, first + n, dtype=torch.int32)
        cache.data[first : first + n] = pack_record(layout, *(side.pages(b, n, page_size) for side in sides))
        first += n
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return Converted(cache, table.to(cache.device), seq_lens.to(cache.device))


@dataclass(frozen=True)
class _Side:
    """Checked and rounded K or V, cut into requests."""

    format: TensorFormat
    group: int
    requests: list[Quantized]

    @classmethod
    def make(cls, name: str, x: Dense, f: TensorFormat, group: int, dtype: torch.dtype, lengths: list[int]) -> _Side:
        heads, head_dim = x.codes.shape[1:]
        if x.codes.numel() and int(x.codes.max()) > f.max_code:
            raise ValueError(f"{name}: a code is {int(x.codes.max())}; {f.bits} bits hold 0 .. {f.max_code}")
        counts = lengths if f.axis == "token" else [-(-n // group) for n in lengths]
        want = (sum(counts), heads, -(-head_dim // group) if f.axis == "token" else head_dim)
        for what, p in (("scale", x.scale), ("bias", x.bias)):
            if tuple(p.shape) != want:
                raise ValueError(f"{name}: {what} must be {list(want)}, not {list(p.shape)}")
        scale, bias = x.scale.to(dtype), x.bias.to(dtype)
        bad = ~(scale.isfinite() & bias.isfinite() & (scale >= 0))
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            kind = str(dtype).removeprefix("torch.")
            raise ValueError(f"{name}: scale {float(x.scale[at]):g} and bias {float(x.bias[at]):g} at {list(at)} are "
                             f"no parameters of type {kind}")  # fmt: skip
        parts = zip(*(p.split(n) for p, n in ((x.codes, lengths), (scale, counts), (bias, counts))), strict=True)
        return cls(f, group, [Quantized(*part) for part in parts])

    def pages(self, b: int, pages: int, page_size: int) -> Quantized:
        """Request ``b`` in whole pages; slack tokens have codes 0, scale CONSTANT_SCALE and bias 0."""
        x, tokens = self.requests[b], pages * page_size
        codes = F.pad(x.codes, (0, 0, 0, 0, 0, tokens - len(x.codes)))
        more = (tokens if self.format.axis == "token" else -(-tokens // self.group)) - len(x.scale)
        zero = x.scale == 0
        codes[: len(x.codes)].masked_fill_(self._spread(zero, x.codes), 0)
        scale = F.pad(x.scale.masked_fill(zero, CONSTANT_SCALE), (0, 0, 0, 0, 0, more), value=CONSTANT_SCALE)
        return Quantized(codes, scale, F.pad(x.bias, (0, 0, 0, 0, 0, more)))

    def _spread(self, p: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """A parameter for each of its codes."""
        dim = 2 if self.format.axis == "token" else 0
        return p.repeat_interleave(self.group, dim).narrow(dim, 0, codes.shape[dim])
