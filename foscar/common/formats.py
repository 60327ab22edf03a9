"""The quantized KV-cache formats and, in one place, where every byte of a cache record lies.

A value is stored as ``x ~ scale * code + bias`` with an unsigned code of 2 or 4 bits and 16-bit parameters.
Packing, unpacking, the cache, the reference, the kernels and the tests all take byte positions from here.

Row bytes
    The ``head_dim`` codes of one token are packed *planar* into ``R = head_dim * bits / 8`` bytes: byte ``i`` holds
    channels ``i, i + R, i + 2R, ...`` in ascending bit positions (``p = channel // R`` is the position, its bits are
    ``[bits * p, bits * (p + 1))``).  One mask over a 32-bit word therefore selects the same position of four
    neighbouring bytes, which is a tensor-core operand register.

Padding
    A ``head_dim`` of 80, 96 or 112 is stored as the 128 channels of ``padded_head_dim``; every size below is of those.
    Padding channels have code 0.  They belong to no group's minimum or maximum; a group of padding channels alone has
    a small scale and bias 0.  The query is padded with zeros and the output's padding is cut off, so they weigh
    nothing.

Record
    One contiguous record per (page, KV head)::

        | K codes | K parameters | V codes | V parameters |

    so that one bulk copy brings a page.  All section sizes are multiples of 64 bytes.

K codes: blocks of 16 tokens.
    The thread that owns query-key rows ``4q + 2i + {0, 1}`` (tokens) and row bytes ``16u + 4t + {0..3}`` reads them as
    one vector of up to 16 bytes; the vectors of a warp are consecutive.  See :meth:`RecordLayout.k_byte`.
V codes: blocks of ``min(page_size, 64)`` tokens.
    A word holds one row byte of four consecutive tokens (the token is the contraction index of P V), and the words of
    one row byte and one token quad of up to four 16-token groups are consecutive.  See :meth:`RecordLayout.v_byte`.
Parameters: (scale, bias) pairs of 4 bytes.
    Axis "token": ``[channel group][token]``.  Axis "channel": ``[token group][channel]``; a group of more tokens than
    a page is repeated in each of its pages.
"""

from __future__ import annotations

import numbers
import re
from dataclasses import dataclass, field, replace
from functools import cached_property

from .tensor_format import TensorFormat, padded_dim, require_format

PARAM_DTYPES = ("float16", "bfloat16")
PAGE_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 112, 128, 256)
PARAM_BYTES = 4  # one (scale, bias) pair


