"""Damaged files and senseless arrays: a graph or one clear error, nothing else. OLLA_FUZZ sets how many."""

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from olla import Graph, GraphError, _core
from tests.support.damage import VALUES, flip_bit, move_chunk, swap_token
from tests.support.samples import FULL

NUM_CASES = int(os.environ.get("OLLA_FUZZ", "500"))


def small_graph(rng: random.Random) -> bytes:
    """The text of a graph file with a few ops."""
    b = Graph.builder(rng.choice(["", "small", "grün"]))
    tensors = [b.tensor(rng.randrange(100), kind="parameter", donated=rng.random() < 0.3) for _ in range(3)]
    for v in range(rng.randrange(6)):
        reads = rng.choices(tensors, k=rng.randrange(3))
        mutates = rng.choices(tensors, k=rng.randrange(2))
        written = [b.tensor(rng.randrange(100)) for _ in range(rng.randrange(3))]
        after = [rng.randrange(v)] if v and rng.random() < 0.3 else []
        b.op(f"op_{v}", reads=reads, mutates=mutates, writes=written, after=after, seconds=0.5, shape=[2, v])
        tensors += written
    b.output(rng.choice(tensors))
    return json.dumps(rng.choice([FULL, b.build().to_dict()])).encode()


def change_value(data: bytes, rng: random.Random) -> bytes:
    """Change one value of readable JSON, most often of an op, so that the file stays readable."""
    content: Any = json.loads(data)
    place = rng.choice([content, content["tensors"], content["ops"], content["ops"]])
    while place:
        key: Any = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.3:
            likely = [rng.randrange(6)] if isinstance(place[key], list) else rng.randrange(8)
            place[key] = rng.choice([rng.choice(VALUES), likely])
            break
        place = place[key]
    return json.dumps(content).encode()


def damaged_file(rng: random.Random) -> bytes:
    """A graph file, plain or gzip, with one value changed, or damaged one to three times before or after gzip."""
    data = small_graph(rng)
    kind = rng.choice(["value", "value", "text", "gzip"])
    if kind == "value":
        data = change_value(data, rng)
    elif kind == "text":
        for _ in range(rng.randrange(1, 4)):
            data = rng.choice([swap_token, swap_token, flip_bit, move_chunk])(data, rng)
    if kind == "gzip" or rng.random() < 0.3:
        data = gzip.compress(data, mtime=0)
    return rng.choice([flip_bit, move_chunk])(data, rng) if kind == "gzip" else data


def test_a_damaged_file_loads_or_gives_one_clear_error(tmp_path: Path) -> None:
    rng = random.Random(20220415)
    path = tmp_path / "damaged.json"
    rules: dict[str, int] = {}
    for case in range(NUM_CASES):
        data = damaged_file(rng)
        path.write_bytes(data)
        try:
            graph = Graph.load(path)
        except GraphError as error:
            message = str(error)
            assert message.startswith(f"{path}: "), (case, data, message)
            assert message.isprintable(), (case, data, message)
            assert len(message) < len(str(path)) + 400, (case, data, message)
            rules[error.rule] = rules.get(error.rule, 0) + 1
        else:
            assert Graph.from_dict(graph.to_dict()).digest == graph.digest, (case, data)
            profile = _core.profile(graph.core, np.arange(graph.num_ops, dtype=np.int32))
            assert profile.peak_bytes >= max(profile.live_bytes, default=0) >= 0, (case, data)
            rules["valid"] = rules.get("valid", 0) + 1
    # The damage is of many kinds, or this test would prove little.
    assert {"valid", "file", "type", "ids", "missing", "cycle", "two_writers"} <= rules.keys(), rules


