"""Agreement of ranks: several processes that train one model checkpoint the modules that the first one chose.

A search may reach its time limit at another point on another machine, and batches may differ. Ranks that recompute
different modules would gather different shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from olla.checkpointing.regions import ModuleRegion
from olla.errors import BudgetError


class Chosen(Protocol):
    """What a search has found."""

    @property
    def regions(self) -> dict[str, ModuleRegion]:
        """How each module is checkpointed, by name."""


Found = TypeVar("Found", bound=Chosen)


def train_together() -> bool:
    """Whether several processes train."""
    is_alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    return not is_alone and dist.get_backend() != "fake"


def of_first_rank(search: Callable[[], Found], of_regions: Callable[[dict[str, ModuleRegion]], Found]) -> Found:
    """Return what a search finds; where several processes train, what that of the first one finds.

    Args:
        search: finds modules to checkpoint.
        of_regions: returns what was found by another rank, as it is here.

    Raises:
        BudgetError: the search of the first rank finds nothing.
    """
    if not train_together():
        return search()
    sent: list[Any] = [None]
    found = None
    if dist.get_rank() == 0:
        try:
            found = search()
            sent = [found.regions]
        except BudgetError as error:
            sent = [error]
    dist.broadcast_object_list(sent, src=0)
    if isinstance(sent[0], BudgetError):
        raise sent[0]
    return of_regions(sent[0]) if found is None else found
