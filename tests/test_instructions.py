"""Instructions of the tile loop per KV element, counted in the SASS, against the stored budget; no GPU.

A better kernel lowers the budget: ``python examples/count_instructions.py --write``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from foscar.common import jit


def _load_script(name: str):
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up while it is executed
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


count = _load_script("count_instructions")

# Two short loops, the inner one with a spill and an A operand in shared memory.
SASS = """
.L_x_1:
        /*0000*/              LOP3.LUT R3, R3, R4, RZ, 0x3c, !PT ;
.L_x_2:
        /*0010*/          @P0 SHF.R.U32.HI R3, RZ, 0x4, R4 ;
{gmmas}
        /*0300*/              LDL R14, [R1] ;
        /*0310*/              HGMMA.64x8x16.F32 R24, gdesc[UR8], R24 ;
        /*0320*/         @!P0 BRA `(.L_x_2) ;
        /*0330*/         @!P0 BRA `(.L_x_1) ;
""".format(gmmas="        /*0020*/  IGMMA.64x8x32.U8.S8.SAT R28, R36, gdesc[UR12], RZ, !UPT ;\n" * 12)


def test_the_counter_itself():
    loop = count.tile_loop(SASS)
    assert (len(loop.instructions), loop.unpack, loop.by_class["wgmma"], loop.by_class["alu"]) == (16, 1, 13, 1)
    assert loop.local_memory == ["LDL R14, [R1]"] and loop.a_from_memory == ["HGMMA.64x8x16.F32 R24, gdesc[UR8], R24"]
    with pytest.raises(ValueError, match="no loop of 12 to 20 wgmmas"):
        count.tile_loop(SASS.replace("IGMMA", "IMAD"))
    budget = {"total": 16, "unpack": 1, "wgmma": 13}
    assert not count.excess("x", loop.counts(), budget)
    assert len(count.excess("x", loop.counts(), {"total": 15, "unpack": 0, "wgmma": 14})) == 3


@pytest.fixture(scope="module")
def counted():
    """(loop, counts) of every kernel of the budget."""
    if jit.dsl_version() is None:
        pytest.skip("compiling the kernels needs nvidia-cutlass-dsl")
    try:
        count.find_nvdisasm()
    except count.MissingTool as e:
        pytest.skip(str(e))
    loops = {name: count.loop_of(config) for name, config in count.configs().items()}
    return loops, {name: loop.counts() for name, loop in loops.items()}


def test_the_loop_is_within_its_budget(counted):
    _, counts = counted
    budget = json.loads(count.BUDGET.read_text())
    assert budget.keys() == counts.keys(), "the budget is of other kernels"
    over = [line for name in counts for line in count.excess(name, counts[name], budget[name])]
    per = count.elements(next(iter(count.configs().values())))
    rows = [row for name in counts for row in ((name, counts[name]), ("  budget", budget[name]))]
    assert not over, "\n".join([*over, "", count.table(rows, per)])


def test_nothing_spills_and_a_stays_in_registers(counted):
    for name, loop in counted[0].items():
        assert not loop.local_memory, f"{name}: {loop.local_memory}"
        assert not loop.a_from_memory, f"{name}: {loop.a_from_memory}"