def random_lists(rng: np.random.Generator, num_ops: int, num_ids: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Offsets and items, most often valid ones."""
    offset = np.zeros(num_ops + 1, dtype=np.int64)
    np.cumsum(rng.integers(0, 3, num_ops), out=offset[1:])
    item = rng.integers(0, max(num_ids, 1), offset[-1], dtype=np.int32)
    damage = rng.integers(0, 40)
    if damage == 0 and len(item):
        item[rng.integers(len(item))] = rng.choice([-1, num_ids, 2**31 - 1, -(2**31)])
    elif damage == 1:
        offset[rng.integers(len(offset))] = rng.choice([-1, 1, 2**31, 2**62, -(2**63), 2**63 - 1])
    elif damage == 2:
        rng.shuffle(offset)
    elif damage == 3:
        offset = offset[: rng.integers(len(offset))]
    elif damage == 4:
        item = item[: len(item) // 2]
    return offset, item


def test_senseless_arrays_give_a_graph_or_a_graph_error() -> None:
    rng = np.random.default_rng(4)
    rules: dict[str, int] = {}
    for _ in range(4 * NUM_CASES):
        n, t = int(rng.integers(0, 6)), int(rng.integers(0, 6))
        lists = [random_lists(rng, n, ids) for ids in (t, t, t, n)]
        if rng.random() < 0.8:  # else hardly a graph would come through
            lists[1] = (np.arange(n + 1).clip(max=t), np.arange(min(n, t), dtype=np.int32))
            lists[3] = (np.zeros(n + 1, dtype=np.int64), np.zeros(0, dtype=np.int32))
        sizes = rng.choice([0, 1, 9, 2**61], t, p=[0.3, 0.3, 0.35, 0.05]).astype(np.int64)
        workspace = rng.choice([0, 5, -1], n, p=[0.6, 0.35, 0.05]).astype(np.int64)
        flags = [np.zeros(length, dtype=np.uint8) for length in (t, n + (rng.random() < 0.05))]
        outputs = rng.integers(0, t + (rng.random() < 0.05), 1, dtype=np.int32) if t else np.zeros(0, dtype=np.int32)
        columns: list[Any] = [
            sizes,
            flags[0],
            *(array for pair in lists for array in pair),
            workspace,
            flags[1],
            outputs,
        ]
        try:
            graph = _graph_of(columns)
        except GraphError as error:
            rules[error.rule] = rules.get(error.rule, 0) + 1
        else:
            order = np.arange(n, dtype=np.int32)
            assert graph.is_order(order)
            _core.profile(graph, order)
            _core.spans(graph)
            rules["valid"] = rules.get("valid", 0) + 1
    assert {"valid", "lengths", "ids", "sizes", "cycle", "program_order", "two_writers"} <= rules.keys(), rules


def test_the_core_takes_no_other_dtype_shape_or_stride() -> None:
    good: list[Any] = [*_columns_of(Graph.from_dict(FULL))]
    _graph_of(good)
    for i, array in enumerate(good):
        other = np.int64 if array.dtype != np.int64 else np.int32
        strided = np.zeros((len(array), 2), dtype=array.dtype)[:, 0]
        for bad in (array.astype(other), array.astype(np.float64), strided, array.reshape(1, -1), list(array), None):
            if bad is strided and len(array) < 2:
                continue  # contiguous after all
            with pytest.raises(TypeError):
                _graph_of([*good[:i], bad, *good[i + 1 :]])


def _graph_of(columns: list[Any]) -> _core.CoreGraph:
    tensor_bytes, donated, *lists, workspace_bytes, random, outputs = columns
    reads, writes, mutates, after = zip(lists[::2], lists[1::2], strict=True)
    return _core.CoreGraph(
        tensor_bytes=tensor_bytes,
        donated=donated,
        reads=reads,
        writes=writes,
        mutates=mutates,
        after=after,
        workspace_bytes=workspace_bytes,
        random=random,
        outputs=outputs,
    )


def _columns_of(graph: Graph) -> list[NDArray[Any]]:
    lists = [array for pair in (graph.reads, graph.writes, graph.mutates, graph.after) for array in pair]
    flags = graph.donated.view(np.uint8), graph.random.view(np.uint8)
    return [graph.tensor_bytes, flags[0], *lists, graph.workspace_bytes, flags[1], graph.outputs]


@pytest.mark.parametrize("op", [-1, 2, 2**31 - 1])
def test_an_op_that_does_not_exist_has_no_predecessors(op: int) -> None:
    with pytest.raises(IndexError):
        Graph.from_dict(FULL).core.preds(op)
