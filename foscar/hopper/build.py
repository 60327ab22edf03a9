"""Compiling the Hopper kernels: config -> artifact.  The only door from a launch to the DSL; needs no GPU."""

from __future__ import annotations

from ..common.artifact import Artifact
from ..common.jit import compile_jit
from ..common.plan import CombineConfig
from ..common.window_config import WindowKernelConfig
from .config import DecodeConfig

# The kernels' parameters by kind, in order (see arguments.py).
_KINDS = {"i64": "Int64", "i32": "Int32", "f32": "Float32"}


def _scalars(kinds: list[str]) -> list:
    import cutlass

    return [getattr(cutlass, _KINDS[k])(1) for k in kinds]


def build_decode(config: DecodeConfig, arch: str) -> Artifact:
    from . import arguments, kernel

    return compile_jit(kernel.host, _scalars(list(arguments.decode(config.options).values())), config, arch=arch)


def build_combine(config: CombineConfig, arch: str) -> Artifact:
    from ..common import combine
    from . import arguments

    names = tuple(kinds := arguments.combine(config.options))
    return compile_jit(combine.host, _scalars(list(kinds.values())), names, config, arch=arch)


def build_window(config: WindowKernelConfig, arch: str) -> Artifact:
    from ..common import window_kernel
    from . import arguments

    names = tuple(kinds := arguments.window(config.options))
    return compile_jit(window_kernel.host, _scalars(list(kinds.values())), names, config, arch=arch)
