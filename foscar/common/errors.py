"""What formats, and compiling and launching a kernel, can raise."""

from __future__ import annotations


class FormatError(ValueError):
    """A format, head dimension or page size that the cache cannot hold; the message names what is supported."""


class CompileError(RuntimeError):
    """A kernel could not be compiled, found or read; the message names the kernel and what to do."""


class MissingDependencyError(ImportError):
    """An optional package is not installed; the message is the one line that installs it."""


class UnsupportedDeviceError(RuntimeError):
    """No kernel for this device; the message names the devices that are supported."""


class LaunchError(RuntimeError):
    """The CUDA driver refused to load or launch a kernel; the message names the call, the kernel and its shape."""
