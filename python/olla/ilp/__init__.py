"""Integer programs by HiGHS: the order, the addresses, both at once."""

from olla.ilp.programs import address_ilp, highs_library, joint_ilp, order_ilp, solver

__all__ = [
    "address_ilp",
    "highs_library",
    "joint_ilp",
    "order_ilp",
    "solver",
]
