"""Many graphs, many goals: in processes, each result kept as soon as it is there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from olla.scale.folder import Folder, graphs_of
from olla.scale.result import ELSEWHERE, FAILED, Result
from olla.scale.task import completed, plan_file
from olla.scale.workers import Died, each


class _Task(NamedTuple):
    graph: str
    folder: str
    options: dict[str, Any]


def plan_files(
    graphs: Iterable[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    options: Sequence[Mapping[str, Any]] = ({},),
    *,
    jobs: int = 1,
    part: tuple[int, int] = (0, 1),
) -> Iterator[Result]:
    """Plan every graph for every goal, in processes, and keep plans and results in a folder.

    What the folder has is not planned again, so an interrupted run is taken up by calling it again; runs at the same
    time on one local folder share the work. A graph that cannot
    be read or planned, or a process that is killed, ends none of the others. Closing the iterator, or Ctrl-C, ends the
    processes; what is done is kept. A script that calls it needs `if __name__ == "__main__":`, as with all of
    `multiprocessing`.

    Args:
        graphs: paths, URLs and patterns of graph files.
        folder: path or URL.
        options: for each goal arguments of `olla.plan`, see `plan_file`.
        jobs: how many processes plan at once.
        part: (i, n): only every n-th pair of a graph and a goal, from the i-th on; for the jobs of an array.

    Yields:
        Results as they come: `plan_file` says what they hold.

    Raises:
        ValueError: an option is unknown or out of its range.
        BudgetError: a budget is no number of bytes.
        OllaError: the folder cannot be made, or a pattern names no graph.
    """
    first, step = part
    if not 0 <= first < step:
        raise ValueError(f"part is {part}, expected (i, n) with i from 0 to n - 1")
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}, expected 1 or more processes")
    for given in options:
        completed(given)
    place = Folder(folder).path
    tasks = [_Task(graph, place, dict(given)) for graph in graphs_of(graphs) for given in options][first::step]
    return _results(tasks, min(jobs, len(tasks)))


def _results(tasks: Sequence[_Task], jobs: int) -> Iterator[Result]:
    elsewhere = list[_Task]()  # of which another run plans each at the moment: they are waited for, when all is done
    for plan, those in ((_plan, tasks), (_wait_for, elsewhere)):
        for task, answer in each(plan, those, jobs):
            if isinstance(answer, Died):
                message = f"{task.graph}: {answer}"
                answer = Result(graph=task.graph, options=task.options, status=FAILED, message=message)
            if answer.status == ELSEWHERE:
                elsewhere.append(task)
            else:
                yield answer


def _plan(task: _Task) -> Result:
    return plan_file(*task, wait=False)


def _wait_for(task: _Task) -> Result:
    return plan_file(*task)
