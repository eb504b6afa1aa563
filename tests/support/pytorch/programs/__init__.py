"""Small training programs for torch.compile, each with something that a wrong rewriting would get wrong."""

from tests.support.pytorch.programs import autograd, calls, layers, storages  # noqa: F401 - they fill PROGRAMS
from tests.support.pytorch.programs.register import PROGRAMS, Compile, seeded

__all__ = ["PROGRAMS", "Compile", "seeded"]
