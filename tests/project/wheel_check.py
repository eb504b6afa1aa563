"""Plan a small graph with the installed wheel: through the package, and through the `olla` command as a user would.

Not a pytest module: it runs in environments that hold the wheel and its dependencies only.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

import olla
import olla._core


def build_graph() -> olla.Graph:
    """Return two branches of unlike width that meet: running the narrow one first is better than the program order."""
    graph = olla.Graph.builder("wheel")
    source = graph.tensor(64, kind="input")
    wide, wide_end = graph.tensor(4096), graph.tensor(2048)
    narrow, narrow_end = graph.tensor(8192), graph.tensor(16)
    loss = graph.tensor(8)
    graph.op("widen", reads=[source], writes=[wide])
    graph.op("narrow", reads=[wide], writes=[wide_end])
    graph.op("widen", reads=[source], writes=[narrow])
    graph.op("narrow", reads=[narrow], writes=[narrow_end])
    graph.op("join", reads=[wide_end, narrow_end], writes=[loss])
    graph.output(loss)
    return graph.build()


def run(*arguments: str) -> str:
    """Run the `olla` command that stands beside this interpreter and return its standard output."""
    command = os.path.join(sysconfig.get_path("scripts"), "olla")
    done = subprocess.run([command, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"olla {' '.join(arguments)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    if run("--version") != f"olla {olla.__version__}\n":
        sys.exit(f"olla --version: expected the version of the package, {olla.__version__}, got {run('--version')!r}")
    graph = build_graph()
    with tempfile.TemporaryDirectory() as folder:
        graph_file, plan_file = str(Path(folder, "graph.json.gz")), str(Path(folder, "plan.json"))
        graph.save(graph_file)
        answer = json.loads(run("plan", graph_file, "-o", plan_file, "--json"))
        run("check", graph_file, plan_file)
    # Widest branch first: 64 resident bytes, 8192 and 16. No order can do with less at the op that needs all three.
    expected = {"num_ops": 5, "peak_bytes": 64 + 8192 + 16, "lower_bound_bytes": 64 + 8192 + 16}
    seen = {key: answer[key] for key in expected}
    if seen != expected or answer["program_peak_bytes"] <= answer["peak_bytes"]:
        sys.exit(f"the plan is not the best one: expected {expected}, got {answer}")
    native = Path(olla.__file__).parent / "pytorch" / "native"
    if not all((native / name).is_file() for name in ("memory.hpp", "module.cpp", "cpu_allocator.cpp")):
        sys.exit(f"the wheel lacks the sources of the planning allocator: expected them in {native}")
    for method in ("ilp", "joint"):  # by HiGHS, however the installed highspy brings it
        proved = olla.plan(graph, method=method)
        olla.check(graph, proved)
        if (proved.peak_bytes, proved.lower_bound_bytes) != (expected["peak_bytes"], expected["peak_bytes"]):
            sys.exit(f"method={method!r} does not prove the best plan: expected {expected}, got {proved}")
    plan = olla.plan(graph)
    olla.check(graph, plan)
    core, highspy = Path(olla._core.__file__).name, metadata.version("highspy")
    print(f"{core}, highspy {highspy}: planned {graph.num_ops} ops, peak {plan.peak_bytes} bytes")


if __name__ == "__main__":
    main()
