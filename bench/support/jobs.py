"""Programs in processes of their own, beside each other or alone, within a time limit; they answer in JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.1
NO_TIME = "no time was left"


@dataclass(frozen=True)
class Job:
    """A program to run.

    Attributes:
        name: under which its answer is found.
        command: its last line of JSON on standard output is the answer.
        environment: beside this process's own.
        is_alone: nothing runs beside it, because its times count.
        most_seconds: after which it has failed.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    is_alone: bool = False
    most_seconds: float = 300.0


@dataclass(frozen=True)
class Answer:
    """What a program found.

    Attributes:
        found: its last line of JSON; None where it printed none.
        fault: why that is not all; empty where it is.
        is_failure: whether the fault is the program's own; else time ran out.
    """

    found: dict[str, Any] | None
    fault: str = ""
    is_failure: bool = False


class _Running:
    """A process at work."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.begin = time.monotonic()
        self._logs = [folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', job.name)}.{end}" for end in ("out", "err")]
        with self._logs[0].open("wb") as out, self._logs[1].open("wb") as err:
            self.process = subprocess.Popen(
                [*job.command],
                stdout=out,
                stderr=err,
                env={**os.environ, **job.environment},
                start_new_session=True,
            )

    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def stop(self) -> None:
        """End the process with all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def answer(self, fault: str = "", is_failure: bool = False) -> Answer:
        """Read what it printed; a status other than 0 is a fault."""
        status = self.process.wait()
        if not fault and status != 0:
            last = (self._logs[1].read_text(errors="replace").strip().splitlines() or [""])[-1]
            fault, is_failure = f"status {status}: {last[:200]}", True
        found = last_json(self._logs[0].read_text(errors="replace"))
        if not fault and found is None:
            fault, is_failure = "it printed no answer", True
        return Answer(found, fault, is_failure)


def last_json(text: str) -> dict[str, Any] | None:
    """Return the last line that is a JSON object."""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None


def run(
    jobs: Sequence[Job], *, until: float, num_at_once: int, folder: Path, tell: Callable[[Job, Answer], None]
) -> None:
    """Run programs in their order, as many beside each other as may be, until a point in time.

    Args:
        until: of `time.monotonic`; what has not ended by then is stopped, and told with what it found so far.
        folder: where their output goes.
        tell: called with every job, once, as soon as it has an answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting, running = list(jobs), list[_Running]()
    try:
        while (waiting or running) and time.monotonic() < until:
            while waiting and _may_start(waiting[0], running, num_at_once):
                running.append(_Running(waiting.pop(0), folder))
            time.sleep(POLL_SECONDS)
            for one in list(running):
                is_late = one.seconds() > one.job.most_seconds
                if one.process.poll() is None and not is_late:
                    continue
                running.remove(one)
                one.stop()
                late = f"stopped after {one.seconds():.0f} s" if is_late else ""
                tell(one.job, one.answer(late, is_late))
    finally:
        for one in running:
            one.stop()
    for one in running:
        tell(one.job, one.answer(f"{NO_TIME} after {one.seconds():.0f} s"))
    for job in waiting:
        tell(job, Answer(None, NO_TIME))


def _may_start(job: Job, running: Sequence[_Running], num_at_once: int) -> bool:
    if not running:
        return True
    return not job.is_alone and not running[0].job.is_alone and len(running) < num_at_once
