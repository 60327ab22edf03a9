"""FOSCAR: decode attention over 2-bit and 4-bit paged KV caches."""

from .api import BatchDecodeWithPagedKVCacheWrapper, decode_attention
from .common.cache import PagedKVCache
from .common.config import ConfigError
from .common.errors import CompileError, MissingDependencyError, UnsupportedDeviceError
from .common.formats import FormatError, KVFormat, TensorFormat
from .hopper.config import TileConfig

__version__ = "0.1.0"

__all__ = [
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
    "decode_attention",
]
