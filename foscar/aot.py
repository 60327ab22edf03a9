"""Compile kernels ahead of time: a folder that a process loads without compiling, also where there is no CuTe DSL.

    python -m foscar.aot --arch sm_90a --formats int2,int4 --head-dims 128 --page-sizes 64 --heads 4,8 \\
        --q-dtypes bfloat16 --out kernels
    FOSCAR_KERNEL_PATH=$PWD/kernels FOSCAR_JIT=0 python serve.py

Every combination of the lists is made: a decode kernel, the combine kernel of its head_dim and type and the append
kernel of its format, head_dim and page size for k and v of q's type.  The folder has the disk cache's
own format (:mod:`foscar.common.jit`); what is there already is kept.  Compiling needs nvidia-cutlass-dsl and no GPU.
The sources are part of a kernel's identity: compile from the version that will run.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .blackwell import config as blackwell
from .blackwell import decode as blackwell_decode
from .common import append_config, jit, kernel_store
from .common.append_config import AppendConfig
from .common.config import ConfigError
from .common.errors import CompileError, FormatError, MissingDependencyError
from .common.formats import KVFormat
from .common.plan import KernelOptions
from .hopper import config as hopper
from .hopper import decode as hopper_decode

# Architecture -> where its configs are, and the kernels of one.
ARCHS = {
    hopper.ARCH: (hopper, hopper_decode.kernels),
    **{arch: (blackwell, blackwell_decode.kernels) for arch in blackwell.ARCHS},
}


@dataclass(frozen=True)
class Job:
    """One kernel to compile: the arguments of :func:`foscar.common.jit.load_or_compile`."""

    name: str
    config: Any
    arch: str
    builder: str

    def __str__(self) -> str:
        fields = {f.name: getattr(self.config, f.name) for f in dataclasses.fields(self.config)}
        names = {name: getattr(value, "name", value) for name, value in fields.items() if name != "tile"}
        shown = (f"{name} {value}" for name, value in names.items() if name != "options" or value)
        return f"{self.name} {self.arch} ({', '.join(shown)})"

    def find(self, root: Path) -> Path | None:
        """The kernel's folder in a folder of kernels, as this machine's DSL compiles it; None where none is sound."""
        key, version = jit.compile_key(self.name, self.config, self.arch, self.builder), jit.dsl_version() or ""
        stem = kernel_store.stem(self.name, self.arch, key)
        there = kernel_store.lookup(root, stem, key, self.arch, version, set_aside=True) is not None
        return root / (stem + version) if there else None


@dataclass(frozen=True)
class Summary:
    """What :func:`build` did: kernels in all and newly made, bytes of all, seconds."""

    kernels: int
    made: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        kept = self.kernels - self.made
        size = f"{self.nbytes / 2**20:.1f} MiB"
        return f"{self.kernels} kernels, {size}: {self.made} made, {kept} there already, {self.seconds:.1f} s"


# ---------------------------------------------------------------------------------------------- what to build
def plan(
    arch: str,
    formats: Iterable[KVFormat],
    head_dims: Iterable[int],
    page_sizes: Iterable[int],
    heads: Iterable[int],
    q_dtypes: Iterable[str],
    knobs: dict[str, Any] | None = None,
    options: str = "",
) -> Iterator[Job]:
    """The kernels of every combination; the same one may come several times.

    Args:
        arch: "sm_90a", "sm_100a" or "sm_103a".
        heads: query heads per KV head; a kernel may serve fewer, too.  With the option "rows": pairs of a query token
            and a head in one pass, up to 16.
        q_dtypes: "bfloat16", "float16".
        knobs: fields of the architecture's TileConfig; None: its defaults.
        options: what the kernels compute beside plain attention (:attr:`foscar.common.plan.KernelOptions.name`).

    Raises:
        FormatError, ConfigError, ValueError: a combination that there is no kernel for.
    """
    module, kernels = ARCHS[arch]
    tile, wanted = module.TileConfig(**(knobs or {})), KernelOptions.parse(options)
    for fmt, dim, page, group, dtype in itertools.product(formats, head_dims, page_sizes, heads, q_dtypes):
        layout, padded = fmt.layout(dim, page), -(-group // 4) * 4
        config = module.DecodeConfig(layout.kernel_format, layout.padded_head_dim, page, padded, dtype, tile, wanted)
        for name, part, builder, _ in kernels(config):
            yield Job(name, part, arch, builder)
        yield Job(append_config.NAME, AppendConfig(fmt, dim, page, dtype), arch, append_config.BUILDER)


# ---------------------------------------------------------------------------------------------- building
def _make(root: Path, job: Job) -> tuple[Path, float]:
    start = time.perf_counter()
    folder = jit.export_kernel(root, job.name, job.config, job.arch, job.builder)
    return folder, time.perf_counter() - start


def _made(root: Path, jobs: list[Job], processes: int) -> Iterator[tuple[Job, Path, float]]:
    """The kernels as they are finished."""
    if processes <= 1 or len(jobs) <= 1:
        yield from ((job, *_make(root, job)) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")  # a forked torch or DSL is not safe to use
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context) as pool:
        pending = {pool.submit(_make, root, job): job for job in jobs}
        try:
            for done in as_completed(pending):
                yield pending[done], *done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.iterdir())


def build(
    folder: str | Path, jobs: Iterable[Job], processes: int = 1, say: Callable[[str], None] = lambda line: None
) -> Summary:
    """Compile what ``folder`` lacks.

    Args:
        folder: made where it does not exist; one for ``FOSCAR_KERNEL_PATH``.
        jobs: what it shall hold.
        processes: compile so many kernels at once.
        say: called with a line for every kernel that is finished.

    Raises:
        CompileError, MissingDependencyError: see :func:`foscar.common.jit.export_kernel`.  Kernels that were finished
            stay.
        OSError: a folder that cannot be made or written to; found before anything is compiled.
    """
    start, root, jobs = time.perf_counter(), Path(folder), list(dict.fromkeys(jobs))
    there = {job: job.find(root) for job in jobs}
    missing = [job for job, path in there.items() if path is None]
    if missing:
        _check_compiler()
        _check_folder(root)
    for n, (job, path, seconds) in enumerate(_made(root, missing, processes), 1):
        there[job] = path
        say(f"[{n}/{len(missing)}] {job}: {seconds:.1f} s, {_size(path) / 1024:.0f} KiB")
    return Summary(len(jobs), len(missing), sum(map(_size, there.values())), time.perf_counter() - start)


def _check_compiler() -> None:
    if not jit.may_compile():
        raise CompileError("FOSCAR_JIT=0 forbids compiling: unset it")
    if jit.dsl_version() is None:
        raise MissingDependencyError(f"compiling kernels needs {jit.INSTALL_DSL}")


def _check_folder(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=root):
        pass


# ---------------------------------------------------------------------------------------------- the command
def _items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(option: str, text: str) -> list[int]:
    parts = _items(text)
    if not parts or not all(p.isascii() and p.isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"--{option}: expected whole numbers such as 64,128, not {text!r}")
    return [int(p) for p in parts]


def knobs_of(tile: type, settings: list[str], what: str = "the tile config") -> dict[str, Any]:
    """The values of ``--set NAME=VALUE`` for a TileConfig.

    Raises:
        ValueError: a name that it does not have.
    """
    names = [f.name for f in dataclasses.fields(tile)]
    knobs = {}
    for text in settings:
        name, _, value = text.partition("=")
        if name not in names:
            raise ValueError(f"--set {text}: {what} has {', '.join(names)}")
        try:
            knobs[name] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError):
            knobs[name] = value
    return knobs


def _jobs(args: argparse.Namespace) -> list[Job]:
    """What the command's options ask for.

    Raises:
        ValueError: an option that cannot be met, in one line that names what can.
    """
    archs, dtypes = _items(args.arch), _items(args.q_dtypes)
    unknown = [a for a in archs if a not in ARCHS]
    if unknown or not archs:
        raise ValueError(f"--arch: there are kernels for {', '.join(ARCHS)}, not for {', '.join(unknown) or 'nothing'}")
    shapes = [_numbers(name, getattr(args, name.replace("-", "_"))) for name in ("head-dims", "page-sizes", "heads")]
    try:
        formats = [KVFormat.parse(name) for name in _items(args.formats)]
    except FormatError as e:
        raise ValueError(f"--formats: {e}") from None
    jobs = []
    for arch in archs:
        knobs = knobs_of(ARCHS[arch][0].TileConfig, args.set, f"the tile config of {arch}")
        jobs += plan(arch, formats, *shapes, dtypes, knobs, args.options)
    if not jobs:
        raise ValueError("nothing to do: --formats and --q-dtypes must name something")
    return jobs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m foscar.aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", required=True, help=f"of {', '.join(ARCHS)}")
    parser.add_argument("--formats", default="int2,int4", help="int2, int4, k4v2, ..., each also with -bf16 "
                        "(scale and bias in bfloat16); default %(default)s")  # fmt: skip
    parser.add_argument("--head-dims", default="128", help="default %(default)s")
    parser.add_argument("--page-sizes", default="64", help="tokens; default %(default)s")
    parser.add_argument("--heads", default="4", help="query heads per KV head; default %(default)s")
    parser.add_argument("--q-dtypes", default="bfloat16", help="bfloat16, float16; default %(default)s")
    parser.add_argument("--options", default="", help="of window, soft_cap, wide_cap (above 256), sinks, out_scale, "
                        "rows (q_indptr, or more than 16 heads), exact, exact_f16 (windows); default none")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a knob of the tile config")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
                        help="compile so many at once; default: the processors, %(default)s here")  # fmt: skip
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the kernels go")
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    try:
        summary = build(args.out, _jobs(args), args.jobs, lambda line: print(line, flush=True))
    except (ValueError, ConfigError, CompileError, MissingDependencyError) as e:
        raise SystemExit(f"foscar.aot: {e}") from None
    except OSError as e:
        raise SystemExit(f"foscar.aot: --out: {e}") from None
    print(f"{args.out}: {summary}")


if __name__ == "__main__":
    main()
