"""Folders of compiled kernels: where they are, and reading and writing them under many processes at once.

Writing renames a finished folder into place, so readers see all of a kernel or nothing; a per-kernel file lock lets one
process compile while the others wait; what contradicts its checksum is renamed ``*.corrupt`` and built again.  A place
that cannot be written or locked costs a warning, never the kernel.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .artifact import Artifact
from .errors import CompileError

log = logging.getLogger("foscar")

# What only another build mends: contents (JSON and Unicode errors are ValueErrors), a missing file, a file or a
# dangling link in the folder's place. Other OSErrors, too many open files say, tell nothing about the kernel.
_BROKEN = (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError)


def cache_dir() -> Path | None:
    """Where kernels are cached, or None where the environment names no place."""
    for variable, tail in (("FOSCAR_CACHE_DIR", ""), ("XDG_CACHE_HOME", "foscar")):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser() / tail
    try:
        return Path.home() / ".cache" / "foscar"
    except RuntimeError:  # no home
        return None


def kernel_path() -> list[Path]:
    """Read-only folders of kernels compiled ahead of time."""
    return [Path(p).expanduser() for p in os.environ.get("FOSCAR_KERNEL_PATH", "").split(os.pathsep) if p]


def stem(name: str, arch: str, key: str) -> str:
    if not re.fullmatch(r"[\w.]+", name):
        raise CompileError(f"a kernel's name is letters, digits, '_' and '.', not {name!r}")
    return f"{name}-{arch}-{key[:24]}-dsl"


def lookup(root: Path, stem: str, key: str, arch: str, version: str | None, *, set_aside: bool) -> Artifact | None:
    """The kernel in one folder of kernels, if a sound one is there; with ``set_aside``, broken ones are renamed."""
    if version is None:
        try:
            found = [p.name for p in root.iterdir() if p.name.startswith(stem) and not p.name.endswith(".corrupt")]
        except OSError:
            return None
        found.sort(key=lambda n: [int(d) for d in re.findall(r"\d+", n[len(stem) :])], reverse=True)
    else:
        found = [stem + version]
    for folder in (root / n for n in found):
        try:
            if os.path.lexists(folder):
                return Artifact.load(folder, key, arch)
        except _BROKEN as e:
            log.warning("broken kernel %s: %s", folder, e)
            if set_aside:
                _set_aside(folder)
        except OSError as e:
            log.warning("cannot read kernel %s: %s", folder, e)
    return None


def _set_aside(folder: Path) -> None:
    """Rename what is broken so that it is rebuilt and can still be looked at (the last broken one is kept)."""
    target = folder.with_name(folder.name + ".corrupt")
    try:
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)
        os.rename(folder, target)
    except OSError as e:
        log.warning("cannot set aside %s: %s", folder, e)


def save(artifact: Artifact, folder: Path) -> bool:
    """Write a kernel so that readers see all of it or nothing; False where the place cannot be written."""
    scratch = folder.with_name(f".tmp-{uuid.uuid4().hex}")
    try:
        scratch.mkdir(parents=True)
        artifact.save(scratch)
        os.rename(scratch, folder)
        return True
    except OSError as e:
        shutil.rmtree(scratch, ignore_errors=True)
        if folder.is_dir():  # somebody else's, as good as ours
            return True
        log.warning("kernel %s stays in memory: cannot write %s: %s", artifact.name, folder, e)
        return False


@contextmanager
def locked(root: Path | None, stem: str) -> Iterator[None]:
    """Only one process at a time compiles a kernel; where locks do not work, each compiles its own."""
    handle = None
    try:
        if root is not None:
            (root / ".locks").mkdir(parents=True, exist_ok=True)
            handle = open(root / ".locks" / stem, "a")
            fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as e:
        log.info("no lock in %s: %s", root, e)
    try:
        yield
    finally:
        if handle is not None:
            handle.close()
