"""Which of the ONNX models that packages of PyPI ship are planned, what do they need, and why are the others refused?

The packages are those named below, as far as they are installed; onnx brings small models of operators as well, which
are counted in one line per folder. Every plan goes through `olla.check`. Where onnxruntime is installed, it runs
all others, unoptimized, and the bytes of all tensors that the planned graph and the model both know are compared.

    python bench/export/bench_onnx.py --markdown bench/results/export/onnx.md
    python bench/export/bench_onnx.py 'silero*' --no-run

It needs the package onnx, onnxscript to fold constants, and the packages with models. Exit status: 0; 1 if a tensor's
bytes differ.
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench

import olla
from bench.support.harness import Cell, Report
from olla.errors import OllaError
from olla.integrations.onnx_folding import folded
from olla.integrations.onnx_inputs import KnownInputs, close

# Import name -> name on PyPI.
PACKAGES = {
    "onnx": "onnx",
    "silero_vad": "silero-vad",
    "rapidocr_onnxruntime": "rapidocr-onnxruntime",
    "ddddocr": "ddddocr",
    "onnxruntime": "onnxruntime",
    "magika": "magika",
}
SMALL = ("pytorch-converted", "pytorch-operator", "simple")  # folders of onnx's small models


class Open(NamedTuple):
    """What a caller says of a model's inputs."""

    shapes: dict[str, tuple[int, ...]] = {}  # noqa: RUF012  (never changed)
    values: dict[str, int] = {}  # noqa: RUF012


# Pattern of the path -> what the model leaves open, as the package itself calls it.
OPEN = {
    "common.onnx": Open({"input1": (1, 1, 64, 200)}),
    "common_old.onnx": Open({"input1": (1, 1, 64, 200)}),
    "ch_PP-OCRv4_det_infer.onnx": Open({"x": (1, 3, 736, 736)}),
    "ch_PP-OCRv4_rec_infer.onnx": Open({"x": (6, 3, 48, 320)}),
    "ch_ppocr_mobile_v2.0_cls_infer.onnx": Open({"x": (6, 3, 48, 192)}),
    "silero_vad_half.onnx": Open({"input": (1, 576), "state": (2, 1, 128)}),
    "silero_vad_16k_sequence.onnx": Open({"input": (32, 576)}),
    "silero_vad_openvino_16k.onnx": Open(),
    "magika/*/*/model.onnx": Open({"bytes": (1, 2048)}),
    "silero_vad*.onnx": Open({"input": (1, 576), "state": (2, 1, 128)}, {"sr": 16000}),
}


def models() -> Iterator[tuple[str, Path]]:
    """Yield the models of the installed packages, each with its package's name."""
    for module, package in PACKAGES.items():
        found = util.find_spec(module)
        for folder in (found.submodule_search_locations or ()) if found else ():
            for path in sorted(Path(folder).rglob("*.onnx")):
                if "node" not in path.parts:  # one operator each, with strings, sequences and branches on purpose
                    yield package, path


def open_of(path: Path) -> Open:
    """Return what is to be said of a model's inputs."""
    return next((said for pattern, said in OPEN.items() if path.match(pattern)), Open())


def inputs_of(model: Any, said: Open) -> dict[str, np.ndarray]:
    """Return numbers for a run: ones, or what is said."""
    held = {tensor.name for tensor in model.graph.initializer}
    feed = {}
    for value in model.graph.input:
        if value.name in held:
            continue
        tensor = value.type.tensor_type
        shape = said.shapes.get(value.name, tuple(n.dim_value for n in tensor.shape.dim))
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        feed[value.name] = np.full(shape, said.values.get(value.name, 1), dtype=dtype)
    return feed


def tensors_of(model: Any) -> set[str]:
    """Return the names of all that the nodes of a model make."""
    return {key for node in model.graph.node for key in node.output if key}


