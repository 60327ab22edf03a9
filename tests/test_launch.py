"""Laying out and launching kernels: on the CPU against a driver that records, on a GPU for real."""

import ctypes
import dataclasses
import struct
import types

import pytest
import torch
from support.tiny_kernel import BUILDER, NAME, TinyConfig

from foscar.common import artifact as art
from foscar.common import jit, launch
from foscar.common.errors import CompileError, LaunchError, MissingDependencyError, UnsupportedDeviceError

needs_dsl = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


# u64, u32, u64, f32, u32: one hole before the second pointer
PARAMS = tuple(art.Param(*p) for p in (("u64", 8, 0), ("u32", 4, 8), ("u64", 8, 16), ("f32", 4, 24), ("u32", 4, 28)))
KERNEL = art.Artifact(b"\x7fELF", "", "entry", "sm_90a", (128, 1, 1), 1536, 0, PARAMS, name=NAME, key="k")


# ---------------------------------------------------------------------------------------------- parameters
def test_parameters_lie_where_the_ptx_says():
    b = launch.ParamBuffer(PARAMS, (2**64 - 1, -5, 0x1122334455667788, 1.5, 2**32 - 1))
    assert b.tobytes() == struct.pack("<Qi4xQfI", 2**64 - 1, -5, 0x1122334455667788, 1.5, 2**32 - 1)
    pointers = (ctypes.c_void_p * 5).from_address(b.address)
    assert [p - pointers[0] for p in pointers] == [p.offset for p in PARAMS]
    assert ctypes.c_float.from_address(pointers[3]).value == 1.5
    b.set(0, -1)
    b.set(3, -2)
    b.set(4, 7)
    assert b.tobytes() == struct.pack("<qi4xQfI", -1, -5, 0x1122334455667788, -2.0, 7)
    b.update((1, 2**32 - 1, 3, 0.5, -4))
    assert b.tobytes() == struct.pack("<qI4xQfi", 1, 2**32 - 1, 3, 0.5, -4)
    assert [p.value for p in map(ctypes.c_uint32.from_address, pointers[1:2])] == [2**32 - 1]
    assert launch.ParamBuffer((), ()).tobytes() == b""


@needs_dsl
def test_parameters_match_a_compiled_kernel():
    """The layout of the entry as ptxas put it into the cubin, by its own record of parameters (EIATTR_KPARAM_INFO)."""
    a = jit.load_or_compile(NAME, TinyConfig(), "sm_90a", BUILDER)
    b = launch.ParamBuffer(a.params, (1, 2, 3, 4.0, 5))
    assert [(p.type, p.size, p.offset) for p in a.params] == [(p.type, p.size, p.offset) for p in PARAMS]
    for ordinal, p in enumerate(a.params):
        record = b"\x04\x17\x0c\x00" + struct.pack("<IHH", 0, ordinal, p.offset)
        at = a.cubin.find(record)
        assert at >= 0, (ordinal, p)
        (packed,) = struct.unpack_from("<I", a.cubin, at + len(record))
        assert packed >> 18 == p.size  # the size lies in the top 14 bits
    assert b.size == 32


@pytest.mark.parametrize(
    "i, value, message",
    [
        (0, 2**64, "parameter 0 .u64. cannot hold"),
        (0, -(2**63) - 1, "parameter 0"),
        (1, 2**32, "parameter 1 .u32. cannot hold 4294967296"),
        (1, -(2**31) - 1, "parameter 1"),
        (1, 1.5, "parameter 1 .u32. cannot hold 1.5"),
        (2, None, "parameter 2 .u64. cannot hold None"),
        (3, "x", "parameter 3 .f32. cannot hold 'x'"),
    ],
)
def test_values_that_do_not_fit(i, value, message):
    b = launch.ParamBuffer(PARAMS, (1, 2, 3, 4, 5))
    before = b.tobytes()
    with pytest.raises(LaunchError, match=message):
        b.set(i, value)
    assert b.tobytes() == before


@pytest.mark.parametrize("values", [(1, 2, 3, 4), (1, 2, 3, "x", 5), (2**64, 2, 3, 4, 5), (1, 2.5, 3, 4, 5)])
def test_updates_that_do_not_fit(values):
    with pytest.raises(LaunchError, match="takes 5 parameters, not 4|parameter . .* cannot hold"):
        launch.ParamBuffer(PARAMS, (1, 2, 3, 4, 5)).update(values)


def test_parameters_that_cannot_be_passed():
    with pytest.raises(LaunchError, match="takes 5 parameters, not 1"):
        launch.ParamBuffer(PARAMS, (1,))
    with pytest.raises(LaunchError, match=r"parameter 0 is b8\[128\]"):
        launch.ParamBuffer((art.Param("b8[128]", 128, 0),), (1,))


