"""Sizes of a training step that fit a given memory, unplanned and planned."""

from olla.fit.result import Fit, SizeRow, Way

__all__ = ["Fit", "SizeRow", "Way"]
