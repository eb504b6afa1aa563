"""Large losses in chunks of rows."""

from olla.chunk.losses import Region
from olla.chunk.rewrite import chunked
from olla.chunk.search import chunk

__all__ = [
    "Region",
    "chunk",
    "chunked",
]
