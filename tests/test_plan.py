"""The schedule's arithmetic: every tile once, balanced, and workspace slots that never collide."""

from __future__ import annotations

import collections
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foscar.common.plan import CombineConfig, Segment, Workspace, combine_grid, inverse_of, ranges, segments, tiles_of

TILE = 128
H200 = 3 * 132  # workers of the default config

relaxed = settings(deadline=None)  # a busy machine is not a failure


def launches(test):
    """The test for any lengths, KV heads and workers."""
    some = st.lists(st.one_of(st.integers(0, 5 * TILE), st.integers(0, 40_000)), min_size=1, max_size=20)
    return relaxed(given(lengths=some, kv_heads=st.integers(1, 9), workers=st.integers(1, 500))(test))


def tiles_of_items(lengths, kv_heads) -> dict[tuple[int, int], int]:
    return {(b, h): tiles_of(n, TILE) for b, n in enumerate(lengths) for h in range(kv_heads)}


def by_item(plan: list[Segment]) -> dict[tuple[int, int], list[Segment]]:
    found = collections.defaultdict(list)
    for s in plan:
        found[s.request, s.head].append(s)
    return found


@pytest.mark.parametrize("length, tiles", [(0, 1), (1, 1), (127, 1), (128, 1), (129, 2), (256, 2), (257, 3)])
def test_an_empty_request_has_a_tile_that_writes_its_zeros(length, tiles):
    assert tiles_of(length, TILE) == tiles


@launches
@example(lengths=[0], kv_heads=1, workers=1)
@example(lengths=[131072] + [512] * 63, kv_heads=8, workers=H200)
def test_every_tile_once_and_in_order(lengths, kv_heads, workers):
    plan = segments(lengths, kv_heads, workers, TILE)
    tiles = [(s.request, s.head, t) for s in plan for t in range(s.tile, s.tile + s.tiles)]
    assert tiles == [(b, h, t) for (b, h), n in tiles_of_items(lengths, kv_heads).items() for t in range(n)]
    assert all(s.tiles > 0 for s in plan)
    assert [s.worker for s in plan] == sorted(s.worker for s in plan)


@launches
def test_workers_differ_by_one_tile_at_most(lengths, kv_heads, workers):
    work = collections.Counter()
    for s in segments(lengths, kv_heads, workers, TILE):
        work[s.worker] += s.tiles
    total = sum(tiles_of_items(lengths, kv_heads).values())
    assert sorted(work) == list(range(min(workers, total))), "an idle worker"
    assert max(work.values()) - min(work.values()) <= 1


@relaxed
@given(total=st.integers(1, 2**31 - 1), workers=st.integers(1, 1000))
def test_ranges_cover_the_line(total, workers):
    cuts = ranges(total, workers)
    assert cuts[0][0] == 0 and cuts[-1][1] == total and len(cuts) == min(total, workers)
    assert all(a[1] == b[0] for a, b in zip(cuts, cuts[1:], strict=False))


