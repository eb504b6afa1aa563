import copy
import csv
import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

import olla
from olla import Graph, GraphError, _core
from olla.graph import Lists
from tests.support import oracle, strategies
from tests.support.samples import FULL, SHARED, chain, changed


def test_every_key_of_a_file_becomes_a_column() -> None:
    graph = Graph.from_dict(FULL)
    assert graph.name == "full"
    assert graph.tensor_bytes.tolist() == [8, 4, 16]
    assert graph.tensor_kinds == ["parameter", "input", "temporary"]
    assert graph.tensor_names == ["weight", "", ""]
    assert graph.donated.tolist() == [False, True, False]
    assert graph.op_names == ["mm", ""]
    assert graph.op_kinds == ["forward", "update"]
    assert graph.reads.to_lists() == [[0, 1], [2]]
    assert graph.writes.to_lists() == [[2], []]
    assert graph.mutates.of(1).tolist() == [0]
    assert graph.after.to_lists() == [[], [0]]
    assert graph.workspace_bytes.tolist() == [3, 0]
    assert graph.seconds.tolist() == [0.5, 0.0]
    assert graph.flops.tolist() == [10, 0]
    assert graph.moved_bytes.tolist() == [20, 0]
    assert graph.launches.tolist() == [2, 1]
    assert graph.random.tolist() == [True, False]
    assert graph.recomputable.tolist() == [False, True]
    assert graph.targets == ["aten.mm.default", ""]
    assert graph.shapes == [(2, 2), ()]
    assert graph.outputs.tolist() == [2]
    assert (graph.num_ops, graph.num_tensors, graph.resident_bytes) == (2, 3, 8)


def test_all_but_bytes_reads_and_writes_may_be_left_out() -> None:
    graph = Graph.from_dict(
        {"format": "olla-graph", "version": 1, "tensors": [{"bytes": 1}], "ops": [{"reads": [], "writes": [0]}]}
    )
    assert graph.name == ""
    assert graph.outputs.tolist() == []


def test_unknown_keys_are_ignored() -> None:
    content = changed("colour", to="red")
    content["ops"][0]["stream"] = [[[]]]
    content["tensors"][0]["device"] = None
    assert Graph.from_dict(content).digest == Graph.from_dict(FULL).digest


def test_columns_have_exact_dtypes_and_are_read_only() -> None:
    graph = Graph.from_dict(FULL)
    dtypes: dict[type, tuple[NDArray[Any], ...]] = {
        np.int64: (
            graph.tensor_bytes,
            graph.workspace_bytes,
            graph.flops,
            graph.moved_bytes,
            graph.launches,
            graph.reads.offset,
        ),
        np.int32: (graph.outputs, graph.reads.item, graph.writes.item, graph.mutates.item, graph.after.item),
        np.bool_: (graph.donated, graph.random, graph.recomputable),
        np.float64: (graph.seconds,),
    }
    for dtype, arrays in dtypes.items():
        for array in arrays:
            assert array.dtype == dtype
            assert not array.flags.writeable
    with pytest.raises(AttributeError):
        graph.__setattr__("name", "other")


def test_arrays_of_the_caller_are_copied() -> None:
    sizes = np.array([5, 6])
    graph = Graph.from_arrays(tensor_bytes=sizes, reads=[], writes=[])
    sizes[0] = 7
    assert graph.tensor_bytes.tolist() == [5, 6]


def test_lists_arrays_and_lists_of_lists_give_the_same_graph() -> None:
    packed = Lists(np.array([0, 0, 1]), np.array([0], dtype=np.int32))
    written = Lists(np.array([0, 1, 2], dtype=np.int32), np.array([0, 1], dtype=np.uint16))
    graph = Graph.from_arrays(tensor_bytes=np.array([1, 1], dtype=np.uint8), reads=packed, writes=written)
    assert graph.digest == chain(2).digest
    assert graph.writes.item.dtype == np.int32


