"""FOSCAR: decode attention over 2-bit and 4-bit paged KV caches."""

from . import ops
from .api import decode_attention
from .common.cache import PagedKVCache
from .common.config import ConfigError
from .common.errors import CompileError, FormatError, MissingDependencyError, UnsupportedDeviceError
from .common.formats import KVFormat, TensorFormat
from .common.merge import merge_states, merge_states_list
from .common.options import AttentionOptions
from .common.window_move import WindowConfig
from .common.windows import WindowedKVCache
from .hopper.config import TileConfig
from .windowed import decode_windowed
from .wrapper import BatchDecodeWithPagedKVCacheWrapper

__version__ = "0.1.0"

__all__ = [
    "AttentionOptions",
    "BatchDecodeWithPagedKVCacheWrapper",
    "CompileError",
    "ConfigError",
    "FormatError",
    "KVFormat",
    "MissingDependencyError",
    "PagedKVCache",
    "TensorFormat",
    "TileConfig",
    "UnsupportedDeviceError",
    "WindowConfig",
    "WindowedKVCache",
    "decode_attention",
    "decode_windowed",
    "merge_states",
    "merge_states_list",
    "ops",
]
