"""Draws of format x shape x option x lengths against float64: on the CPU backend, in the emulator and on a GPU.

The seed of every draw's random values is one of hypothesis's choices, which it prints when a draw fails; the seed of
hypothesis itself is logged by the GPU test and taken from FOSCAR_PROPERTY_SEED (draws: FOSCAR_PROPERTY_DRAWS).
"""

from __future__ import annotations

import dataclasses
import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from support import decode_checks as checks
from support import option_checks, option_table
from support.gpu_kernels import KERNELS, Q_TYPES
from support.inputs import all_formats, fits
from support.runners import EmulatorRunner, GpuRunner, why_no_gpu

from foscar.common import jit
from foscar.common.options import AttentionOptions

GPU_DRAWS = int(os.environ.get("FOSCAR_PROPERTY_DRAWS", 500))
GPU_SEED = int(os.environ.get("FOSCAR_PROPERTY_SEED", random.randrange(2**31)))
FORMATS = all_formats()
quiet = settings(
    deadline=None, database=None, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)  # fmt: skip


def lengths_to(longest: int) -> st.SearchStrategy[list[int]]:
    """Batches of any raggedness, with the edges of pages and tiles, empty requests among them."""
    edges = [n for n in (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257) if n <= longest]
    return st.lists(st.sampled_from(edges) | st.integers(0, longest), min_size=1, max_size=6)


@st.composite
def option_cases(draw, longest: int):
    """Any format, shape and options, for the CPU backend."""
    head_dim, page_size = draw(st.sampled_from((64, 80, 96, 112, 128, 256))), draw(st.sampled_from((16, 32, 64, 128)))
    lengths = draw(lengths_to(longest))
    drafts = draw(st.none() | st.lists(st.integers(0, 16), min_size=len(lengths), max_size=len(lengths)))
    options = AttentionOptions(
        window=draw(st.none() | st.integers(1, 2 * longest)),
        soft_cap=draw(st.sampled_from((0.0, 0.0, 2.5, 30.0))),
        out_scale=draw(st.sampled_from((1.0, 1.0, 0.37))),
    )
    return option_checks.option_case(
        lengths, drafts, options=options, sinks=draw(st.booleans()), sm_scale=draw(st.sampled_from((None, 0.3))),
        seed=draw(st.integers(0, 2**31 - 1)), head_dim=head_dim, page_size=page_size,
        fmt=draw(st.sampled_from([f for f in FORMATS if fits(f, head_dim, page_size)])),
        kv_heads=draw(st.integers(1, 2)), group_heads=draw(st.integers(1, 12)),
        dtype=draw(st.sampled_from((torch.bfloat16, torch.float16))),
    )  # fmt: skip


@settings(quiet, max_examples=60)
@given(x=option_cases(150), lse_base=st.sampled_from((2, "e")), wrapper=st.sampled_from((None, "dense", "compressed")))
def test_cpu(x, lse_base, wrapper):
    rows = x.bounds[-1]
    out, lse = option_checks.call(x, lse_base=lse_base, wrapper=wrapper, backend="torch")
    option_checks.assert_option_contract(out[:rows], lse[:rows], x, lse_base=lse_base)


@st.composite
def kernel_cases(draw, kernels, longest: int):
    """(a kernel, a case that it takes)."""
    config = draw(st.sampled_from(kernels))
    group = draw(st.integers(config.heads - 3, config.heads))
    case = checks.case_for(
        config, draw(lengths_to(longest)), kv_heads=draw(st.integers(1, 3)), group=group,
        seed=draw(st.integers(0, 2**31 - 1)),
    )  # fmt: skip
    return config, case


CALLS = {"lse_base": st.sampled_from((2, "e")), "sm_scale": st.sampled_from((None, 0.02, 0.3)), "flat": st.booleans()}


def hold(runner, drawn, lse_base, sm_scale, flat) -> None:
    """The contract for a drawn case, with dense or compressed tables."""
    config, case = drawn
    assert case.q.dtype == Q_TYPES[config.q_dtype]
    tables = checks.compressed(case) if flat else checks.tables_of(case)
    out, lse = runner.decode(case.q, case.cache, tables, tile=config.tile, sm_scale=sm_scale, lse_base=lse_base)
    checks.assert_contract(out, lse, case, sm_scale=sm_scale, lse_base=lse_base)


@st.composite
def option_kernel_cases(draw, longest: int):
    """(a case that a kernel of the options' table takes, options of the call)."""
    name = draw(st.sampled_from(sorted(option_table.CASES)))
    shape, _, q_lens, given_options, call = option_table.CASES[name]
    lengths, options = draw(lengths_to(longest)), given_options.get("options", AttentionOptions())
    if options.window is not None:
        options = dataclasses.replace(options, window=draw(st.integers(1, 2 * longest)))
    if q_lens is not None:
        most = min(call.get("max_q_len", 16), 16)
        q_lens = draw(st.lists(st.integers(0, most), min_size=len(lengths), max_size=len(lengths)))
    seed = draw(st.integers(0, 2**31 - 1))
    return option_checks.option_case(lengths, q_lens, seed=seed, **shape, **given_options | {"options": options}), call


@pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
@settings(quiet, max_examples=12)
@given(drawn=kernel_cases(KERNELS, 300), **CALLS)
def test_emulated(drawn, **call):
    hold(EmulatorRunner(ctas=2), drawn, **call)


@pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
@settings(quiet, max_examples=8)
@given(drawn=option_kernel_cases(200))
def test_emulated_options(drawn):
    option_checks.kernel_meets_contract(EmulatorRunner(ctas=2), drawn[0], **drawn[1])


@pytest.mark.gpu
@pytest.mark.skipif(why_no_gpu() is not None, reason=str(why_no_gpu()))
def test_gpu():
    """GPU_DRAWS draws; the log says how many ran and from which seed."""
    drawn_kernels = set()

    @seed(GPU_SEED)
    @settings(quiet, max_examples=GPU_DRAWS // 5)
    @given(drawn=option_kernel_cases(600))
    def option_draws(drawn):
        option_checks.kernel_meets_contract(GpuRunner(), drawn[0], **drawn[1])
        counts["draws"] += 1

    @seed(GPU_SEED)
    @settings(quiet, max_examples=GPU_DRAWS)
    @given(drawn=kernel_cases(KERNELS, 3000), **CALLS)
    def draws(drawn, **call):
        hold(GpuRunner(), drawn, **call)
        drawn_kernels.add(drawn[0])
        counts["draws"] += 1

    counts = {"draws": 0}
    draws()
    option_draws()
    print(f"{counts['draws']} draws, {len(drawn_kernels)} kernels without options, seed {GPU_SEED}")
    assert counts["draws"] >= GPU_DRAWS
