"""Where a decode check runs: the same call on the CPU backend, on a GPU or in the emulator, CPU tensors in and out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Protocol
from unittest import mock

import torch

import foscar
from foscar import api
from foscar.common.cache import PagedKVCache
from foscar.common.options import Variant
from foscar.hopper import decode as decode_module
from foscar.hopper.config import ARCH, TileConfig
from foscar.hopper.decode import HopperDecode, Tables

from .compare import assert_equal
from .gpu_kernels import config_of

# How the emulator runs a kernel: in order, as late as allowed, in random orders (options of ptx_emulator.Launch).
SCHEDULES: dict[str, dict[str, object]] = {
    "inorder": {},
    "late": {"schedule": "late"},
    **{f"seed{n}": {"seed": n} for n in (1, 2, 3)},
}


class Runner(Protocol):
    """What the checks of :mod:`support.decode_checks` need.

    Attributes:
        unit: (sm_scale, lse_base) with which the LSE of a single token is ``q . k`` itself, without a rounding.
    """

    unit: tuple[float, int | str]

    def workers(self, config) -> int:
        """How many workers of a kernel share the tiles of a launch."""

    def decode(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        tables: Tables,
        *,
        tile: TileConfig | None = None,
        sm_scale: float | None = None,
        lse_base: int | str = 2,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of tensors on the CPU, whose strides are kept; ``out`` is written in place, where given."""


def call(q, cache, tables: Tables, *, tile, sm_scale, lse_base, out, backend) -> tuple[torch.Tensor, torch.Tensor]:
    """The public API on tensors of any device: dense tables by decode_attention, compressed ones by the wrapper."""
    options = {"sm_scale": sm_scale, "lse_base": lse_base, "backend": backend, "tile": tile}
    if tables.indptr is None:
        return foscar.decode_attention(q, cache, tables.pages, tables.lengths, out=out, return_lse=True, **options)
    wrapper = foscar.BatchDecodeWithPagedKVCacheWrapper()
    last = tables.lengths - (tables.indptr.diff() - 1).clamp(min=0) * cache.page_size
    wrapper.plan(
        tables.indptr, tables.pages, last, q.shape[1], cache.num_kv_heads, cache.head_dim, cache.page_size,
        format=cache.format, q_data_type=q.dtype, **options,
    )  # fmt: skip
    return wrapper.run(q, cache, out=out, return_lse=True)


class TorchRunner:
    """The folded CPU backend: what a check must accept, and what it can be tried on where there is no GPU."""

    unit = (1.0, "e")

    def workers(self, config) -> int:
        return 7

    def decode(self, q, cache, tables, *, tile=None, sm_scale=None, lse_base=2, out=None):
        config_of(q, cache, tile)
        return call(q, cache, tables, tile=tile, sm_scale=sm_scale, lse_base=lse_base, out=out, backend="torch")


class GpuRunner:
    """The kernels on a GPU."""

    unit = (1 / math.log2(math.e), 2)

    def __init__(self, device: str = "cuda"):
        self.device = torch.device(device)

    def workers(self, config) -> int:
        return config.warpgroups * torch.cuda.get_device_properties(self.device).multi_processor_count

    def run(self, body, *arguments, **named):
        """``body(..., device=this one)``, a function that calls the public API."""
        return body(*arguments, device=self.device, **named)

    def decode(self, q, cache, tables, *, tile=None, sm_scale=None, lse_base=2, out=None):
        config_of(q, cache, tile)
        there = mirror_cache(cache, self.device)
        tables = Tables(*(None if x is None else x.to(self.device) for x in vars(tables).values()))
        target = None if out is None else mirror(out, self.device)
        result, lse = call(mirror(q, self.device), there, tables, tile=tile, sm_scale=sm_scale, lse_base=lse_base,
                           out=target, backend="cuda")  # fmt: skip
        if out is None:
            return result.cpu(), lse.cpu()
        storage(out).copy_(storage(result))
        return out, lse.cpu()


class EmulatedLaunch:
    """In the place of launch.PreparedLaunch: runs the kernel's PTX in the emulator."""

    def __init__(self, artifact, owner: EmulatedDecode):
        self.artifact, self.owner, self.values = artifact, owner, []

    def update(self, values) -> None:
        self.values = list(values)

    def __call__(self, grid: int, stream: int) -> None:
        from ptx_emulator import Launch

        owner, kernel = self.owner, self.artifact
        arguments = [owner.tensors.get(value, value) for value in self.values]  # addresses back to tensors
        Launch(kernel.ptx, grid, kernel.block, arguments, smem=kernel.smem, memory=owner.memory, **owner.options).run()


