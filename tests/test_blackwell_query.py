"""Q' of a K with parameters per channel on Blackwell: the stage alone, in the emulator."""

from __future__ import annotations

import pytest
import torch
from support.blackwell import K_CHANNEL, name_of

from foscar.common import jit
from foscar.common.pack import pack_record
from foscar.common.quantize import Quantized, param_dtype
from foscar.hopper import folds

pytestmark = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
STEP = 256
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCALE = 0.375


def operand_rows(data: torch.Tensor, config, row_bytes: int) -> torch.Tensor:
    """[term, head, byte] of an operand in shared memory."""
    from foscar.blackwell.tcgen05 import operand_byte, operand_row

    at = [
        [
            [operand_byte(row_bytes, operand_row(head, term), k) for k in range(row_bytes)]
            for head in range(config.heads)
        ]
        for term in range(2)
    ]
    return data[torch.tensor(at)]


def products(data: torch.Tensor, config) -> torch.Tensor:
    """[head, channel]: the raw product with a code of 1 at that channel, from one unit's operands."""
    if config.format.k.bits == 4:
        terms = [
            operand_rows(x, config, config.head_dim).view(torch.float8_e4m3fn) for x in data.chunk(config.byte_steps)
        ]
        return sum(x.double().sum(0) for x in terms) * 2.0**-9
    total = 0.0
    for step, x in enumerate(data.chunk(config.digit_steps)):
        codes = operand_rows(x, config, config.head_dim // 2)
        codes = torch.cat([codes & 15, codes >> 4], -1).long()
        values = (E2M1[codes & 7] * torch.where(codes & 8 > 0, -1.0, 1.0)).double()
        total = total + (values[0] + values[1] * 2.0**-9) * 8.0**-step / 2
    return total


def random_side(axis: str, bits: int, units: int, d: int, dtype, gen) -> Quantized:
    codes = torch.randint(0, 1 << bits, (STEP, 1, d), generator=gen, dtype=torch.uint8)
    shape = (units, 1, d) if axis == "channel" else (STEP, 1, 1)
    scale, bias = (torch.randn(shape, generator=gen).to(dtype) for _ in range(2))
    return Quantized(codes, scale * torch.logspace(-2, 2, shape[-1]).to(dtype), bias)


@pytest.mark.parametrize("config", [c for c in K_CHANNEL if STEP % c.layout.k_group == 0], ids=name_of)
def test_queries_of_a_step(config):
    """Against float64: each unit's products within 2^-16 of its largest; a unit beyond the length has zeros."""
    from ptx_emulator import Launch
    from support.blackwell_query_probe import BUILDER, QueryConfig

    gen = torch.Generator().manual_seed(4)
    d, heads, dtype = config.head_dim, config.heads, param_dtype(config.format.params)
    unit, page = folds.k_side(config).unit, config.page_size
    k, v = (
        random_side(f.axis, f.bits, STEP // g, d, dtype, gen)
        for f, g in ((config.format.k, config.layout.k_group), (config.format.v, config.layout.v_group))
    )
    step = pack_record(config.layout, k, v).flatten()
    tokens = STEP - unit  # the last unit has none: where it has pages of its own, their pairs are NaN
    if unit >= page:
        step.view(-1, config.layout.record_bytes)[tokens // page :] = 255
    q = (torch.randn(heads, d, generator=gen) + 0.5).to(getattr(torch, config.q_dtype))
    operands = torch.full((config.query_operands, config.query_bytes), 0x55, dtype=torch.uint8)
    numbers = torch.full((config.query_operands, heads, 2), torch.nan)
    artifact = jit.load_or_compile("blackwell_query", QueryConfig(config, tokens, SCALE), "sm_100a", BUILDER)
    Launch(artifact.ptx, 1, artifact.block, [q, step, operands, numbers], smem=artifact.smem).run()
    for number in range(config.query_operands):
        group = min(number * unit // config.layout.k_group, len(k.scale) - 1)
        live = number * unit < tokens
        scale, bias = (x[group, 0].double() * live for x in (k.scale, k.bias))
        want, offset = SCALE * q.double() * scale, SCALE * (q.double() * bias).sum(-1)
        got = products(operands[number], config) * numbers[number, :, :1].double()
        error = (got - want).abs().amax(-1)
        assert (error <= 2.0**-16 * want.abs().amax(-1)).all(), (number, error, want.abs().amax(-1))
        assert torch.allclose(numbers[number, :, 1].double(), offset, rtol=0, atol=2e-5), number
