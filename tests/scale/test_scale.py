"""Many graphs and goals: kept in a folder, not planned twice, none ended by another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import olla
from olla.cli.parser import main
from olla.errors import BudgetError, OllaError
from olla.scale import Folder, Result, graphs_of, plan_file, plan_files, text
from olla.scale.workers import Died, each
from tests.support.fans import idle
from tests.support.plans import hard_graph, training_step

SHORT = {"time_limit": 1.0}


@pytest.fixture
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graphs").mkdir()
    training_step().save("graphs/a.json.gz")
    idle(30).save("graphs/b.json")
    return ["graphs/a.json.gz", "graphs/b.json"]


def checked(result: Result) -> olla.Plan:
    """Return the plan of a result, which passes the checker."""
    plan = olla.Plan.load(result.plan)
    olla.check(olla.Graph.load(result.graph), plan)
    return plan


def test_every_pair_of_a_graph_and_a_goal_is_planned_and_kept(graphs: list[str]) -> None:
    goals = [SHORT, {**SHORT, "max_slowdown": 0.1}, {**SHORT, "budget": "1GiB"}]
    results = list(plan_files(["graphs/*"], "plans", goals, jobs=2))
    assert sorted((r.graph, str(r.options)) for r in results) == sorted((g, str(o)) for g in graphs for o in goals)
    assert {result.status for result in results} == {"planned"}
    for result in results:
        plan = checked(result)
        direct = olla.plan(result.graph, **result.options)
        assert plan.order.tolist() == direct.order.tolist()
        assert result.figures["peak_bytes"] == plan.peak_bytes == direct.peak_bytes
    names = {name for result in results for name in (f"{result.key}.json", f"{result.key}.plan.json.gz")}
    assert len(names) == 12
    assert set(os.listdir("plans")) == names


def test_what_the_folder_has_is_not_planned_again(graphs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan_file(graphs[0], "plans", SHORT)
    before = {path: path.stat().st_mtime_ns for path in Path("plans").iterdir()}
    monkeypatch.setattr("olla.scale.task.plan", None)  # whoever plans fails
    again = plan_file(graphs[0], "plans", {**SHORT, "seed": 0, "device": "a100"})  # the defaults, given
    assert again.status == "planned"
    assert (first.is_new, again.is_new) == (True, False)
    assert (again.key, again.plan, again.figures) == (first.key, first.plan, first.figures)
    assert before == {path: path.stat().st_mtime_ns for path in Path("plans").iterdir()}
    assert plan_file(graphs[0], "plans", {**SHORT, "seed": 1}).status == "failed"


def test_a_key_tells_costs_and_goals_apart(graphs: list[str]) -> None:
    content = olla.Graph.load(graphs[0]).to_dict()
    content["ops"][0]["seconds"] = 1.0  # the digest of a graph does not count them, a goal does
    Path("slow.json").write_text(json.dumps(content))
    tasks = [(graphs[0], {}), ("slow.json", {}), (graphs[0], {"budget": "2GB"}), (graphs[0], {"max_slowdown": 0.0})]
    keys = [plan_file(graph, "plans", {**SHORT, **goal}).key for graph, goal in tasks]
    assert len(set(keys)) == 4
    assert plan_file(graphs[0], "plans", {**SHORT, "budget": 2_000_000_000}).key == keys[2]


@pytest.mark.parametrize("damage", ["cut off", "no plan", "another version", "not json"])
def test_a_damaged_result_is_planned_again(graphs: list[str], damage: str) -> None:
    first = plan_file(graphs[0], "plans", SHORT)
    kept, plan = Path("plans", f"{first.key}.json"), Path(first.plan)
    if damage == "no plan":
        plan.unlink()
    elif damage == "another version":
        kept.write_text(kept.read_text().replace('"version":3', '"version":1'))
    else:
        kept.write_bytes(kept.read_bytes()[:40] if damage == "cut off" else b"[1]")
    again = plan_file(graphs[0], "plans", SHORT)
    assert again.is_new
    assert checked(again).peak_bytes == first.figures["peak_bytes"]
    assert not plan_file(graphs[0], "plans", SHORT).is_new


def test_a_budget_that_nothing_fits_is_an_answer_and_kept(graphs: list[str]) -> None:
    goal = {**SHORT, "budget": 900}
    first, again = (plan_file(graphs[0], "plans", goal) for _ in range(2))
    assert first.status == again.status == "nothing fits"
    assert (first.is_new, again.is_new, first.plan) == (True, False, "")
    assert "900" in again.message


def test_one_bad_file_ends_none_of_the_others(graphs: list[str]) -> None:
    Path("graphs/c.json").write_text("x")
    results = {r.graph: r for r in plan_files(["graphs/*", "missing.json"], "plans", [SHORT], jobs=2)}
    assert [results[graph].status for graph in graphs] == ["planned", "planned"]
    assert results["graphs/c.json"].message.startswith("graphs/c.json: is not JSON")
    assert results["missing.json"].message.startswith("missing.json: cannot be read")
    shown = text(results.values())
    assert "Planned: 2 of 4, 0 of them before; failed: 2." in shown
    assert "missing.json: cannot be read" in shown


def test_a_process_that_is_killed_takes_only_its_own_item(graphs: list[str]) -> None:
    items = ["1 + 1", "__import__('os').kill(__import__('os').getpid(), 9)", "__import__('os')._exit(3)", "2 + 2"]
    answers: dict[str, Any] = dict(each(eval, items, 2))
    assert [answers[items[0]], answers[items[3]]] == [2, 4]
    assert answers[items[1]] == Died(-9)
    assert "SIGKILL: was there too little memory?" in str(answers[items[1]])
    assert str(answers[items[2]]) == "its process ended with status 3"


def test_a_closed_iterator_ends_its_processes() -> None:
    items = ["1", "__import__('time').sleep(600)", "__import__('time').sleep(600)"]
    start = time.monotonic()
    answers = each(eval, items, 2)
    assert next(answers) == ("1", 1)
    answers.close()  # type: ignore[attr-defined]
    assert time.monotonic() - start < 60


def test_parts_are_all_and_each_once(graphs: list[str]) -> None:
    goals = [SHORT, {**SHORT, "seed": 1}, {**SHORT, "seed": 2}]
    parts = [list(plan_files(graphs, "plans", goals, part=(i, 4))) for i in range(4)]
    assert sorted(map(len, parts)) == [1, 1, 2, 2]
    assert all(result.is_new for part in parts for result in part)
    assert len(os.listdir("plans")) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precedences": []}, "there is no option 'precedences' for many graphs"),
        ({"link": olla.plan}, "link is a function, expected a number"),
        ({"time_limit": -1}, "time_limit is -1"),
        ({"budget": "16GB", "minimise": "peak"}, "budget and minimise are given"),
        ({"method": "best"}, "method is 'best'"),
    ],
)
def test_wrong_options_are_told_before_any_work(graphs: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(plan_files(graphs, "plans", [options]))
    assert not os.path.exists("plans")


def test_other_wrong_arguments_are_told(graphs: list[str]) -> None:
    with pytest.raises(BudgetError, match="budget 'much'"):
        list(plan_files(graphs, "plans", [{"budget": "much"}]))
    with pytest.raises(ValueError, match="part is"):
        list(plan_files(graphs, "plans", part=(2, 2)))
    with pytest.raises(ValueError, match="jobs is 0"):
        list(plan_files(graphs, "plans", jobs=0))
    with pytest.raises(OllaError, match=r"nothing\*\.json: no file has such a name"):
        graphs_of(["nothing*.json"])
    with pytest.raises(OllaError, match="no folder can be made there"):
        Folder("graphs/a.json.gz/plans")


def test_graphs_and_results_may_be_anywhere_that_fsspec_reaches(graphs: list[str]) -> None:
    fsspec = pytest.importorskip("fsspec", reason="URLs need fsspec")
    memory = fsspec.filesystem("memory")
    memory.put_file(graphs[0], "/bucket/graphs/a.json.gz")
    memory.pipe_file("/bucket/graphs/bad.json", b"x")
    found = graphs_of(["memory://bucket/graphs/*"])
    assert found == ["memory:///bucket/graphs/a.json.gz", "memory:///bucket/graphs/bad.json"]
    first, again = (plan_file(found[0], "memory://bucket/plans", SHORT) for _ in range(2))
    assert (first.status, first.is_new, again.is_new) == ("planned", True, False)
    assert plan_file(found[1], "memory://bucket/plans").message.startswith(f"{found[1]}: is not JSON")
    assert plan_file("memory://bucket/none.json", "memory://bucket/plans").status == "failed"
    assert sorted(Folder("memory://bucket/plans").names()) == [f"{first.key}.json", f"{first.key}.plan.json.gz"]
    memory.get_file(first.plan, "plan.json.gz")
    olla.check(olla.Graph.load(graphs[0]), olla.Plan.load("plan.json.gz"))
    local = plan_file(graphs[0], "plans", SHORT)
    assert local.key == first.key  # the same everywhere
    memory.rm("/bucket", recursive=True)


def test_without_fsspec_local_paths_work_and_urls_say_what_to_install(
    graphs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    assert plan_file(graphs[0], "plans", SHORT).status == "planned"
    with pytest.raises(OllaError, match=r"s3://bucket/plans: cannot be reached: .*; pip install fsspec"):
        Folder("s3://bucket/plans")


def test_the_command_plans_lists_of_goals_and_says_what_it_has(
    graphs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", *graphs, "--output-folder", "plans", "--jobs", "2", "--time-limit", "1"]
    assert main([*command, "--max-slowdown", "0.05,0.1"]) == 0
    assert "Planned: 4 of 4, 0 of them before." in capsys.readouterr().out
    assert main([*command, "--budget", "1GB,900"]) == 1
    assert "Planned: 2 of 4, 0 of them before; nothing fits: 2." in capsys.readouterr().out
    assert main([*command, "--max-slowdown", "0.1", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["status"], row["is_new"]) for row in rows] == [("planned", False)] * 2
    assert main([*command[:1], "missing.json", *command[1:]]) == 2
    assert "missing.json: cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["graphs/b.json"], "2 graphs are given: say with --output-folder where their plans go"),
        (["--part", "0/2"], "--part is for many graphs"),
        (["--max-slowdown", "0.1,0.2"], "2 values of --max-slowdown are given"),
        (["--output-folder", "plans", "-o", "plan.json"], "-o is for one plan"),
        (["--output-folder", "plans", "--budget", "much"], "budget 'much' is no number of bytes"),
        (["--output-folder", "plans", "--chunked-loss", "4"], "chunked_loss is for a goal"),
    ],
)
def test_wrong_arguments_of_the_command_get_one_line(
    graphs: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", graphs[0], *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("part", ["2/2", "x/3", "/2", "1"])
def test_a_part_that_is_none_is_refused(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", "a.json", "--part", part])
    assert left.value.code == 2
    assert "is not I/N" in capsys.readouterr().err


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_keeps_what_is_done_and_the_next_run_goes_on(graphs: list[str]) -> None:
    hard_graph().save("graphs/hard.json")
    command = [sys.executable, "-m", "olla", "plan", *graphs, "graphs/hard.json", "--output-folder", "plans"]
    long = [*command, "--time-limit", "3000", "--jobs", "2"]
    with subprocess.Popen(long, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        folder = Path("plans")
        while not folder.exists() or len(list(folder.glob("*.plan.json.gz"))) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)  # the second result follows its plan
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=100)
    assert process.returncode == 130, errors
    assert "Planned: 2 of 2, 0 of them before." in out
    assert errors == "olla: interrupted: 2 of 3 done and kept; the same command goes on from there\n"
    done = subprocess.run([*command[:-3], *command[-2:], "--time-limit", "3000"], capture_output=True, text=True)
    assert "Planned: 2 of 2, 2 of them before." in done.stdout