# ---------------------------------------------------------------------------------------------- devices
def test_architectures():
    assert [launch.arch_of(*c) for c in ((9, 0), (10, 0), (10, 3))] == ["sm_90a", "sm_100a", "sm_103a"]
    for major, minor in ((8, 0), (8, 9), (12, 0)):
        with pytest.raises(
            UnsupportedDeviceError, match=rf"^RTX is sm_{major}{minor}; .*sm_90a .*H200.*sm_100a .*B200"
        ):
            launch.arch_of(major, minor, "RTX")


def test_the_architecture_of_a_torch_device(monkeypatch):
    with pytest.raises(UnsupportedDeviceError, match="cpu is not a CUDA device"):
        launch.device_arch("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedDeviceError, match="no CUDA device"):
        launch.device_arch("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capability = {"cuda:0": (9, 0), "cuda:1": (8, 9), None: (10, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "NVIDIA L4")
    assert launch.device_arch("cuda:0") == "sm_90a" and launch.device_arch() == "sm_100a"
    with pytest.raises(UnsupportedDeviceError, match="NVIDIA L4 is sm_89"):
        launch.device_arch("cuda:1")


# ---------------------------------------------------------------------------------------------- a driver that records
class FakeDriver:
    """What launch.py uses of cuda.bindings.driver, with two sm_90 devices whose contexts are 100 and 101."""

    CUresult = types.SimpleNamespace(CUDA_SUCCESS=0)
    CUfunction_attribute = types.SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic")
    CUdevice_attribute = types.SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="room",
    )
    CUlaunchAttributeID = types.SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="pdl")
    CUlaunchConfig = types.SimpleNamespace

    def __init__(self):
        self.stack, self.attributes, self.launches, self.fail = [], {"major": 9, "minor": 0, "room": 232448}, [], 0
        self.cuInit = lambda flags: (0,)
        self.cuDeviceGet = lambda i: (0, i) if i < 2 else (101,)
        self.cuDeviceGetAttribute = lambda kind, device: (0, self.attributes[kind])
        self.cuDevicePrimaryCtxRetain = lambda device: (0, 100 + device)
        self.cuCtxGetCurrent = lambda: (0, self.stack[-1] if self.stack else 0)
        self.cuModuleLoadData = lambda image: (0, ("module", image, self.stack[-1]))
        self.cuModuleGetFunction = lambda module, name: (0, (name, module[2]))
        self.cuFuncSetAttribute = lambda f, kind, value: self.attributes.update({(f, kind): value}) or (0,)

    def CUlaunchAttribute(self):
        return types.SimpleNamespace(value=types.SimpleNamespace())

    def cuCtxPushCurrent(self, context):
        self.stack.append(context)
        return (0,)

    def cuCtxPopCurrent(self):
        return (0, self.stack.pop())

    def _record(self, function, shape, smem, stream, params, attributes=()):
        address = (ctypes.c_void_p * 5).from_address(params)
        values = ctypes.string_at(address[0], 32)
        self.launches.append((function, self.stack[-1], shape, smem, stream, values, attributes))
        return (self.fail,)

    def cuLaunchKernel(self, f, gx, gy, gz, bx, by, bz, smem, stream, params, extra):
        return self._record(f, (gx, gy, gz, bx, by, bz), smem, stream, params)

    def cuLaunchKernelEx(self, c, f, params, extra):
        shape = (c.gridDimX, c.gridDimY, c.gridDimZ, c.blockDimX, c.blockDimY, c.blockDimZ)
        attributes = tuple((a.id, a.value.programmaticStreamSerializationAllowed) for a in c.attrs[: c.numAttrs])
        return self._record(f, shape, c.sharedMemBytes, c.hStream, params, attributes)


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(launch, "_driver", lambda: fake)
    monkeypatch.setattr(launch, "_loaded", {})
    return fake


def test_loading_leaves_the_callers_context(driver):
    driver.stack = [7]
    kernel = launch.LoadedKernel(KERNEL, 1)
    assert driver.stack == [7]
    assert kernel.function == (b"entry", 101)
    assert driver.attributes[kernel.function, "dynamic"] == 1536
    assert "sm_90a" in repr(kernel) and "cuda:1" in repr(kernel)


@pytest.mark.parametrize("current", [[], [100], [101]], ids=["no context", "other device", "this device"])
@pytest.mark.parametrize("pdl", [False, True])
def test_a_launch_runs_in_its_own_context(driver, current, pdl):
    go = launch.LoadedKernel(KERNEL, 1).prepare((1, 2, 3, 4, 5), pdl=pdl)
    driver.stack = list(current)
    go(132, 77)
    go.set(1, -9)
    go((2, 3, 4), 78)
    assert driver.stack == current
    pdl_attribute = (("pdl", 1),) if pdl else ()
    expected = [((132, 1, 1), 77, 2), ((2, 3, 4), 78, -9)]
    for got, (grid, stream, second) in zip(driver.launches, expected, strict=True):
        values = struct.pack("<Qi4xQfI", 1, second, 3, 4, 5)
        assert got == ((b"entry", 101), 101, (*grid, 128, 1, 1), 1536, stream, values, pdl_attribute)


