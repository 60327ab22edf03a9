"""One stage of the Hopper decode kernel at a time: what the probe kernels are called with, and where they run.

The kernels are in :mod:`support.probe_kernels` (the DSL is imported only to compile one).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from foscar.common import jit
from foscar.common.artifact import Artifact
from foscar.common.formats import KVFormat
from foscar.common.launch import load_kernel
from foscar.hopper.config import ARCH, DecodeConfig, TileConfig

BUILDER = "support.probe_kernels:build"
MARK = -0x5A3C_A5C4  # a word that no copy has overwritten
# A segment as store.finish takes it: schedule.Work, then the item's tiles and the segment's.
WORK = ("request", "head", "tile", "position", "left", "total", "workers", "worker", "tiles", "n")

_TABLES = {
    "cache": "i64", "page_stride": "i64", "head_stride": "i64", "pages": "i64", "table_stride": "i64", "indptr": "i64",
    "lengths": "i64",
}  # fmt: skip
# Per stage, the kernel's parameters by name and kind, in order.
PARAMETERS: dict[str, dict[str, str]] = {
    "load": {**_TABLES, "tiles": "i64", "batch": "i32", "kv_heads": "i32", "kv_heads_inverse": "i32",
             "workers_inverse": "i32"},
    "query": {
        "q": "i64", "q_stride": "i64", "q_head_stride": "i64", "operand": "i64", "factors": "i64", "kv_heads": "i32",
        "group": "i32", "sm_scale_log2": "f32",
    },
    "scores": {"tiles": "i64", "operand": "i64", "scores": "i64"},
    "params": {"tiles": "i64", "left": "i64", "params": "i64"},
    "softmax": dict.fromkeys(("scores", "params", "factors", "folded", "probs", "sums"), "i64"),
    "values": {"tiles": "i64", "probs": "i64", "products": "i64"},
    "store": {
        "work": "i64", "products": "i64", "sums": "i64", "steps": "i32", "out": "i64", "out_stride": "i64",
        "out_head_stride": "i64", "lse": "i64", "partial_out": "i64", "partial_lse": "i64",
        "kv_heads": "i32", "group": "i32", "lse_unit": "f32",
    },
}  # fmt: skip


@dataclass(frozen=True)
class ProbeConfig:
    """One probe kernel.

    Args:
        stage: a key of PARAMETERS.
        decode: the decode kernel whose stage it is.
    """

    stage: str
    decode: DecodeConfig

    @property
    def name(self) -> str:
        d = self.decode
        return f"{self.stage}-{d.format.name}-d{d.head_dim}-p{d.page_size}-h{d.heads}-{d.q_dtype}"


def _decode(k_bits, v_bits, head_dim, page_size, heads, q_dtype, params="float16", warpgroups=1) -> DecodeConfig:
    fmt = KVFormat.make(k_bits, v_bits, params=params)
    return DecodeConfig(fmt, head_dim, page_size, heads, q_dtype, TileConfig(math_warpgroups=warpgroups, kv_stages=2))


# Between them: both widths of K and of V, both head_dims, every number of heads, pages below, at and above a V block,
# both types of q and of the parameters, and the rows of V whose bytes serve two warps (d64, 2 bits).
DECODES = (
    _decode(2, 2, 128, 64, 4, "bfloat16"),
    _decode(4, 2, 64, 128, 12, "bfloat16", "bfloat16"),
    _decode(2, 4, 64, 16, 8, "float16"),
    _decode(4, 4, 128, 32, 16, "float16", "bfloat16"),
)
LOADS = tuple(_decode(b, b, 64, page, 4, "bfloat16", warpgroups=2) for b, page in ((2, 16), (4, 64), (2, 128)))
PROBES = (
    *(ProbeConfig("load", d) for d in LOADS),
    *(ProbeConfig(stage, d) for stage in PARAMETERS if stage != "load" for d in DECODES),
)


def of_stage(stage: str) -> tuple[ProbeConfig, ...]:
    return tuple(p for p in PROBES if p.stage == stage)


def artifact_of(config: ProbeConfig) -> Artifact:
    return jit.load_or_compile(f"probe_{config.stage}", config, ARCH, BUILDER)


# ---------------------------------------------------------------------------------------------- where they run
# (artifact, grid, values by name with CPU tensors for pointers): runs the kernel, which writes to those tensors.
Place = Callable[[Artifact, int, dict[str, object]], None]


def in_emulator(artifact: Artifact, grid: int, values: dict[str, object], **options) -> None:
    """``options``: of ptx_emulator.Launch."""
    from ptx_emulator import Launch

    Launch(artifact.ptx, grid, artifact.block, list(values.values()), smem=artifact.smem, **options).run()


def on_gpu(artifact: Artifact, grid: int, values: dict[str, object]) -> None:
    there = {id(v): v.cuda() for v in values.values() if isinstance(v, torch.Tensor)}
    numbers = [there[id(v)].data_ptr() if id(v) in there else v for v in values.values()]
    launch = load_kernel(artifact, torch.cuda.current_device()).prepare(numbers)
    launch(grid, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    for v in values.values():
        if id(v) in there:
            v.copy_(there[id(v)])


def emulator(**options) -> Place:
    return functools.partial(in_emulator, **options)


def run(where: Place, config: ProbeConfig, grid: int, **values) -> None:
    """The probe of ``config`` on ``grid`` blocks.

    Args:
        values: by name, all of PARAMETERS[stage]; contiguous CPU tensors for pointers, 0 for none.
    """
    names = PARAMETERS[config.stage]
    if values.keys() != names.keys():
        raise TypeError(f"{config.stage}: needs {sorted(names)}, not {sorted(values)}")
    for name, v in values.items():
        if isinstance(v, torch.Tensor) and (not v.is_contiguous() or v.dtype.itemsize > 4):
            raise TypeError(f"{name}: {v.dtype} of strides {v.stride()}; probes take contiguous data of up to 32 bits")
    where(artifact_of(config), grid, {name: values[name] for name in names})
