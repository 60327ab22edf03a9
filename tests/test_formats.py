"""Formats and the record: every byte has one owner, and neighbours are what the kernels' vector loads need."""

from __future__ import annotations

import pytest
from support.inputs import all_formats, fits

from foscar.common.errors import FormatError
from foscar.common.formats import HEAD_DIMS, PAGE_SIZES, KVFormat, RecordLayout, TensorFormat

LAYOUTS = [
    pytest.param(f.layout(d, p), id=f"{f.name}-d{d}-p{p}")
    for f in all_formats(bits=(2, 4), params=("float16",), groups=(None, 32, 128))
    for d in (64, 128)
    for p in (16, 64)
    if fits(f, d, p)
]
SIZES = [KVFormat.int2().layout(d, p) for d in HEAD_DIMS for p in PAGE_SIZES]
SIZES += [KVFormat.make(4, 2).layout(d, p) for d in HEAD_DIMS for p in PAGE_SIZES]


def owners(layout: RecordLayout) -> list[list]:
    """Who claims each byte of the record."""
    claimed = [[] for _ in range(layout.record_bytes)]
    for token in range(layout.page_size):
        for i in range(layout.k_row_bytes):
            claimed[layout.k_byte(token, i)].append(("k", token, i))
        for i in range(layout.v_row_bytes):
            claimed[layout.v_byte(token, i)].append(("v", token, i))
    for name, f, group, param in (
        ("k", layout.format.k, layout.k_group, layout.k_param),
        ("v", layout.format.v, layout.v_group, layout.v_param),
    ):
        token_step = 1 if f.axis == "token" else min(group, layout.page_size)
        channel_step = group if f.axis == "token" else 1
        for token in range(0, layout.page_size, token_step):
            for channel in range(0, layout.padded_head_dim, channel_step):
                for b in range(4):
                    claimed[param(token, channel) + b].append((name, "pair", token, channel, b))
    return claimed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_has_one_owner(layout):
    wrong = [(i, who) for i, who in enumerate(owners(layout)) if len(who) != 1]
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("layout", SIZES, ids=str)
def test_every_byte_has_one_owner_at_all_sizes(layout):
    assert all(len(who) == 1 for who in owners(layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_are_shared_by_their_group_only(layout):
    for f, group, param in (
        (layout.format.k, layout.k_group, layout.k_param),
        (layout.format.v, layout.v_group, layout.v_param),
    ):
        for token in range(0, layout.page_size, 7):
            for channel in range(0, layout.head_dim, 5):
                if f.axis == "token":
                    assert param(token, channel) == param(token, channel // group * group)
                else:
                    assert param(token, channel) == param(token // group * group, channel)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sections_are_aligned_for_bulk_copies(layout):
    sections = [layout.k_params_offset, layout.v_offset, layout.v_params_offset, layout.record_bytes]
    assert sections == sorted(sections) and all(s % 64 == 0 for s in sections)


@pytest.mark.parametrize("layout", SIZES, ids=str)
def test_k_vectors(layout):
    """A thread (token quad q, thread t) reads its rows' words in vectors that follow each other in thread order."""
    width = 4 * layout.k_vector_words
    for half in range(2):
        for quad in range(4):
            for t in range(4):
                mine = sorted(
                    layout.k_byte(4 * quad + 2 * half + row, 16 * u + 4 * t + b)
                    for row in range(2)
                    for u in range(layout.k_row_bytes // 16)
                    for b in range(4)
                )
                vectors = [mine[i : i + width] for i in range(0, len(mine), width)]
                for v in vectors:
                    assert v == list(range(v[0], v[0] + width))
                    assert v[0] // width % 16 == 4 * quad + t  # consecutive threads, consecutive vectors


@pytest.mark.parametrize("layout", SIZES, ids=str)
def test_v_words_hold_four_tokens(layout):
    groups = min(layout.page_size, 64) // 16
    for byte in range(0, layout.v_row_bytes, 3):
        for token in range(0, layout.page_size, 4):
            at = layout.v_byte(token, byte)
            assert at % 4 == 0
            assert [layout.v_byte(token + i, byte) for i in range(4)] == [at, at + 1, at + 2, at + 3]
        for group in range(1, groups):
            assert layout.v_byte(16 * group, byte) == layout.v_byte(0, byte) + 4 * group


def test_known_sizes():
    int2 = KVFormat.int2().layout(128, 64)
    assert (int2.record_bytes, int2.bytes_per_token) == (4608, 72)
    assert KVFormat.int4().layout(128, 64).bytes_per_token == 64 + 64 + 8
    assert KVFormat.make(2, k_axis="channel", k_group=128).layout(64, 16).bytes_per_token == 16 + 16 + 16 + 4


def test_names_are_distinct():
    formats = all_formats()
    assert len({f.name for f in formats}) == len(set(formats)) == len(formats)
    assert KVFormat.int2().name == "k2v2"


def test_names_are_read_back():
    for fmt in all_formats(groups=(None, 32, 64, 128, 256)):
        assert KVFormat.parse(fmt.name) == fmt
    assert KVFormat.parse("int2") == KVFormat.int2() and KVFormat.parse("int4") == KVFormat.int4()
    assert KVFormat.parse("int4-bf16") == KVFormat.make(4, params="bfloat16")
    assert KVFormat.parse("k2c16v4") == KVFormat.make(2, 4, k_axis="channel", k_group=16)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "k2",
        "int2 ",
        "k2v2-fp16",
        "k2tv2",
        "kv",
        "K2V2",
        "k2v2x",
        "int",
        "int2c64",
        "int2v4",
        "int2-",
        "int4-bf16-bf16",
        "k02v2",
        "k2c064v2",
        "k２v2",
        "int２",
        "k2t６４v2",
        "k2v2\n",
        "int2\n",
    ],
)
def test_unknown_names(name):
    with pytest.raises(FormatError, match="^a format's name is int2, int4, k4v2, ") as error:
        KVFormat.parse(name)
    assert str(error.value).endswith(repr(name)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: TensorFormat(3), "bits"),
        (lambda: KVFormat.make(2.0), "bits"),
        (lambda: KVFormat.int2().layout(128.0, 64), "head_dim"),
        (lambda: KVFormat.int2().layout(128, 64.0), "page_size"),
        (lambda: TensorFormat(2, "row"), "axis"),
        (lambda: TensorFormat(2, "token", 16), "32"),
        (lambda: TensorFormat(2, "channel", 24), "16"),
        (lambda: TensorFormat(2, "channel", -16), "16"),
        (lambda: KVFormat.make(2, params="float32"), "params"),
        (lambda: KVFormat.parse("int3"), "bits"),
        (lambda: KVFormat.parse("k2t33v2"), "multiple of 32, not 33"),
        (lambda: KVFormat.parse("k2v4c0"), "multiple of 16, not 0"),
        (lambda: KVFormat.int2().layout(72, 64), "head_dim"),
        (lambda: KVFormat.int2().layout(128, 8), "page_size"),
        (lambda: KVFormat.make(2, k_group=96).layout(128, 64), "96"),
        (lambda: KVFormat.make(2, v_axis="channel", v_group=48).layout(128, 64), "48"),
    ],
)
def test_errors_are_one_line_that_names_the_field(make, word):
    with pytest.raises(FormatError, match=word) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [None, 2, b"int2", KVFormat.int2()])
def test_names_are_strings(name):
    with pytest.raises(TypeError, match="^a format's name must be a str, not "):
        KVFormat.parse(name)


def test_bits_in_place_of_a_tensor_format():
    with pytest.raises(TypeError, match=r"^k must be a foscar.TensorFormat, not 2; foscar.KVFormat.make takes bits$"):
        KVFormat(2, 2)