@pytest.mark.parametrize("current", [[], [100]])
def test_a_refused_launch_says_which(driver, current):
    go = launch.LoadedKernel(KERNEL, 0).prepare((1, 2, 3, 4, 5))
    driver.stack, driver.fail = list(current), 701
    with pytest.raises(
        LaunchError, match=rf"701 .*kernel {NAME}, cuda:0, 128 threads, 1536 B shared, grid \(9, 1, 1\)"
    ):
        go(9, 0)
    assert driver.stack == current


def test_what_cannot_be_loaded(driver):
    with pytest.raises(LaunchError, match="cuDeviceGet: 101 .*cuda:2"):
        launch.LoadedKernel(KERNEL, 2)
    with pytest.raises(UnsupportedDeviceError, match="compiled for sm_100a, cuda:0 is sm_90a"):
        launch.LoadedKernel(dataclasses.replace(KERNEL, arch="sm_100a"), 0)
    with pytest.raises(UnsupportedDeviceError, match="needs 999999 . 0 bytes of shared memory, cuda:0 has 232448"):
        launch.LoadedKernel(dataclasses.replace(KERNEL, smem=999999), 0)
    driver.attributes["major"] = 8
    with pytest.raises(UnsupportedDeviceError, match="cuda:0 is sm_80"):
        launch.LoadedKernel(KERNEL, 0)
    assert driver.stack == []


def test_a_kernel_is_loaded_once_per_device(driver):
    first = launch.load_kernel(KERNEL, 0)
    assert launch.load_kernel(KERNEL, 0) is first
    assert launch.load_kernel(KERNEL, 1) is not first
    assert launch.load_kernel(dataclasses.replace(KERNEL, key="other"), 0) is not first


def test_without_cuda_python_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(MissingDependencyError, match=r"^launching kernels needs cuda-python: pip install cuda-python$"):
        launch.LoadedKernel(KERNEL, 0)


# ---------------------------------------------------------------------------------------------- a GPU
@gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_the_tiny_kernel_on_every_gpu(pdl):
    try:
        artifacts = {
            d: jit.load_or_compile(NAME, TinyConfig(), launch.device_arch(d), BUILDER)
            for d in range(torch.cuda.device_count())
        }
    except (CompileError, MissingDependencyError) as e:
        pytest.skip(f"no compiled kernel: {e}")
    n, threads = 1000, 128
    for d, artifact in artifacts.items():  # the current device stays 0
        kernel = launch.load_kernel(artifact, d)
        x = torch.randn(n, device=f"cuda:{d}")
        y, z = torch.zeros_like(x), torch.zeros_like(x)
        expected = (x * 2.5 + 1).cpu()
        stream = torch.cuda.Stream(device=d)
        stream.wait_stream(torch.cuda.current_stream(d))
        go = kernel.prepare((x.data_ptr(), n, y.data_ptr(), 2.5, 1), pdl=pdl)
        go(-(-n // threads), stream.cuda_stream)
        go.set(2, z.data_ptr())
        go.set(4, -3)
        go((-(-n // threads), 1, 1), stream.cuda_stream)
        torch.cuda.synchronize(d)
        full = n // threads * threads  # whole blocks are reversed in place

        def flipped(t, full=full):
            return t[:full].view(-1, threads).flip(1).reshape(-1)

        torch.testing.assert_close(y.cpu()[:full], flipped(expected))
        torch.testing.assert_close(z.cpu()[:full], flipped(expected - 4))


@gpu
def test_a_captured_launch_replays_and_bad_shapes_are_refused():
    try:
        artifact = jit.load_or_compile(NAME, TinyConfig(), launch.device_arch(0), BUILDER)
    except (CompileError, MissingDependencyError) as e:
        pytest.skip(f"no compiled kernel: {e}")
    x = torch.arange(128, device="cuda:0", dtype=torch.float32)
    y = torch.zeros_like(x)
    go = launch.load_kernel(artifact, 0).prepare((x.data_ptr(), 128, y.data_ptr(), 1.0, 0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        go(1, torch.cuda.current_stream().cuda_stream)
    go.set(3, 5.0)  # the graph keeps what it captured
    x.add_(1)
    graph.replay()
    torch.testing.assert_close(y, x.flip(0))
    with pytest.raises(LaunchError, match="INVALID_VALUE"):
        go(0, torch.cuda.current_stream().cuda_stream)
