"""Load a compiled kernel on a device and launch it through the CUDA driver (cuda-python); the DSL is not needed.

A launch is prepared once (:meth:`LoadedKernel.prepare`) and repeated: its parameters live in one buffer laid out as the
PTX declares, so that a call writes only what changed and makes one driver call.  Modules are loaded into the device's
primary context, the one that torch uses; a launch makes that context current when it is not and puts the caller's back.
The stream is always the caller's: pass ``torch.cuda.current_stream(device).cuda_stream``.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any

from .artifact import Artifact, Param
from .errors import LaunchError, MissingDependencyError, UnsupportedDeviceError

ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
SUPPORTED = "sm_90a (H100, H200, GH200) and, unproven, sm_100a (B200, GB200), sm_103a (B300, GB300)"

_INTEGERS = {"u64": 64, "s64": 64, "b64": 64, "u32": 32, "s32": 32, "b32": 32}
_CTYPES = {64: ctypes.c_uint64, 32: ctypes.c_uint32}

_loaded: dict[tuple[str, str, int], LoadedKernel] = {}
_lock = threading.Lock()


def arch_of(major: int, minor: int, name: str = "this GPU") -> str:
    """The architecture whose kernels run on a compute capability.

    Raises:
        UnsupportedDeviceError: none do.
    """
    if (major, minor) not in ARCHS:
        raise UnsupportedDeviceError(f"{name} is sm_{major}{minor}; FOSCAR's kernels run on {SUPPORTED}")
    return ARCHS[major, minor]


def device_arch(device: Any = None) -> str:
    """The architecture of a torch device ("cuda:1", an index, a ``torch.device``; None: the current one).

    Raises:
        UnsupportedDeviceError: not a CUDA device, or one without kernels.
    """
    import torch

    if device is not None and not isinstance(device, int) and torch.device(device).type != "cuda":
        raise UnsupportedDeviceError(f"{device} is not a CUDA device; FOSCAR's kernels run on {SUPPORTED}")
    if not torch.cuda.is_available():
        raise UnsupportedDeviceError(f"torch sees no CUDA device; FOSCAR's kernels run on {SUPPORTED}")
    return arch_of(*torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


def current_stream(device: Any) -> int:
    """The handle of a ``torch.device``'s current stream; by the call of torch's compiler, where this torch has it."""
    import torch

    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if quick is None or device.index is None:
        return torch.cuda.current_stream(device).cuda_stream
    return quick(device.index)


def _struct_format(params: Sequence[Param]) -> str:
    """The parameter space for :mod:`struct`: signed integers, holes as padding."""
    text, end = "<", 0
    for p in params:
        text += f"{p.offset - end}x" if p.offset > end else ""
        text += "f" if p.type == "f32" else {64: "q", 32: "i"}[_INTEGERS[p.type]]
        end = p.offset + p.size
    return text


class ParamBuffer:
    """Kernel parameters in one block of memory, at the offsets that the PTX declares; needs no driver.

    Args:
        params: the kernel's parameters; 64- and 32-bit integers and float32 only.
        values: one number each; pointers as integers; signed values may be negative.

    Raises:
        LaunchError: wrong number of values, a parameter type that cannot be passed, or a value out of range.
    """

    def __init__(self, params: Sequence[Param], values: Sequence[int | float]) -> None:
        if len(values) != len(params):
            raise LaunchError(f"the kernel takes {len(params)} parameters, not {len(values)}")
        self.params = tuple(params)
        self.size = max((p.offset + p.size for p in params), default=0)
        self._buffer = (ctypes.c_ubyte * max(self.size, 1))()
        base = ctypes.addressof(self._buffer)
        self._slots: list[Any] = []
        self._ranges: list[tuple[int, int] | None] = []
        for i, p in enumerate(params):
            bits = _INTEGERS.get(p.type)
            if bits is None and p.type != "f32":
                raise LaunchError(f"parameter {i} is {p.type}; only 64- and 32-bit integers and float32 can be passed")
            kind = ctypes.c_float if bits is None else _CTYPES[bits]
            self._slots.append(kind.from_buffer(self._buffer, p.offset))
            self._ranges.append(None if bits is None else (-(1 << (bits - 1)), 1 << bits))
        self._pointers = (ctypes.c_void_p * max(len(params), 1))(*(base + p.offset for p in params))
        self.address = ctypes.addressof(self._pointers)  # a void **, the driver's kernelParams
        self._struct = struct.Struct(_struct_format(params))
        self.update(values)

    def update(self, values: Sequence[int | float]) -> None:
        """Write all parameters, a few times faster than one by one."""
        try:
            self._struct.pack_into(self._buffer, 0, *values)
        except (struct.error, TypeError, OverflowError):  # unsigned with the top bit set, or a value to complain about
            if len(values) != len(self.params):
                raise LaunchError(f"the kernel takes {len(self.params)} parameters, not {len(values)}") from None
            for i, value in enumerate(values):
                self.set(i, value)

    def set(self, i: int, value: int | float) -> None:
        """Write parameter ``i``."""
        limits = self._ranges[i]
        try:
            if limits is not None and not limits[0] <= value < limits[1]:
                raise LaunchError(f"parameter {i} ({self.params[i].type}) cannot hold {value}")
            self._slots[i].value = value
        except TypeError as e:
            raise LaunchError(f"parameter {i} ({self.params[i].type}) cannot hold {value!r}") from e

    def tobytes(self) -> bytes:
        """The parameter space as the kernel sees it."""
        return bytes(self._buffer)[: self.size]


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise MissingDependencyError("launching kernels needs cuda-python: pip install cuda-python") from e
    return driver


class LoadedKernel:
    """A kernel in the memory of one device.

    Args:
        artifact: what :func:`foscar.common.jit.load_or_compile` gave.
        device_index: as torch counts them.

    Raises:
        MissingDependencyError: cuda-python is not installed.
        UnsupportedDeviceError: the kernel was compiled for another architecture or needs more shared memory.
        LaunchError: the driver refused.

    Loading synchronizes: do it before capturing a CUDA graph.
    """

    def __init__(self, artifact: Artifact, device_index: int) -> None:
        self.artifact, self.device_index = artifact, device_index
        self._cu = cu = _driver()
        self._check("cuInit", cu.cuInit(0))
        device = self._check("cuDeviceGet", cu.cuDeviceGet(device_index))
        self._check_device(device)
        # Held until the process ends, like torch's own.
        self._context = self._check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(device))
        self._check("cuCtxPushCurrent", cu.cuCtxPushCurrent(self._context))
        try:
            self._module = self._check("cuModuleLoadData", cu.cuModuleLoadData(artifact.cubin))
            name = artifact.entry.encode()
            self.function = self._check("cuModuleGetFunction", cu.cuModuleGetFunction(self._module, name))
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check("cuFuncSetAttribute", cu.cuFuncSetAttribute(self.function, attribute, artifact.smem))
        finally:
            cu.cuCtxPopCurrent()

    def _check_device(self, device: Any) -> None:
        cu, a = self._cu, self.artifact
        which = cu.CUdevice_attribute

        def attribute(kind: Any) -> int:
            return self._check("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(kind, device))

        major = attribute(which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = attribute(which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        arch = arch_of(major, minor, f"cuda:{self.device_index}")
        if arch != a.arch:
            raise UnsupportedDeviceError(
                f"{a.name or a.entry} is compiled for {a.arch}, cuda:{self.device_index} is {arch}"
            )
        room = attribute(which.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        if a.smem + a.static_smem > room:
            raise UnsupportedDeviceError(
                f"{a.name or a.entry} needs {a.smem} + {a.static_smem} bytes of shared memory, "
                f"cuda:{self.device_index} has {room}"
            )

    def _check(self, call: str, result: tuple, shape: str = "") -> Any:
        """The value of a driver call, or a :class:`LaunchError` that says what failed."""
        status, *values = result
        if status != self._cu.CUresult.CUDA_SUCCESS:
            a = self.artifact
            raise LaunchError(
                f"{call}: {getattr(status, 'name', status)} "
                f"(kernel {a.name or a.entry}, cuda:{self.device_index}, {a.threads} threads, {a.smem} B shared{shape})"
            )
        return values[0] if len(values) == 1 else None

    def prepare(self, values: Sequence[int | float], *, pdl: bool = False) -> PreparedLaunch:
        """A launch with its parameters laid out.

        Args:
            values: one number per kernel parameter.
            pdl: programmatic dependent launch: the kernel may start before its predecessor in the stream has ended,
                and itself waits (``griddepcontrol.wait``) before touching that one's results.
        """
        return PreparedLaunch(self, values, pdl)

    def __repr__(self) -> str:
        return (
            f"LoadedKernel({self.artifact.name or self.artifact.entry}, {self.artifact.arch}, cuda:{self.device_index})"
        )


class PreparedLaunch:
    """A repeatable launch; see :meth:`LoadedKernel.prepare`.  Not for several threads at once."""

    def __init__(self, kernel: LoadedKernel, values: Sequence[int | float], pdl: bool) -> None:
        self.kernel = kernel
        self.buffer = ParamBuffer(kernel.artifact.params, values)
        self.set, self.update = self.buffer.set, self.buffer.update
        cu = kernel._cu
        self._context = int(kernel._context)
        self._success = cu.CUresult.CUDA_SUCCESS
        self._get_context = cu.cuCtxGetCurrent
        self._config = self._pdl_config() if pdl else None
        self._last: tuple[int, int, int, int] | None = None  # grid and stream that the config holds

    def _pdl_config(self) -> Any:
        cu, a = self.kernel._cu, self.kernel.artifact
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = cu.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = a.block
        config.sharedMemBytes = a.smem
        config.attrs, config.numAttrs = [attribute], 1
        return config

    def __call__(self, grid: int | tuple[int, int, int], stream: int) -> None:
        """Launch ``grid`` blocks on ``stream`` (a handle).

        Raises:
            LaunchError: the driver refused; errors while the kernel runs surface at the next synchronization.
        """
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        status, current = self._get_context()
        if status == self._success and int(current) == self._context:
            status = self._launch(x, y, z, stream)
        else:
            kernel = self.kernel
            kernel._check("cuCtxPushCurrent", kernel._cu.cuCtxPushCurrent(kernel._context))
            try:
                status = self._launch(x, y, z, stream)
            finally:
                kernel._cu.cuCtxPopCurrent()
        if status != self._success:
            self.kernel._check("launch", (status,), f", grid ({x}, {y}, {z})")

    def _launch(self, x: int, y: int, z: int, stream: int) -> Any:
        kernel, config = self.kernel, self._config
        if config is None:
            a = kernel.artifact
            return kernel._cu.cuLaunchKernel(
                kernel.function, x, y, z, *a.block, a.smem, stream, self.buffer.address, 0
            )[0]
        if self._last != (x, y, z, stream):  # every assignment converts: a few microseconds
            config.gridDimX, config.gridDimY, config.gridDimZ, config.hStream = x, y, z, stream
            self._last = (x, y, z, stream)
        return kernel._cu.cuLaunchKernelEx(config, kernel.function, self.buffer.address, 0)[0]


def load_kernel(artifact: Artifact, device_index: int) -> LoadedKernel:
    """The kernel on a device, loaded once per process.

    Raises: see :class:`LoadedKernel`.
    """
    key = (artifact.key or artifact.cubin_sha256, artifact.entry, device_index)
    with _lock:
        if key not in _loaded:
            _loaded[key] = LoadedKernel(artifact, device_index)
        return _loaded[key]
