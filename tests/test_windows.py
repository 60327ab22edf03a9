"""Windows of exact tokens: which tokens are exact and which are quantized, after any history of appends; decoding."""

from __future__ import annotations

import math

import pytest
import torch
from support.compare import assert_equal, error_report
from support.inputs import POISON, indptr_of, int32, random_values, shuffled_table

import foscar
from foscar import KVFormat, WindowConfig, WindowedKVCache
from foscar.common.quantize import dequantize, quantize
from foscar.common.reference import relative_error
from foscar.common.window_attention import windowed_reference

NAMES = ("token", "head", "channel")
PAGE = 16
FORMATS = {
    "int2": KVFormat.int2(),
    "k4v2-groups": KVFormat.make(4, 2, k_group=32, v_group=32),
    "kivi": KVFormat.make(2, k_axis="channel", k_group=32, v_group=32),
    "both channel": KVFormat.make(4, k_axis="channel", v_axis="channel", k_group=16, v_group=32),
}
WINDOWS = {
    "sink and recent": WindowConfig(5, 20),
    "residual": WindowConfig(0, 33, "float16"),
    "sink alone": WindowConfig(7, 0),
    "none": WindowConfig.none(),
}


def rounded(x: torch.Tensor, cache: WindowedKVCache) -> torch.Tensor:
    return x.to(getattr(torch, cache.window.dtype))


def back(x: torch.Tensor, f, group: int) -> torch.Tensor:
    """Quantized and read back."""
    return dequantize(quantize(x, f, group=group), f, group=group, dtype=torch.float64)


class Model:
    """What a request's tokens must be, from its exact values alone."""

    def __init__(self, cache: WindowedKVCache, k: torch.Tensor, v: torch.Tensor):
        self.cache, self.sides = cache, (rounded(k, cache), rounded(v, cache))

    def end(self, length: int) -> int:
        w, unit = self.cache.window, self.cache.unit
        return w.n_sink + max(0, length - w.n_sink - w.n_recent) // unit * unit

    def values(self, length: int, end: int | None = None) -> list[torch.Tensor]:
        """(K, V) float64 [length, heads, D]; ``end``: where the history ends, if not as the length says."""
        packed, n_sink = self.cache.packed, self.cache.window.n_sink
        end = max(n_sink, min(length, self.end(length) if end is None else end))
        found = []
        for x, f in zip(self.sides, (packed.format.k, packed.format.v), strict=True):
            middle = x[n_sink:end].float()
            if len(middle) and f.axis == "channel":
                middle = back(middle, f, f.resolved_group(packed.head_dim, packed.page_size))
            elif len(middle):  # each group of channels by itself
                parts = middle.split(f.group or packed.head_dim, dim=2)
                middle = torch.cat([back(part, f, part.shape[2]) for part in parts], dim=2)
            found.append(torch.cat([x[: min(n_sink, length)].double(), middle.double(), x[end:length].double()]))
        return found