def results_of(model: Any, wanted: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return tensors of a model, run as it is."""
    import onnxruntime as ort

    declared = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=key) for key in wanted if key not in declared)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(wanted, feed)) if wanted else []


def compared(path: Path, graph: olla.Graph, said: Open) -> tuple[int, list[str]]:
    """Run a model with all tensors that the graph names as outputs.

    Returns:
        How many tensors were compared, and in words those whose bytes differ.
    """
    model = onnx.load(path)
    feed, outputs = inputs_of(model, said), [value.name for value in model.graph.output]
    expected = results_of(model, outputs, feed)
    if not {graph.tensor_names[t] for t in graph.writes.item} <= tensors_of(
        model
    ):  # branches were taken: so they are here, weights included
        close(model, {tensor.name: 0 for tensor in model.graph.initializer}, KnownInputs(said.shapes, said.values))
        model, _ = folded(model)
    wanted = [key for key in graph.tensor_names if key in tensors_of(model)]
    results = results_of(model, wanted, {key: value for key, value in feed.items() if key not in said.values})
    found = dict(zip(wanted, results, strict=True))
    for key, value in zip(outputs, expected, strict=True):
        if key in found:
            np.testing.assert_allclose(found[key], value, rtol=1e-3, atol=1e-5, err_msg=f"{path.name}: {key}")
    planned = dict(zip(graph.tensor_names, graph.tensor_bytes.tolist(), strict=True))
    wrong = [
        f"{key}: {planned[key]:,} planned, {result.nbytes:,} in onnxruntime"
        for key, result in zip(wanted, results, strict=True)
        if planned[key] != result.nbytes
    ]
    return len(wanted), wrong


def row(path: Path, run: bool) -> tuple[list[Cell], list[str]]:
    """Return a model's row without its package, and what is wrong with its sizes."""
    said = open_of(path)
    num_nodes = len(onnx.load(path, load_external_data=False).graph.node)
    try:
        graph = olla.from_onnx(path, shapes=said.shapes, values=said.values)
    except (OllaError, ValueError) as error:
        reason = " ".join(str(error).removeprefix(f"{path}: ").split())
        return [path.stem, num_nodes, None, None, None, None, None, f"refused: {reason}"], []
    plan = olla.plan(graph)
    olla.check(graph, plan)
    num_compared, wrong = None, list[str]()
    if run:
        try:
            num_compared, wrong = compared(path, graph, said)
        except Exception as error:  # of classes of onnxruntime's own: an operator that it lacks
            print(f"{path.stem}: not run by onnxruntime: {' '.join(str(error).split())[:200]}", flush=True)
    mib = [n / 2**20 for n in (graph.resident_bytes, graph.program_peak_bytes, plan.peak_bytes)]
    verdict = "planned, proved optimal" if plan.peak_bytes == plan.lower_bound_bytes else "planned"
    return [path.stem, num_nodes, graph.num_ops, *mib, num_compared, verdict], wrong


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of models, such as 'silero*'; all by default")
    parser.add_argument("--no-run", action="store_true", help="do not run the models by onnxruntime")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the table there")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    run = not args.no_run and util.find_spec("onnxruntime") is not None
    columns = ["package", "model", "nodes", "ops", "resident MiB", "program order MiB", "planned MiB", "sizes compared"]
    report = Report("ONNX models that packages ship: planned, or refused and why", [*columns, "verdict"])
    small: dict[str, list[str]] = {}  # folder -> verdicts
    num_compared, all_wrong = 0, list[str]()
    for package, path in models():
        if args.names and not any(fnmatch.fnmatch(path.stem, name) for name in args.names):
            continue
        folder = next((part for part in path.parts if package == "onnx" and part in SMALL), None)
        cells, wrong = row(path, run and folder is None)
        all_wrong += [f"{path.stem}: {words}" for words in wrong]
        num_compared += int(cells[6] or 0)
        if folder is None:
            report.rows.append([package, *cells])
            print(report.rows[-1], flush=True)
        else:
            small.setdefault(folder, []).append(str(cells[-1]).replace("refused", f"{path.parent.name} refused"))
    planned = [str(r[-1]).startswith("planned") for r in report.rows]
    report.summary["planned and checked"] = f"{sum(planned)} of {len(planned)} models"
    for folder, verdicts in small.items():
        refused = [words for words in verdicts if "refused" in words]
        report.summary[f"onnx, small models of {folder}"] = f"{len(verdicts) - len(refused)} of {len(verdicts)} planned"
        for words in refused:
            name, _, reason = words.partition(" refused: ")
            report.summary[f"refused, {name}"] = reason
    report.summary["tensors whose bytes were compared with onnxruntime's"] = num_compared
    report.summary["of them different"] = "; ".join(all_wrong) or 0
    for package in ("onnxscript", *PACKAGES.values()):
        try:
            report.machine[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            report.machine[package] = "absent"
    report.print()
    for path in (args.markdown, args.json):
        if path:
            report.save(path)
    return int(bool(all_wrong))


if __name__ == "__main__":
    sys.exit(main())
