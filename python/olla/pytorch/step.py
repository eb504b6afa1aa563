"""olla.compile: a training step that runs in its planned order, in one arena. Importing this does not import torch."""

from __future__ import annotations

import dataclasses
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from olla.budgets import Goal, Swapping
from olla.devices import profile_of
from olla.errors import ReplayError
from olla.plan import Plan, plan
from olla.pytorch.capture import capture

if TYPE_CHECKING:
    import torch
    from torch.utils._pytree import TreeSpec

    from olla.devices import DeviceProfile
    from olla.graph import Graph
    from olla.pytorch.replay import Replay
    from olla.pytorch.runner import Runner
    from olla.report.step import StepReport
    from olla.swap import Link

_this_thread = threading.local()  # .running: whether a step runs on it


def compile(
    model: torch.nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    step: Callable[[Any, Any, Any], Any] | None = None,
    device: torch.device | str | None = None,
    time_limit: float = 15.0,
    seed: int = 0,
    updates_may_move: bool = True,
    arena: bool | None = None,
    cache_size: int = 8,
    cuda_graph: bool = False,
    disk_cache: bool = True,
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    minimise: str | None = None,
    plan_for: str | DeviceProfile | None = None,
    in_place: bool = True,
    recompute: bool = True,
    method: str = "auto",
    swap: bool | None = None,
    link: Link | float | None = None,
    host_budget: int | str | None = None,
    chunked_loss: int | None = None,
) -> Step:
    """Turn a training step into one that runs in planned order, in one arena; the first call captures and plans it.

    Parameters, buffers and optimizer state stay the user's own tensors: state_dict, checkpoints, param_groups, learning
    rate schedules and ``model.eval()`` work as before.

    Args:
        model: the model to train; which modules it consists of is fixed from now on.
        optimizer: see olla.capture. None: the gradients are left in ``.grad``, added to those already there.
        loss: ``loss(model, batch)`` returns the loss, or a tuple that starts with it. None: inference.
        step: ``step(model, optimizer, batch)``, the body of a training loop, in place of ``loss``: see olla.capture.
        device: where the model must be; not checked if not given.
        time_limit: seconds to search for an order; a fifth of it more for the layout.
        seed: for every random choice of the searches.
        updates_may_move: whether weight updates may run early, in the backward pass.
        arena: whether to run at planned addresses, or in planned order on torch's own allocator. None: on a CPU only;
            the allocator for CUDA is built, but has not been measured yet, so there it must be asked for.
        cache_size: captures to keep, the latest used. A batch of other shapes or types, another mode of a module,
            another frozen parameter and another setting of the optimizer (the learning rate aside) need one each.
        cuda_graph: whether to capture the planned step in a CUDA graph and to replay that: from the third call on, and
            anew when a learning rate changes, unless that is a tensor on the GPU. Built, not measured.
        disk_cache: whether captures and plans are kept on disk and found there again by later processes; see
            docs/step.md. What decides that they fit: model, loss, optimizer, shapes, versions and source files.
        budget: the memory there is, "16GB", "16GiB" or bytes, for resident tensors, outputs and the arena: ops run
            again, and results take over inputs that die, until the step fits, in the least added time. Results stay
            the same to the bit.
        max_slowdown: in place of a budget: the least peak within this share of added time; 0.05 is 5 %.
        minimise: "peak", in place of a budget: the least peak at whatever time.
        plan_for: what added time is estimated for, see olla.plan; by default "cpu" or "a100", by where the model is.
        in_place: whether a budget may let results take over inputs.
        recompute: whether a budget may run ops again.
        method: "auto", or "autoswap": the program order, tensors swapped by AutoSwap, with or without a budget.
        swap: whether a budget may copy tensors to host memory and back; default: where ``host_budget`` says how much of
            it there is. On CUDA that is built, not measured.
        link: to host memory: an olla.swap.Link, or bytes per second both ways; by default that of ``plan_for``.
        host_budget: the host memory there is for swapping, in bytes or as text.
        chunked_loss: with a goal: compute large linear layers with their cross-entropy in so many chunks of rows. This
            changes rounding, and is off unless asked for.

    Returns:
        The step: ``step(batch)`` runs it and returns what ``loss`` or ``step`` returned.

    Raises:
        ReplayError: the model is elsewhere than ``device``, or not on a GPU with ``cuda_graph=True``.
        BudgetError: the budget is no number of bytes. A call of the step raises it where nothing fits the budget.
        ValueError: cache_size is below 1, an option of the budget is out of its range, or the method is unknown.

    Example:
        >>> import torch, olla
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss = lambda model, x: model(x).square().mean()
        >>> step = olla.compile(model, optimizer=optimizer, loss=loss, arena=False)
        >>> losses = [float(step(torch.ones(2, 8))) for _ in range(3)]
        >>> losses[2] < losses[1] < losses[0]
        True
    """
    profile = _profile(model, plan_for)
    goal = Goal.of(budget, max_slowdown, minimise, profile, in_place, recompute, chunked_loss)
    return Step(
        model,
        optimizer,
        loss,
        step,
        device,
        {"time_limit": time_limit, "seed": seed, "updates_may_move": updates_may_move},
        arena,
        cache_size,
        cuda_graph,
        disk_cache,
        goal,
        _swapping(profile, goal, method, swap, link, host_budget),
        method == "autoswap",
        profile,
    )