class EmulatedDecode(HopperDecode):
    """The host side of a decode as it is, on CPU tensors; its workspace is poisoned before every call."""

    def __init__(self, config, ctas: int, options: dict, mutate: Callable[[str], str] | None, arch: str = ARCH):
        self.options = options
        decode_name = next(job[0] for job in self.kernels(config) if job[0].endswith("_decode"))
        gpu = SimpleNamespace(multi_processor_count=ctas)

        def load_kernel(artifact, index):
            if mutate and artifact.name == decode_name:
                artifact = dataclasses.replace(artifact, ptx=mutate(artifact.ptx))
            return SimpleNamespace(prepare=lambda values, pdl: EmulatedLaunch(artifact, self))

        with (
            mock.patch.object(decode_module, "load_kernel", load_kernel),
            mock.patch.object(torch.cuda, "get_device_properties", lambda device: gpu),
        ):
            super().__init__(config, torch.device("cpu"), arch)

    def bind(self, q, cache, tables, out, lse, buffers, *rest) -> Callable[..., None]:
        bound = super().bind(q, cache, tables, out, lse, buffers, *rest)
        variants = [x for x in rest if isinstance(x, Variant)]
        more = [y for x in variants for y in (x.sinks, x.q_indptr)]
        exact = [x.exact for x in variants if x.exact]
        more += [y for x in exact for y in vars(x).values()]
        given = (q, cache.data, out, lse, *vars(tables).values(), *vars(buffers).values(), *more)
        room = [*vars(buffers).values(), *(y for x in exact for y in (x.out, x.lse))]
        return functools.partial(self._launch, bound, room, given)

    def _launch(self, bound, room, given, *addresses) -> None:
        from ptx_emulator import Memory

        for x in room:
            x.fill_(math.nan if x.is_floating_point() else -1)
        self.tensors = {x.data_ptr(): x for x in given if x is not None and x.numel()}
        self.memory = Memory()
        with mock.patch.object(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0)):
            bound(*addresses)


class EmulatorRunner:
    """The public API with the kernels' PTX run on this machine by :mod:`ptx_emulator`: small sizes only.

    Args:
        ctas: as many as a GPU would have SMs.
        mutate: changes the decode kernel's PTX before it runs.
        options: of ``ptx_emulator.Launch``, such as ``seed`` or ``schedule``.
    """

    unit = GpuRunner.unit

    def __init__(self, ctas: int = 1, mutate: Callable[[str], str] | None = None, **options):
        self.ctas, self.mutate, self.options = ctas, mutate, options

    def _decoder(self, config, index) -> EmulatedDecode:
        return EmulatedDecode(config, self.ctas, self.options, self.mutate)

    def workers(self, config) -> int:
        return config.warpgroups * self.ctas

    def run(self, body, *arguments, **named):
        """A function that calls the public API on CPU tensors."""
        with self.active():
            return body(*arguments, **named)

    @contextlib.contextmanager
    def active(self):
        """While it is, calls of the public API on CPU tensors run the kernels here."""
        with (
            mock.patch.object(api, "device_arch", lambda device: ARCH),
            mock.patch.object(api, "_backend", lambda name, cache: "cuda"),
            mock.patch.object(api, "decoder", self._decoder),
        ):
            yield

    def decode(self, q, cache, tables, *, tile=None, sm_scale=None, lse_base=2, out=None):
        config_of(q, cache, tile)
        with self.active():
            return call(q, cache, tables, tile=tile, sm_scale=sm_scale, lse_base=lse_base, out=out, backend="cuda")


class ScheduledRunner(EmulatorRunner):
    """The emulator under every one of SCHEDULES, which must all give the same bits; returned are those in order."""

    def __init__(self, ctas: int = 1):
        super().__init__(ctas)

    def run(self, body, *arguments, **named):
        first = None
        for name, schedule in SCHEDULES.items():
            try:
                found = EmulatorRunner(self.ctas, **schedule).run(body, *arguments, **named)
            except Exception as e:
                raise AssertionError(f"schedule {name!r}: {type(e).__name__}: {e}") from e
            first = first or found
            for got, want in zip(found, first, strict=True):
                assert_equal(got, want, (f"schedule {name}: row", "head", "channel"))
        return first

    def decode(self, q, cache, tables, *, out=None, **options):
        first = None
        for name, schedule in SCHEDULES.items():
            target = None if out is None else mirror(out, out.device)
            try:
                found = EmulatorRunner(self.ctas, **schedule).decode(q, cache, tables, out=target, **options)
            except Exception as e:
                raise AssertionError(f"schedule {name!r}: {type(e).__name__}: {e}") from e
            first = first or found
            for got, want in zip(found, first, strict=True):
                assert_equal(got, want, (f"schedule {name}: request", "head", "channel"))
        if out is None:
            return first
        storage(out).copy_(storage(first[0]))
        return out, first[1]


def storage(x: torch.Tensor) -> torch.Tensor:
    """The whole memory that ``x`` is a view of, as a flat tensor of its type."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def mirror(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``x`` on another device with its strides and offset, and with all that lies between its elements."""
    return storage(x).to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())


def mirror_cache(cache: PagedKVCache, device: torch.device) -> PagedKVCache:
    shape = (cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim)
    return PagedKVCache(*shape, cache.format, data=mirror(cache.data, device))


def why_no_gpu() -> str | None:
    """Why the kernels cannot run here, or None."""
    if not torch.cuda.is_available():
        return "needs a Hopper GPU: no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"needs a Hopper GPU, not {torch.cuda.get_device_name()}"
    return None
