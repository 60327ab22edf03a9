"""The configuration of the kernel over a cache's tokens in 16 bits (no DSL import)."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import KernelOptions

WARPS = 8
ROWS = 16  # of a matrix product
BLOCK = 16  # tokens that a warp takes at once


@dataclass(frozen=True)
class WindowKernelConfig:
    """One window kernel.

    Args:
        head_dim: 64, 128 or 256, of the stored windows.
        heads: rows of an item that there is room for: 4, 8, 12 or 16.
        q_dtype: "bfloat16" or "float16", of the query; of the windows as ``options.exact_f16`` says.
        options: rows, soft_cap and wide_cap of the decode kernel's, exact and exact_f16.
    """

    head_dim: int
    heads: int
    q_dtype: str
    options: KernelOptions

    def __post_init__(self) -> None:
        if self.options.window or not self.options.exact:
            raise ValueError(f"the window kernel is for exact tokens, without a window, not {self.options.name!r}")

    @property
    def dtype(self) -> str:
        """Of the windows."""
        return "float16" if self.options.exact_f16 else "bfloat16"

    @property
    def query_terms(self) -> int:
        """A float16 query is the sum of two bfloat16."""
        return 2 if (self.q_dtype, self.dtype) == ("float16", "bfloat16") else 1

    @property
    def scales_query(self) -> bool:
        """Whether rows of the query are multiplied by powers of two, for the range of float16."""
        return (self.q_dtype, self.dtype) == ("bfloat16", "float16")

    @property
    def prob_terms(self) -> int:
        """Probabilities are one float16 or two bfloat16: 11 or 16 bits."""
        return 1 if self.options.exact_f16 else 2

    @property
    def threads(self) -> int:
        return 32 * WARPS