@dataclass(frozen=True)
class KVFormat:
    """The format of a KV cache: one :class:`TensorFormat` each for K and V, and the type of the parameters.

    ``KVFormat.int2()`` and ``KVFormat.int4()`` are the usual ones (per token, one group, fp16 parameters).
    """

    k: TensorFormat = field(default_factory=TensorFormat)
    v: TensorFormat = field(default_factory=TensorFormat)
    params: str = "float16"

    def __post_init__(self) -> None:
        for name, f in (("k", self.k), ("v", self.v)):
            if not isinstance(f, TensorFormat):
                raise TypeError(f"{name} must be a foscar.TensorFormat, not {f!r}; foscar.KVFormat.make takes bits")
        require_format(self.params in PARAM_DTYPES, f"params must be one of {PARAM_DTYPES}, not {self.params!r}")

    @classmethod
    def make(
        cls,
        k_bits: int = 2,
        v_bits: int | None = None,
        *,
        k_axis: str = "token",
        v_axis: str = "token",
        k_group: int | None = None,
        v_group: int | None = None,
        params: str = "float16",
    ) -> KVFormat:
        """Flat spelling; ``v_bits`` defaults to ``k_bits``."""
        v_bits = k_bits if v_bits is None else v_bits
        return cls(TensorFormat(k_bits, k_axis, k_group), TensorFormat(v_bits, v_axis, v_group), params)

    @classmethod
    def int2(cls) -> KVFormat:
        return cls.make(2)

    @classmethod
    def int4(cls) -> KVFormat:
        return cls.make(4)

    @property
    def name(self) -> str:
        """A short name such as ``k2v2`` or ``k4c32v2-bf16`` (c: per channel, t: per token; the number: the group)."""

        def one(f: TensorFormat) -> str:
            if f.axis == "token":
                return f"{f.bits}" + ("" if f.group is None else f"t{f.group}")
            return f"{f.bits}c" + ("" if f.group is None else f"{f.group}")

        return f"k{one(self.k)}v{one(self.v)}" + ("" if self.params == "float16" else "-bf16")

    @classmethod
    def parse(cls, name: str) -> KVFormat:
        """The format of a :attr:`name`, or of ``int2`` (``k2v2``) and ``int4``; else a FormatError."""
        if not isinstance(name, str):
            raise TypeError(f"a format's name must be a str, not {type(name).__name__}")
        number = "(0|[1-9][0-9]*)"
        side = f"{number}(?:(t(?=[0-9])|c){number}?)?"  # bits, axis, group
        full = re.sub(f"^int{number}(?=-|$)", r"k\1v\1", name)
        found = re.fullmatch(f"k{side}v{side}(-bf16)?", full)
        require_format(
            found is not None,
            f"a format's name is int2, int4, k4v2, k2c64v2 (c: per channel; group), ..., with -bf16 for bfloat16 "
            f"parameters; not {name!r}",
        )
        k, v = (
            TensorFormat(int(bits), "channel" if axis == "c" else "token", int(group) if group else None)
            for bits, axis, group in (found.group(1, 2, 3), found.group(4, 5, 6))
        )
        return cls(k, v, "bfloat16" if found[7] else "float16")

    def layout(self, head_dim: int, page_size: int) -> RecordLayout:
        return RecordLayout(self, head_dim, page_size)


def check_format(format: KVFormat | None) -> KVFormat:
    """The format that a caller gave; None: INT2.

    Raises:
        TypeError: not a KVFormat.
    """
    if format is None:
        return KVFormat.int2()
    if not isinstance(format, KVFormat):
        raise TypeError(f"format must be a foscar.KVFormat such as foscar.KVFormat.int2(), not {format!r}")
    return format


