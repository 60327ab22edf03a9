"""Options in the kernels: shapes and calls whose kernels are the OPTIONS of gpu_kernels.py."""

from __future__ import annotations

import torch

from foscar import AttentionOptions, KVFormat

INT2 = {"fmt": KVFormat.int2(), "page_size": 16, "head_dim": 64, "group_heads": 3}
INT4 = {"fmt": KVFormat.int4(), "page_size": 32, "head_dim": 64, "group_heads": 4, "dtype": torch.float16}
WIDE = {"fmt": KVFormat.int4(), "page_size": 64, "head_dim": 128, "group_heads": 2, "dtype": torch.float16}
D256 = {"fmt": KVFormat.int4(), "page_size": 32, "head_dim": 256, "group_heads": 2, "kv_heads": 1}
MIXED = {"fmt": KVFormat.make(2, 4), "page_size": 128, "head_dim": 128, "group_heads": 4}
CHANNEL = {"page_size": 16, "head_dim": 64, "group_heads": 3, "dtype": torch.float16}
ALL = AttentionOptions(window=30, soft_cap=4.0, out_scale=0.5)
# Empty, one token, ends of tiles; windows of 40 that begin at a tile, a page and within one.
SINGLE = [300, 0, 1, 128, 129, 168, 167, 40, 41]
# Rows before position 0, an empty request with rows, one without rows, drafts of every size over tile ends; 279: of
# a window of 150, the last row alone does not see the first token of the second tile.
LENGTHS = [70, 0, 1, 133, 16, 5, 279, 128]
Q_LENS = [16, 3, 1, 7, 16, 9, 4, 0]

# name -> (shape, lengths, query tokens, options of option_case, options of the call)
CASES = {
    "window int2": (INT2, SINGLE, None, {"options": AttentionOptions(window=40)}, {}),
    "window 1": (INT2, SINGLE, None, {"options": AttentionOptions(window=1)}, {}),
    "window wide": (INT2, SINGLE, None, {"options": AttentionOptions(window=2**31 - 1)}, {}),
    "window int4": (INT4, SINGLE, None, {"options": AttentionOptions(window=129)}, {}),
    # Public report 29.
    "window 1024 of 256 channels": (D256, [1300, 40], None, {"options": AttentionOptions(window=1024)}, {}),
    # Pages smaller than a group, of its size and larger, so that windows begin at, in and before a group's first page.
    "window K per channel": (CHANNEL | {"fmt": KVFormat.parse("k2c64v2")}, SINGLE, None,
                             {"options": AttentionOptions(window=45)}, {}),
    "window K per channel 128": (CHANNEL | {"fmt": KVFormat.parse("k2c128v2t32")}, SINGLE, None,
                                 {"options": AttentionOptions(window=150)}, {}),
    "window V per channel": (CHANNEL | {"fmt": KVFormat.parse("k4v4c64")}, SINGLE, None,
                             {"options": AttentionOptions(window=45)}, {}),
    "window both per channel": (CHANNEL | {"fmt": KVFormat.parse("k4c32v2c32"), "page_size": 32}, SINGLE, None,
                                {"options": AttentionOptions(window=45)}, {}),
    "window both per channel 128": (CHANNEL | {"fmt": KVFormat.parse("k2c128v2c128")}, SINGLE, None,
                                    {"options": AttentionOptions(window=77)}, {}),
    "window K in groups": (CHANNEL | {"fmt": KVFormat.parse("k2t32v2c32")}, SINGLE, None,
                           {"options": AttentionOptions(window=45)}, {}),
    "drafts, window and channels": (CHANNEL | {"fmt": KVFormat.parse("k2c32v2c64"), "group_heads": 2}, LENGTHS, Q_LENS,
                                    {"options": AttentionOptions(window=150)}, {}),
    "soft-cap int2": (INT2, SINGLE, None, {"options": AttentionOptions(soft_cap=3.0)}, {}),
    "soft-cap int4": (INT4, SINGLE, None, {"options": AttentionOptions(soft_cap=30.0), "sm_scale": 0.5}, {}),
    "soft-cap wide": (INT2 | {"dtype": torch.float16}, SINGLE, None, {"options": AttentionOptions(soft_cap=2e4)}, {}),
    "sinks int2": (INT2, SINGLE, None, {"sinks": True}, {}),
    "sinks int4": (INT4, SINGLE, None, {"sinks": True}, {}),
    "out_scale int2": (INT2, SINGLE, None, {"options": AttentionOptions(out_scale=0.37)}, {}),
    "out_scale int4": (INT4, SINGLE, None, {"options": AttentionOptions(out_scale=3.0)}, {}),
    "drafts int2": (INT2, LENGTHS, Q_LENS, {}, {}),
    "drafts int4": (WIDE, LENGTHS, Q_LENS, {}, {}),
    "drafts and window": (INT2, LENGTHS, Q_LENS, {"options": AttentionOptions(window=150)}, {}),
    "drafts and sinks": (INT2, LENGTHS, Q_LENS, {"sinks": True}, {}),
    "all int2": (INT2, LENGTHS, Q_LENS, {"options": ALL, "sinks": True}, {}),
    "all int4": (WIDE, LENGTHS, Q_LENS, {"options": ALL, "sinks": True}, {}),
    "pairs": (MIXED, [270, 129, 1, 2, 0], [2, 2, 2, 1, 0], {"options": AttentionOptions(window=128)}, {"max_q_len": 2}),
    "24 heads": (INT2 | {"group_heads": 24, "kv_heads": 1}, [300, 0, 1], None, {}, {}),
    # Items that are split and of which no row sees anything.
    "long drafts": (INT2 | {"kv_heads": 1, "group_heads": 1}, [130], [280], {}, {"max_q_len": 280}),
}  # fmt: skip
