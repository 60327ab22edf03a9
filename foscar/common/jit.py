"""Compile a kernel once, find it again everywhere.

A kernel is identified by :func:`compile_key`: its name, architecture, the frozen config that generates it, and the
sources of its device code.  :func:`load_or_compile` looks in memory, in the folders of ``FOSCAR_KERNEL_PATH``
(compiled ahead of time, never written), in the disk cache, and only then compiles, which needs neither a GPU nor a
driver.  Nothing here imports the DSL unless it compiles.  Where a source was edited after the process started, its key
cannot be trusted: what is compiled then stays in memory.

======================  =============================================================================
``FOSCAR_CACHE_DIR``    the disk cache (default: ``$XDG_CACHE_HOME/foscar``, ``~/.cache/foscar``)
``FOSCAR_KERNEL_PATH``  folders of kernels compiled elsewhere, separated by ``:``, searched first
``FOSCAR_JIT=0``        never compile: a kernel that is not found is an error
======================  =============================================================================

One kernel is one folder ``NAME-ARCH-KEY-dslVERSION`` of ``kernel.cubin``, ``kernel.ptx`` and ``kernel.json``; copying
the folder is how a kernel moves to another machine.  Where the DSL is installed and may compile, the version must be
its own; elsewhere the newest serves.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import kernel_store as store
from .artifact import Artifact, make_artifact
from .errors import CompileError, MissingDependencyError
from .sources import source_files

log = logging.getLogger("foscar")
INSTALL_DSL = 'nvidia-cutlass-dsl: pip install "nvidia-cutlass-dsl>=4.8,<4.9"'

_IMPORTED = time.time()
_memory: dict[str, Artifact] = {}
_lock = threading.RLock()


# ---------------------------------------------------------------------------------------------- identity
@functools.cache
def dsl_version() -> str | None:
    """Version of nvidia-cutlass-dsl, or None where it is not installed; does not import it."""
    try:
        return importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return None


def canonical(value: Any) -> Any:
    """``value`` as JSON data that differs whenever the value does (dataclasses with their names and every field).

    Raises:
        TypeError: a value with no canonical form.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        data = {f.name: canonical(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"__dataclass__": type(value).__qualname__, **data}
    if isinstance(value, enum.Enum):
        return {"__enum__": f"{type(value).__qualname__}.{value.name}"}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [canonical(v) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"__dict__": {k: canonical(v) for k, v in value.items()}}
    raise TypeError(f"{type(value).__qualname__} cannot be part of a compile key: {value!r}")


@functools.cache
def source_fingerprint(modules: tuple[str, ...]) -> str:
    """Digest of the sources of some modules and all that they import from here; read once per process."""
    files = source_files(modules)
    digest = hashlib.sha256()
    for name in sorted(files):
        data = files[name].read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _sources(config: Any, builder: str) -> tuple[str, ...]:
    """The modules whose sources, with all that they import from here, count in a kernel's key."""
    return builder.partition(":")[0], type(config).__module__


def _edited(config: Any, builder: str) -> Path | None:
    """A source of the kernel that changed after this process began to import them: its key may name other code."""
    for path in source_files(_sources(config, builder)).values():
        try:
            if path.stat().st_mtime > _IMPORTED:
                return path
        except OSError:
            return path
    return None


@functools.cache
def _warn_edited(path: Path) -> None:
    log.warning("%s was edited after this process started: kernels compiled here stay in memory", path)


def compile_key(name: str, config: Any, arch: str, builder: str) -> str:
    """The identity of a kernel but for the DSL's version: 64 hex digits.

    Args:
        name: such as "hopper_decode".
        config: a frozen dataclass; every field, also of nested dataclasses, counts.
        arch: such as "sm_90a".
        builder: "module:function" of ``build(config, arch) -> Artifact``.

    Raises:
        TypeError: config is no frozen dataclass, or a field has no canonical form.
    """
    params = getattr(type(config), "__dataclass_params__", None)
    if params is None or not params.frozen:
        raise TypeError(f"a kernel's config must be a frozen dataclass, not {type(config).__qualname__}")
    identity = {
        "name": name,
        "arch": arch,
        "builder": builder,
        "config": canonical(config),
        "sources": source_fingerprint(_sources(config, builder)),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------- compiling
def compile_jit(host: Callable[..., Any], *args: Any, arch: str, options: str = "") -> Artifact:
    """Compile a ``@cute.jit`` host function that launches one kernel; needs no GPU.

    Args:
        host: called as ``host(*args, stream)``; the stream is supplied here.
        args: DSL scalars (``Int64(0)`` for a pointer) and compile-time constants.
        arch: "sm_90a", "sm_100a", ...
        options: further options of ``cute.compile``.

    Raises:
        MissingDependencyError: nvidia-cutlass-dsl is not installed.
        CompileError: what came out cannot be launched by :mod:`foscar.common.launch`.
    """
    try:
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_stream
    except ImportError as e:
        raise MissingDependencyError(f"compiling kernels needs {INSTALL_DSL}") from e
    with tempfile.TemporaryDirectory(prefix="foscar-") as dump:
        notes = Path(dump) / "ptxas.yaml"
        flags = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {dump} --remark-output {notes} remarks{{ptx}}"
        compiled = cute.compile(host, *args, make_fake_stream(), options=f"{flags} {options}".strip())
        cubin, ptx = compiled.artifacts.CUBIN, compiled.artifacts.PTX
        ptxas = notes.read_text(errors="replace") if notes.exists() else ""
    return make_artifact(cubin, ptx, str(compiled.ir_module), ptxas, arch=arch, dsl=dsl_version() or "")


def _compile(name: str, config: Any, arch: str, builder: str, key: str) -> Artifact:
    start = time.perf_counter()
    module, _, function = builder.partition(":")
    try:
        artifact = getattr(importlib.import_module(module), function)(config, arch)
    except Exception as e:
        first = (str(e).strip().splitlines() or [""])[0]
        raise CompileError(f"compiling {name} for {arch} failed: {type(e).__name__}: {first}") from e
    if artifact.arch != arch:
        raise CompileError(f"compiling {name} for {arch} gave a kernel for {artifact.arch}")
    artifact = dataclasses.replace(artifact, name=name, key=key, config=canonical(config))
    seconds = time.perf_counter() - start
    log.info(
        "compiled %s for %s in %.1f s: %s registers, %d B shared, %d threads",
        *(name, arch, seconds, artifact.registers, artifact.smem, artifact.threads),
    )
    for remark in artifact.costly_remarks:
        log.warning("%s (%s): %s", name, arch, remark)
    return artifact


# ---------------------------------------------------------------------------------------------- what callers use
def may_compile() -> bool:
    """Whether ``FOSCAR_JIT`` allows compiling."""
    return os.environ.get("FOSCAR_JIT", "1").strip().lower() not in ("0", "false", "no", "off")


def load_or_compile(name: str, config: Any, arch: str, builder: str) -> Artifact:
    """The compiled kernel, from memory, disk or a compilation.

    Args: see :func:`compile_key`.

    Raises:
        CompileError: not found while compiling is forbidden (``FOSCAR_JIT=0``), or compiling failed.
        MissingDependencyError: not found and nvidia-cutlass-dsl is not installed.
    """
    key = compile_key(name, config, arch, builder)
    with _lock:
        if key not in _memory:
            _memory[key] = _load_or_compile(name, config, arch, builder, key)
        return _memory[key]


def _load_or_compile(name: str, config: Any, arch: str, builder: str, key: str) -> Artifact:
    version = dsl_version() if may_compile() else None
    stem, root = store.stem(name, arch, key), store.cache_dir()
    for place in [*store.kernel_path(), *([root] if root else [])]:
        if (hit := store.lookup(place, stem, key, arch, version, set_aside=False)) is not None:
            log.debug("%s for %s from %s", name, arch, place)
            return hit
    if version is None:
        _raise_missing(name, config, arch, builder, stem)
    with store.locked(root, stem):
        if root is not None and (hit := store.lookup(root, stem, key, arch, version, set_aside=True)) is not None:
            return hit
        artifact = _compile(name, config, arch, builder, key)
        if (path := _edited(config, builder)) is not None:
            _warn_edited(path)
        elif root is not None:
            store.save(artifact, root / (stem + version))
        return artifact


def _aot_flags(config: Any) -> str | None:
    """The options of ``python -m foscar.aot`` that make the kernel of a config, or None where it cannot."""
    named = {"format": "formats", "head_dim": "head-dims", "page_size": "page-sizes", "heads": "heads",
             "q_dtype": "q-dtypes", "out_dtype": "q-dtypes"}  # fmt: skip
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    tile, options = values.pop("tile", None), values.pop("options", None)
    if "head_dim" not in values or not values.keys() <= named.keys():
        return None
    flags = [f"--{named[name]} {getattr(value, 'name', value)}" for name, value in values.items()]
    if tile is not None:
        changed = {knob: x for knob, x in vars(tile).items() if x != getattr(type(tile)(), knob)}
        flags += [f"--set {knob}={x}" for knob, x in changed.items()]
    if getattr(options, "name", ""):
        flags.append(f"--options {options.name}")
    return " ".join(flags)


def _raise_missing(name: str, config: Any, arch: str, builder: str, stem: str) -> None:
    places = ", ".join(map(str, [*store.kernel_path(), store.cache_dir()]))
    what = f"no compiled kernel {name} for {arch} ({stem}*) in {places}"
    flags = _aot_flags(config)
    how = f"foscar.common.jit.export_kernel(FOLDER, {name!r}, {config!r}, {arch!r}, {builder!r})"
    if flags is not None:
        how = f"python -m foscar.aot --arch {arch} {flags} --out FOLDER"
    how = f"on any machine with nvidia-cutlass-dsl (no GPU needed) run {how} and name FOLDER in FOSCAR_KERNEL_PATH"
    if not may_compile():
        raise CompileError(f"{what}, and FOSCAR_JIT=0 forbids compiling; {how}")
    raise MissingDependencyError(f"{what}; compiling it needs {INSTALL_DSL}; or {how}")


def export_kernel(folder: str | Path, name: str, config: Any, arch: str, builder: str) -> Path:
    """Compile a kernel ahead of time into ``folder`` (one for ``FOSCAR_KERNEL_PATH``); returns its own folder.

    Raises:
        CompileError, MissingDependencyError: see :func:`load_or_compile`; or ``folder`` cannot be written, or a source
            was edited after this process started.
    """
    artifact = load_or_compile(name, config, arch, builder)
    if (path := _edited(config, builder)) is not None:
        raise CompileError(f"{path} was edited after this process started: export {name} from a new one")
    folder, stem = Path(folder), store.stem(name, arch, artifact.key)
    target = folder / (stem + artifact.dsl)
    there = store.lookup(folder, stem, artifact.key, arch, artifact.dsl, set_aside=True)
    if there is None and not store.save(artifact, target):
        raise CompileError(f"cannot write {target}")
    return target


def forget() -> None:
    """Empty the in-memory cache (for tests)."""
    with _lock:
        _memory.clear()
