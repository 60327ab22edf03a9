"""Instructions of every role of the Blackwell kernel per tile, counted in the SASS, against the stored budget; no GPU.

A better kernel lowers the budget: ``python examples/count_blackwell.py --write``.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from foscar.common import jit

EXAMPLES = Path(__file__).parents[1] / "examples"
SPILLED = {"k2c128v2c128 heads 16 correct": 3}  # loads and stores of local memory in two tiles


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        spec = importlib.util.spec_from_file_location("count_blackwell", EXAMPLES / "count_blackwell.py")
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "count_blackwell", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


SASS = """
.L_x_1:
        /*0000*/              UTCQMMA tmem[UR10], gdesc[UR26], tmem[UR11], tmem[UR20], idesc[UR21], !UPT ;
        /*0010*/          @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0020*/              LOP3.LUT R3, R3.reuse, 0x3030303, RZ, 0xc0, !PT ;
        /*0030*/              SHF.R.U32.HI R4, RZ, 0x4, R3 ;
        /*0034*/              SHF.R.U32.HI R4, RZ, 0x2, R3 ;
        /*0038*/              LOP3.LUT R5, R4, 0x33333333, RZ, 0xc0, !PT ;
        /*0040*/              LOP3.LUT R3, R3, R4, RZ, 0x3c, !PT ;
        /*0050*/              STTM.16dp128bit.x8 tmem[UR5], R20 ;
        /*0060*/              STL [R1], R20 ;
        /*0070*/          @P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0080*/              LDTM.x2 R4, tmem[UR5] ;
        /*0090*/              MUFU.EX2 R6, R5 ;
.L_x_4:
        /*00a0*/              LDTM.x2 R4, tmem[UR5] ;
        /*00b0*/              MUFU.EX2 R6, R5 ;
        /*00c0*/              STS [R4], R6 ;
        /*00d0*/          @P0 BRA `(.L_x_4) ;
.L_x_5:
        /*00e0*/              UBLKCP.S.G [UR4], [UR6], UR8 ;
        /*00f0*/          @P0 BRA `(.L_x_5) ;
{more}
"""
CORRECT = """.L_x_6:
        /*0100*/              LDTM.x2 R4, tmem[UR5] ;
        /*0110*/              MUFU.EX2 R6, R5 ;
        /*0120*/          @P0 BRA `(.L_x_6) ;
"""


def test_the_counter_itself(script):
    roles = ("load", "mma", "unpack", "softmax", "correct")
    loops = script.role_loops(SASS.format(more=CORRECT), roles)
    assert {role: len(loop.instructions) for role, loop in loops.items()} == {
        "load": 2, "mma": 2, "unpack": 8, "softmax": 4, "correct": 3,
    }  # fmt: skip
    counts = loops["unpack"].counts(1)
    assert (counts["total"], counts["masks"], counts["alu"], counts["tensor"]) == (8, 4, 5, 1)
    assert loops["unpack"].k_masks == 2
    assert loops["unpack"].local_memory == ["STL [R1], R20"]
    with pytest.raises(ValueError, match="no loop of the correct warps"):
        script.role_loops(SASS.format(more=""), roles)
    with pytest.raises(ValueError, match="no loop of the query warps"):
        script.role_loops(SASS.format(more=CORRECT), (*roles, "query"))
    rows = {role: loop.counts(1) for role, loop in loops.items()}
    assert not script.excess("x", rows, rows)
    less = {role: {k: v - 1 for k, v in c.items()} for role, c in rows.items()}
    assert len(script.excess("x", rows, less)) == 3 * len(rows)


@pytest.fixture(scope="module")
def counted(script):
    """Role loops of every kernel of the budget."""
    if jit.dsl_version() is None:
        pytest.skip("compiling the kernels needs nvidia-cutlass-dsl")
    shared = importlib.import_module("count_instructions")
    try:
        shared.find_nvdisasm()
    except shared.MissingTool as e:
        pytest.skip(str(e))
    return {name: script.loops_of(config) for name, config in script.all_configs().items()}


def test_every_role_is_within_its_budget(script, counted):
    counts = {name: script.counts_of(loops) for name, loops in counted.items()}
    budget = json.loads(script.BUDGET.read_text())
    assert budget.keys() == counts.keys(), "the budget is of other kernels"
    over = [line for name in counts for line in script.excess(name, counts[name], budget[name])]
    assert not over, "\n".join([*over, "", script.table(counts)])


def test_what_spills(counted):
    """One register of one role of one kernel, nothing else."""
    found = {
        f"{name} {role}": len(loop.local_memory)
        for name, loops in counted.items()
        for role, loop in loops.items()
        if loop.local_memory
    }
    assert found == SPILLED


def test_masks_per_element(script, counted):
    """At 2 bits 3 / 16 for K and 5 / 16 for V, at 4 bits 3 / 8."""
    for name, loops in counted.items():
        two = script.all_configs()[name].format.k.bits == 2
        both = script.masks_per_element(script.counts_of(loops))
        assert both <= (0.25 if two else 0.375), name
        if two:
            k = script.k_masks_per_element(loops)
            assert 0 < k <= 0.1875 and 2 * both - k <= 0.3125, name


def test_no_conversion_back_from_e4m3(counted):
    """ptxas 13.4 puts it above the instruction that makes its operand: see foscar/blackwell/lowfloat.py."""
    for name, loops in counted.items():
        back = [text for text in loops["softmax"].instructions if text.startswith("F2FP.F16.E4M3.UNPACK_B ")]
        assert not back, f"{name}: {back}"


def test_the_table_of_the_document(script, counted):
    """docs/performance.md has what the model computes now: every number within the budget's slack, the same words."""
    found = importlib.import_module("blackwell_model").model()
    head, _, *rows = found.splitlines()
    document = (EXAMPLES.parent / "docs" / "performance.md").read_text().splitlines()
    assert head in document, "the table's columns are others: python examples/blackwell_model.py"
    at = document.index(head) + 2
    slack = importlib.import_module("count_instructions").SLACK
    for here, there in zip(rows, document[at : at + len(rows)], strict=True):
        assert re.sub(r"[\d.]+", "#", here) == re.sub(r"[\d.]+", "#", there), f"now {here}, in the document {there}"
        for a, b in zip(*(re.findall(r"\d+(?:\.\d+)?", x) for x in (here, there)), strict=True):
            rounding = 0.01 if "." in a else 1
            assert abs(float(a) - float(b)) <= slack * float(a) + rounding, f"now {here}, in the document {there}"
