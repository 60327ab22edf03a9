"""The documentation: its snippets run on the CPU, its links lead somewhere, the reference is what the docstrings say.

A Python block runs where the line before it is ``<!-- run -->``, or the end of a comment ``<!-- run`` ... ``-->`` whose
lines run first (what the reader has already: a model's tensors).  The blocks of a file share their names, in order.
``device="cuda"`` becomes ``device="cpu"``.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^<!-- run(?P<before>.*?)-->\n```python\n(?P<code>.*?)^```$", re.S | re.M)
MUST_RUN = {"aot.md", "cache.md", "formats.md", "graphs.md"}


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line, code) of the blocks that run."""
    text = page.read_text(encoding="utf-8")
    found = []
    for m in BLOCK.finditer(text):
        line = text[: m.start("before")].count("\n")
        gap = "\n" * (text[: m.start("code")].count("\n") - line - m["before"].count("\n"))
        found.append((line, m["before"] + gap + m["code"].replace('device="cuda"', 'device="cpu"')))
    return found


def test_every_marked_block_is_found():
    for page in PAGES:
        marks = len(re.findall(r"^<!-- run\b", page.read_text(encoding="utf-8"), re.M))
        assert len(blocks(page)) == marks, page
    assert {p.name for p in PAGES if blocks(p)} >= MUST_RUN


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_snippets_run(page):
    torch.manual_seed(0)
    names = {"__name__": page.stem}
    for line, code in blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), names)  # tracebacks name the page's lines


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if not path.startswith("http") and path:
            assert (page.parent / path).exists(), f"{page.name}: {target}"
        elif not path:
            titles = re.findall(r"^#+ (.*)$", text, re.M)
            assert anchor in {t.lower().replace(" ", "-") for t in titles}, f"{page.name}: {target}"


# ---------------------------------------------------------------------------------------------- the reference
def reference():
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "scripts" / "api_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date():
    module = reference()
    assert module.TARGET.read_text(encoding="utf-8") == module.render(), "run python scripts/api_reference.py"


def test_what_the_reference_makes_of_a_docstring():
    def f(a: int, *, b: str = "x") -> float:
        """One line with ``code`` and :class:`foscar.KVFormat`::

            x = 1

        Args:
            a: a number,
                of two lines.
            b: see :func:`f`.

        Returns:
            A float.
        """

    module = reference()
    assert module.signature("f", f) == ["f(a: int, *, b: str = 'x') -> float"]
    assert list(module.markdown(inspect.getdoc(f))) == [
        "One line with `code` and `foscar.KVFormat`:", "", "```", "x = 1", "```", "",
        "**Args**", "", "- `a`: a number,", "  of two lines.", "- `b`: see `f`.", "",
        "**Returns**: A float.",
    ]  # fmt: skip
