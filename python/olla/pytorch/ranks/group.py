"""Agreement between the ranks of a step before they run it: small objects, over a gloo group of their own.

Every rank takes part in every exchange. Waiting is bounded by the time-out of the step's group, and Ctrl-C ends it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from olla import errors
from olla.errors import OllaError, ReplayError
from olla.pytorch.ranks.collectives import resolved

T = TypeVar("T")


class Ranks:
    """The ranks that run one step.

    Args:
        members: their global ranks.
        timeout: of one exchange.

    Attributes:
        rank: position of this one.
        size: how many there are.
    """

    def __init__(self, members: list[int], timeout: datetime.timedelta) -> None:
        self.size = len(members)
        self.rank = members.index(dist.get_rank())
        self._timeout = timeout
        local = self.size < dist.get_world_size()
        self._members = members
        self._group = self._waited(
            lambda: dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=local)
        )

    def gather(self, value: Any) -> list[Any]:
        """Return what every rank gives here, in their order; values are what `json` takes.

        Raises:
            ReplayError: a rank is gone, or takes longer than the time-out.
        """
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.numbers(len(text))
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(text)] = text
        found = torch.zeros(self.size * len(padded), dtype=torch.uint8)
        self._run(lambda: dist.all_gather_into_tensor(found, padded, group=self._group, async_op=True))
        rows = found.reshape(self.size, -1)
        return [json.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)]

    def numbers(self, value: int) -> list[int]:
        """Return the whole number that every rank gives here.

        Raises:
            ReplayError: see `gather`.
        """
        found = torch.zeros(self.size, dtype=torch.int64)
        own = torch.tensor([value], dtype=torch.int64)
        self._run(lambda: dist.all_gather_into_tensor(found, own, group=self._group, async_op=True))
        numbers: list[int] = found.tolist()
        return numbers

    def first(self, make: Callable[[], Any]) -> Any:
        """Return what the first rank makes; the others wait for it.

        Raises:
            OllaError: what `make` raised, on every rank.
            ReplayError: see `gather`.
        """
        text = self.together(lambda: bytearray(json.dumps(make() if self.rank == 0 else None).encode()))
        size = self.numbers(len(text))[0]
        content = torch.frombuffer(text, dtype=torch.uint8) if self.rank == 0 else torch.zeros(size, dtype=torch.uint8)
        source = self._members[0]
        self._run(lambda: dist.broadcast(content, source, group=self._group, async_op=True))
        return json.loads(bytes(content.numpy()))

    def together(self, run: Callable[[], T]) -> T:
        """Run something on every rank; where one of them fails, all do.

        Raises:
            OllaError: of this rank, or naming the first other one that failed.
        """
        result: Any = None
        own: Exception | None = None
        try:
            result = run()
        except Exception as raised:
            own = raised
        failed = self.gather(None if own is None else _described(own))
        if own is not None:
            raise own
        for rank, error in enumerate(failed):
            if error is not None:
                raise _raised(rank, error)
        found: T = result
        return found

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Run a step inside this context; where one of its collectives fails, the error says what that means.

        Raises:
            ReplayError: a rank is gone, or took longer than the time-out of the step's group.
        """
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise ReplayError(
                f"rank {self.rank} of {self.size} lost the others in the middle of a step: one of them ended, or took "
                f"longer than the time-out of the group ({self._timeout.total_seconds():g} s). Look at what the other "
                "ranks printed, and start all again from a checkpoint: some parameters may have their new values "
                f"({error})"
            ) from error

    def _run(self, begin: Callable[[], Any]) -> None:
        """Run a collective, asking for its end again and again: a thread that waits in C++ hears no Ctrl-C."""

        def wait() -> None:
            work = begin()
            while not work.is_completed():
                time.sleep(0)
            work.wait()

        self._waited(wait)

    def _waited(self, run: Callable[[], T]) -> T:
        try:
            return run()
        except (RuntimeError, ValueError) as error:
            raise ReplayError(
                f"rank {self.rank} of {self.size} could not agree with the others on the step: one of them ended, or "
                f"took longer than the time-out of the group ({self._timeout.total_seconds():g} s). Look at what the "
                f"other ranks printed, or give init_process_group a longer timeout ({error})"
            ) from error


def ranks_of(groups: Iterable[str]) -> Ranks | None:
    """Return the ranks that have to agree on a step; None where this process has nobody to agree with.

    Those of the group, given by name, that it communicates in; where there are several, all ranks.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    names = list(dict.fromkeys(groups))
    group = resolved(names[0]) if len(names) == 1 else dist.group.WORLD
    members = dist.get_process_group_ranks(group)
    if len(members) < 2 or dist.get_backend(group) == "fake":
        return None
    return Ranks(members, timeout_of(group))


def timeout_of(group: Any) -> datetime.timedelta:
    """Return the time-out of a group."""
    for device in ("cpu", "cuda"):
        try:
            found: datetime.timedelta = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        return found
    return dist.default_pg_timeout


def _described(error: Exception) -> list[Any]:
    return [type(error).__name__, str(error), getattr(error, "rule", ""), list(getattr(error, "ids", ()))]


def _raised(rank: int, described: list[Any]) -> OllaError:
    """Return the error of another rank."""
    kind, text, rule, ids = described
    known = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    made = known.get(kind)
    if made is None or not issubclass(made, OllaError):
        made, text = ReplayError, f"{kind}: {text}"
    return made(f"rank {rank}: {text}", rule=rule, ids=tuple(ids))
