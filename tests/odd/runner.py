"""Runs an odd loop eagerly and compiled, each in a world of its own, and says what came of it."""

from __future__ import annotations

import contextlib
import json
import math
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

import olla
from tests.odd.loops import REGISTER, Loop, Odd, be_process, cleanup
from tests.support.pytorch.steps import printed_by_two_processes, torch

TIME_LIMIT = 0.05
# In a wrapped loss, and in pieces of a step that is refused: see docs/wrap.md.
UNSEEN = ("generator_returned", "number_behind_an_attribute_of_a_metaclass")
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "peak": {"minimise": "peak"},
    "swap": {"max_slowdown": 0.5, "swap": True},
    "run": {"on_unsupported": "warn"},
}
WRAPPED = ("wrap", "loss")  # olla.wrap around the model, or around the function that gives the loss
CLASSES = ("equal", "rounding", "error", "WRONG", "RAW")
UNSEEN_BY_STEPS = ("number_behind_an_attribute_of_a_metaclass",)  # see docs/step.md
MIN_REMEDY = 60  # characters; less says what is wrong at most


@dataclass
class Moment:
    """What the user sees behind one step."""

    result: Any
    error: BaseException | None
    before: Any
    tensors: Any
    seen: Any


@dataclass
class Verdict:
    """What came of a loop: one of CLASSES, and why."""

    name: str
    kind: str
    note: str = ""
    num_captures: int = 0
    cached: bool = False

    @property
    def fails(self) -> bool:
        """Whether the loop breaks the promise."""
        entry = REGISTER[self.name]
        if self.kind == "error" or (self.kind == "rounding" and not entry.may_round):
            return self.kind == "rounding" or entry.must_be_equal
        too_many = entry.num_captures is not None and self.num_captures > entry.num_captures
        return self.kind in ("WRONG", "RAW") or too_many

    def __str__(self) -> str:
        mark = "*" if self.fails else " "
        return f"{mark} {self.name:<58} {self.kind:<8} {self.num_captures:>2}  {self.note[:150]}"


def judge(entry: Odd, mode: str = "plain") -> Verdict:
    """Run a loop both ways and compare what the user sees behind each step."""
    eager, _ = _moments(entry)
    try:
        options = (
            {"time_limit": TIME_LIMIT, "wrapped": mode}
            if mode in WRAPPED
            else {"time_limit": TIME_LIMIT, "cache_size": 64, **MODES[mode]}
        )
        planned, step = _moments(entry, options, eager)
    except BrokenLoop as error:
        return Verdict(entry.name, "RAW", f"beside the step: {error}")
    kind, note = _compared(eager, planned)
    verdict = Verdict(entry.name, kind, note)
    with contextlib.suppress(olla.OllaError):
        if step is not None:
            report = step.report()
            verdict.num_captures, verdict.cached = report.num_captures, report.cached
    return verdict


def in_two_processes(names: Sequence[str], folder: Path) -> list[Verdict]:
    """Run loops in one process and again in another one, on one disk cache; the verdicts of both.

    What a loop takes from loops.of_process differs between the two.
    """
    here = Path(__file__).parents[2]
    child = f"import sys; sys.path[:0] = [{str(here)!r}]; from tests.odd.runner import child\n"
    child += f"child({list(names)!r}, {str(folder)!r})"
    return [Verdict(**v) for printed in printed_by_two_processes(child, folder) for v in json.loads(printed[-1])]


def child(names: Sequence[str], folder: str) -> None:
    """Judge loops in a process that in_two_processes starts."""
    from tests.odd import catalogue  # noqa: F401

    mark = Path(folder) / "first"
    be_process(int(mark.exists()))
    mark.touch()
    found = [asdict(judge(REGISTER[name])) for name in names]
    print(json.dumps(found, separators=(",", ":")).replace(" ", "\\u0020"))  # one word


def _moments(entry: Odd, options: Any = None, eager: Sequence[Moment] = ()) -> tuple[list[Moment], Any]:
    """What is seen behind each step, up to the first that is refused though the ordinary loop goes on."""
    with _own_settings():
        _seed(0)
        world = entry.build()
        for group in world.optimizer.param_groups if world.optimizer is not None else ():
            if "foreach" in group:
                group["foreach"] = False
        if options is not None and "wrapped" in options:
            _wrap(world, options["wrapped"])
        elif options is not None:
            world.step = world.compiled(**options | world.options)
        _seed(7)
        found = []
        for i in range(world.num_steps):
            found.append(_moment(world, i))
            if isinstance(found[-1].error, olla.OllaError) and eager[i].error is None:
                break
        return found, world.step


