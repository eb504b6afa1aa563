"""The examples of docs/scale.md run; of SLURM only the line of a job, with its variables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fans import idle
from tests.support.plans import training_step

TEXT = (Path(__file__).parents[2] / "docs/scale.md").read_text()
PYTHON, RAY = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
(CONSOLE,) = re.findall(r"^```console\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
(SLURM,) = re.findall(r"^```bash\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "graphs").mkdir()
    training_step().save(tmp_path / "graphs/a.json.gz")
    idle(30).save(tmp_path / "graphs/b.json.gz")
    command = tmp_path / "bin/olla"  # this olla, whatever is installed
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m olla "$@"\n')
    command.chmod(0o755)
    return tmp_path


def ran(folder: Path, command: list[str], **variables: str) -> str:
    """Run a command where the graphs are and return what it printed."""
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_command_lines_run(folder: Path) -> None:
    first, second = CONSOLE.splitlines()
    assert "Planned: 2 of 2, 0 of them before." in ran(folder, ["bash", "-c", first])
    assert "Planned: 6 of 6, 0 of them before." in ran(folder, ["bash", "-c", second])


def test_python_runs(folder: Path) -> None:
    (folder / "all.py").write_text(PYTHON)
    assert "Planned: 4 of 4, 0 of them before." in ran(folder, [sys.executable, "all.py"])


def test_the_jobs_of_an_array_share_the_work(folder: Path) -> None:
    (folder / "job.sh").write_text(SLURM)
    for i in range(3):
        job = {"SLURM_ARRAY_TASK_ID": str(i), "SLURM_ARRAY_TASK_COUNT": "3"}
        assert f"Planned: {(2, 1, 1)[i]} of {(2, 1, 1)[i]}, 0 of them before." in ran(folder, ["bash", "job.sh"], **job)
    whole = SLURM.splitlines()[-1].partition(" --part")[0]
    assert "Planned: 4 of 4, 4 of them before." in ran(folder, ["bash", "-c", whole])


def test_ray_tasks_run(folder: Path) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "olla-planner[ray]"')
    (folder / "all.py").write_text("import ray\nray.init(num_cpus=2, include_dashboard=False)\n" + RAY)
    assert "Planned: 4 of 4, 0 of them before." in ran(folder, [sys.executable, "all.py"])