def check_whole(name: str, value: int) -> int:
    """A count that a caller gave, as a plain int.

    Raises:
        TypeError: not a whole number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    return int(value)


@dataclass(frozen=True)
class RecordLayout:
    """Byte positions within the record of one (page, KV head); see the module's docstring.

    ``head_dim`` is the caller's, ``padded_head_dim`` the record's: channels of the methods below are of the latter.

    Raises:
        FormatError: unsupported head_dim, page_size or group for them.
    """

    format: KVFormat
    head_dim: int
    page_size: int

    def __post_init__(self) -> None:
        dim, page = self.head_dim, self.page_size
        require_format(type(dim) is int and dim in HEAD_DIMS, f"head_dim must be one of {HEAD_DIMS}, not {dim!r}")
        require_format(type(page) is int and page in PAGE_SIZES, f"page_size must be one of {PAGE_SIZES}, not {page!r}")
        for name, f in (("K", self.format.k), ("V", self.format.v)):
            g = f.resolved_group(self.head_dim, self.page_size)
            if f.axis == "token":
                fits = self.padded_head_dim % g == 0
                require_format(fits, f"{name}: a group of {g} channels does not divide head_dim {self.padded_head_dim}")
            else:
                fits = self.page_size % g == 0 or g % self.page_size == 0
                require_format(
                    fits, f"{name}: a group of {g} tokens neither divides nor is a multiple of the page size"
                )

    # ---- sizes and section offsets, in bytes
    @cached_property
    def padded_head_dim(self) -> int:
        return padded_dim(self.head_dim)

    @cached_property
    def kernel_format(self) -> KVFormat:
        """The format of the same record for a head_dim of ``padded_head_dim``: what a kernel is built for."""
        if self.head_dim == self.padded_head_dim:
            return self.format
        whole = (f.axis == "token" and f.group == self.head_dim for f in (self.format.k, self.format.v))
        sides = (replace(f, group=None) if w else f for f, w in zip((self.format.k, self.format.v), whole, strict=True))
        return KVFormat(*sides, self.format.params)

    @property
    def k_group(self) -> int:
        return self.format.k.resolved_group(self.head_dim, self.page_size)

    @property
    def v_group(self) -> int:
        return self.format.v.resolved_group(self.head_dim, self.page_size)

    @property
    def k_row_bytes(self) -> int:
        return self.format.k.row_bytes(self.padded_head_dim)

    @property
    def v_row_bytes(self) -> int:
        return self.format.v.row_bytes(self.padded_head_dim)

    def _pairs(self, f: TensorFormat, group: int) -> int:
        if f.axis == "token":
            return self.page_size * (self.padded_head_dim // group)
        return self.padded_head_dim * max(1, self.page_size // group)

    @cached_property
    def k_params_offset(self) -> int:
        return self.page_size * self.k_row_bytes

    @cached_property
    def v_offset(self) -> int:
        return self.k_params_offset + PARAM_BYTES * self._pairs(self.format.k, self.k_group)

    @cached_property
    def v_params_offset(self) -> int:
        return self.v_offset + self.page_size * self.v_row_bytes

    @cached_property
    def record_bytes(self) -> int:
        return self.v_params_offset + PARAM_BYTES * self._pairs(self.format.v, self.v_group)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token of one KV head, K and V, codes and parameters."""
        return self.record_bytes / self.page_size

    # ---- K codes: blocks of 16 tokens, [half-quad plane][vector plane][token quad, thread in quad][words of a vector]
    @property
    def k_vector_words(self) -> int:
        """32-bit words of one vector load of K codes (1, 2 or 4)."""
        return min(4, 2 * (self.k_row_bytes // 16))

    def k_byte(self, token: int, byte: int) -> int:
        """Offset in the record of row byte ``byte`` (0 .. k_row_bytes - 1) of K of ``token`` (0 .. page_size - 1)."""
        words_per_row = self.k_row_bytes // 16  # that one thread (t) reads
        vw = self.k_vector_words
        block, tok = token // 16, token % 16  # not divmod: device code calls this with integers of its own
        quad, half, row = tok // 4, tok % 4 // 2, tok % 2
        u, t, b = byte // 16, byte % 16 // 4, byte % 4
        column = row * words_per_row + u
        plane, word = column // vw, column % vw
        vector = ((half * (2 * words_per_row // vw) + plane) * 4 + quad) * 4 + t
        return 16 * self.k_row_bytes * block + 4 * (vector * vw + word) + b

    # ---- V codes: blocks of v_block_tokens tokens, [row byte][token quad][16-token group] words of four tokens
    @property
    def v_block_tokens(self) -> int:
        return min(self.page_size, 64)

    def v_byte(self, token: int, byte: int) -> int:
        """Offset in the record of row byte ``byte`` (0 .. v_row_bytes - 1) of V of ``token`` (0 .. page_size - 1)."""
        n = self.v_block_tokens
        block, tok = token // n, token % n
        group, quad, b = tok // 16, tok % 16 // 4, tok % 4
        return self.v_offset + n * self.v_row_bytes * block + 4 * ((4 * byte + quad) * (n // 16) + group) + b

    # ---- parameters: the offset of the pair (scale: bytes 0-1, bias: bytes 2-3) of one element
    def _param(self, f: TensorFormat, base: int, group: int, token: int, channel: int) -> int:
        if f.axis == "token":
            return base + PARAM_BYTES * (channel // group * self.page_size + token)
        return base + PARAM_BYTES * (token // group * self.padded_head_dim + channel)

    def k_param(self, token: int, channel: int) -> int:
        """Offset of the (scale, bias) pair of K[token, channel]."""
        return self._param(self.format.k, self.k_params_offset, self.k_group, token, channel)

    def v_param(self, token: int, channel: int) -> int:
        """Offset of the (scale, bias) pair of V[token, channel]."""
        return self._param(self.format.v, self.v_params_offset, self.v_group, token, channel)
