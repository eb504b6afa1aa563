"""Inputs of forward that are saved as they are, where Inductor would save a copy in the layout of convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from olla.inductor.compat import compat, fallback
from olla.inductor.saving import emission

HOOK = "post_grad_custom_post_pass"


class SavedAsGiven(compat.CustomGraphPass):  # type: ignore[misc]
    """Has forward return parameters and inputs that backward needs as they are; they are in memory anyway.

    Inductor turns what flows into convolutions to channels-last once, and what is also a result of the graph lives
    on as that copy: all weights of convolutions a second time. Backward turns them again, one after the other.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Mark the results of a graph that are its inputs: their strides are not to change."""
        with fallback.tried("parameters and inputs are saved in the layout torch gives them"):
            compat.keep_strides_of_results(graph)
        with fallback.tried("gradients of chunks are added in memory of their own"):
            emission.add_in_place(graph)

    def uuid(self) -> str:
        """Return what identifies the pass, for Inductor's caches."""
        return compat.code_digest()


def patches() -> Mapping[str, Any]:
    """Return what this changes in Inductor's configuration, by name: nothing where the user has a pass there."""
    taken = getattr(compat.config, HOOK)
    return {} if taken and not isinstance(taken, SavedAsGiven) else {HOOK: SavedAsGiven()}
