"""Unpack and both matrix products of the Blackwell kernel alone, bit for bit, in the emulator under every schedule."""

from __future__ import annotations

import pytest
import torch
from support.blackwell import INT2, LAYOUTS, MIXED, V_CHANNEL, name_of
from support.compare import assert_equal
from support.runners import SCHEDULES

from foscar.common import jit
from foscar.common.pack import pack_record
from foscar.common.quantize import Quantized, param_dtype
from foscar.hopper import folds

pytestmark = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
TOKENS = 128
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FEW = (INT2, LAYOUTS[0], LAYOUTS[13], MIXED[1])  # 128 and 64 channels, 2 and 4 bits, 4 to 16 heads


def operand(data: torch.Tensor) -> torch.Tensor:
    """[columns, bytes] as the bytes of a B operand in shared memory."""
    from foscar.blackwell.tcgen05 import operand_byte

    columns, width = data.shape
    at = torch.tensor([[operand_byte(width, row, k) for k in range(width)] for row in range(columns)])
    out = torch.zeros(columns * width, dtype=torch.uint8)
    out[at] = data.view(torch.uint8)
    return out


def halves(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [..., channels] as bytes: channel ``c`` below channel ``c + channels / 2``."""
    low, high = codes.chunk(2, -1)
    return low | high << 4


def token_of_lane() -> torch.Tensor:
    lane = torch.arange(TOKENS)
    return lane // 32 * 32 + 4 * (lane % 8) + lane % 32 // 16 * 2 + lane % 16 // 8


def channel_of_lane(head_dim: int) -> torch.Tensor:
    """-1: no channel."""
    lane = torch.arange(TOKENS)
    channel = 32 * (lane % 32 // 8) + 8 * (lane // 32) + lane % 8
    return torch.where(channel < head_dim, channel, -1)


def weights(bits: int, head_dim: int) -> torch.Tensor:
    """What the masks of bytes leave a code of each channel multiplied with."""
    position = torch.arange(head_dim) // (head_dim * bits // 8)
    return torch.where((position % 2 == 1) & (bits == 2), 4.0, 1.0)


def k_bytes(config) -> int:
    """Of one token's codes as an operand: 2-bit codes are halves of bytes."""
    return config.head_dim // (2 if config.format.k.bits == 2 else 1)


def random_query(config, gen) -> tuple[torch.Tensor, torch.Tensor]:
    """What each column multiplies the codes with, [columns, head_dim], and the bytes of its operands."""
    columns, d = config.columns, config.head_dim
    if config.format.k.bits == 4:
        q = torch.randint(-8, 9, (config.byte_steps, columns, d), generator=gen).to(torch.float8_e4m3fn)
        return q.float().sum(0) * 2.0**-9, torch.cat([operand(x) for x in q])
    codes = torch.randint(0, 16, (3, columns, d), generator=gen, dtype=torch.uint8)
    values = E2M1[(codes & 7).long()] * torch.where(codes & 8 > 0, -1.0, 1.0)
    q = sum(values[step] * 8.0**-step for step in range(3)) / 2  # a code's half is multiplied
    return q, torch.cat([operand(halves(step)) for step in codes])


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
    v_one = torch.ones(folds.v_side(config).units, 1, d).to(dtype) if folds.v_side(config).channel else one
    tile = pack_record(config.layout, Quantized(k, one, one), Quantized(v, v_one, v_one)).flatten()
    q, q_operand = random_query(config, gen)
    p = torch.randint(0, 17, (config.columns, TOKENS), generator=gen).to(torch.float8_e4m3fn)
    words = [torch.full((TOKENS, n), -1, dtype=torch.int32) for n in (k_bytes(config) // 4, TOKENS // 4)]
    sums = [torch.full((TOKENS, config.columns * n), torch.nan) for n in (1, folds.v_side(config).units)]
    artifact = jit.load_or_compile("blackwell_probe", ProbeConfig(config), "sm_100a", BUILDER)
    Launch(artifact.ptx, 1, artifact.block, [tile, q_operand, operand(p), *words, *sums], smem=artifact.smem,
           **schedule).run()  # fmt: skip
    return k[:, 0].float(), v[:, 0].float(), q, p.float(), *(w.view(torch.uint8) for w in words), *sums


def check(config, schedule: dict, seed: int = 0) -> None:
    k, v, q, p, got_k, v_bytes, s, o = probe(config, schedule, seed)
    tokens, channels = token_of_lane(), channel_of_lane(config.head_dim)
    assert sorted(tokens.tolist()) == list(range(TOKENS))
    live = channels >= 0
    assert sorted(channels[live].tolist()) == list(range(config.head_dim))
    v = v * weights(config.format.v.bits, config.head_dim)
    want_k = halves(k.to(torch.uint8)).float() if config.format.k.bits == 2 else k
    assert_equal(got_k.float(), want_k[tokens], ("lane", "byte"))
    assert_equal(v_bytes[live].float(), v.T[channels[live]], ("lane", "token"))
    unit = 2.0**-9
    assert_equal(s, k[tokens] @ q.T, ("lane", "column"))
    units = folds.v_side(config).units
    parts = [a.T @ b.T for a, b in zip(v.chunk(units), p.chunk(units, 1), strict=True)]
    assert_equal(o[live], (torch.cat(parts, 1) * unit)[channels[live]], ("lane", "column"))


@pytest.mark.parametrize("config", [*LAYOUTS, *MIXED, *V_CHANNEL], ids=name_of)
def test_every_format(config):
    check(config, {})


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("config", FEW, ids=name_of)
def test_every_schedule(config, schedule):
    check(config, schedule, seed=1)


def test_digits_of_every_integer():
    """Six e2m1 digits of base 8 give back every integer up to 2^17, two at a time."""
    from ptx_emulator import Launch
    from support.blackwell_probe import DIGITS_BUILDER, DigitsConfig

    near = [0, 1, 3, 4, 5, 7, 8, 2**15, 2**16 - 1, 3 * 2**15, 112347, 112348, 2**17 - 1, 2**17]
    n = torch.cat([torch.tensor(near), torch.randint(0, 2**17, (50,), generator=torch.Generator().manual_seed(3))])
    n = torch.cat([n, -n]).float()
    words = torch.full((len(n), 6), -1, dtype=torch.int32)
    artifact = jit.load_or_compile("blackwell_digits", DigitsConfig(len(n)), "sm_100a", DIGITS_BUILDER)
    Launch(artifact.ptx, 1, artifact.block, [n, words], smem=artifact.smem).run()
    codes = words.view(torch.uint8).view(len(n), 6, 4)[..., :2]
    assert (codes < 16).all()
    digits = 2 * E2M1[(codes & 7).long()] * torch.where(codes & 8 > 0, -1.0, 1.0)
    got = (digits * 8.0 ** torch.arange(5, -1, -1)[:, None]).sum(1)
    assert_equal(got, torch.stack([n, -n], 1), ("number", "place"))
