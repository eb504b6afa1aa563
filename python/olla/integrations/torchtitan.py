"""torchtitan's GraphTrainer: a memory policy that keeps and recomputes what olla chooses."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from olla.base import human_bytes, percent
from olla.errors import BudgetError
from olla.graph import DeviceProfile
from olla.integrations.torchtitan_program import (
    HEADS,
    GraphTrainerProgram,
    Judged,
    first_backward,
    is_backward,
    module_name,
)
from olla.plan import Goal, asked

if TYPE_CHECKING:
    from torch import fx

    from olla.graph import Graph
    from olla.pytorch.ranks.group import Ranks

_log = logging.getLogger(__name__)
_SLOWDOWN = 0.05  # where no goal is given
_SENDS_AHEAD = "joint_transformer_block_bucketing_reordering_pass"


@dataclass(frozen=True)
class PolicyChoice:
    """What a policy chose for one graph; bytes and seconds are of the graph that GraphTrainer makes of it.

    Attributes:
        ops: names of the nodes that are ops of the graph; the others are views.
        recomputed: names of those that are recomputed in backward, with the waits of collectives.
        peak_bytes: most memory live at once, in program order, with all placeholders.
        saved_peak_bytes: the same with everything saved.
        added_seconds, base_seconds: estimated, of what is recomputed, and of the step without.
    """

    ops: frozenset[str]
    recomputed: tuple[str, ...]
    peak_bytes: int
    saved_peak_bytes: int
    added_seconds: float
    base_seconds: float


def register(
    name: str = "olla",
    *,
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    device: str | DeviceProfile = "a100",
) -> None:
    """Register a memory policy for torchtitan's GraphTrainer: `config.compile.memory_policy = name`.

    Args:
        name: of the policy; an older one of that name is replaced.
        budget: memory for forward, loss and backward, parameters and gradients included: least added time within it.
        max_slowdown: least peak within this share of added time; 0.05 where no goal is given.
        minimise: "peak": least peak at whatever time.
        device: what time is estimated for.

    Raises:
        BudgetError, ValueError: as `olla.plan`.
        ImportError: torchtitan is not installed.
    """
    goal = _goal(budget, max_slowdown, minimise, device)
    from torchtitan.experiments.graph_trainer.registry import register_memory_policy

    def policy(module: fx.GraphModule, *, config: Any) -> fx.GraphModule:
        name_sums(module)
        left_out = () if config.compile.enable_passes else (_SENDS_AHEAD,)
        left_out = (*left_out, *config.compile.disable_passes)
        tag(module, choose(module, goal, sends_ahead=_SENDS_AHEAD not in left_out))
        return module

    register_memory_policy(name)(policy)


def _goal(budget: Any, max_slowdown: Any, minimise: Any, device: Any) -> Goal:
    if budget is max_slowdown is minimise is None:
        max_slowdown = _SLOWDOWN
    goal, _ = asked(
        budget=budget, max_slowdown=max_slowdown, minimise=minimise, device=device, in_place=False, recompute=True
    )
    assert goal is not None
    return goal


def choose(module: fx.GraphModule, goal: Goal, *, sends_ahead: bool = True) -> PolicyChoice:
    """Choose what backward recomputes in a graph of forward, loss and backward; the graph stays as it is.

    Every candidate is judged in the program GraphTrainer makes of it: each recomputed node runs once more, right before
    the first node of backward that needs it. Collectives may be recomputed as well: a parameter is gathered again.
    Ranks that trace the same operators take the choice of the first of them.

    Args:
        module: as `minimal_fx_tracer` traces it: nodes of backward have `meta["autograd_backward"]`.
        goal: what is asked for.
        sends_ahead: whether GraphTrainer sends the messages of FSDP as one for each layer, ahead of it.

    Raises:
        BudgetError: nothing was found that fits the budget.

    Complexity:
        Some 400 simulations, each O(ops + reads).
    """
    from olla.pytorch.imported import from_fx
    from olla.pytorch.ranks.group import ranks_of

    graph = from_fx(module)
    program = GraphTrainerProgram(graph, module, goal.device, sends_ahead=sends_ahead)
    ranks = ranks_of(group for group in graph.groups if group)
    best = _best(program, goal) if ranks is None else _best_of_ranks(ranks, graph, program, goal)
    saved, names = program.judged(frozenset()), program.names_of(best.ops)
    _log.info(
        "memory policy: peak %s, with everything saved %s; %d ops recomputed, %s of the time",
        *(human_bytes(best.peak_bytes), human_bytes(saved.peak_bytes), len(names)),
        percent(best.added_seconds / program.base_seconds if program.base_seconds else 0.0),
    )
    ops = frozenset(program.names_of(range(program.graph.num_ops)))
    return PolicyChoice(ops, names, best.peak_bytes, saved.peak_bytes, best.added_seconds, program.base_seconds)


def _best(program: GraphTrainerProgram, goal: Goal) -> Judged:
    budget = goal.budget_bytes
    if budget is None:
        most = math.inf if goal.max_slowdown is None else goal.max_slowdown * program.base_seconds * (1 + 1e-12)
        best = program.best(lambda point: (max(point.added_seconds - most, 0.0), point.peak_bytes, point.added_seconds))
        return program.without(best, best.peak_bytes)
    best = program.best(lambda point: (max(point.peak_bytes - budget, 0), point.added_seconds, point.peak_bytes))
    if best.peak_bytes > budget:
        raise BudgetError(
            f"nothing was found that fits budget {budget}: the least is {best.peak_bytes} bytes, with parameters and "
            "gradients. Take a smaller batch, or at least that budget",
            rule="budget",
        )
    return program.without(best, budget)


def _best_of_ranks(ranks: Ranks, graph: Graph, program: GraphTrainerProgram, goal: Goal) -> Judged:
    """Return the choice of the first rank that has the same operators; shapes may differ, as uneven shards do.

    Ranks with another choice would communicate in another order, and wait for each other for ever.
    """
    from olla.pytorch.ranks.agreement import digest

    own = digest(*graph.op_names, *graph.targets)
    found: BudgetError | Judged
    said: dict[str, Any]
    try:
        found = _best(program, goal)
        said = {"recomputed": program.names_of(found.ops)}
    except BudgetError as error:
        found, said = error, {"error": str(error)}
    everyone = ranks.gather([own, said])
    first = next(rank for rank, (theirs, _) in enumerate(everyone) if theirs == own)
    said = everyone[first][1]
    if isinstance(found, BudgetError) and first == ranks.rank:
        raise found
    if "error" in said:
        raise BudgetError(f"rank {first}: {said['error']}", rule="budget")
    return program.judged(program.ops_of(said["recomputed"]))


def name_sums(module: fx.GraphModule) -> None:
    """Give sums of gradients the module of what they sum: torch 2.13 has them belong to the loss, which began backward.

    GraphTrainer recomputes nothing before the last node of the loss.
    """
    for node in module.graph.nodes:
        if is_backward(node) and module_name(node) in HEADS and "add" in str(node.target):
            others = [fqn for fqn in map(module_name, node.all_input_nodes) if fqn and not fqn.startswith(HEADS)]
            if others:
                node.meta["custom"] = {**node.meta["custom"], "module_fqn": others[0]}


def tag(module: fx.GraphModule, choice: PolicyChoice) -> None:
    """Mark the nodes of forward for GraphTrainer's passes: what is recomputed, views included, and what is saved."""
    import operator

    from torch.utils.checkpoint import CheckpointPolicy

    recomputed, ops = set(choice.recomputed), choice.ops
    nodes = list(module.graph.nodes)
    first = first_backward(nodes)
    place = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        if node.op != "call_function" or is_backward(node) or module_name(node).startswith(HEADS):
            continue
        early = any(is_backward(user) and place[user] < first for user in node.users)
        if node.target is operator.getitem and "recompute" in getattr(node.args[0], "meta", {}):
            node.meta["recompute"] = node.args[0].meta["recompute"]
        elif node.name in recomputed:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif node.name in ops or early:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        else:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    module.recompile()
