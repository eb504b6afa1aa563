"""olla inside torch.compile: chooses what forward saves and what backward recomputes, for fused code."""

from olla.inductor.backend import backend
from olla.inductor.explain import Explanation, explain
from olla.inductor.saving.partition import Partitioner
from olla.inductor.settings import disable, enable

__all__ = ["Explanation", "Partitioner", "backend", "disable", "enable", "explain"]