def make(fmt: KVFormat, window: WindowConfig, total: int, *, batch: int = 3, head_dim: int = 64, slots: int = 5):
    """A poisoned cache, models of ``batch`` requests, a block table with spare entries of -1, slot ids."""
    pages = batch * -(-total // PAGE)
    cache = WindowedKVCache(pages, PAGE, 2, head_dim, fmt, max_batch=slots, window=window)
    cache.packed.data.fill_(POISON)
    for pair in cache.storage:
        for x in pair:
            x.fill_(torch.nan)
    models = [Model(cache, *(random_values((total, 2, head_dim), 10 * b + i) for i in (0, 1))) for b in range(batch)]
    table = shuffled_table([total] * batch, PAGE, pages, 3)
    return cache, models, table, int32([4, 0, 2][:batch])


def append(cache, models, table, slots, lengths, counts) -> list[int]:
    """``counts`` more tokens to requests of ``lengths``; returns the new lengths."""
    k, v = (torch.cat([m.sides[i][a : a + n] for m, a, n in zip(models, lengths, counts, strict=True)]) for i in (0, 1))
    indptr = None if set(counts) == {1} else indptr_of(counts)
    cache.append(k, v, table, int32(lengths), slots, indptr)
    return [a + n for a, n in zip(lengths, counts, strict=True)]


def check(cache, models, table, slots, lengths) -> None:
    for b, (model, length) in enumerate(zip(models, lengths, strict=True)):
        got = cache.read_request(table[b], length, int(slots[b]))
        for x, want in zip(got, model.values(length), strict=True):
            assert_equal(x, want, NAMES)


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_token_by_token(fmt, window):
    """After every token; requests that start at different times, so that batches are ragged."""
    cache, models, table, slots = make(fmt, window, 110)
    lengths = append(cache, models, table, slots, [0, 0, 0], [0, 3, 31])
    check(cache, models, table, slots, lengths)
    for _ in range(79):
        lengths = append(cache, models, table, slots, lengths, [1, 1, 1])
        check(cache, models, table, slots, lengths)


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_chunks(fmt, window):
    """Chunks shorter and longer than the windows, one that is the whole prompt, empty ones."""
    cache, models, table, slots = make(fmt, window, 150)
    lengths = [0, 0, 0]
    for counts in ([150, 1, 0], [0, 4, 24], [0, 30, 60], [0, 0, 1], [0, 100, 2], [0, 15, 63]):
        lengths = append(cache, models, table, slots, lengths, counts)
        check(cache, models, table, slots, lengths)
    assert lengths == [150, 150, 150]


def test_a_ring_holds_the_recent_tokens_only():
    """A prompt that is longer than the ring would write entries twice, in an order that a GPU does not promise."""
    cache, models, table, slots = make(KVFormat.int2(), WindowConfig(5, 20), 150, batch=1)
    append(cache, models, table, slots, [0], [150])
    written = torch.zeros(cache.capacity, dtype=torch.bool)
    written[torch.arange(130, 150) % cache.capacity] = True
    assert torch.equal(~cache.recent_k[int(slots[0])].isnan().any(2).any(0), written)
    assert torch.equal(~cache.recent_v[int(slots[0])].isnan().any(2).any(0), written)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_bytes_do_not_depend_on_the_cuts(fmt):
    """Whole, and token by token: the same records."""
    caches = []
    for step in (90, 1, 37):
        cache, models, table, slots = make(fmt, WindowConfig(3, 10), 90, batch=1)
        for i in range(0, 90, step):
            append(cache, models, table, slots, [i], [min(step, 90 - i)])
        caches.append(cache)
    for cache in caches[1:]:
        assert torch.equal(cache.packed.data, caches[0].packed.data)
        assert torch.equal(cache.packed_lens, caches[0].packed_lens)


def test_the_unit_is_whole_groups_of_both():
    fmt = KVFormat.make(2, k_axis="channel", v_axis="channel", k_group=32, v_group=48)
    cache, models, table, slots = make(fmt, WindowConfig(0, 10), 250)
    assert cache.unit == 96
    check(cache, models, table, slots, append(cache, models, table, slots, [0, 0, 0], [105, 106, 250]))


@pytest.mark.parametrize("fmt, unit", [("int2", 1), ("kivi", 32), ("both channel", 32)])
def test_how_many_tokens_are_exact(fmt, unit):
    cache, models, table, slots = make(FORMATS[fmt], WindowConfig(4, 40), 130, batch=1)
    assert cache.unit == unit and cache.capacity % 16 == 0 and cache.capacity >= 40 + unit - 1
    lengths = [0]
    for _ in range(130):
        lengths = append(cache, models, table, slots, lengths, [1])
        recent = lengths[0] - min(4, lengths[0]) - int(cache.history_lens(int32(lengths), slots))
        if lengths[0] < 44:
            assert recent == max(0, lengths[0] - 4)
        else:
            assert 40 <= recent < 40 + unit


# ---------------------------------------------------------------------------------------------------------- decoding
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one request, q [heads, D]: in float64, or by the usual route, operands in ``dtype``."""

    def cast(x):
        return x.double() if dtype is None else x.to(dtype).float()

    q, k, v = (cast(x) for x in (q.unflatten(0, (k.shape[1], -1)), k, v))
    s = torch.einsum("hgc,nhc->hgn", q, k) / math.sqrt(q.shape[-1])
    p = torch.exp(s - s.amax(-1, keepdim=True))
    out = torch.einsum("hgn,nhc->hgc", cast(p), v) / p.sum(-1)[..., None]
    return out.flatten(0, 1), s.logsumexp(-1).flatten()


def check_decode(cache, models, table, slots, lengths, ends=None, seed=7):
    q = random_values((len(lengths), 6, cache.packed.head_dim), seed, torch.bfloat16, mean=0.5)
    out, lse = torch.full_like(q, torch.nan), None
    out, lse = foscar.decode_windowed(q, cache, table, int32(lengths), slots, out=out, return_lse=True, lse_base="e")
    for b, length in enumerate(lengths):
        if length == 0:
            assert not bool(out[b].any()) and bool((lse[b] == -math.inf).all())
            continue
        k, v = models[b].values(length, None if ends is None else ends[b])
        want, want_lse = attention(q[b], k, v)
        usual, usual_lse = attention(q[b], k, v, torch.bfloat16)
        allowed = relative_error(usual, want) + relative_error(want.to(out.dtype), want) + 2.0**-22
        assert relative_error(out[b], want) <= allowed, error_report(out[b], want, ("head", "channel"))
        error = (lse[b] - want_lse).abs().max()
        assert error <= max((usual_lse - want_lse).abs().max(), 2.0**-20 * want_lse.abs().max()), (b, length)
    base2 = foscar.decode_windowed(q, cache, table, int32(lengths), slots, return_lse=True)[1]
    torch.testing.assert_close(base2 * math.log(2.0), lse, rtol=1e-6, atol=1e-6)
    truth = windowed_reference(q, cache, table, int32(lengths), slots)
    torch.testing.assert_close(truth[0].to(out.dtype), out, rtol=0.02, atol=0.02)
    return out


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("lengths", [(0, 1, 4), (5, 6, 25), (26, 57, 90), (140, 0, 37)])
def test_decode(fmt, window, lengths):
    """Lengths of 0 and 1, below the sink, at its end, below the recent window, one token of history, and more."""
    cache, models, table, slots = make(fmt, window, 140)
    append(cache, models, table, slots, [0, 0, 0], lengths)
    check_decode(cache, models, table, slots, lengths)


@pytest.mark.parametrize("head_dim", [80, 128])
def test_presets(head_dim):
    for window, fmt, numbers in (
        (WindowConfig.oscar(), KVFormat.int2(), (64, 256, "bfloat16")),
        (WindowConfig.kivi(), FORMATS["kivi"], (0, 128, "float16")),
    ):
        assert (window.n_sink, window.n_recent, window.dtype) == numbers
        cache, models, table, slots = make(fmt, window, 400, head_dim=head_dim)
        lengths = append(cache, models, table, slots, [0, 0, 0], [400, 63, 330])
        check(cache, models, table, slots, lengths)
        check_decode(cache, models, table, slots, lengths)
    assert WindowConfig.none() == WindowConfig(0, 0)


def test_decode_ignores_what_other_requests_and_slack_hold():
    """Public reports 7 and 34: NaN in every entry of windows and pages that is not the request's."""
    cache, models, table, slots = make(KVFormat.int2(), WindowConfig(5, 20), 60)
    lengths = append(cache, models, table, slots, [0, 0, 0], [60, 3, 41])
    before = check_decode(cache, models, table, slots, lengths)
    for pair in cache.storage:
        for x in pair:
            x[int(slots[0])] = torch.nan
            x[int(slots[1]), :, 3:] = torch.nan
    pages = table[0, : -(-35 // PAGE)].long()
    cache.packed.data[pages] = POISON
    q = random_values((3, 6, 64), 7, torch.bfloat16, mean=0.5)
    after = foscar.decode_windowed(q, cache, table, int32(lengths), slots)
    assert bool(after[0].isnan().all()) and torch.equal(after[1:], before[1:])


# ---------------------------------------------------------------------------------------------------------- sharing
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_two_requests_share_pages_across_the_window_boundary(fmt):
    """Public report 30.  A prefix of 69 tokens: 64 of history, in pages of both; one request is far beyond it, so that
    the prefix is quantized, the other's windows still hold most of it, and both go on with tokens of their own."""
    cache, models, table, slots = make(fmt, WindowConfig(5, 20), 180, batch=2)
    for side in (models[1].sides,):
        for mine, theirs in zip(side, models[0].sides, strict=True):
            mine[:69] = theirs[:69]
    table[1, : 64 // PAGE] = table[0, : 64 // PAGE]  # a page of which every token is common
    lengths = append(cache, models, table, slots, [0, 0], [150, 0])
    lengths = append(cache, models, table, slots, lengths, [0, 72])
    check(cache, models, table, slots, lengths)
    for _ in range(30):
        lengths = append(cache, models, table, slots, lengths, [1, 1])
        check(cache, models, table, slots, lengths)
        check_decode(cache, models, table, slots, lengths)
    lengths = append(cache, models, table, slots, lengths, [0, 78])
    check_decode(cache, models, table, slots, lengths)


@pytest.mark.parametrize("length", [0, 3, 5, 37, 50, 75, 100])
@pytest.mark.parametrize("fmt", ["int2", "kivi"])
def test_fork(fmt, length):
    """A request that begins like a longer one: what is quantized stays so, the rest is exact; both go on alone."""
    cache, models, table, slots = make(FORMATS[fmt], WindowConfig(5, 20), 180, batch=2)
    append(cache, models[:1], table[:1], slots[:1], [0], [100])
    end = min(length, models[0].end(100))
    for mine, theirs in zip(models[1].sides, models[0].sides, strict=True):
        mine[:length] = theirs[:length]
    history = max(0, length - 5)
    shared = history // 32 * 32 // PAGE  # whole pages and whole groups
    table[1, :shared] = table[0, :shared]
    for i in range(shared, -(-history // PAGE)):
        cache.packed.data[int(table[1, i])] = cache.packed.data[int(table[0, i])]  # copied before it is written to
    cache.fork(int(slots[0]), int(slots[1]))
    got = cache.read_request(table[1], length, int(slots[1]))
    if fmt == "int2" or history % 32 == 0 or length > models[0].end(100):
        for x, want in zip(got, models[1].values(length, end), strict=True):
            assert_equal(x, want, NAMES)
        check_decode(cache, models, table, slots, [100, length], [None, end])
    lengths = append(cache, models, table, slots, [100, length], [40, 60])
    check(cache, models[:1], table, slots[:1], lengths[:1])
    if fmt == "int2":
        for x, want in zip(cache.read_request(table[1], lengths[1], int(slots[1])),
                           models[1].values(lengths[1], max(end, models[1].end(lengths[1]))), strict=True):  # fmt: skip
            assert_equal(x, want, NAMES)
    else:  # a group that was cut in two keeps its parameters: its new tokens may be further off
        for x, want in zip(cache.read_request(table[1], lengths[1], int(slots[1])), models[1].sides, strict=True):
            assert bool(((x - want[: lengths[1]]).abs() < 4).all())


@pytest.mark.parametrize("fmt", ["int2", "kivi"])
def test_rejected_drafts(fmt):
    """Lengths may shrink: the next append goes on from there."""
    cache, models, table, slots = make(FORMATS[fmt], WindowConfig(5, 20), 120, batch=1)
    lengths = append(cache, models, table, slots, [0], [60])
    draft = [Model(cache, *(x.float() + 3 for x in models[0].sides))]
    end = models[0].end(64)
    for _ in range(12):
        append(cache, draft, table, slots, lengths, [4])
        lengths = append(cache, models, table, slots, lengths, [1])
        end = max(end, models[0].end(lengths[0]))
        got = cache.read_request(table[0], lengths[0], int(slots[0]))
        end = max(end, models[0].end(lengths[0] + 3))
        exact = [x[end : lengths[0]].double() for x in models[0].sides]
        for x, want in zip(got, exact, strict=True):
            assert_equal(x[end:], want, NAMES)


def test_a_slot_starts_anew():
    cache, models, table, slots = make(KVFormat.int2(), WindowConfig(5, 20), 60, batch=2)
    append(cache, models[:1], table[:1], slots[:1], [0], [60])
    lengths = append(cache, models[1:], table[1:], slots[:1], [0], [8])
    check(cache, models[1:], table[1:], slots[:1], lengths)
    check_decode(cache, models[1:], table[1:], slots[:1], lengths)


def test_a_padded_batch():
    """Slot -1 stores nothing, wherever its block table points, and decodes to zeros with a length of 0."""
    cache, models, table, slots = make(KVFormat.int2(), WindowConfig(5, 20), 60, batch=2)
    lengths = append(cache, models, table, slots, [0, 0], [40, 40])
    before = [x.clone() for x in (cache.packed.data, cache.packed_lens, cache.recent_k, cache.sink_v)]
    padded = torch.tensor([-1, -1], dtype=torch.int32)
    cache.append(torch.ones(2, 2, 64), torch.ones(2, 2, 64), table, int32(lengths), padded)
    for x, want in zip((cache.packed.data, cache.packed_lens, cache.recent_k, cache.sink_v), before, strict=True):
        assert torch.equal(x.nan_to_num(), want.nan_to_num())
    out = foscar.decode_windowed(torch.ones(2, 6, 64).bfloat16(), cache, table, int32([0, 40]), int32([-1, 0]))
    assert not bool(out[0].any()) and bool(out[1].any())


# ---------------------------------------------------------------------------------------------------------- errors
def test_a_refused_append_writes_nothing():
    cache, models, table, slots = make(KVFormat.int2(), WindowConfig(5, 20), 60, batch=2)
    lengths = append(cache, models, table, slots, [0, 0], [41, 8])  # the next token to leave begins a page
    state = (cache.packed.data, cache.packed_lens, cache.recent_k, cache.sink_k, cache.recent_v, cache.sink_v)
    before = [x.clone() for x in state]
    one = torch.ones(2, 2, 64)
    nan, big = one.clone(), one.clone()
    nan[1, 1, 9], big[0, 0, 3] = torch.nan, 7e4
    bad_table = table.clone()
    bad_table[0, 0], bad_table[0, 1] = 99, -1
    cases = [
        ((nan, one, table, int32(lengths), slots), ValueError, r"^k\[token 1, head 1, channel 9\] is nan"),
        ((one, big, table, int32(lengths), slots), ValueError, r"^v\[token 0, head 0, channel 3\] is 70000.0, .*16"),
        ((one, one, bad_table, int32(lengths), slots), ValueError, r"block_table\[0\] holds page id -1"),
        ((one, one, table[:, :1], int32(lengths), slots), ValueError, "outside its block table of 1 pages"),
        ((one, one, table, int32(lengths), slots.long()), ValueError, "slot_ids must be int32"),
        ((one, one, table, int32(lengths), int32([3, 3])), ValueError, "slot_ids must be different slots of 0 .. 4"),
        ((one, one, table, int32(lengths), int32([5, 0])), ValueError, "slot_ids must be different slots of 0 .. 4"),
        ((one, one, table, int32(lengths), [4, 0]), TypeError, "slot_ids must be a torch.Tensor, not list"),
        ((one, one, table, int32([41, -1]), slots), ValueError, "request 1 has -1 tokens; slot .* holds 0 .. 25"),
        ((one, one, table, int32([41, 30]), slots), ValueError, "request 1 has 30 tokens; slot .* holds 0 .. 25"),
        ((one, one, table, int32([42, 8]), slots), ValueError, "request 0 has 42 tokens; slot .* holds 0 .. 41"),
        ((one, one[:1], table, int32(lengths), slots), ValueError, "k has 2 tokens, v 1"),
        ((one, one, table, int32(lengths), slots, int32([0, 1, 3])), ValueError, "indptr must ascend"),
    ]  # fmt: skip
    for arguments, kind, message in cases:
        with pytest.raises(kind, match=message) as error:
            cache.append(*arguments)
        assert "\n" not in str(error.value)
        for x, want in zip(state, before, strict=True):
            assert torch.equal(x.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize(
    "make_it, kind, message",
    [
        (lambda: WindowConfig(-1, 0), ValueError, "n_sink must be at least 0, not -1"),
        (lambda: WindowConfig(0, 1.5), TypeError, "n_recent must be a whole number, not 1.5"),
        (lambda: WindowConfig(0, 0, "float32"), ValueError, "float16 or bfloat16"),
        (lambda: WindowedKVCache(-2, 16, 1, 64, max_batch=1), ValueError, "needs num_pages >= 0 .* not -2 and 1"),
        (lambda: WindowedKVCache(-1, 16, 1, 64, max_batch=1), ValueError, "needs num_pages >= 0 .* not -1 and 1"),
        (lambda: WindowedKVCache(2.0, 16, 1, 64, max_batch=1), TypeError, "num_pages must be a whole number"),
        (lambda: WindowedKVCache(1, 16, 1, 64, max_batch=0), ValueError, "max_batch must be at least 1, not 0"),
        (lambda: WindowedKVCache(1, 16, 1, 64, max_batch=1, window=(1, 2)), TypeError, "must be a foscar.Window"),
    ],
)  # fmt: skip
def test_configuration_errors(make_it, kind, message):
    with pytest.raises(kind, match=message):
        make_it()


def test_decode_errors():
    cache, models, table, slots = make(KVFormat.int2(), WindowConfig(5, 20), 60, batch=2)
    lengths, q = int32(append(cache, models, table, slots, [0, 0], [40, 8])), torch.ones(2, 6, 64).bfloat16()
    with pytest.raises(TypeError, match="cache must be a foscar.WindowedKVCache, not PagedKVCache"):
        foscar.decode_windowed(q, cache.packed, table, lengths, slots)
    with pytest.raises(ValueError, match="slot_ids must be int32"):
        foscar.decode_windowed(q, cache, table, lengths, slots[:1])
    with pytest.raises(ValueError, match="query heads are not a multiple"):
        foscar.decode_windowed(q[:, :5], cache, table, lengths, slots)
    for change, message in (([41, 8], "request 0 has 41 tokens; slot . holds 0 .. 40"), ([40, -1], "request 1 has -1")):
        with pytest.raises(ValueError, match=message):
            foscar.decode_windowed(q, cache, table, int32(change), slots)
    with pytest.raises(ValueError, match="request 1 has 8 tokens; slot -1 holds 0 .. 0"):
        foscar.decode_windowed(q, cache, table, lengths, int32([int(slots[0]), -1]))
    with pytest.raises(ValueError, match="has 15 tokens and 0 pages"):
        foscar.decode_windowed(q, cache, table[:, :0], lengths, slots)


def test_plan_errors():
    cache, models, table, slots = make(KVFormat.int2(), WindowConfig(5, 20), 60, batch=2)
    lengths, q = int32(append(cache, models, table, slots, [0, 0], [40, 8])), torch.ones(2, 6, 64).bfloat16()
    shape = {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 64, "page_size": PAGE, "window": cache.window}
    wrapper = foscar.BatchDecodeWithPagedKVCacheWrapper()

    def plan(**changes):
        wrapper.plan(**{"block_table": table, "seq_lens": lengths, "slot_ids": slots, **shape, **changes})

    for change, kind, message in (
        ({"slot_ids": slots.long()}, ValueError, "^slot_ids must be int32"),
        ({"slot_ids": int32([0, 9, 1, 9])[::2]}, ValueError, "^plan keeps slot_ids: it must be contiguous"),
        ({"slot_ids": None}, ValueError, "^a window goes with slot_ids"),
        ({"window": (5, 20)}, TypeError, "^window must be a foscar.WindowConfig or None, not tuple"),
        ({"tile": foscar.TileConfig()}, ValueError, "^slot_ids go with block_table and seq_lens, and without a tile"),
    ):
        with pytest.raises(kind, match=message):
            plan(**change)
    plan(window=None)
    with pytest.raises(ValueError, match="^the plan is for WindowConfig.n_sink=64.*, the cache has WindowConfig"):
        wrapper.run(q, cache)
    plan()
    with pytest.raises(TypeError, match="^cache must be a foscar.WindowedKVCache, not PagedKVCache"):
        wrapper.run(q, cache.packed)
    lengths += 1  # in place: the plan keeps it
    with pytest.raises(ValueError, match="^request 0 has 41 tokens; slot . holds 0 .. 40"):
        wrapper.run(q, cache)
