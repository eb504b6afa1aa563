"""Inputs of forward that are saved as they are, where Inductor would save a copy in the layout of convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from olla.inductor.compat import compat, fallback
from olla.inductor.saving import emission

HOOK = "post_grad_custom_post_pass"


class SavedAsGiven(compat.CustomGraphPass):  # type: ignore[misc]
    """Makes forward save parameters and inputs in the layout they are given in; they are in memory anyway.

    Inductor converts inputs of convolutions to channels-last, and saves the converted copy of one that is also a result
    of the graph: all weights of convolutions a second time. Instead, backward converts them again, one by one.
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
