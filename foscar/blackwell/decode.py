"""Launching a decode on Blackwell: the same arguments, workspace and combine kernel as on Hopper.

No such GPU has run the kernel yet, so the first use warns.
"""

from __future__ import annotations

import functools
import threading
import warnings

import torch

from ..common import jit
from ..common.launch import device_arch, load_kernel
from ..common.plan import CombineConfig
from ..hopper import arguments
from ..hopper.decode import HopperDecode
from .config import ARCHS, DecodeConfig

BUILD = f"{__package__}.build"


def kernels(config: DecodeConfig) -> tuple[tuple[str, DecodeConfig | CombineConfig, str, dict[str, str]], ...]:
    """(name, config, builder, parameters) of the decode kernel and its combine, for jit.load_or_compile."""
    combine = CombineConfig(config.head_dim, config.q_dtype)
    return (
        ("blackwell_decode", config, f"{BUILD}:build_decode", arguments.DECODE),
        ("blackwell_combine", combine, f"{BUILD}:build_combine", arguments.COMBINE),
    )


class BlackwellDecode(HopperDecode):
    """Both kernels of a config on one device, ready to launch; thread-safe."""

    def __init__(self, config: DecodeConfig, device: torch.device, arch: str):
        assert arch in ARCHS
        self.config, self.device = config, device
        self.ctas = torch.cuda.get_device_properties(device).multi_processor_count
        self.launches = []
        for name, part, builder, parameters in kernels(config):
            loaded = load_kernel(jit.load_or_compile(name, part, arch, builder), device.index)
            self.launches.append((loaded.prepare([0] * len(parameters), pdl=True), list(parameters)))
        self.lock = threading.Lock()


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
