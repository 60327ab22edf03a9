"""The paged KV cache: storage, append, and reading back.

Storage is one uint8 tensor [num_pages, num_kv_heads, record_bytes], the record as in :mod:`foscar.common.formats`.
A request owns the pages of its row of a block table, int32 [batch, max_pages]: its token ``p`` is row
``p % page_size`` of page ``block_table[b, p // page_size]``.  Entries beyond a request's length are never read and
may hold anything, -1 for example.
"""

from __future__ import annotations

import functools

import torch

from foscar.common import append_launch, traced
from foscar.common.append import NewTokens, store
from foscar.common.append_checks import check_new_values
from foscar.common.autocast import without_autocast
from foscar.common.errors import UnsupportedDeviceError
from foscar.common.formats import KVFormat, RecordLayout, check_format, check_whole
from foscar.common.pack import TensorTable, record_tables, unpack_tensor
from foscar.common.quantize import Quantized, dequantize
from foscar.common.tensor_checks import check_kinds

ALIGNMENT = 16  # bytes: what a bulk copy needs of the base address and of every stride


class PagedKVCache:
    """K and V of one layer in 2 or 4 bits, quantized once per KV head.

    Args:
        num_pages, page_size: pages of ``page_size`` (16, 32, 64 or 128) tokens.
        num_kv_heads: KV heads, not query heads.
        head_dim: 64, 128 or 256; also 80, 96 and 112, which are stored as 128 (:mod:`foscar.common.formats`) and
            take the bytes of 128.
        format: bits, axes, groups and parameter type.
        device: where to allocate (ignored with ``data``).
        data: storage to use instead of allocating: uint8 [num_pages, num_kv_heads, record_bytes], possibly a strided
            view (layers interleaved, say) whose last dimension is contiguous and whose base address and other strides
            are multiples of 16 bytes.

    Raises:
        TypeError: a format that is no KVFormat, a count that is no whole number, ``data`` that is no tensor.
        FormatError: a format, head_dim or page size that is not supported.
        UnsupportedDeviceError: "cuda" where torch sees no GPU.
        ValueError: ``data`` of another type, shape or alignment.

    Attributes:
        data, format, layout, num_pages, page_size, num_kv_heads, device; head_dim, the caller's, and padded_head_dim,
        the records'.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        format: KVFormat | None = None,
        device: str | torch.device = "cpu",
        data: torch.Tensor | None = None,
    ):
        self.format = check_format(format)
        self.num_pages = num_pages = check_whole("num_pages", num_pages)
        self.page_size = check_whole("page_size", page_size)
        self.num_kv_heads = num_kv_heads = check_whole("num_kv_heads", num_kv_heads)
        self.head_dim = check_whole("head_dim", head_dim)
        self.layout: RecordLayout = _layout(self.format, self.head_dim, self.page_size)
        self.padded_head_dim = self.layout.padded_head_dim
        if num_pages < 0 or num_kv_heads < 1:
            raise ValueError(f"a cache needs num_pages >= 0 and num_kv_heads >= 1, not {num_pages} and {num_kv_heads}")
        shape = (num_pages, num_kv_heads, self.layout.record_bytes)
        if data is None:
            data = torch.zeros(shape, dtype=torch.uint8, device=check_device(device))
        _check_storage(data, shape)
        self.data = data
        # the operators' arguments of that name: here because torch.compile cannot trace the making of a name
        self.operator_shape = (self.format.name, self.page_size, self.head_dim)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in all KV heads, K and V, codes and parameters."""
        return self.layout.bytes_per_token * self.num_kv_heads

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.num_pages * self.num_kv_heads * self.layout.record_bytes

    def __repr__(self) -> str:
        return (
            f"PagedKVCache({self.format.name}, {self.num_pages} pages of {self.page_size} tokens, "
            f"{self.num_kv_heads} KV heads of {self.head_dim}, {self.bytes_per_token:g} bytes per token, "
            f"{self.nbytes / 2**20:.1f} MiB on {self.device})"
        )

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        indptr: torch.Tensor | None = None,
        *,
        check: bool | None = None,
    ) -> None:
        """Quantize new tokens and store them behind those that the requests already have.

        Request ``b`` gets rows ``indptr[b] : indptr[b + 1]`` of ``k`` and ``v`` (without ``indptr``: row ``b``) at its
        positions ``seq_lens[b], seq_lens[b] + 1, ...``.  Nothing is written if an error is raised on the CPU.

        On CUDA, unchecked, with k and v of one of bfloat16, float16 and float32 and a contiguous last dimension, it is
        one kernel of :mod:`foscar.common.append_kernel`, for which the host does not wait; where it can be neither
        found nor compiled, torch operations write the same bytes (said once, by a log line), per channel waiting for
        the lengths.
        Axis "token": no byte but the new tokens' is written.
        Axis "channel": a token group (counted from the request's token 0) may be filled bit by bit.  Where the new
        values of a channel lie within the group's present range, its parameters and old codes stay bit for bit;
        elsewhere the channel is quantized again from its *dequantized* old values and the new ones, which loses up to
        half a step each time, and the losses add up: after many, an old value can be off by nearly the group's whole
        range (measured: 0.95 after 128 values rising from 0 to 1, appended one by one at INT2).  Append whole groups.
        A group whose codes are all 0 holds one value, which is its range.
        Requests must not share the page or the token group that they append to: a group's parameters lie in all of its
        pages, also in those below the length, and may change with its later tokens.

        Args:
            k, v: [n, num_kv_heads, head_dim], any float type and strides, on the cache's device.
            block_table: int32 [batch, max_pages].
            seq_lens: int32 [batch], the lengths *before* the append.
            indptr: int32 [batch + 1], from 0 to n, ascending.
            check: raise for values that cannot be represented, alone or with those already in their token group
                (None: on the CPU only).  Unchecked, such a group decodes to NaN, and nothing else does.

        Raises:
            TypeError: an argument that is no tensor.
            ValueError: types, shapes or devices; on the CPU also page ids outside the cache, positions outside the
                block table, a bad ``indptr``, values as above, and a token group per channel that another request of
                the batch shares and that has tokens already.  On CUDA the kernel skips a token whose position or
                page id is outside (per channel, the new tokens of its group); torch operations stop in a device
                assertion.
        """
        if torch.compiler.is_compiling():
            return traced.append(self, k, v, block_table, seq_lens, indptr, check)
        check = self.device.type == "cpu" if check is None else check
        check_new_values(self, k, v, block_table, seq_lens, indptr)
        if self.device.type == "cuda" and not check:
            if append_launch.launch(self, k, v, block_table, seq_lens, indptr):
                return
        store(self, k, v, NewTokens.make(self, k, v, block_table, seq_lens, indptr), check, self.data)

    def read_tokens(
        self, block_table_row: torch.Tensor, start: int, stop: int, sides: str = "kv"
    ) -> tuple[Quantized, ...]:
        """(K, V), or only the ``sides`` asked for, of one request's tokens ``start:stop`` in codes, padding channels
        included.

        Parameters of axis "channel" come per stored group (``record_tables(layout, device).k.group`` tokens, the last
        may be partial).  Rows beyond ``stop`` and page ids beyond the last page needed are not looked at.

        Args:
            block_table_row: int32 [max_pages].
            start: a multiple of the page size.
            sides: of "k" and "v", in the order wanted.

        Raises:
            TypeError: a row that is no tensor.
            ValueError: a row of another shape, tokens that it has no pages for, other sides; on the CPU also a page id
                outside the cache.
        """
        page = self.page_size
        check_kinds(block_table_row=block_table_row)
        if block_table_row.ndim != 1 or not set(sides) <= {"k", "v"}:
            raise ValueError(f"block_table_row must be [max_pages] and sides of 'k' and 'v', not "
                             f"{list(block_table_row.shape)} and {sides!r}")  # fmt: skip
        start, stop = check_whole("start", start), check_whole("stop", stop)
        if start % page or not 0 <= start <= stop or -(-stop // page) > block_table_row.shape[0]:
            raise ValueError(
                f"tokens {start}:{stop} do not start at a page or do not fit {block_table_row.shape[0]} pages of {page}"
            )
        ids = block_table_row[start // page : -(-stop // page)].long()
        if ids.device.type == "cpu" and bool(((ids < 0) | (ids >= self.num_pages)).any()):
            raise ValueError(f"block_table holds a page id outside 0 .. {self.num_pages - 1} below the length")
        records = self.data.index_select(0, ids)
        tables = record_tables(self.layout, self.device)
        wanted = (getattr(tables, side) for side in sides)
        return tuple(_first_tokens(unpack_tensor(self.layout, t, records), t, stop - start) for t in wanted)

    @without_autocast
    def dequantize_request(
        self, block_table_row: torch.Tensor, length: int, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(K, V) of one request [length, num_kv_heads, head_dim]: what the cache holds, as ``dtype``.

        Args:
            block_table_row: int32 [max_pages]; only the first ``ceil(length / page_size)`` entries are read.
        """
        tables = record_tables(self.layout, self.device)
        k, v = self.read_tokens(block_table_row, 0, length)
        return tuple(
            dequantize(x, table.format, group=table.group, dtype=dtype)[..., : self.head_dim]
            for x, table in ((k, tables.k), (v, tables.v))
        )


def _first_tokens(x: Quantized, table: TensorTable, count: int) -> Quantized:
    """The first ``count`` tokens of whole pages, without the slack rows and the groups that hold only slack."""
    params = count if table.format.axis == "token" else -(-count // table.group)
    return Quantized(x.codes[:count], x.scale[:params], x.bias[:params])


@functools.cache
def _layout(format: KVFormat, head_dim: int, page_size: int) -> RecordLayout:
    return format.layout(head_dim, page_size)


def check_device(device: str | torch.device) -> torch.device:
    """A device that a caller gave.

    Raises:
        ValueError: not a device, nor the name of one.
        UnsupportedDeviceError: "cuda" where torch sees no GPU.
    """
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a torch.device or its name, such as 'cuda:0', not {device!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedDeviceError(f"device {str(device)!r} needs a GPU, and torch sees none; device='cpu' runs the "
                                     "CPU backend")  # fmt: skip
    return device


def _check_storage(data: torch.Tensor, shape: tuple[int, int, int]) -> None:
    check_kinds(data=data)
    if data.layout is not torch.strided:
        raise ValueError(f"data must be dense and strided, not {data.layout}")
    if data.dtype != torch.uint8 or tuple(data.shape) != shape:
        raise ValueError(f"data must be uint8 {list(shape)}, not {data.dtype} {list(data.shape)}")
    if data.numel() == 0:
        return
    outer = [(data.stride(i), data.shape[i]) for i in (0, 1) if data.shape[i] > 1]
    if data.stride(2) != 1 or data.data_ptr() % ALIGNMENT or any(s % ALIGNMENT for s, _ in outer):
        raise ValueError(
            f"data must have a contiguous last dimension and a base address and strides that are multiples of "
            f"{ALIGNMENT} bytes; its strides are {list(data.stride())}, its address {data.data_ptr():#x}"
        )
    outer.sort()
    extent = shape[2]
    for stride, size in outer:
        if stride < extent:
            raise ValueError(f"data has overlapping records: strides {list(data.stride())}, record {shape[2]} bytes")
        extent += stride * (size - 1)