def _profile(model: torch.nn.Module, plan_for: str | DeviceProfile | None) -> DeviceProfile:
    if plan_for is None:
        tensors = [*model.parameters(), *model.buffers()]
        plan_for = "a100" if any(t.device.type == "cuda" for t in tensors) else "cpu"
    return profile_of(plan_for)


def _swapping(
    profile: DeviceProfile,
    goal: Goal | None,
    method: str,
    swap: bool | None,
    link: Link | float | None,
    host_budget: int | str | None,
) -> Swapping | None:
    from olla.swap import Link

    if method not in ("auto", "autoswap"):
        raise ValueError(f"method is {method!r}, expected 'auto' or 'autoswap': the others plan, see olla.plan")
    found = Swapping.of(swap, host_budget, link, method, goal)
    return found and dataclasses.replace(found, link=Link.of(profile if link is None else link))


class Step:
    """A compiled training step; made by olla.compile.

    An exception in the middle of a call (out of memory, Ctrl-C) leaves the process healthy and the next call correct;
    as in an ordinary loop, buffers, and parameters whose update ran already, then have their new values.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        loss: Callable[[Any, Any], Any] | None,
        step: Callable[[Any, Any, Any], Any] | None,
        device: torch.device | str | None,
        options: dict[str, Any],
        arena: bool | None,
        cache_size: int,
        cuda_graph: bool,
        disk_cache: bool,
        goal: Goal | None = None,
        swapping: Swapping | None = None,
        by_autoswap: bool = False,
        profile: str | DeviceProfile = "a100",
    ) -> None:
        import torch

        from olla.pytorch.copies import HostMemory
        from olla.pytorch.feeds import Feed

        if cache_size < 1:
            raise ValueError(f"cache_size is {cache_size}, expected 1 or more")
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self._body = step
        self._feed = Feed(model, optimizer)
        self._options = options
        self._arena = arena
        self._cache_size = cache_size
        self._cuda_graph = cuda_graph
        self._disk_cache = disk_cache
        self._goal = goal
        self._swapping = swapping
        self._by_autoswap = by_autoswap
        self._profile = profile
        self._host = HostMemory(self._feed.device.type)
        self._runners: OrderedDict[Hashable, Runner] = OrderedDict()  # the latest used last
        self._lock = threading.Lock()
        self._replay: Replay | None = None
        self._note = ""
        if cuda_graph and self._feed.device.type != "cuda":
            raise ReplayError(
                f"cuda_graph=True needs CUDA, and the model is on {self._feed.device}: move it there, or leave it out"
            )
        if swapping is not None and cuda_graph:
            raise ReplayError("a step that swaps cannot be a CUDA graph yet: leave cuda_graph or swapping out")
        if device is not None and (wanted := torch.device(device)) != self._feed.device:
            here = self._feed.device
            if wanted.type != here.type or wanted.index not in (None, here.index):
                raise ReplayError(f"the step is meant for {wanted}, and the model is on {here}: move it, then compile")

    def __call__(self, batch: Any) -> Any:
        """Run one step.

        Args:
            batch: see olla.capture. The first one with new shapes or types is captured and planned before it runs.

        Returns:
            What ``loss(model, batch)`` returns, without a gradient; without a loss, what the model returns.

        Raises:
            CaptureError: the step cannot be captured.
            ReplayError: the step is called by one of its own operators.
        """
        if getattr(_this_thread, "running", False):
            raise ReplayError(
                "a step was called while another one runs on the same thread: "
                "call it after that one has returned, not from its operators or its loss function"
            )
        _this_thread.running = True
        try:
            with self._lock:
                return self._run(batch)
        finally:
            _this_thread.running = False

    @property
    def graph(self) -> Graph:
        """The step that runs, for the shapes it ran with last; with workspaces and seconds if it was recorded.

        With a budget it is the rewritten graph: op i stands for op ``plan.origin[i]`` of the captured one.
        """
        return self._latest.graph

    @property
    def plan(self) -> Plan:
        """The plan of this graph. The layout of the arena is not in it: that one knows every request for memory."""
        return self._latest.plan

    def report(self) -> StepReport:
        """Return memory and time of the step, for the shapes it ran with last.

        Raises:
            ReplayError: the step has not run yet.
        """
        return self._latest.report(len(self._runners))

    def release(self) -> None:
        """Give the memory of the arena, and that in the host, back until the next call, for work outside the step."""
        self._host.release()
        if self._replay is not None:
            self._replay.release()

    def __repr__(self) -> str:
        return f"<Step of {type(self.model).__name__}, {len(self._runners)} captures>"

    @property
    def _latest(self) -> Runner:
        if not self._runners:
            raise ReplayError("the step has not run yet: call step(batch) once, then ask for its report")
        return next(reversed(self._runners.values()))

    def _run(self, batch: Any) -> Any:
        from olla.pytorch.feeds import flatten

        leaves, spec = flatten(batch)
        key = self._feed.key(leaves, spec)
        latest = next(reversed(self._runners), None)
        if key == latest:  # to hash it takes longer
            return self._give_back(self._latest, self._latest.run(leaves))
        runner = self._runners.get(key)
        if runner is None:
            runner = self._prepare(batch, leaves, spec)
        results = runner.run(leaves)
        self._runners[key] = runner
        self._runners.move_to_end(key)
        if len(self._runners) > self._cache_size:
            self._runners.popitem(last=False)
            warnings.warn(
                f"the step needed more than {self._cache_size} captures: pad batches to few shapes, keep settings of "
                "the optimizer other than the learning rate constant, or raise cache_size",
                stacklevel=3,
            )
        return self._give_back(runner, results)

    def _prepare(self, batch: Any, leaves: Sequence[Any], spec: TreeSpec) -> Runner:
        from olla.pytorch.budgeted import Planner
        from olla.pytorch.cache import find
        from olla.pytorch.runner import Runner, device_type
        from olla.report.progress import ProgressLine

        planner, options = None, self._options
        if self._goal is not None or self._swapping is not None:
            by: dict[str, Any] = {"by_autoswap": self._by_autoswap, "device": self._profile}
            planner = Planner(self._goal, self._options, self._swapping, **by, replays=not self._cuda_graph)
            options = {**self._options, "goal": self._goal, "swapping": self._swapping, **by}
        with ProgressLine(f"compiling {type(self.model).__name__}") as progress:
            place = (
                find(self.model, self.optimizer, self.loss, self._body, leaves, spec, options)
                if self._disk_cache
                else None
            )
            known = place.load() if place is not None else None
            if known is None:
                captured = capture(self.model, batch, optimizer=self.optimizer, loss=self.loss, step=self._body)
                captured.structure.check()
                found: Plan
                if planner is None:
                    found = plan(captured, layout=False, progress=progress, **self._options)
                else:
                    captured, found = planner.plan(captured, device_type(captured), progress)
                if place is not None:
                    place.save(captured, found)
            else:
                captured, found = known
                captured = planner.known(captured, found) if planner is not None else captured
            replay, note = self._planned_memory()
        sources = self._feed.sources(captured.inputs)
        return Runner(captured, found, sources, replay, note, place, self._cuda_graph, planner, self._host)

    def _planned_memory(self) -> tuple[Replay | None, str]:
        """Return the planned memory of the device, or None and why there is none."""
        if self._arena is False:
            return None, "arena=False: torch's own allocator."
        if self._arena is None and self._feed.device.type != "cpu":
            return None, f"Planned addresses are not measured on {self._feed.device.type} yet: ask with arena=True."
        if self._replay is None and not self._note:
            from olla.pytorch.replay import load

            try:
                self._replay = load(self._feed.device)
            except ReplayError as error:
                self._note = f"The step runs in planned order on torch's own allocator, in no arena: {error}"
                warnings.warn(self._note, stacklevel=5)
            else:
                weakref.finalize(self, self._replay.release).atexit = False
        return self._replay, self._note

    def _give_back(self, runner: Runner, results: Sequence[torch.Tensor]) -> Any:
        """Leave gradients in .grad, and return what the loss function returned."""
        from olla.pytorch.results import accumulate

        if self.optimizer is not None:
            # A learning-rate scheduler warns unless it sees that the optimizer stepped.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        num_values = runner.structure.num_tensors
        for (name, is_own), gradient in zip(runner.gradients, results[num_values:], strict=True):
            accumulate(self._feed.parameter(name), gradient, is_own)
        return runner.structure.fill(results[:num_values])
