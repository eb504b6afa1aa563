"""Large losses in chunks of rows."""

from olla.chunk.losses import LossRegion
from olla.chunk.rewrite import chunked
from olla.chunk.search import chunk

__all__ = [
    "LossRegion",
    "chunk",
    "chunked",
]
