from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import olla
from olla.cli.parser import main
from olla.plan import Plan
from tests.support import buffers
from tests.support.plans import hard_graph, training_step

PLAN_KEYS = [
    *("graph", "num_ops", "num_tensors", "method", "status", "message", "peak_bytes", "lower_bound_bytes", "gap"),
    *("program_peak_bytes", "saved_bytes", "resident_bytes", "arena_bytes", "load_bytes", "arena_lower_bound_bytes"),
    *("fragmentation", "alignment", "seconds"),
]
LAYOUT_KEYS = [
    *("status", "height_bytes", "load_bytes", "bound_bytes", "num_buffers", "seconds", "capacity_bytes", "fits"),
]
BUFFERS = "id,lower,upper,size\na,0,3,4\nb,3,9,4\nc,0,9,4\n"


@pytest.fixture
def graph_file(tmp_path: Path) -> str:
    training_step().save(tmp_path / "graph.json.gz")
    return str(tmp_path / "graph.json.gz")


@pytest.fixture
def buffers_file(tmp_path: Path) -> str:
    (tmp_path / "buffers.csv").write_text(BUFFERS)
    return str(tmp_path / "buffers.csv")


def run(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "olla", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def one_line_of_error(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_plan_check_and_show_work_on_files(graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file = str(tmp_path / "plan.json")
    assert main(["plan", graph_file, "-o", plan_file]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "two layers: 6 ops, 8 tensors" in printed.out
    assert main(["check", graph_file, plan_file]) == 0
    assert capsys.readouterr().out == "ok: valid for two layers, peak 1.63 KiB, arena 2.00 KiB\n"
    assert main(["show", plan_file]) == 0
    assert capsys.readouterr().out == f"{Plan.load(plan_file)}\n"


def test_plan_json_is_one_object_with_all_figures(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", graph_file, "--json"]) == 0
    printed = capsys.readouterr().out
    summary = json.loads(printed)
    assert printed.count("\n") == 1
    assert list(summary) == PLAN_KEYS
    assert {"capture", "order", "layout", "check", "total"} <= summary["seconds"].keys()
    figures = [summary[key] for key in ("program_peak_bytes", "peak_bytes", "saved_bytes", "resident_bytes", "status")]
    assert figures == [1868, 1668, 200, 800, "optimal"]
    assert (summary["graph"], summary["num_ops"], summary["num_tensors"], summary["gap"]) == ("two layers", 6, 8, 0.0)


def test_plan_options_reach_the_planner(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    def summary(*options: str) -> dict[str, Any]:
        assert main(["plan", graph_file, "--json", *options]) == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    assert summary("--order-only")["arena_bytes"] == 0
    assert summary("--alignment", "4KiB")["alignment"] == 4096
    assert summary("--method", "program")["peak_bytes"] == 1868
    assert summary("--updates-stay")["peak_bytes"] == 1868
    assert summary("--seed", "7", "--time-limit", "2")["peak_bytes"] == 1668


def test_an_unknown_gap_is_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from olla.cli.commands import print_json

    print_json({"gap": float("inf"), "peak_bytes": 1})
    assert json.loads(capsys.readouterr().out) == {"gap": None, "peak_bytes": 1}


def test_a_plan_that_breaks_a_rule_is_bad_input(
    graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file = tmp_path / "plan.json"
    assert main(["plan", graph_file, "-o", str(plan_file)]) == 0
    content = json.loads(plan_file.read_text())
    plan_file.write_text(json.dumps({**content, "peak_bytes": content["peak_bytes"] - 1}))
    capsys.readouterr()
    assert main(["check", graph_file, str(plan_file)]) == 2
    assert "plan.json breaks rule 'peak': peak_bytes is reported as 1667" in one_line_of_error(capsys)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan", "missing.json"], "missing.json: cannot be read"),
        (["plan", "{graph}", "-o", "no/such/folder/plan.json"], "there is no folder no/such/folder"),
        (["plan", "{graph}", "-o", "{folder}"], "cannot be written: it is a folder"),
        (["check", "{graph}", "missing.json"], "missing.json: cannot be read"),
        (["check", "{graph}", "{graph}"], "format is 'olla-graph', expected 'olla-plan'"),
        (["show", "{graph}"], "this is no plan"),
        (["layout", "missing.csv"], "missing.csv: cannot be read"),
        (["plan", "{graph}", "-o", "{folder}/plan.jsn"], "plan.jsn: has an unknown ending, expected .json or .json.gz"),
        (["show", "{graph}", "--graph", "{graph}", "--html", "page.pdf"], "unknown ending, expected .html or .htm"),
        (["show", "{graph}", "--graph", "{graph}", "--memory-viz", "a.json"], "expected .pickle or .pkl"),
        (["fit", "a:b", "--memory", "1GB", "--plot", "a.jpg"], "a.jpg: has an unknown ending, expected .png"),
        (["plan", "README.md"], "README.md: has an unknown ending, expected .json or .json.gz or .onnx"),
        (["show", "README.md"], "README.md: has an unknown ending, expected .json or .json.gz"),
        (["layout", "{graph}"], "graph.json.gz: has an unknown ending, expected .csv or .csv.gz"),
        (["layout", "{folder}", "-o", "out.txt"], "out.txt: has an unknown ending, expected .csv or .csv.gz"),
        (["capture", "nonsense", "-o", "g.json"], "write MODULE:FUNCTION"),
        (["capture", "no_such_module:step", "-o", "g.json"], "No module named 'no_such_module'"),
        (["capture", "json:step", "-o", "g.json"], "module json has no function step"),
        (["capture", "time:time", "-o", "g.json"], "returned a float, expected (model, batch, optimizer, loss)"),
        (["capture", "os:uname_", "-o", "no/g.json"], "there is no folder no"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(
    args: list[str], message: str, graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([arg.format(graph=graph_file, folder=tmp_path) for arg in args]) == 2
    assert message in one_line_of_error(capsys)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "olla: error: the following arguments are required: COMMAND"),
        (["plan"], "olla: error: the following arguments are required: GRAPH (see olla plan --help)"),
        (["plan", "g.json", "--time-limit", "-1"], "'-1' is not a number of seconds"),
        (["plan", "g.json", "--time-limit", "nan"], "'nan' is not a number of seconds"),
        (["plan", "g.json", "--alignment", "0"], "'0' is not a size from 1 to 1.00 GiB, such as 512, 4KiB"),
        (["plan", "g.json", "--seed", "x"], "'x' is not a whole number"),
        (["plan", "g.json", "--method", "magic"], "invalid choice: 'magic'"),
        (["layout", "b.csv", "--capacity", "-5"], "'-5' is not a size from 0"),
        (["layout", "b.csv", "--capacity", "5 apples"], "'5 apples' is not a size from 0"),
        (["fly"], "invalid choice: 'fly'"),
    ],
)
def test_bad_usage_gets_one_line_and_status_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert message in one_line_of_error(capsys)


def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for args, word in ((["--help"], "capture"), (["plan", "--help"], "--updates-stay"), (["--version"], "olla ")):
        with pytest.raises(SystemExit) as caught:
            main(args)
        assert caught.value.code == 0
        assert word in capsys.readouterr().out


def test_layout_writes_offsets_and_says_how_good_they_are(
    buffers_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.csv"
    assert main(["layout", buffers_file, "-o", str(output), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert list(summary) == LAYOUT_KEYS
    assert [summary[key] for key in LAYOUT_KEYS[:5]] == ["optimal", 8, 8, 8, 3]
    rows = [row.split(",") for row in output.read_text().splitlines()]
    assert rows[0] == ["id", "lower", "upper", "size", "offset"]
    assert {row[4] for row in rows[1:]} == {"0", "4"}
    assert main(["layout", buffers_file, "--alignment", "512"]) == 0
    assert "3 buffers: height 1024 (1.00 KiB), load 1024 (1.00 KiB)" in capsys.readouterr().out


def test_layout_that_cannot_fit_has_status_1(buffers_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", buffers_file, "--capacity", "8"]) == 0
    capsys.readouterr()
    assert main(["layout", buffers_file, "--capacity", "7", "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["status"], summary["capacity_bytes"], summary["fits"]) == ("infeasible", 7, False)
    assert main(["layout", buffers_file, "--capacity", "7"]) == 1
    assert "no layout fits 7 bytes: proved" in capsys.readouterr().out


def test_layout_that_was_not_found_says_that_nothing_is_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = buffers.generate("tight", 1001, 1)
    path, output = tmp_path / "tight.csv", tmp_path / "out.csv"
    buffers.save(problem, path)
    command = ["layout", str(path), "-o", str(output), "--capacity", str(problem.load_bytes), "--threads", "1"]
    assert main([*command, "--time-limit", "0", "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["status"], summary["fits"]) == ("unknown", None)
    assert main([*command, "--time-limit", "0"]) == 1
    answer = capsys.readouterr().out
    assert "none found within" in answer
    assert "not proved" in answer
    assert not output.exists()


def test_layout_keeps_the_fixed_offsets_of_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "in.csv", tmp_path / "out.csv"
    path.write_text("id,lower,upper,size,fixed,preferred\na,0,2,4,8,\nb,0,1,4,,4\nc,1,2,4,-1,-1\n")
    assert main(["layout", str(path), "-o", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["height_bytes"] == 12
    assert [row.split(",")[4] for row in output.read_text().splitlines()[1:3]] == ["8", "4"]
    path.write_text("id,lower,upper,size,fixed\na,0,2,4,8\nb,0,1,4,10\n")
    assert main(["layout", str(path)]) == 2
    assert "buffer 0 at [8, 12) and buffer 1 at [10, 14)" in one_line_of_error(capsys)


def test_layout_names_the_line_of_a_buffer_that_ends_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.csv"
    path.write_text("id,lower,upper,size\na,0,2,4\nb,5,1,20\n")
    assert main(["layout", str(path)]) == 2
    error = one_line_of_error(capsys)
    assert "in.csv, line 3: the buffer is alive from lower = 5 to upper = 1; upper must be lower or later" in error


@pytest.mark.parametrize("name", ["graph.json.gz", "graph.json"])
def test_a_dash_is_standard_input_and_output(tmp_path: Path, name: str) -> None:
    training_step().save(tmp_path / name)
    command = [sys.executable, "-m", "olla"]
    made = subprocess.run(
        [*command, "plan", "-", "-o", "-"], input=(tmp_path / name).read_bytes(), capture_output=True, timeout=120
    )
    assert made.returncode == 0
    assert b"two layers: 6 ops" in made.stderr  # the table, beside the file
    (tmp_path / "plan.json").write_bytes(made.stdout)
    assert Plan.load(tmp_path / "plan.json").peak_bytes == 1668
    shown = subprocess.run([*command, "show", "-"], input=made.stdout, capture_output=True, timeout=120)
    assert (shown.returncode, shown.stderr) == (0, b"")
    checked = subprocess.run(
        [*command, "check", str(tmp_path / name), "-"], input=made.stdout, capture_output=True, timeout=120
    )
    assert checked.stdout.startswith(b"ok: valid for two layers")
    placed = subprocess.run(
        [*command, "layout", "-", "-o", "-"], input=BUFFERS.encode(), capture_output=True, timeout=120
    )
    assert placed.stdout.splitlines()[0] == b"id,lower,upper,size,offset"
    assert b"3 buffers: height 8" in placed.stderr


def test_show_and_check_print_json_too(graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file = tmp_path / "plan.json"
    assert main(["plan", graph_file, "-o", str(plan_file), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["show", str(plan_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == planned
    assert main(["check", graph_file, str(plan_file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"valid": True, "graph": "two layers", "peak_bytes": 1668, "arena_bytes": 2048}
    content = json.loads(plan_file.read_text())
    plan_file.write_text(json.dumps({**content, "peak_bytes": content["peak_bytes"] - 1}))
    assert main(["check", graph_file, str(plan_file), "--json"]) == 2
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["valid"], found["rule"]) == (False, "peak")
    assert "peak_bytes is reported as 1667" in found["message"]
    assert "breaks rule 'peak'" in printed.err


def test_a_warning_is_one_line_without_a_place_in_the_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import warnings\nfrom types import SimpleNamespace\nfrom olla import Graph\n"
        "def step():\n    warnings.warn('two\\nlines', stacklevel=1)\n"
        "    return SimpleNamespace(graph=Graph.load('step.json'))\n"
    )
    training_step().save(tmp_path / "step.json")
    done = run("capture", "train:step", "-o", "graph.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "olla: warning: two lines\n")


WITHOUT_TORCH = [
    "olla.compile", "olla.capture", "olla.pool", "olla.Step", "olla.from_fx", "olla.from_export", "olla.inductor",
    "olla.device_profile()", "__import__('olla.integrations.transformers')",
]  # fmt: skip


@pytest.mark.parametrize("call", WITHOUT_TORCH)
def test_whatever_needs_torch_says_how_to_get_it(call: str) -> None:
    program = f"import sys; sys.modules['torch'] = None\nimport olla\ntry: {call}\nexcept ImportError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    extra = "transformers" if "transformers" in call else "torch"
    assert done.stdout == f'torch is not installed: pip install "olla-planner[{extra}]"\n', done.stderr


def test_a_fit_without_torch_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    program = "import sys; sys.modules['torch'] = None; from olla.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "fit", "train:step", "--memory", "1GB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    expected = 'olla: error: train:step: torch is not installed: pip install "olla-planner[torch]"\n'
    assert (done.returncode, done.stderr) == (2, expected)


def test_the_module_runs_as_a_program(graph_file: str) -> None:
    done = run("plan", graph_file, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert list(json.loads(done.stdout)) == PLAN_KEYS
    failed = run("plan", "missing.json")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "olla: error: missing.json: cannot be read: No such file or directory\n"


def test_a_reader_that_goes_away_is_no_traceback(graph_file: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "olla", "plan", graph_file]
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_capture_without_torch_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def step():\n    return 'model', 'batch', None, None\n")
    program = "import sys; sys.modules['torch'] = None; from olla.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "capture", "train:step", "-o", "graph.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "olla-planner[torch]" in done.stderr


def test_capture_writes_the_graph_of_a_captured_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training_step().save(tmp_path / "step.json")
    (tmp_path / "my_step.py").write_text(
        "from types import SimpleNamespace\n"
        "from olla import Graph\n"
        "def step():\n    return SimpleNamespace(graph=Graph.load('step.json'))\n"
        "def broken():\n    raise ValueError('two\\nlines')\n"
    )
    done = run("capture", "my_step:step", "-o", "graph.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "graph.json: two layers, 6 ops, 8 tensors, 800 B resident\n"
    assert (tmp_path / "graph.json").read_bytes() == (tmp_path / "step.json").read_bytes()
    failed = run("capture", "my_step:broken", "-o", "graph.json", cwd=tmp_path)
    assert failed.stderr == "olla: error: my_step:broken failed with ValueError: two lines\n"
    assert failed.returncode == 2


@pytest.mark.torch
def test_capture_traces_the_step_a_function_returns(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "def step():\n"
        "    model = torch.nn.Linear(8, 4)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    return model, torch.ones(2, 8), optimizer, lambda model, x: model(x).square().mean()\n"
    )
    done = run("capture", "train:step", "-o", "graph.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Linear" in done.stdout
    assert run("plan", "graph.json", "--json", cwd=tmp_path).returncode == 0


def test_a_terminal_sees_a_progress_line_after_a_second(tmp_path: Path) -> None:
    hard_graph().save(tmp_path / "hard.json")
    command = [sys.executable, "-m", "olla", "plan", str(tmp_path / "hard.json"), "--time-limit", "4", "--json"]
    leader, follower = pty.openpty()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=follower, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(follower)
        seen = b""
        try:
            while piece := os.read(leader, 4096):
                seen += piece
        except OSError:  # what Linux says when the other side is closed
            pass
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["status"] == "feasible"
    os.close(leader)
    assert b"bound" in seen
    assert b"Ctrl-C" in seen


def test_a_budget_on_the_command_line_is_planned_checked_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = olla.Graph.builder("chain")
    a, b, c, d = builder.tensor(100), builder.tensor(10), builder.tensor(100), builder.tensor(1)
    builder.op("a", writes=[a])
    builder.op("b", reads=[a], writes=[b])
    builder.op("c", reads=[b], writes=[c])
    builder.op("d", reads=[c], writes=[d])
    builder.op("e", reads=[a, d])
    graph, plan = str(tmp_path / "graph.json"), str(tmp_path / "plan.json")
    builder.build().save(graph)
    arguments = ["plan", graph, "--alignment", "1", "--budget"]
    assert main([*arguments, "150B", "--json", "-o", plan]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak_bytes"] == 110
    assert (found["num_recomputed"], found["swapped_bytes"], found["host_bytes"]) == (1, 0, 0)
    assert 0 < found["added_seconds_lower_bound"] <= found["added_seconds"] <= found["base_seconds"]
    assert found["peak_lower_bound_bytes"] <= 110
    assert main(["check", graph, plan]) == 0
    assert main(["show", plan]) == 0
    assert "added time" in capsys.readouterr().out
    assert main([*arguments, "50B"]) == 1
    assert "no plan fits it: every one needs at least 110 bytes" in capsys.readouterr().err
    assert main([*arguments, "150B", "--no-recompute"]) == 1
    assert main([*arguments, "16XB"]) == 2
    assert "unknown unit" in capsys.readouterr().err
    assert main(["plan", graph, "--max-slowdown", "10", "--device", "b100"]) == 2
