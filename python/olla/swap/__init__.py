"""Plans that copy tensors to host memory and back."""

from olla.swap.choose import plan_swaps
from olla.swap.graph import swapped_graph

__all__ = [
    "plan_swaps",
    "swapped_graph",
]
