"""What an append kernel is compiled for, its parameters and its grid: pure integers, no DSL and no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .errors import FormatError
from .formats import KVFormat, RecordLayout

NAME, BUILDER = "append", f"{__package__}.append_kernel:build"
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}  # of k and v: bytes of an element
THREADS = 128
CHANNELS = 4  # consecutive ones that a thread has at each bit position: a word of a row
MAX_HEADS = 65535  # of a grid's second dimension

# The kernel's parameters, by name and kind, in the order of its signature. Strides of k and v count elements, of the
# table entries, of the cache bytes.
PARAMETERS: dict[str, str] = {
    "k": "i64",  # [n, kv_heads, head_dim] of the config's dtype
    "k_stride": "i64",
    "k_head_stride": "i64",
    "v": "i64",
    "v_stride": "i64",
    "v_head_stride": "i64",
    "cache": "i64",  # records
    "page_stride": "i64",
    "head_stride": "i64",
    "pages": "i64",  # int32 [batch, max_pages], rows ``table_stride`` apart
    "table_stride": "i64",
    "lengths": "i64",  # int32 [batch], before the append
    "indptr": "i64",  # int32 [batch + 1], or 0: row i is request i's
    "n": "i32",
    "batch": "i32",
    "max_pages": "i32",
    "num_pages": "i32",
}


@dataclass(frozen=True)
class AppendConfig:
    """One append kernel.

    Args:
        format: of the cache.
        head_dim: the caller's, of k and v.
        page_size: tokens.
        dtype: of k and v: "bfloat16", "float16" or "float32".
        vector: whether every row of k and v begins at a multiple of ``CHANNELS`` elements: 4 of them per load.

    Raises:
        FormatError: a head_dim, page_size or dtype that there is no append kernel for.
    """

    format: KVFormat
    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    vector: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise FormatError(f"k and v must be one of {tuple(DTYPES)}, not {self.dtype!r}")
        self.layout  # noqa: B018 (raises for what has no record)

    @cached_property
    def layout(self) -> RecordLayout:
        return self.format.layout(self.head_dim, self.page_size)

    def lanes(self, row_bytes: int) -> int:
        """Threads that share a row (one token of one head) of K or V: a power of two, at most a warp."""
        return row_bytes // CHANNELS

    def grid(self, n: int, kv_heads: int, batch: int, ragged: bool) -> tuple[int, int, int]:
        """Blocks for ``n`` > 0 tokens of ``batch`` requests: [tokens or token groups, KV heads, K and V].

        Without ``ragged`` each request has one token.
        """
        x, threads = self.layout, []
        for f, row_bytes, group in (
            (self.format.k, x.k_row_bytes, x.k_group),
            (self.format.v, x.v_row_bytes, x.v_group),
        ):
            if f.axis == "token":
                threads.append(n * self.lanes(row_bytes))
            else:  # a warp for each place that append_rows.first_item leaves for a token group
                threads.append(32 * (n // group + 2 * batch if ragged else batch))
        return -(-max(threads) // THREADS), kv_heads, 2
