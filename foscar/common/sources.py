"""Which source files shape a kernel: the modules of this package that its builder imports, directly or not.

Read from the syntax trees, so nothing is imported and a lazily imported module counts like any other.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT.name


def _file(module: str) -> Path | None:
    """The module's source file; for this package without importing anything."""
    parts = module.split(".")
    if parts[0] == PACKAGE:
        base = ROOT.joinpath(*parts[1:])
        return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
    origin = getattr(sys.modules.get(module), "__file__", None)
    if origin is None and module != "__main__":
        spec = importlib.util.find_spec(module)
        origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") else None


@functools.cache  # parsing takes most of the time of a warm start, and the kernels share most of their files
def _imports(module: str, path: Path) -> set[str]:
    """Modules of this package that a file names in import statements, wherever in the file."""
    found = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] == PACKAGE and name != PACKAGE}


@functools.cache
def source_files(modules: tuple[str, ...]) -> dict[str, Path]:
    """Module name -> file, for ``modules`` and all that they import from this package."""
    todo, files = list(modules), {}
    while todo:
        module = todo.pop()
        path = None if module in files else _file(module)
        if path is not None:
            files[module] = path
            todo += _imports(module, path)
    return files