def _moment(world: Loop, i: int) -> Moment:
    result = error = before = None
    try:
        with _raises_only(olla.OllaError):
            world.change(i)
        before = _copy(world.tensors())
        with _raises_only():
            batch = world.batch(i) if callable(world.batch) else world.batch
        found = world.call(world.plain if world.step is None else world.step, batch)
        result = _copy(found)
        with _raises_only():
            world.after(i, found)
    except BaseException as caught:
        if type(caught) in (KeyboardInterrupt, SystemExit, BrokenLoop):
            raise
        error = caught
    return Moment(result, error, before, _copy(world.tensors()), _copy(world.seen()))


def _wrap(world: Loop, what: str) -> None:
    """Have a loop run as it is around a planned model, or a planned loss."""
    torch.compiler.reset()
    if what == "wrap" or world.loss is None:
        olla.wrap(world.model, max_slowdown=0.5, time_limit=TIME_LIMIT)
    else:
        world.loss = olla.wrap(world.loss, max_slowdown=0.5, time_limit=TIME_LIMIT)


class BrokenLoop(Exception):
    """What surrounds the step raised an error: the loop shows nothing."""


@contextlib.contextmanager
def _raises_only(*expected: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except expected:
        raise
    except Exception as error:
        raise BrokenLoop(f"{type(error).__name__}: {error}") from error


def _compared(eager: list[Moment], planned: list[Moment]) -> tuple[str, str]:
    worst, note = "equal", ""
    for i, (a, b) in enumerate(zip(eager, planned, strict=False)):
        if isinstance(b.error, olla.OllaError):
            worst, note = _refused(i, b, a.error is not None)
            if worst != "error" or a.error is None:
                return worst, note
            continue
        if b.error is not None and type(a.error) is not type(b.error):
            return "RAW", f"step {i} raises {type(b.error).__name__}: {b.error}".replace("\n", " ")
        if a.error is not None and b.error is None:
            return "WRONG", f"step {i} raises no {type(a.error).__name__}: {a.error}"
        for what in ("result", "tensors", "seen"):
            kind, where = _difference(getattr(a, what), getattr(b, what))
            if kind == "WRONG" and a.error is not None:  # how far a step came that fails is not promised
                return "error", f"step {i} raises {type(a.error).__name__} as the loop does; then {where}"
            if kind == "WRONG":
                return kind, f"{what} of step {i}: {where}"
            if kind == "rounding":
                worst, note = kind, f"{what} of step {i}: {where}"
    return worst, note


def _refused(i: int, refused: Moment, fails_anyway: bool) -> tuple[str, str]:
    text = f"step {i}: {refused.error}".replace("\n", " ")
    if len(str(refused.error)) < MIN_REMEDY:
        return "RAW", f"{text} (names no remedy)"
    kind, where = _difference(refused.before, refused.tensors)
    if kind != "equal" and refused.before is not None and not fails_anyway:
        return "WRONG", f"{text} - but {where} after it"
    return "error", text


def _difference(left: Any, right: Any) -> tuple[str, str]:
    """The worst difference between two values of any structure, and where it is."""
    (ours, spec), (theirs, other) = pytree.tree_flatten_with_path(left), pytree.tree_flatten_with_path(right)
    if spec != other:
        return "WRONG", f"eager has {str(spec)[:60]}, olla {str(other)[:60]}"
    worst = "equal", ""
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        if _same(a, b):
            continue
        where = f"{pytree.keystr(path)} is {_short(b)} in place of {_short(a)}"
        if not _close(a, b):
            return "WRONG", where
        worst = "rounding", where
    return worst


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))
    if (a.shape, a.dtype, a.device, a.layout) != (b.shape, b.dtype, b.device, b.layout):
        return False
    return bool(torch.equal(a, b) or ((a == b) | (a.isnan() & b.isnan())).all())


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.is_floating_point():
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-6, atol=1e-7)
    return isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-6)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.item():.9g}" if value.numel() == 1 else f"a tensor {list(value.shape)} {value.dtype}"
    return f"{value!r:.60}"


def _copy(value: Any) -> Any:
    """The value as it is now: tensors copied, other objects by their fields."""

    def leaf(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            is_real = type(x) is not FakeTensor and x.device.type != "meta" and not is_lazy(x)
            return x.detach().clone() if is_real else f"a {type(x).__name__} on {x.device.type}"
        if isinstance(x, int | float | complex | str | bytes | bool | None):
            return x
        return _copy(vars(x)) if hasattr(x, "__dict__") else repr(type(x))

    return pytree.tree_map(leaf, value)


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - what loops draw from


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """One thread, no warnings; what loops change of the process ends with them."""
    num_threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    argv, precision = list(sys.argv), torch.get_float32_matmul_precision()
    deterministic, random_state = torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), cleanup:
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.argv[:] = argv
        torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_autocast_enabled("cpu", False)
        torch.set_grad_enabled(True)
        torch.set_rng_state(random_state)
