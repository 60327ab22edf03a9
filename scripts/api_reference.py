"""Write docs/api.md from the docstrings of everything that ``foscar`` exports.

    python scripts/api_reference.py

tests/test_docs.py fails where the file is not what this writes.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "api.md"
HEADER = """# API reference

Everything that `import foscar` gives. Written by `python scripts/api_reference.py` from the docstrings; do not edit.
"""
SECTION = re.compile(r"(Args|Returns|Raises|Attributes):(.*)")
LINE = 120


# ---------------------------------------------------------------------------------------------- docstrings to markdown
def inline(text: str) -> str:
    """Roles and double backticks as Markdown code."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def items(lines: list[str]) -> Iterator[str]:
    """A section's ``name: text`` entries as bullets, ``name`` in code; what has no name is plain text."""
    for line in lines:
        name = re.match(r"([\w ,*()]+): (.*)", line)
        yield f"- `{name[1]}`: {inline(name[2])}" if name else re.sub("^    ", "  ", inline(line))


def markdown(doc: str) -> Iterator[str]:
    """The lines of a docstring (as ``inspect.getdoc`` gives it) in Markdown."""
    lines = doc.splitlines()
    while lines:
        line = lines.pop(0)
        found = SECTION.fullmatch(line)
        literal = line.endswith("::")
        if not found and not literal:
            yield inline(line)
            continue
        block = []
        while lines and (not lines[0] or lines[0].startswith("    ")):
            block.append(lines.pop(0)[4:])
        while block and not block[-1]:
            block.pop()
            lines.insert(0, "")
        if literal:
            yield from (inline(line[:-1]), "", "```", *(block[1:] if block and not block[0] else block), "```")
        elif found[2].strip() and not block:
            yield f"**{found[1]}**: {inline(found[2].strip())}"
        elif found[1] == "Returns":
            yield from ("**Returns**: " + inline(block[0]), *map(inline, block[1:]))
        else:
            yield from (f"**{found[1]}**{':' + inline(found[2]) if found[2] else ''}", "", *items(block))


# ---------------------------------------------------------------------------------------------- signatures
def annotation(value: Any) -> str:
    return value if isinstance(value, str) else inspect.formatannotation(value)


def parameter(p: inspect.Parameter) -> str:
    text = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
    if p.annotation is not p.empty:
        text += f": {annotation(p.annotation)}"
    if p.default is not p.empty:
        default = repr(p.default)
        text += f" = {'...' if default.startswith('<') else default}"
    return text


def signature(name: str, f: Callable) -> list[str]:
    """``name(...) -> ...``, one parameter a line where one line is too long."""
    found = inspect.signature(f)
    parts: list[str] = []
    for p in found.parameters.values():
        if p.name in ("self", "cls") and not parts:
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in parts and not any(x.startswith("*") for x in parts):
            parts.append("*")
        parts.append(parameter(p))
    back = found.return_annotation
    arrow = "" if back in (found.empty, None, "None") else f" -> {annotation(back)}"
    line = f"{name}({', '.join(parts)}){arrow}"
    return [line] if len(line) <= LINE else [f"{name}(", *(f"    {p}," for p in parts), f"){arrow}"]


# ---------------------------------------------------------------------------------------------- entries
def entry(level: int, title: str, code: list[str], doc: str | None) -> Iterator[str]:
    yield from ("", f"{'#' * level} {title}", "")
    if code:
        yield from ("```python", *code, "```", "")
    yield from markdown(doc or "")


def members(cls: type) -> Iterator[str]:
    """Public methods and properties that the class itself defines, in order."""
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        title = f"{cls.__name__}.{name}"
        if isinstance(member, property) or hasattr(member, "attrname"):  # cached_property
            get = member.fget if isinstance(member, property) else member.func
            kind = inspect.signature(get).return_annotation
            if inspect.getdoc(get):
                yield from entry(4, title, [f"{title}: {annotation(kind)}"], inspect.getdoc(get))
        elif isinstance(member, (types.FunctionType, classmethod, staticmethod)):
            bound = getattr(cls, name)
            yield from entry(4, title, signature(title, bound), inspect.getdoc(bound))


def describe(name: str, thing: Any) -> Iterator[str]:
    """One exported thing; a module stands for its functions."""
    if inspect.ismodule(thing):
        yield from entry(3, name, [], inspect.getdoc(thing))
        for part, value in vars(thing).items():
            if isinstance(value, types.ModuleType) or part.startswith("_"):
                continue
            f = getattr(value, "_init_fn", None)  # of a torch.library.custom_op
            if f is not None:
                yield from entry(4, f"{name}.{part}", signature(f"{name}.{part}", f), inspect.getdoc(f))
    elif inspect.isclass(thing) and issubclass(thing, Exception):
        bases = ", ".join(b.__name__ for b in thing.__bases__)
        yield from entry(3, name, [f"class {name}({bases})"], inspect.getdoc(thing))
    elif inspect.isclass(thing):
        yield from entry(3, name, signature(name, thing), inspect.getdoc(thing))
        yield from members(thing)
    else:
        yield from entry(3, name, signature(name, thing), inspect.getdoc(thing))


def render() -> str:
    """The text of docs/api.md."""
    import foscar

    things = {name: getattr(foscar, name) for name in foscar.__all__}
    kinds: dict[str, Callable[[Any], bool]] = {
        "Functions": inspect.isfunction,
        "Classes": lambda x: inspect.isclass(x) and not issubclass(x, Exception),
        "Operators": inspect.ismodule,
        "Errors": lambda x: inspect.isclass(x) and issubclass(x, Exception),
    }
    lines = [HEADER.rstrip()]
    for kind, belongs in kinds.items():
        chosen = {name: x for name, x in things.items() if belongs(x)}
        lines += ["", f"## {kind}", "", ", ".join(f"[{name}](#{name.lower()})" for name in chosen)]
        for name, thing in chosen.items():
            lines += describe(name, thing)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    TARGET.write_text(render(), encoding="utf-8")
    print(f"{TARGET.relative_to(ROOT)}: {len(render().splitlines())} lines")
