"""Processes that take one item after the other; one that dies takes only its own item with it."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Died(NamedTuple):
    """A process ended without an answer.

    Attributes:
        exit_code: its exit status; -n where signal n ended it.
    """

    exit_code: int | None

    def __str__(self) -> str:
        """Say what became of the process."""
        code = self.exit_code
        if code is None or code >= 0:
            return f"its process ended with status {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"its process was ended by {name}" + (": was there too little memory?" if name == "SIGKILL" else "")


def each(
    function: Callable[[Item], Answer], items: Iterable[Item], num_processes: int
) -> Iterator[tuple[Item, Answer | Died]]:
    """Call a function on every item, in processes; closing the iterator ends them.

    Args:
        function: of a module, picklable as its items and answers; what it raises ends its process.
        items: what to call it on.
        num_processes: how many at once.

    Yields:
        Item and answer, as they come.
    """
    waiting, workers, tasks = deque(items), dict[Connection, SpawnProcess](), dict[Connection, Item]()
    try:
        while waiting or tasks:
            while waiting and len(tasks) < num_processes:
                idle = [connection for connection in workers if connection not in tasks]
                connection = idle[0] if idle else _start(function, workers)
                tasks[connection] = waiting.popleft()
                with suppress(OSError):  # it ended while it was idle: its next answer says so
                    connection.send(tasks[connection])
            for ready in wait(list(tasks)):
                assert isinstance(ready, Connection)
                item, answer = tasks.pop(ready), _answer(ready, workers)
                yield item, answer
    finally:
        for connection, process in workers.items():
            connection.close()
            process.terminate()
            process.join()


def _start(function: Callable[[Any], Any], workers: dict[Connection, SpawnProcess]) -> Connection:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(function, theirs), daemon=True)
    process.start()
    theirs.close()  # or its end would never be seen
    workers[ours] = process
    return ours


def _answer(connection: Connection, workers: dict[Connection, SpawnProcess]) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):
        process = workers.pop(connection)
        connection.close()
        process.join()
        return Died(process.exitcode)


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    """Answer until nobody asks any more. Ctrl-C is for the one who asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        connection.send(function(item))