@pytest.mark.parametrize(
    "graph",
    [
        Graph.builder("nothing").build(),
        Graph.from_arrays(tensor_bytes=[], reads=[[], []], writes=[[], []]),
        Graph.from_arrays(tensor_bytes=[0, 0], reads=[[], [0]], writes=[[0], [1]]),
        Graph.from_arrays(tensor_bytes=[3, 4], reads=[[], []], writes=[[0], [1]]),
        Graph.from_arrays(tensor_bytes=[2**62], reads=[], writes=[]),
    ],
    ids=["empty", "ops without tensors", "zero-byte tensors", "disconnected, nobody reads", "2^62 bytes"],
)
def test_unusual_graphs_are_valid(graph: Graph, tmp_path: Path) -> None:
    graph.save(tmp_path / "g.json")
    assert Graph.load(tmp_path / "g.json").digest == graph.digest
    _core.spans(graph.core)
    _core.profile(graph.core, np.arange(graph.num_ops, dtype=np.int32))


@given(strategies.graphs())
def test_dictionaries_and_columns_rebuild_any_graph(graph: Graph) -> None:
    content = graph.to_dict()
    assert Graph.from_dict(content).to_dict() == content
    assert Graph.from_arrays(**graph.to_arrays()).to_dict() == content
    assert content == json.loads(json.dumps(content))


@given(strategies.graphs(), strategies.graphs())
def test_offsets_items_and_writers_make_the_builders_graph_and_its_plan(graph: Graph, other: Graph) -> None:
    """The builder's graph, whose rows are lists, from arrays alone."""
    lists = {name: tuple(getattr(graph, name)) for name in ("reads", "mutates", "after")}
    wide = {name: (offset.astype(np.uint32), item.astype(np.int64)) for name, (offset, item) in lists.items()}
    columns = {**graph.to_arrays(), **wide, "tensor_bytes": graph.tensor_bytes.astype(np.uint64)}
    columns |= {"writer": graph.writer, "op_names": np.array(graph.op_names, dtype=np.str_)}
    del columns["writes"]
    packed = Graph.from_arrays(**columns)
    assert packed.to_dict() == graph.to_dict()
    assert packed.digest == graph.digest
    assert (packed.digest == other.digest) == (graph.digest == other.digest)
    plan, expected = olla.plan(packed), olla.plan(graph)
    assert plan.order.tolist() == expected.order.tolist()
    assert plan.offsets.tolist() == expected.offsets.tolist()
    olla.check(graph, plan)


def test_columns_left_out_are_those_of_a_builder_without_arguments() -> None:
    b = Graph.builder()
    first, second = b.tensor(3), b.tensor(4)
    b.op("", writes=[first])
    b.op("", reads=[first], writes=[second])
    expected = b.build().to_arrays()
    reads = np.array([0, 0, 1]), np.array([0])
    found = Graph.from_arrays(tensor_bytes=np.array([3, 4]), reads=reads, writer=np.array([0, 1])).to_arrays()
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        if isinstance(column, Lists):
            assert found[name].to_lists() == column.to_lists()
        elif isinstance(column, np.ndarray):
            assert (found[name].dtype, found[name].tolist()) == (column.dtype, column.tolist())
        else:
            assert found[name] == column


def test_builder_fills_the_same_columns_as_a_file() -> None:
    b = Graph.builder("full")
    b.tensor(8, kind="parameter", name="weight")
    b.tensor(4, kind="input", donated=True)
    b.tensor(16)
    first = b.op(
        "mm",
        reads=iter([0, 1]),
        writes=[2],
        kind="forward",
        workspace_bytes=3,
        seconds=0.5,
        flops=10,
        moved_bytes=20,
        launches=2,
        random=True,
        recomputable=False,
        target="aten.mm.default",
        shape=(2, 2),
    )
    b.op("", reads=[2], mutates=[0], after=[first], kind="update")
    b.output(2)
    assert b.build().to_dict() == FULL


def test_numbers_of_numpy_are_numbers() -> None:
    b = Graph.builder()
    b.tensor(np.int64(5))  # type: ignore[arg-type]
    b.op("v", writes=[np.int32(0)], seconds=np.float32(1), random=np.bool_(True))  # type: ignore[list-item, arg-type]
    assert b.build().tensor_bytes.tolist() == [5]


def test_unknown_and_missing_columns_are_named() -> None:
    with pytest.raises(TypeError, match="unknown columns: read; known are after, collectives, donated"):
        Graph.from_arrays(tensor_bytes=[], read=[], writes=[])
    with pytest.raises(TypeError, match="missing columns: reads, writes"):
        Graph.from_arrays(tensor_bytes=[])


