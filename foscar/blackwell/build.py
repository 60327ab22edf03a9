"""Compiling the Blackwell kernel: config -> artifact; needs no GPU.  The combine kernel is common to both."""

from __future__ import annotations

from ..common.artifact import Artifact
from ..common.jit import compile_jit
from ..hopper.build import _scalars, build_combine
from .config import DecodeConfig


def build_decode(config: DecodeConfig, arch: str) -> Artifact:
    from ..hopper import arguments
    from . import kernel, smem

    artifact = compile_jit(kernel.host, _scalars(list(arguments.decode(config.options).values())), config, arch=arch)
    smem.check(config, artifact.smem)
    return artifact


__all__ = ["build_combine", "build_decode"]
