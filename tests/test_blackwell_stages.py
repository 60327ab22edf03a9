"""Unpack and both matrix products of the Blackwell kernel alone, bit for bit, in the emulator under every schedule."""

from __future__ import annotations

import pytest
import torch
from support.blackwell import INT2, LAYOUTS, MIXED, name_of
from support.compare import assert_equal
from support.runners import SCHEDULES

from foscar.common import jit
from foscar.common.pack import pack_record
from foscar.common.quantize import Quantized, param_dtype

pytestmark = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
TOKENS = 128
FEW = (INT2, LAYOUTS[0], LAYOUTS[13], MIXED[1])  # 128 and 64 channels, 2 and 4 bits, 4 to 16 heads


def operand(values: torch.Tensor) -> torch.Tensor:
    """[columns, K] e4m3 as the bytes of a B operand in shared memory."""
    from foscar.blackwell.tcgen05 import operand_byte

    columns, width = values.shape
    at = torch.tensor([[operand_byte(width, row, k) for k in range(width)] for row in range(columns)])
    out = torch.zeros(columns * width, dtype=torch.uint8)
    out[at] = values.view(torch.uint8)
    return out


def token_of_lane() -> torch.Tensor:
    lane = torch.arange(TOKENS)
    return lane // 32 * 32 + 4 * (lane % 8) + lane % 32 // 16 * 2 + lane % 16 // 8


def channel_of_lane(head_dim: int) -> torch.Tensor:
    """-1: no channel."""
    lane = torch.arange(TOKENS)
    channel = 32 * (lane % 32 // 8) + 8 * (lane // 32) + lane % 8
    return torch.where(channel < head_dim, channel, -1)


def weights(bits: int, head_dim: int) -> torch.Tensor:
    """What the masks leave a code of each channel multiplied with."""
    position = torch.arange(head_dim) // (head_dim * bits // 8)
    return torch.where((position % 2 == 1) & (bits == 2), 4.0, 1.0)


def probe(config, schedule: dict, seed: int = 0):
    """(codes K, codes V, Q, P, the four results) of random codes and integers in B."""
    from ptx_emulator import Launch
    from support.blackwell_probe import BUILDER, ProbeConfig

    gen = torch.Generator().manual_seed(seed)
    d, dtype = config.head_dim, param_dtype(config.format.params)
    k, v = (
        torch.randint(0, 1 << f.bits, (TOKENS, 1, d), generator=gen, dtype=torch.uint8)
        for f in (config.format.k, config.format.v)
    )
    one = torch.ones(TOKENS, 1, 1).to(dtype)
    tile = pack_record(config.layout, Quantized(k, one, one), Quantized(v, one, one)).flatten()
    q = torch.randint(-8, 9, (config.columns, d), generator=gen).to(torch.float8_e4m3fn)
    p = torch.randint(0, 17, (config.columns, TOKENS), generator=gen).to(torch.float8_e4m3fn)
    words = [torch.full((TOKENS, n), -1, dtype=torch.int32) for n in (d // 4, TOKENS // 4)]
    sums = [torch.full((TOKENS, config.columns), torch.nan) for _ in range(2)]
    artifact = jit.load_or_compile("blackwell_probe", ProbeConfig(config), "sm_100a", BUILDER)
    Launch(artifact.ptx, 1, artifact.block, [tile, operand(q), operand(p), *words, *sums], smem=artifact.smem,
           **schedule).run()  # fmt: skip
    return k[:, 0].float(), v[:, 0].float(), q.float(), p.float(), *(w.view(torch.uint8) for w in words), *sums


def check(config, schedule: dict, seed: int = 0) -> None:
    k, v, q, p, k_bytes, v_bytes, s, o = probe(config, schedule, seed)
    tokens, channels = token_of_lane(), channel_of_lane(config.head_dim)
    assert sorted(tokens.tolist()) == list(range(TOKENS))
    live = channels >= 0
    assert sorted(channels[live].tolist()) == list(range(config.head_dim))
    k, v = k * weights(config.format.k.bits, config.head_dim), v * weights(config.format.v.bits, config.head_dim)
    assert_equal(k_bytes.float(), k[tokens], ("lane", "channel"))
    assert_equal(v_bytes[live].float(), v.T[channels[live]], ("lane", "token"))
    unit = 2.0**-9
    assert_equal(s, k[tokens] @ q.T * unit, ("lane", "column"))
    assert_equal(o[live], (v.T @ p.T * unit)[channels[live]], ("lane", "column"))


@pytest.mark.parametrize("config", [*LAYOUTS, *MIXED], ids=name_of)
def test_every_format(config):
    check(config, {})


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("config", FEW, ids=name_of)
def test_every_schedule(config, schedule):
    check(config, schedule, seed=1)
