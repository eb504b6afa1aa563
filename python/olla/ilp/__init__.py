"""OLLA's integer programs, solved by HiGHS."""

from olla.ilp.highs import solver
from olla.ilp.programs import address_ilp, joint_ilp, order_ilp

__all__ = ["address_ilp", "joint_ilp", "order_ilp", "solver"]
