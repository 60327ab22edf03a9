"""Launching a decode on Blackwell: the same arguments, workspace and combine kernel as on Hopper.

No such GPU has run the kernel yet, so the first use warns.
"""

from __future__ import annotations

import functools
import warnings

import torch

from ..common.launch import device_arch
from ..common.plan import CombineConfig
from ..hopper import arguments
from ..hopper.decode import HopperDecode
from .config import ARCHS, DecodeConfig

BUILD = f"{__package__}.build"


def kernels(config: DecodeConfig) -> tuple[tuple[str, DecodeConfig | CombineConfig, str, dict[str, str]], ...]:
    """(name, config, builder, parameters) of the decode kernel and its combine, for jit.load_or_compile."""
    combine = CombineConfig.of(config)
    return (
        ("blackwell_decode", config, f"{BUILD}:build_decode", arguments.decode(config.options)),
        ("blackwell_combine", combine, f"{BUILD}:build_combine", arguments.combine(combine.options)),
    )


class BlackwellDecode(HopperDecode):
    """Both kernels of a config on one device, ready to launch; thread-safe."""

    kernels = staticmethod(kernels)

    def __init__(self, config: DecodeConfig, device: torch.device, arch: str):
        assert arch in ARCHS
        super().__init__(config, device, arch)


@functools.cache
def decoder(config: DecodeConfig, device_index: int) -> BlackwellDecode:
    """The kernels of ``config`` on a device, compiled and loaded once."""
    warnings.warn(
        "FOSCAR's Blackwell kernel has run in the PTX emulator only, never on hardware: "
        "compare its results with backend='torch' first",
        stacklevel=2,
    )
    device = torch.device("cuda", device_index)
    return BlackwellDecode(config, device, device_arch(device))