@relaxed
@given(total=st.integers(1, 2**31 - 1), workers=st.integers(1, 4096), data=st.data())
def test_the_device_computes_the_same_bounds(total, workers, data):
    """In 32 bits."""
    schedule = pytest.importorskip("foscar.common.schedule", reason="the kernels need nvidia-cutlass-dsl")
    workers = min(workers, total)
    i = data.draw(st.integers(0, workers))
    assert schedule.share(total, workers, i, lambda n: n // workers) == total * i // workers
    assert total // workers * i < 2**31 and (total % workers) * i < 2**31


@launches
@example(lengths=[10_000], kv_heads=1, workers=7)
@example(lengths=[300, 300, 300], kv_heads=2, workers=4)
def test_workspace_slots_never_collide(lengths, kv_heads, workers):
    """store.py's rule: slot 1 for the part that holds its item's first tile, slot 0 for one that does not.

    combine.py finds part ``s`` of an item in the slots of worker ``first + s``: slot 1 for the first part, then slot 0.
    """
    plan, items = segments(lengths, kv_heads, workers, TILE), tiles_of_items(lengths, kv_heads)
    used = {}
    for item, parts in by_item(plan).items():
        if len(parts) == 1:
            assert parts[0].tiles == items[item], "a whole item needs no slot"
            continue
        first = parts[0].worker
        for s, part in enumerate(parts):
            assert part.worker == first + s, "the parts of an item are in consecutive workers"
            slot = 2 * part.worker + (part.tile == 0)
            assert slot == 2 * (first + s) + (s == 0)
            assert slot not in used, f"{item} and {used[slot]} share slot {slot}"
            used[slot] = item
    shared = collections.Counter(slot // 2 for slot in used)
    assert all(n <= 2 for n in shared.values())
    size = Workspace.sizes(workers, 5, 64)
    assert all(slot < 2 * workers for slot in used) and size.partial_lse == 2 * workers * 5
    assert size.partial_out == size.partial_lse * 64


@launches
def test_a_worker_begins_one_split_item_at_most(lengths, kv_heads, workers):
    """What schedule.split_of_worker relies on: an entry per worker is enough."""
    begun = collections.Counter(
        parts[0].worker for parts in by_item(segments(lengths, kv_heads, workers, TILE)).values() if len(parts) > 1
    )
    assert all(n == 1 for n in begun.values())


@launches
@example(lengths=[1_000_000], kv_heads=1, workers=H200)
def test_the_worker_of_an_items_last_tile(lengths, kv_heads, workers):
    """What schedule.worker_of is to find, in closed form: how many parts an item has follows from it."""
    plan, items = segments(lengths, kv_heads, workers, TILE), tiles_of_items(lengths, kv_heads)
    total = sum(items.values())
    taking_part = min(workers, total)
    position = 0
    for item, parts in by_item(plan).items():
        end = position + items[item]
        assert (end * taking_part - 1) // total == parts[-1].worker
        for worker in range(taking_part) if taking_part < 50 else ():
            assert (ranges(total, workers)[worker][0] < end) == (total * worker < end * taking_part)
        position = end


@launches
def test_a_worker_finds_where_its_range_begins(lengths, kv_heads, workers):
    """schedule.py's arithmetic: requests are searched on one head's line of tiles, then head and tile by division."""
    plan = segments(lengths, kv_heads, workers, TILE)
    tiles = [tiles_of(n, TILE) for n in lengths]
    first = {}
    for s in plan:
        first.setdefault(s.worker, s)
    for worker, (begin, _) in enumerate(ranges(sum(tiles) * kv_heads, workers)):
        line = begin // kv_heads
        request = sum(sum(tiles[: b + 1]) <= line for b in range(len(tiles)))
        inside = begin - sum(tiles[:request]) * kv_heads
        found = (request, inside // tiles[request], inside % tiles[request])
        assert found == (first[worker].request, first[worker].head, first[worker].tile)


def test_one_long_request_among_many_short_ones():
    """Public report 15."""
    plan = segments([131072] + [512] * 63, 8, H200, TILE)
    work = collections.Counter()
    for s in plan:
        work[s.worker] += s.tiles
    assert len(work) == H200 and max(work.values()) - min(work.values()) <= 1
    parts = [len(p) for p in by_item(plan).values()]
    assert min(parts[:8]) > 30, "the long request is split"
    assert max(parts[8:]) <= 2


@pytest.mark.parametrize("batch, kv_heads, length", [(64, 1, 32768), (1, 1, 131072), (16, 8, 16384), (3, 1, 70_000)])
def test_the_gpu_is_filled(batch, kv_heads, length):
    """Public report 16."""
    assert {s.worker for s in segments([length] * batch, kv_heads, H200, TILE)} == set(range(H200))


def test_fewer_tiles_than_workers():
    plan = segments([100, 0, 200], 2, H200, TILE)
    assert [(s.worker, s.request, s.head, s.tile, s.tiles) for s in plan] == [
        (0, 0, 0, 0, 1), (1, 0, 1, 0, 1), (2, 1, 0, 0, 1), (3, 1, 1, 0, 1),
        (4, 2, 0, 0, 1), (5, 2, 0, 1, 1), (6, 2, 1, 0, 1), (7, 2, 1, 1, 1),
    ]  # fmt: skip


@relaxed
@given(
    batch=st.integers(1, 300), items=st.integers(1, 20), workers=st.integers(1, 500), rows=st.integers(1, 16),
    sms=st.integers(1, 200), head_dim=st.sampled_from([64, 128, 256]),
)  # fmt: skip
def test_the_combine_covers_all_that_may_be_split(batch, items, workers, rows, sms, head_dim):
    """CTAs for every entry and all its channels."""
    found = combine_grid(batch, items, workers, rows, head_dim, sms)
    channels = 4 << found.lane_bits
    columns = rows * head_dim // channels
    assert 2 <= found.lane_bits <= 5 and head_dim % channels == 0
    assert found.grid[:2] == ((items, batch) if found.by_item else (workers, 1))
    chunks = found.grid[2]
    assert (chunks - 1) << found.column_bits < columns <= chunks << found.column_bits
    assert math.prod(found.grid) <= max(math.prod(found.grid[:2]), 2 * sms)


def test_the_combine_of_one_item_takes_many_ctas():
    grids = [combine_grid(n, 1, 396, 8, 128, 132).grid for n in (1, 2, 8, 16, 64, 128, 500)]
    assert [math.prod(grid) for grid in grids] == [64, 128, 128, 128, 256, 256, 396]


@relaxed
@given(n=st.integers(0, 2**31 - 1), d=st.integers(1, 2**31 - 1))
@example(n=2**31 - 1, d=1)
def test_a_product_and_one_step_divide(n, d):
    """device.divide."""
    q = n * (inverse_of(d) % 2**32) >> 32
    assert q + (n - q * d >= d) == n // d and -(2**31) <= inverse_of(d) < 2**31


def test_every_head_dim_has_a_combine():
    for head_dim in (64, 128, 256):
        assert CombineConfig(head_dim).threads >= head_dim
