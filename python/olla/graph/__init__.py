"""The training step as a graph: tensors, ops, what they cost, what they allow."""

from olla._core import nearest_order
from olla.graph.columns import Lists
from olla.graph.devices import PROFILES, DeviceProfile, profile_of
from olla.graph.graph import Graph
from olla.graph.operators import Rerun, Rules, draws_numbers, operator, rules
from olla.graph.timeline import Timeline, collective_seconds, timeline

__all__ = [
    "PROFILES",
    "DeviceProfile",
    "Graph",
    "Lists",
    "Rerun",
    "Rules",
    "Timeline",
    "collective_seconds",
    "draws_numbers",
    "nearest_order",
    "operator",
    "profile_of",
    "rules",
    "timeline",
]
