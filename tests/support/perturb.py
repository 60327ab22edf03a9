"""Change a frozen dataclass one field at a time, whatever its fields are."""

import copy
import dataclasses
import enum
from collections.abc import Iterator
from typing import Any


def _other(value: Any) -> Any:
    """A value of the same kind that differs."""
    if isinstance(value, enum.Enum):
        return next(m for m in type(value) if m is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if value is None:
        return 1
    if isinstance(value, tuple):
        return (*value, 1)
    raise TypeError(f"no way to perturb {value!r}")


def _with(config: Any, name: str, value: Any) -> Any:
    """A copy with one field replaced, without validation: a key must differ whether or not the config is sensible."""
    changed = copy.copy(config)
    object.__setattr__(changed, name, value)
    return changed


def perturbations(config: Any) -> Iterator[tuple[str, Any]]:
    """(path of the field, config that differs in this field alone), for every field of nested dataclasses too."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            for path, changed in perturbations(value):
                yield f"{f.name}.{path}", _with(config, f.name, changed)
        else:
            yield f.name, _with(config, f.name, _other(value))
