"""How the work of a launch is cut: the schedule's arithmetic on the host, in pure integers.

The device computes the same from the lengths it reads (``schedule.py``); the host needs only sizes that do not
depend on lengths, so a captured graph replays correctly with others.  The rest serves tests and inspection.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

TILE_TOKENS = 128  # of a stage and of a softmax step: 256 fail the numeric contract on an attention sink


WIDE_CAP = 256.0
MAX_ROWS = 16  # query rows that an item of the decode kernel has room for


@dataclass(frozen=True)
class KernelOptions:
    """What a decode kernel and its combine compute beside plain attention (common/options.py has the formulas).

    Compile-time: a kernel without an option has no code and no parameter of it.  Values are run-time parameters.

    Args:
        window: a sliding window; tiles before it are no part of an item.
        soft_cap: logits are capped, with an error of up to 2^-22 of the cap.
        wide_cap: of soft-caps above WIDE_CAP: logits far below the cap keep their precision.
        sinks: a logit per query head joins the denominator.
        out_scale: the output is multiplied by a number.
        rows: an item has rows, (query token, head of the group) pairs, up to the config's ``heads`` of them; a request
            with more has several items per KV head, which all read the cache.
        exact: the packed tokens are the history of a cache with windows in 16 bits, over which window_kernel.py has
            attended: its results join.
        exact_f16: float16 windows, not bfloat16 (nothing to the decode kernel and its combine).
    """

    window: bool = False
    soft_cap: bool = False
    wide_cap: bool = False
    sinks: bool = False
    out_scale: bool = False
    rows: bool = False
    exact: bool = False
    exact_f16: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            if type(getattr(self, f.name)) is not bool:
                raise TypeError(f"{f.name} must be True or False, not {getattr(self, f.name)!r}")

    @property
    def name(self) -> str:
        """Such as "window,sinks"; "" for none."""
        return ",".join(f.name for f in fields(self) if getattr(self, f.name))

    @classmethod
    def parse(cls, name: str) -> KernelOptions:
        """From :attr:`name`.

        Raises:
            ValueError: an option that there is not.
        """
        known, given = [f.name for f in fields(cls)], [part.strip() for part in name.split(",") if part.strip()]
        for part in given:
            if part not in known:
                raise ValueError(f"options are {', '.join(known)}, not {part!r}")
        return cls(**dict.fromkeys(given, True))


PLAIN = KernelOptions()


def rows_of_item(group: int, q_len: int) -> int:
    """The config's ``heads`` for up to ``q_len`` query tokens of ``group`` heads: as few passes as there can be."""
    rows = group * q_len
    passes = -(-rows // MAX_ROWS)
    return -(-rows // (4 * passes)) * 4


def tiles_of(length: int, tile_tokens: int) -> int:
    """Tiles of one (request, KV head): an empty request has one, which writes its zeros."""
    return max(1, -(-length // tile_tokens))


@dataclass(frozen=True)
class Segment:
    """Tiles ``[tile, tile + tiles)`` of one item, taken by ``worker``; its tile 0 is tile ``first`` of the request."""

    worker: int
    request: int
    head: int
    tile: int
    tiles: int
    chunk: int = 0
    first: int = 0


@dataclass(frozen=True)
class Cut:
    """What the schedule makes of one request: ``chunks`` items per KV head, of ``tiles`` tiles from tile ``first``."""

    first: int
    tiles: int
    chunks: int = 1

    @classmethod
    def make(cls, length: int, tile_tokens: int, *, rows=1, q_len=1, group=1, window: int | None = None) -> Cut:
        """Of a request of ``length`` tokens and ``q_len`` query tokens (schedule.cut_of on the device).

        Args:
            rows, group: of an item; query heads per KV head.
            window: see foscar.AttentionOptions.
        """
        if q_len == 0:
            length = 0  # nothing to compute, nothing to read
        first = 0 if window is None else max(0, length - q_len + 1 - window) // tile_tokens
        return cls(first, tiles_of(length - first * tile_tokens, tile_tokens), max(1, -(-q_len * group // rows)))


@dataclass(frozen=True)
class Workspace:
    """Device memory beside inputs and outputs: sizes in elements."""

    partial_out: int  # float32
    partial_lse: int  # float32

    @classmethod
    def sizes(cls, workers: int, group: int, head_dim: int) -> Workspace:
        """Every worker shares at most two items with others."""
        rows = 2 * workers * group
        return cls(rows * head_dim, rows)


def ranges(total: int, workers: int) -> list[tuple[int, int]]:
    """Worker ``i``'s range on the line of ``total`` tiles; workers beyond ``total`` get none."""
    n = min(total, workers)
    return [(total * i // n, total * (i + 1) // n) for i in range(n)]


def segments(
    lengths: list[int], kv_heads: int, workers: int, tile_tokens: int, cuts_of: list[Cut] | None = None
) -> list[Segment]:
    """The whole launch, in the order of the line: requests outside, KV heads inside, row chunks innermost.

    ``cuts_of``: of each request where there are options; None: plain attention.
    """
    cuts_of = cuts_of or [Cut.make(n, tile_tokens) for n in lengths]
    items = [
        (b, h, c, cut.first, cut.tiles)
        for b, cut in enumerate(cuts_of)
        for h in range(kv_heads)
        for c in range(cut.chunks)
    ]
    total = sum(item[-1] for item in items)
    result = []
    cuts = iter(enumerate(ranges(total, workers)))
    worker, (_, end) = next(cuts)
    position = 0
    for b, h, chunk, first, tiles in items:
        tile = 0
        while tile < tiles:
            if position == end:
                worker, (_, end) = next(cuts)
            n = min(tiles - tile, end - position)
            result.append(Segment(worker, b, h, tile, n, chunk, first))
            tile += n
            position += n
    return result


def inverse_of(d: int) -> int:
    """What device.divide takes for a divisor of 1 to 2^31 - 1: ``(2^32 - 1) // d``, as an int32."""
    return (2**32 - 1) // d if d > 1 else -1


@dataclass(frozen=True)
class CombineGrid:
    """How the combine kernel's work is cut: its parameters of these names (combine.Args), and its grid."""

    by_item: int
    column_bits: int
    lane_bits: int
    grid: tuple[int, int, int]


def combine_grid(batch: int, items: int, workers: int, rows: int, head_dim: int, sms: int) -> CombineGrid:
    """For ``batch`` requests of up to ``items`` items of ``rows`` query heads or rows, shared out over ``workers``.

    Few items are split into many parts each: a CTA per SM, of narrow columns, or up to two of whole heads, since one of
    the items may have most of the parts.  Of many items most are whole or in two parts, so a CTA takes all of an entry,
    and looking per worker instead of per item bounds the CTAs that only look.
    """
    by_item = batch * items < workers
    entries = batch * items if by_item else workers
    most = (head_dim // 4).bit_length() - 1
    columns, lane_bits = rows << max(0, most - 5), min(most, 5)
    column_bits = (columns - 1).bit_length()
    while column_bits > 0 and entries * -(-columns // (1 << column_bits - 1)) <= 2 * sms:
        column_bits -= 1
    while column_bits == 0 and lane_bits > 2 and entries * columns * 2 <= sms:
        columns, lane_bits = 2 * columns, lane_bits - 1
    chunks = -(-columns // (1 << column_bits))
    return CombineGrid(int(by_item), column_bits, lane_bits, (*((items, batch) if by_item else (workers, 1)), chunks))


COMBINE_WARPS = 8


@dataclass(frozen=True)
class CombineConfig:
    """The combine kernel.

    Args:
        head_dim: 64, 128 or 256.
        out_dtype: "bfloat16" or "float16".
        options: the decode kernel's; a soft-cap is nothing to the combine.
    """

    head_dim: int
    out_dtype: str = "bfloat16"
    options: KernelOptions = PLAIN

    @classmethod
    def of(cls, config) -> CombineConfig:
        """Of a decode kernel."""
        return cls(config.head_dim, config.q_dtype, replace(config.options, soft_cap=False, wide_cap=False))

    @property
    def threads(self) -> int:
        return 32 * COMBINE_WARPS
