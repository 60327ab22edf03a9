"""Faults planted in a compiled decode kernel, one place at a time, and what notices them in the emulator.

Noticed means: a report (race, hazard, deadlock, misuse) or other bits than the kernel as it is, under some schedule.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property

from foscar.common import jit

from . import decode_checks as checks
from .runners import SCHEDULES, EmulatorRunner


class Planted:
    """A decode whose kernel is changed: the PTX, not the sources, so that nothing is recompiled.

    Args:
        runner: EmulatorRunner or one like it.
        config, arch, kernels: the kernel's, and what lists an architecture's kernels.
        lengths: of the requests.
    """

    def __init__(self, runner: Callable[..., EmulatorRunner], config, arch: str, kernels: Callable, lengths: list[int]):
        self.runner, self.config, self.arch, self.kernels = runner, config, arch, kernels
        self.case = checks.case_for(config, lengths, kv_heads=1, seed=60)
        checks.poison_slack(self.case)

    @cached_property
    def ptx(self) -> str:
        name, config, builder, _ = self.kernels(self.config)[0]
        return jit.load_or_compile(name, config, self.arch, builder).ptx

    @cached_property
    def want(self):
        """The bits of the kernel as it is, under every schedule."""
        results = [checks.decode(self.runner(**options), self.config, self.case) for options in SCHEDULES.values()]
        assert all(_same(found, results[0]) for found in results)
        checks.assert_contract(*results[0], self.case)
        return results[0]

    def outcome(self, mutate: Callable[[str], str]) -> str:
        """What noticed the fault; '' if nothing did."""
        from ptx_emulator import EmulatorError

        for name, options in SCHEDULES.items():
            runner = self.runner(mutate=mutate, max_instructions=400_000, **options)
            try:
                got = checks.decode(runner, self.config, self.case)
            except EmulatorError as e:
                return f"{name}: {e.kind}"
            if not _same(got, self.want):
                return f"{name}: wrong"
        return ""

    def check(self, fault: str, pattern: str, replacement: str, most: int) -> None:
        """At most ``most`` places of the pattern, spread over the kernel, replaced (as of re.sub) one at a time."""
        places = list(re.finditer(pattern, self.ptx))
        assert places, f"the kernel has no {pattern!r}: the fault must be written anew"
        for place in _spread(places, most):
            changed = self.ptx[: place.start()] + place.expand(replacement) + self.ptx[place.end() :]
            found = self.outcome(lambda _, changed=changed: changed)
            line = self.ptx.count("\n", 0, place.start()) + 1
            print(f"{fault}, PTX line {line}: {found or 'unnoticed'}")
            assert found, f"unnoticed: PTX line {line}: {place.group()}"


def _same(got, want) -> bool:
    return all(a.equal(b) for a, b in zip(got, want, strict=True))


def _spread(items: list, n: int) -> list:
    """At most ``n`` of them, the first and the last among them."""
    return items if len(items) <= n else [items[i * (len(items) - 1) // (n - 1)] for i in range(n)]
