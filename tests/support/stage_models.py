"""What each stage of the Hopper decode kernel should give, from its documented layouts, in plain tensors.

``threads`` and ``elements`` are those of the docstrings of foscar/hopper/qk.py, pv.py and softmax.py; nothing here is
taken from their code.
"""

from __future__ import annotations

import math

import torch

from foscar.common.formats import TensorFormat
from foscar.common.pack import unpack_record
from foscar.hopper.config import TILE_TOKENS, DecodeConfig

THREADS = 128
SMALLEST_SCALE = {"float16": 2.0**-64, "bfloat16": 2.0**-100}  # of V, by the parameters' type
PROB_TOP = 65535.0
LARGEST = 127 * 256 + 127  # of a scaled query


# ---------------------------------------------------------------------------------------------- layouts
def to_operand(x: torch.Tensor) -> torch.Tensor:
    """8-bit [..., columns, k] to the bytes of a B operand: core matrices of 8 columns x 16 k, column groups first."""
    return x.unflatten(-1, (-1, 16)).unflatten(-3, (-1, 8)).movedim(-2, -4).contiguous().flatten(-4)


def from_operand(data: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of :func:`to_operand`, of [..., bytes]."""
    return data.unflatten(-1, (-1, columns // 8, 8, 16)).movedim(-4, -2).flatten(-4, -3).flatten(-2)


def scores_to_threads(s: torch.Tensor) -> torch.Tensor:
    """[blocks, token, column] to [blocks, half, thread, element]."""
    blocks, _, columns = s.shape
    x = s.view(blocks, 4, 8, 2, 2, columns // 8, 4, 2)  # warp, g, half, row half, j, t, term
    return x.permute(0, 3, 1, 2, 6, 5, 4, 7).reshape(blocks, 2, THREADS, columns // 2).contiguous()


def scores_from_threads(raw: torch.Tensor) -> torch.Tensor:
    """[blocks, half, thread, element] to [blocks, token, column]."""
    blocks, columns = raw.shape[0], 2 * raw.shape[3]
    x = raw.view(blocks, 2, 4, 8, 4, columns // 8, 2, 2)
    return x.permute(0, 2, 3, 1, 6, 5, 4, 7).reshape(blocks, TILE_TOKENS, columns)


def products_to_threads(d: torch.Tensor) -> torch.Tensor:
    """[..., channel, column] to [..., thread, element]."""
    channels, columns = d.shape[-2:]
    x = d.view(-1, channels // 64, 2, 4, 8, columns // 8, 4, 2)  # m, row half, warp, g, j, t, term
    return x.permute(0, 3, 4, 6, 1, 5, 2, 7).reshape(*d.shape[:-2], THREADS, channels * columns // THREADS).contiguous()


def products_from_threads(raw: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[..., thread, element] to [..., channel, column]."""
    columns = raw.shape[-1] * THREADS // head_dim
    x = raw.view(-1, 4, 8, 4, head_dim // 64, columns // 8, 2, 2)
    return x.permute(0, 4, 6, 1, 2, 5, 3, 7).reshape(*raw.shape[:-2], head_dim, columns)


def tokens_to_threads(x: torch.Tensor) -> torch.Tensor:
    """[..., token] to [..., thread, 4]: every thread of a quad of lanes holds the same four tokens."""
    quads = x.unflatten(-1, (-1, 1, 4))
    return quads.expand(*quads.shape[:-2], 4, 4).flatten(-3, -2).contiguous()


def heads_to_threads(x: torch.Tensor) -> torch.Tensor:
    """[..., head] to [..., thread, j]: thread ``t`` of a quad holds heads t, t + 4, ..."""
    mine = x.unflatten(-1, (-1, 4)).transpose(-1, -2)
    return mine.unsqueeze(-3).expand(*x.shape[:-1], THREADS // 4, *mine.shape[-2:]).flatten(-3, -2).contiguous()


def heads_over_threads(x: torch.Tensor) -> torch.Tensor:
    """[..., thread, j] summed over the threads that share heads: [..., head]."""
    return x.unflatten(-2, (-1, 4)).sum(-3).transpose(-1, -2).flatten(-2)


# ---------------------------------------------------------------------------------------------- stages
def random_tiles(config: DecodeConfig, blocks: int, seed: int) -> torch.Tensor:
    """Records of random bytes, uint8 [blocks, stage_bytes]; the parameters among them are garbage too."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (blocks, config.stage_bytes), generator=gen, dtype=torch.uint8)


def codes_of(config: DecodeConfig, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(K, V) codes, int64 [blocks, token, channel]."""
    records = tiles.view(-1, 1, config.layout.record_bytes)
    return tuple(x.codes.view(len(tiles), TILE_TOKENS, -1).long() for x in unpack_record(config.layout, records))


def position(fmt: TensorFormat, head_dim: int) -> torch.Tensor:
    """Where in its byte each channel's code lies."""
    return torch.arange(head_dim) // fmt.row_bytes(head_dim)


def k_factor(config: DecodeConfig) -> torch.Tensor:
    """What unpacking multiplies K's codes by, int64 [channel]: 2-bit codes at odd positions come out times 4."""
    p = position(config.format.k, config.head_dim)
    return torch.where((p % 2 == 1) & (config.format.k.bits == 2), 4, 1)


def v_factor(config: DecodeConfig) -> torch.Tensor:
    """Likewise of V, which no shift moves: ``2^(bits * position)``."""
    return 1 << (config.format.v.bits * position(config.format.v, config.head_dim))


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b^T`` of integers, through float64, which holds every sum here."""
    return (a.double() @ b.double().transpose(-1, -2)).long()


def query_terms(config: DecodeConfig, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of q [..., channel]: (int8 terms [..., 2, channel], factor, q_sum)."""
    q = q.double()
    top = q.abs().amax(-1, keepdim=True)
    r = 2.0 ** (LARGEST / top).log2().floor().clamp(max=126)  # the largest power of two that two terms have room for
    f = k_factor(config)
    rounded = (q * r / f).round()  # half to even, like the card
    high = ((rounded + 128) / 256).floor()
    terms = torch.stack([high, rounded - 256 * high], -2).to(torch.int8)
    return terms, (torch.tensor(scale).float() / r[..., 0]).float(), (rounded * f).sum(-1).float()


def token_params(k_scale, k_bias, v_scale, v_bias, left: int, dtype: str = "float16") -> torch.Tensor:
    """float64 [5, token]: k_scale, k_bias, log2 of V's scale, its reciprocal, bias / scale; zeros from ``left`` on."""
    live = torch.arange(len(k_scale)) < left
    ks, kb, vs, vb = (torch.where(live, x.double(), 0.0) for x in (k_scale, k_bias, v_scale, v_bias))
    vs = torch.maximum(vs, torch.tensor(SMALLEST_SCALE[dtype], dtype=torch.float64))
    log = torch.where(live, vs.log2(), -math.inf)
    return torch.stack([ks, kb, log, 1 / vs, vb / vs])


def fold(raw: torch.Tensor, params: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores to w, and the size of what was added up, float64 [blocks, head, token].

    Args:
        raw: int64 [blocks, token, head]; params: [blocks, 5, token]; factors: [blocks, head, 2].
    """
    ks, kb, log = (params[:, i, None].double() for i in range(3))
    factor, q_sum = (factors[:, :, i, None].double() for i in range(2))
    parts = (ks * raw.double().transpose(1, 2) * factor, kb * q_sum * factor, log)
    return sum(parts), sum(torch.where(x.isfinite(), x.abs(), 0.0) for x in parts)


def merge(lse: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalized parts [part, ...] with LSEs in base 2 to (out, lse), float64."""
    lse, out = lse.double(), out.double()
    total = torch.logsumexp(lse * math.log(2.0), 0) / math.log(2.0)
    return ((lse - total).exp2()[..., None] * out).sum(0), total
