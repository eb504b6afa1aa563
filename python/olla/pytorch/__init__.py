"""PyTorch in, graphs out; plans in, steps out."""

from olla.base.packages import require

require("torch", "torch")
