"""Other projects' quantized caches -> foscar's, with the same codes: nothing is quantized again."""

from .bitdecoding import from_bitdecoding_codes
from .dense import Converted, Dense, from_quantized
from .kivi import ConvertedWindows, add_kivi_residual, from_kivi
from .oscar import from_oscar
from .qserve import from_qserve

__all__ = [
    "Converted",
    "ConvertedWindows",
    "Dense",
    "add_kivi_residual",
    "from_bitdecoding_codes",
    "from_kivi",
    "from_oscar",
    "from_qserve",
    "from_quantized",
]
