"""Shared memory as a ledger: which bytes belong to whom, as byte addresses.

- ``stages`` ring slots of ``stage_bytes``: the pages of one step, record after record (load, read by unpack, softmax);
- Q^T, 2 x ``columns x head_dim`` e4m3, or as many e2m1 for each of three steps (query, B operands of Q K^T; rows:
  tcgen05.operand_row);
- P^T, 2 x ``[tile]``, each ``columns x TILE_TOKENS`` e4m3, likewise (softmax, B operand of P V);
- token parameters, float32 ``[warp][tile][value][32 tokens]`` (within each softmax warp);
- 2 x float32 ``[tile][head][warp]`` maxima, ``[head][warp]`` denominators and offsets (softmax to correct), ``[head]``
  query factors, an item's number of tiles and, with V per channel, ``[tile][head][warp]`` sums of P;
- the barriers of pipeline.py and the word that tcgen05.alloc writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from ..common import device
from .config import BUFFERS, SHARED_BYTES, STEP_TILES, ConfigError, DecodeConfig
from .pipeline import Barriers, edges


@dataclass
class Shared:
    """Addresses (bytes, shared window)."""

    ring: Int32
    query: Int32
    probs: Int32
    params: Int32
    reduce: Int32
    barriers: Barriers
    tensor: cute.Pointer  # where the address of tensor memory is


@dataclass
class Reduction:
    """One buffer of what softmax and correct exchange, and query's numbers for softmax and mma."""

    maxima: Int32
    sums: Int32
    offsets: Int32
    factors: Int32
    tiles: Int32
    tile_sums: Int32  # with V per channel only


def reduction(cfg: DecodeConfig, shared: Shared, buffer) -> Reduction:
    base, part = shared.reduce + buffer * cfg.reduce_bytes, 16 * cfg.heads
    sums = base + STEP_TILES * part
    factors = sums + 2 * part
    tiles = factors + 8 * cfg.heads * cfg.query_operands
    return Reduction(base, sums, sums + part, factors, tiles, tiles + 16)


def query_operand(cfg: DecodeConfig, buffer, number=0):
    """Offset of Q^T, with K per channel of a unit of the step (channel_query.py)."""
    return (buffer * cfg.query_operands + number) * cfg.query_bytes


def probs_tile(cfg: DecodeConfig, buffer, tile: int):
    """Offset of a tile's P^T."""
    return (STEP_TILES * buffer + tile) * cfg.prob_bytes


def joined(address, op) -> Float32:
    """One number from the four warps' parts."""
    four = device.load_shared(address, 4)
    return device.tree(op, [four[i].bitcast(Float32) for i in range(4)])


def allocate(cfg: DecodeConfig) -> Shared:
    allocator = cutlass.memory.SmemAllocator()

    def room(size: int, align: int = 128) -> Int32:
        return allocator.allocate_tensor(Uint8, cute.make_layout(size), byte_alignment=align).iterator.toint()

    query, probs = room(query_operand(cfg, BUFFERS), 1024), room(probs_tile(cfg, BUFFERS, 0), 1024)
    ring, params = room(cfg.stages * cfg.stage_bytes), room(cfg.param_bytes)
    reduce = room(BUFFERS * cfg.reduce_bytes)
    pointer = allocator.allocate_array(Int64, sum(edge.depth for edge in edges(cfg.stages, cfg.ring_readers)))
    tensor = allocator.allocate_array(Int32, 1)
    barriers = Barriers(pointer, cfg.stages, cfg.ring_readers)
    return Shared(ring, query, probs, params, reduce, barriers, tensor)


def check(cfg: DecodeConfig, allocated: int) -> None:
    """What was compiled against what the config promised."""
    if allocated > min(cfg.shared_bytes, SHARED_BYTES):
        raise ConfigError(f"{allocated} B of shared memory allocated; {cfg.describe()}")
