"""Plan, the answer: when every op runs, where every tensor lies, and the proof of how good that is."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from olla import planfile
from olla.errors import PlanError
from olla.files import naming, read_json, write_json
from olla.planfile import LiveTensor, OpAt

if TYPE_CHECKING:
    from olla.devices import DeviceProfile
    from olla.graph import Graph
    from olla.pipeline import Progress, Source
    from olla.swap import Link

__all__ = ["LiveTensor", "OpAt", "Plan", "Status", "plan"]


class Status(Enum):
    """What is known about a plan's order. A limit that was reached is a status, not an error."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"

    @property
    def message(self) -> str:
        """What the status means, for a reader."""
        return _STATUS_MESSAGES[self]


_STATUS_MESSAGES = {
    Status.OPTIMAL: "Proved: no valid order has a lower peak.",
    Status.FEASIBLE: "Not proved: a better order may exist, but none has a peak below the bound.",
}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Plan:
    """When every op of a training step runs, where every tensor lies, and how good that is.

    All byte figures include resident memory, except `arena_bytes` and `load_bytes`: these cover the arena, in which
    lies what ops write, and their workspaces. A plan made without a layout has no arena: all offsets are -1.

    Attributes:
        graph_name: name of the graph the plan was made for.
        graph_digest: digest of that graph; the plan is refused for any other.
        num_ops: ops of the graph.
        num_tensors: tensors of the graph.
        method: as given to `plan`, or "given" for an order the caller gave.
        status: OPTIMAL or FEASIBLE.
        message: what is known, and what to try next.
        order: int32[num_ops]: the op that runs at step i.
        offsets: int64[num_tensors], bytes: where tensor i begins in the arena; -1 where it keeps its own storage.
        workspace_offsets: int64[num_ops], bytes: where the workspace of op i begins; -1 where it has none.
        alignment: every offset is a multiple of this many bytes.
        peak_bytes: most bytes live at once in this order.
        lower_bound_bytes: no valid order has a lower peak.
        program_peak_bytes: the peak of the program order.
        resident_bytes: live throughout: parameters, optimizer state, data.
        arena_bytes: size of the arena.
        load_bytes: most bytes live at once in the arena, each size rounded up to the alignment: no arena of this order
            is smaller.
        arena_lower_bound_bytes: no valid order and layout have a smaller arena; 0 where nothing is known.
        before: int32[k], op ids: extra precedences the order keeps besides those of the graph.
        after: int32[k], op ids: op before[i] runs before op after[i].
        seconds: wall-clock time per stage, and "total".
        peak_op: the first op at the peak; None in an empty graph.
        peak_tensors: the largest tensors live at the peak that are not resident, largest first.
        options: the options the plan was made with.
        details: lines for a reader who wants to know more, such as the status of every part that a method solved.

    Example:
        >>> import olla
        >>> from olla.plan import Plan
        >>> builder = olla.Graph.builder("two ops")
        >>> activation = builder.tensor(1000)
        >>> _ = builder.op("forward", writes=[activation])
        >>> _ = builder.op("backward", reads=[activation])
        >>> plan = olla.plan(builder.build())
        >>> plan.peak_bytes, plan.status.value, plan.order.tolist(), plan.arena_bytes
        (1000, 'optimal', [0, 1], 1024)
    """

    graph_name: str
    graph_digest: str
    num_ops: int
    num_tensors: int
    method: str
    status: Status
    message: str
    order: NDArray[np.int32]
    offsets: NDArray[np.int64]
    workspace_offsets: NDArray[np.int64]
    alignment: int
    peak_bytes: int
    lower_bound_bytes: int
    program_peak_bytes: int
    resident_bytes: int
    arena_bytes: int
    load_bytes: int
    arena_lower_bound_bytes: int = 0
    before: NDArray[np.int32]
    after: NDArray[np.int32]
    seconds: Mapping[str, float]
    peak_op: OpAt | None
    peak_tensors: tuple[LiveTensor, ...]
    options: Mapping[str, Any]
    details: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Make the arrays read-only, like the rest."""
        for array in (self.order, self.offsets, self.workspace_offsets, self.before, self.after):
            array.flags.writeable = False

    @property
    def gap(self) -> float:
        """How far the peak can be from the best: (peak - bound) / bound."""
        return _ratio(self.peak_bytes - self.lower_bound_bytes, self.lower_bound_bytes)

    @property
    def saved_bytes(self) -> int:
        """What the order saves against the program order; negative if a given order is worse."""
        return self.program_peak_bytes - self.peak_bytes

    @property
    def fragmentation(self) -> float:
        """How much larger the arena is than its load: (arena - load) / load."""
        return _ratio(self.arena_bytes - self.load_bytes, self.load_bytes)

    def verify(self, graph: Graph) -> None:
        """Raise PlanError unless the plan is valid for the graph; see `olla.check`."""
        from olla.check import check

        check(graph, self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, through gzip where the name ends in `.gz`; the file appears whole or not at all.

        Raises:
            PlanError: the file cannot be written.
        """
        with naming(os.fsdecode(path)):
            write_json(path, self._to_object(), PlanError)

    def _to_object(self) -> dict[str, Any]:
        return planfile.to_object(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan written by `save`. That it fits a graph is for `verify` to say.

        Raises:
            PlanError: the file cannot be read, is damaged, is no plan, or has an unknown version.
        """
        with naming(os.fsdecode(path)):
            return cls.from_object(read_json(path, PlanError))

    @classmethod
    def from_object(cls, content: object) -> Plan:
        """Return the plan of what `json.loads` made of a plan file.

        Raises:
            PlanError: it is no plan, damaged, or of an unknown version.
        """
        fields = planfile.fields_of(content)
        assert isinstance(content, dict)
        try:
            status = Status(fields.pop("status"))
        except ValueError as cause:
            raise PlanError(f"status: {cause}; expected one of {[s.value for s in Status]}", rule="type") from None
        if "swap" in content:
            from olla import swapplan

            return swapplan.SwapPlan(**fields, **swapplan.fields_of(content["swap"]), status=status)
        if "rewrite" in content:
            from olla import budgetplan

            return budgetplan.BudgetPlan(**fields, **budgetplan.fields_of(content["rewrite"]), status=status)
        return cls(**fields, status=status)

    def __repr__(self) -> str:
        """Say the essentials on one line."""
        return (
            f"<Plan of {self.graph_name!r}: {self.num_ops} ops, peak {self.peak_bytes} bytes, {self.status.value}, "
            f"arena {self.arena_bytes} bytes>"
        )

    def __str__(self) -> str:
        """Return the plan as the table a person wants."""
        from olla.report.text import text

        return text(self)


def _ratio(difference: int, base: int) -> float:
    if difference == 0:
        return 0.0
    return difference / base if base > 0 else math.inf


def plan(
    graph: Source,
    *,
    method: str = "auto",
    time_limit: float = 15.0,
    seed: int = 0,
    alignment: int = 512,
    layout: bool = True,
    updates_may_move: bool = True,
    precedences: Iterable[tuple[int, int]] = (),
    order: ArrayLike | None = None,
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    device: str | DeviceProfile = "a100",
    in_place: bool = True,
    recompute: bool = True,
    chunked_loss: int | None = None,
    swap: bool | None = None,
    link: Link | float | None = None,
    host_budget: int | str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan the memory of a training step: order its ops, lay out its tensors, prove how good that is.

    With `budget`, `max_slowdown` or `minimise` the graph is rewritten as well: ops run again instead of keeping what
    they make, and pointwise results take over inputs that die. The answer is then a `BudgetPlan`.

    The plan has passed the independent checker. It is never worse than the program order, unless extra precedences
    forbid that order or another one was given. Ctrl-C returns the best plan so far.

    Args:
        graph: a `Graph`, the path of a graph file, or a captured step (anything whose `.graph` is a `Graph`).
        method: "auto", ours: min-cut refinement and branch and bound, then the order program where a gap is left. The
            others are there to compare with: "ilp" (OLLA's order program, then its address program), "joint" (order
            and addresses in one program), "model" (MODeL's devices), "roam" (segments at narrow waists, ordered and
            laid out one by one), "smartpool" (the program order; best fit by falling size), "inductor" (the best of
            PyTorch Inductor's four orders), "program" (the program order, our layout). See docs/model.md.
            "autoswap": the program order, tensors swapped to host memory by AutoSwap; the answer is a `SwapPlan`.
        time_limit: seconds for the whole call; what is not proved by then ends as FEASIBLE with its gap.
        seed: for every random choice. Same input, options and seed give the same plan, time-limited stages aside.
        alignment: every offset is a multiple of it, in bytes; 512 on CUDA.
        layout: whether to place tensors in an arena; False leaves all offsets at -1.
        updates_may_move: whether weight updates may run early; False keeps them in program order, behind all ops
            that precede the first of them.
        precedences: extra pairs of op ids (before, after).
        order: int32[num_ops], the op that runs at step i: keep this order; only its tensors are laid out.
        budget: the memory there is, "16GB", "16GiB" or bytes: least added time with which everything fits, the arena
            included.
        max_slowdown: least peak within this share of added time; 0.05 is 5 %.
        minimise: "peak": least peak at whatever time.
        device: what time is estimated for where the graph has no measured seconds: "h100", "h200", "a100", "rtx4090",
            "cpu" or a `DeviceProfile`.
        in_place, recompute: which levers a rewriting may use.
        chunked_loss: with a goal: compute large linear layers with their cross-entropy in so many chunks of rows. This
            changes rounding. See `BudgetPlan.chunked`.
        swap: whether a rewriting may swap tensors to host memory; the answer is then a `SwapPlan`. Default: where
            `host_budget` says how much of it there is. True without that: as much as it takes.
        link: to host memory: a `Link`, or bytes per second both ways; default: the device's, and for "autoswap" PCIe 3.
        host_budget: the host memory there is for swapping, "64GB", "64GiB" or bytes.
        progress: called some ten times a second with (stage, seconds, value, bound) in bytes; False stops the search
            with its best answer.

    Returns:
        The plan; `plan.order[i]` is the op that runs at step i, `plan.offsets[t]` the first byte of tensor t.

    Raises:
        GraphError: the graph is invalid, or the precedences form a cycle with its dependencies.
        PlanError: the given order breaks a dependency.
        BudgetError: the budget is no number of bytes, or no plan fits it.
        ValueError: an option is out of its range.

    Example:
        >>> import olla
        >>> builder = olla.Graph.builder("fork")
        >>> a, b = builder.tensor(100), builder.tensor(10)
        >>> _ = builder.op("large", writes=[a]), builder.op("small", writes=[b]), builder.op("use", reads=[a])
        >>> plan = olla.plan(builder.build(), time_limit=1.0)
        >>> plan.program_peak_bytes, plan.peak_bytes, plan.gap
        (110, 100, 0.0)
    """
    from olla.budgets import Goal, Swapping
    from olla.pipeline import Options, run

    autoswap = method == "autoswap"  # keeps the order, and rewrites the graph
    options = Options(
        method="program" if autoswap else method,
        time_limit=time_limit,
        seed=seed,
        alignment=alignment,
        layout=layout,
        updates_may_move=updates_may_move,
        precedences=tuple(precedences),
        order=None if order is None else np.array(order),
    )
    goal = Goal.of(budget, max_slowdown, minimise, device, in_place, recompute, chunked_loss)
    swapping = Swapping.of(swap, host_budget, link, method, goal)
    if swapping is not None:
        from olla import combine

        how: dict[str, Any] = {**vars(swapping), "progress": progress}
        if autoswap or goal is None:
            return combine.autoswap(graph, options, goal, device=device, **how)
        return combine.run(graph, options, goal, **how)
    if goal is not None:
        from olla import budget as budgeted

        return budgeted.run(graph, options, goal, progress)
    return run(graph, options, progress)