def test_digest_changes_with_all_that_matters_to_a_plan() -> None:
    changes = [
        changed("tensors", 0, "bytes", to=9),
        changed("tensors", 1, "donated", to=False),
        changed("ops", 1, "reads", to=[1, 2]),
        changed("ops", 1, "mutates", to=[]),
        changed("ops", 1, "after", to=[]),
        changed("ops", 0, "writes", to=[]),
        changed("ops", 0, "workspace_bytes", to=4),
        changed("ops", 0, "random", to=False),
        changed("outputs", to=[]),
        changed("ops", to=[]),
        FULL,
    ]
    digests = {Graph.from_dict(content).digest for content in changes}
    assert len(digests) == len(changes)
    assert all(len(digest) == 64 for digest in digests)


def test_digest_ignores_names_kinds_costs_and_the_order_of_ids() -> None:
    digest = Graph.from_dict(FULL).digest
    for content in (
        changed("name", to="other"),
        changed("tensors", 0, "name", to="w"),
        changed("tensors", 0, "kind", to="buffer"),
        changed("ops", 0, "name", to="matmul"),
        changed("ops", 0, "seconds", to=7),
        changed("ops", 0, "reads", to=[1, 0, 1]),
        changed("outputs", to=[2, 2]),
        dict(reversed(FULL.items())),
    ):
        assert Graph.from_dict(content).digest == digest


@given(strategies.graphs())
def test_the_core_derives_the_dependencies_of_the_definition(graph: Graph) -> None:
    expected = oracle.dependencies(graph)
    for before in expected:
        before |= {w for u in before for w in expected[u]}
    closure: list[set[int]] = []
    for v in range(graph.num_ops):
        direct = graph.core.preds(v).tolist()
        closure.append(set(direct).union(*(closure[u] for u in direct)))
    assert closure == expected
    offset, item = graph.core.precedences()
    assert [item[offset[v] : offset[v + 1]].tolist() for v in range(graph.num_ops)] == [
        graph.core.preds(v).tolist() for v in range(graph.num_ops)
    ]


def test_extra_precedences_that_close_a_cycle_are_rejected() -> None:
    graph = chain(3)
    with pytest.raises(GraphError, match="cycle") as error:
        graph.core.constrained(np.array([2], dtype=np.int32), np.array([0], dtype=np.int32))
    assert sorted(error.value.ids) == [0, 1, 2]
    with pytest.raises(GraphError, match="as many"):
        graph.core.constrained(np.array([2], dtype=np.int32), np.array([], dtype=np.int32))


def test_sixty_thousand_ops_load_in_seconds(tmp_path: Path) -> None:
    graph = chain(60_000, seconds=np.full(60_000, 0.25), shapes=[[4, 5]] * 60_000, op_names=["operator"] * 60_000)
    graph.save(tmp_path / "g.json.gz")
    start = time.process_time()
    loaded = Graph.load(tmp_path / "g.json.gz")
    assert time.process_time() - start < 2.5
    assert loaded.digest == graph.digest
    start = time.process_time()
    _core.spans(graph.core)
    assert time.process_time() - start < 2.5


@pytest.mark.skipif(not (SHARED / "graphs").is_dir(), reason=f"no captured graphs in {SHARED}: set OLLA_SHARED")
def test_captured_graphs_have_the_resident_and_program_peak_bytes_of_the_reference() -> None:
    with (SHARED / "graphs" / "REFERENCE.csv").open() as reference:
        rows = list(csv.DictReader(reference))
    assert len(rows) == 70
    for row in rows:
        graph = Graph.load(SHARED / "graphs" / f"{row['graph']}.json.gz")
        peak = _core.profile(graph.core, np.arange(graph.num_ops, dtype=np.int32)).peak_bytes
        expected = (row["graph"], int(row["ops"]), int(row["resident_bytes"]), int(row["program_peak_bytes"]))
        assert (graph.name, graph.num_ops, graph.resident_bytes, peak) == expected


def test_pickled_and_copied_graphs_are_the_same_graph() -> None:
    graph = Graph.from_dict(FULL)
    for twin in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert twin.digest == graph.digest
        assert twin.to_dict() == graph.to_dict()
