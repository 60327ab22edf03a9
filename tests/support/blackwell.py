"""The Blackwell kernel's configs for tests, and the runner that executes them in the emulator."""

from __future__ import annotations

import contextlib
from unittest import mock

from foscar import api
from foscar.blackwell import decode as decode_module
from foscar.blackwell.config import DecodeConfig, TileConfig
from foscar.common.formats import KVFormat

from . import gpu_kernels
from .runners import EmulatedDecode, EmulatorRunner, call


def config(k_bits, v_bits, head_dim, page_size, heads, q_dtype, params="float16", **tile) -> DecodeConfig:
    fmt = KVFormat.make(k_bits, v_bits, params=params)
    return DecodeConfig(fmt, head_dim, page_size, heads, q_dtype, TileConfig(**tile))


def like(hopper) -> DecodeConfig:
    """The same cache and query as a Hopper config's."""
    return DecodeConfig(hopper.format, hopper.head_dim, hopper.page_size, hopper.heads, hopper.q_dtype)


LAYOUTS = tuple(like(c) for c in gpu_kernels.LAYOUTS)
MIXED = tuple(like(c) for c in gpu_kernels.MIXED)
INT2, INT4 = like(gpu_kernels.INT2), like(gpu_kernels.INT4)
INT2_FP16, INT4_FP16 = like(gpu_kernels.INT2_FP16), like(gpu_kernels.INT4_FP16)


def _fold(name, head_dim, page_size, heads, q_dtype) -> DecodeConfig:
    return DecodeConfig(KVFormat.parse(name), head_dim, page_size, heads, q_dtype)


# Per channel: a group of a tile, of parts of one, of more tokens than a tile; straddling tiles; head_dim 64.
V_CHANNEL = (
    _fold("k2v2c128", 128, 64, 4, "float16"),
    _fold("k4v2c64-bf16", 128, 64, 8, "bfloat16"),
    _fold("k4v4c32", 64, 32, 4, "float16"),
    _fold("k2v4c256", 64, 16, 12, "float16"),
    _fold("k2v2c96", 64, 32, 4, "float16"),
    _fold("k4v4c128", 128, 128, 16, "bfloat16"),
)
K_CHANNEL = (
    _fold("k2c128v2", 128, 64, 4, "float16"),  # KIVI
    _fold("k4c128v2-bf16", 128, 128, 8, "bfloat16"),
    _fold("k2c64v2c64", 128, 64, 4, "float16"),
    _fold("k4c64v4c64", 64, 32, 8, "bfloat16"),
    _fold("k2c32v4", 64, 32, 8, "float16"),
    _fold("k4c32v4c128", 64, 32, 4, "float16"),
    _fold("k2c256v2c256", 128, 16, 12, "float16"),
    _fold("k2c96v4", 64, 32, 4, "bfloat16"),
)


def name_of(c: DecodeConfig) -> str:
    return f"{c.format.name}-d{c.head_dim}-p{c.page_size}-h{c.heads}-{c.q_dtype}"


class EmulatedBlackwell(EmulatedDecode, decode_module.BlackwellDecode):
    """The host side of a decode as it is, on CPU tensors."""


class BlackwellRunner(EmulatorRunner):
    """The public API as on a GPU of ``arch``, the kernels' PTX run in the emulator."""

    def __init__(self, ctas: int = 1, arch: str = "sm_100a", mutate=None, **options):
        super().__init__(ctas, mutate, **options)
        self.arch = arch

    def _decoder(self, config, index) -> EmulatedBlackwell:
        return EmulatedBlackwell(config, self.ctas, self.options, self.mutate, self.arch)

    @contextlib.contextmanager
    def active(self):
        with (
            mock.patch.object(api, "device_arch", lambda device: self.arch),
            mock.patch.object(api, "blackwell_decoder", self._decoder),
            mock.patch.object(api, "_backend", lambda name, cache: "cuda"),
        ):
            yield

    def decode(self, q, cache, tables, *, tile=None, sm_scale=None, lse_base=2, out=None):
        with self.active():
            return call(q, cache, tables, tile=tile, sm_scale=sm_scale, lse_base=lse_base, out=out, backend="cuda")
