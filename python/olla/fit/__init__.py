"""Does it fit, and which batch: sizes of a training step beside the memory there is."""

from olla.fit.result import Fit, SizeRow, Way

__all__ = ["Fit", "SizeRow", "Way"]
