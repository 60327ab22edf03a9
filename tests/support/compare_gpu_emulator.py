"""The compiled decode kernels on a GPU and in the emulator, same inputs. Needs a Hopper GPU:

    python tests/support/compare_gpu_emulator.py [LOG]

Unpacking, copies and integer sums are exact on both sides: one-hot probes must agree bit for bit.  Whole decodes may
differ where the GPU approximates (exp2, log2, reciprocal) and in how the tiles are split: the log gives the largest
difference of the outputs in units of the last place of their type, and of the LSEs.  Exits with 1 if a probe differs
anywhere or a decode by more than one unit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # "support" and "ptx_emulator", as pytest's pythonpath has them

from support import decode_checks as checks  # noqa: E402
from support.gpu_kernels import LAYOUTS, MIXED, TILES, name_of  # noqa: E402
from support.runners import EmulatorRunner, GpuRunner  # noqa: E402

LENGTHS = [1, 0, 17, 130, 300]


class Both:
    """Runs every decode on both sides and keeps the pairs of results; the GPU's go back to the check."""

    unit = GpuRunner.unit

    def __init__(self):
        self.gpu, self.emulator, self.pairs = GpuRunner(), EmulatorRunner(), []

    def workers(self, config) -> int:
        return self.gpu.workers(config)

    def decode(self, *args, **options):
        pair = self.gpu.decode(*args, **options), self.emulator.decode(*args, **options)
        self.pairs.append(pair)
        return pair[0]


def units(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference in units of the last place of the larger value's binade, at least 2^-6.

    Smaller outputs are differences of terms of order 1, of which float32 roundings remain.
    """
    bits = {torch.bfloat16: 8, torch.float16: 11}[a.dtype]
    a, b = a.double(), b.double()
    size = torch.maximum(a.abs(), b.abs()).clamp(min=2.0**-6)
    return ((a - b).abs() / torch.exp2(torch.floor(torch.log2(size)) - bits + 1)).max().item()


def compare(config, log) -> bool:
    probes = Both()
    tokens, channels = (1, 58, 127), range(0, config.head_dim, config.head_dim // config.heads - 1)
    checks.k_unpack(probes, config, tokens=tokens, channels=channels, kv_heads=1)
    checks.v_unpack(probes, config, tokens=tokens, kv_heads=1)
    exact = all(torch.equal(a, b) for (a, _), (b, _) in probes.pairs)
    case = checks.case_for(config, LENGTHS)
    both = Both()
    both.decode(case.q, case.cache, checks.tables_of(case), tile=config.tile)
    (out, lse), (other, other_lse) = both.pairs[0]
    apart, live = units(out, other), lse.isfinite()
    lse_apart = (lse - other_lse)[live].abs().max().item()
    equal = (out == other).double().mean().item()
    ok = exact and apart <= 1.0 and torch.equal(lse[~live], other_lse[~live])
    log.write(
        f"{name_of(config):44} probes {'equal' if exact else 'DIFFER'}, decode: {equal:.2%} of out equal, at most "
        f"{apart:.2f} units apart, LSE {lse_apart:.1e}{'' if ok else '  <- wrong'}\n"
    )
    log.flush()
    return ok


def main() -> int:
    log = open(sys.argv[1], "w") if len(sys.argv) > 1 else sys.stdout
    with log:
        results = [compare(config, log) for config in dict.fromkeys((*LAYOUTS, *MIXED, *TILES))]
        log.write(f"{sum(results)} of {len(results)} kernels agree\n")
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
