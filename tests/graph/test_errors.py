"""Everything that can be wrong with a graph's content is named."""

import numpy as np
import pytest

from olla import Graph, GraphError
from olla.graph import Lists
from tests.support.samples import chain, changed, without


def error_of(content: object) -> GraphError:
    with pytest.raises(GraphError) as error:
        Graph.from_dict(content)
    return error.value


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"seconds": [1.0]}, "graph: ops[].seconds has 1 entries, expected 2"),
        (
            {"donated": np.zeros(2, dtype=np.uint8)},
            "graph: tensors[0].donated is from an array of uint8, expected true or false: convert the array first, "
            ".astype(bool)",
        ),
        (
            {"workspace_bytes": np.array([1.0, 2.5])},
            "graph: ops[0].workspace_bytes is from an array of float64, expected a whole number of bytes up to 2^62: "
            "convert the array first, .astype(numpy.int64)",
        ),
        ({"workspace_bytes": np.array([1, -5])}, "graph: ops[1].workspace_bytes is -5, expected 0 or more"),
        (
            {"workspace_bytes": np.zeros(3, dtype=np.int64)},
            "graph: ops[].workspace_bytes has 3 entries, expected 2: one per op, as in reads",
        ),
        (
            {"donated": np.zeros(3, dtype=np.bool_)},
            "graph: tensors[].donated has 3 entries, expected 2: one per tensor, as in tensor_bytes",
        ),
        (
            {"mutates": (np.array([0, 0, 2]), np.array([1, 7]))},
            "graph: ops[1].mutates[1] is 7, but the graph has tensors 0 to 1",
        ),
        (
            {"mutates": (np.array([0, 1, 1]), np.array([0.0]))},
            "graph: ops[0].mutates[0] is from an array of float64, expected an id, a whole number below 2^31: convert",
        ),
        ({"mutates": (np.array([0, 1, 1]), np.array([2**40]))}, "graph: ops[0].mutates[0] is 1099511627776, expected"),
        (
            {"after": (np.array([0, 2, 1]), np.array([0]))},
            "graph: after: the offsets must rise from 0 to the number of items (1), with one list for each of the 2 "
            "ops, but offset[2] is 1 after 2",
        ),
        (
            {"after": (np.array([0, 0, 2]), np.array([0]))},
            "graph: after: the offsets must rise from 0 to the number of items (1), with one list for each of the 2 "
            "ops, but offset[2] is 2, the last of 3",
        ),
        (
            {"after": (np.array([1, 1, 1]), np.array([0]))},
            "graph: after: the offsets must rise from 0 to the number of items (1), with one list for each of the 2 "
            "ops, but offset[0] is 1",
        ),
        (
            {"after": (np.array([0, 0]), np.array([], dtype=np.int32))},
            "graph: offset of ops[].after[] has 2 entries, expected 3: one more than there are ops, which are counted "
            "in reads",
        ),
        (
            {"flops": np.zeros((2, 1))},
            "graph: ops[].flops is array([[0.], [0.]]), expected a list or a one-dimensional array",
        ),
        ({"flops": np.zeros(2)}, "graph: ops[0].flops is from an array of float64, expected a whole number"),
        ({"flops": np.array([0, 2**63], dtype=np.uint64)}, "graph: ops[1].flops is 9223372036854775808, expected"),
        (
            {"after": Lists(np.array([0, 5, 0]), np.array([], dtype=np.int32))},
            "graph: after: the offsets must rise from 0",
        ),
        (
            {"after": Lists(np.array([0]), np.array([], dtype=np.int32))},
            "graph: offset of ops[].after[] has 1 entries, expected 3",
        ),
        ({"after": [np.array([0]), []]}, "graph: ops[0].after is array([0]), expected a list"),
        ({"op_kinds": "forward"}, "graph: ops[].kind is 'forward', expected a list"),
    ],
)
def test_columns_that_do_not_fit_are_rejected(columns: dict[str, object], message: str) -> None:
    with pytest.raises(GraphError) as error:
        chain(2, **columns)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "graph: the content is a list of 0, expected an object"),
        (None, "graph: the content is None, expected an object"),
        (without("format"), "graph: \"format\" is None, expected 'olla-graph'"),
        (changed("format", to="onnx"), "graph: \"format\" is 'onnx', expected 'olla-graph'"),
        (without("version"), 'graph: "version" is None, expected 1'),
        (changed("version", to=3), 'graph: "version" is 3, expected 1 or 2, which this olla reads'),
        (changed("version", to=True), 'graph: "version" is True, expected 1'),
        (changed("version", to=1.0), 'graph: "version" is 1.0, expected 1'),
        (changed("name", to=5), "graph: name is 5, expected text"),
        (without("tensors"), "graph: has no 'tensors', expected a list of objects"),
        (without("ops"), "graph: has no 'ops', expected a list of objects"),
        (changed("ops", to={}), "graph: ops is a dict of 0, expected a list of objects"),
        (changed("ops", 1, to=[1]), "graph: ops[1] is a list of 1, expected an object"),
        (without("tensors", 1, "bytes"), "graph: tensors[1] has no 'bytes', which every entry needs"),
        (without("ops", 1, "reads"), "graph: ops[1] has no 'reads', which every entry needs"),
        (without("ops", 0, "writes"), "graph: ops[0] has no 'writes', which every entry needs"),
        (
            changed("tensors", 1, "bytes", to=2.0),
            "graph: tensors[1].bytes is 2.0, expected a whole number of bytes up to 2^62",
        ),
        (
            changed("tensors", 1, "bytes", to=True),
            "graph: tensors[1].bytes is True, expected a whole number of bytes up to 2^62",
        ),
        (
            changed("tensors", 1, "bytes", to="2"),
            "graph: tensors[1].bytes is '2', expected a whole number of bytes up to 2^62",
        ),
        (
            changed("tensors", 1, "bytes", to=None),
            "graph: tensors[1].bytes is None, expected a whole number of bytes up to 2^62",
        ),
        (
            changed("tensors", 1, "kind", to="weights"),
            "graph: tensors[1].kind is 'weights', expected one of parameter, buffer",
        ),
        (changed("tensors", 1, "donated", to=1), "graph: tensors[1].donated is 1, expected true or false"),
        (changed("tensors", 1, "name", to=["x"]), "graph: tensors[1].name is a list of 1, expected text"),
        (
            changed("tensors", 1, "name", to="\ud800"),
            "graph: tensors[1].name is '\\ud800', expected text without lone surrogates",
        ),
        (
            changed("ops", 0, "kind", to="loss"),
            "graph: ops[0].kind is 'loss', expected one of forward, backward, update, other",
        ),
        (changed("ops", 1, "reads", to=2), "graph: ops[1].reads is 2, expected a list"),
        (changed("ops", 1, "reads", to={"2": 2}), "graph: ops[1].reads is a dict of 1, expected a list"),
        (changed("ops", 1, "reads", to=[2, "2"]), "graph: ops[1].reads[1] is '2', expected an id, a whole number"),
        (changed("ops", 1, "mutates", to=[False]), "graph: ops[1].mutates[0] is False, expected an id, a whole number"),
        (
            changed("ops", 1, "reads", to=[2**31]),
            "graph: ops[1].reads[0] is 2147483648, expected an id, a whole number",
        ),
        (changed("ops", 1, "reads", to=[2**63]), "graph: ops[1].reads[0] is 9223372036854775808, expected an id"),
        (
            changed("ops", 1, "seconds", to=float("nan")),
            "graph: ops[1].seconds is nan, expected a finite number of seconds",
        ),
        (
            changed("ops", 1, "seconds", to=float("inf")),
            "graph: ops[1].seconds is inf, expected a finite number of seconds",
        ),
        (
            changed("ops", 1, "seconds", to=-1),
            "graph: ops[1].seconds is -1, expected a finite number of seconds from 0 on",
        ),
        (
            changed("ops", 1, "seconds", to=10**400),
            "graph: ops[1].seconds is a number of 1329 bits, expected a finite number",
        ),
        (changed("ops", 1, "seconds", to="1"), "graph: ops[1].seconds is '1', expected a finite number"),
        (changed("ops", 1, "flops", to=-1), "graph: ops[1].flops is -1, expected a whole number from 0 to 2^63 - 1"),
        (changed("ops", 1, "flops", to=1.5), "graph: ops[1].flops is 1.5, expected a whole number"),
        (
            changed("ops", 1, "launches", to=2**63),
            "graph: ops[1].launches is 9223372036854775808, expected a whole number",
        ),
        (changed("ops", 1, "random", to="no"), "graph: ops[1].random is 'no', expected true or false"),
        (
            changed("ops", 1, "shape", to=[2, -1]),
            "graph: ops[1].shape[1] is -1, expected a whole number from 0 to 2^63 - 1",
        ),
        (changed("ops", 1, "shape", to=[[2]]), "graph: ops[1].shape[0] is a list of 1, expected a whole number"),
        (changed("ops", 1, "shape", to=7), "graph: ops[1].shape is 7, expected a list"),
        (changed("outputs", to=2), "graph: outputs[] is 2, expected a list"),
        (changed("outputs", to=[0, None]), "graph: outputs[1] is None, expected an id, a whole number"),
    ],
)
def test_wrong_content_is_rejected_with_its_place_named(content: object, message: str) -> None:
    assert str(error_of(content)).startswith(message)


def test_a_huge_number_does_not_fill_the_message() -> None:
    message = str(error_of(changed("tensors", 0, "bytes", to=10**5000)))
    assert message == "graph: tensors[0].bytes is a number of 16610 bits, expected a whole number of bytes up to 2^62"
    assert len(str(error_of(changed("tensors", 0, "kind", to="x" * 10_000)))) < 200


@pytest.mark.parametrize(
    ("content", "rule", "ids", "message"),
    [
        (
            changed("ops", 1, "reads", to=[2, 9]),
            "ids",
            (1, 9),
            "graph: ops[1].reads[1] is 9, but the graph has tensors 0 to 2",
        ),
        (
            changed("ops", 0, "mutates", to=[-1]),
            "ids",
            (0, -1),
            "graph: ops[0].mutates[0] is -1, but the graph has tensors 0 to 2 (op 0 is 'mm')",
        ),
        (
            changed("ops", 1, "after", to=[2]),
            "ids",
            (1, 2),
            "graph: ops[1].after[0] is 2, but the graph has ops 0 to 1",
        ),
        (changed("outputs", to=[3]), "ids", (3,), "graph: outputs[0] is 3, but the graph has tensors 0 to 2"),
        (
            changed("ops", 1, "writes", to=[2]),
            "two_writers",
            (2, 0, 1),
            "graph: tensor 2 is written by op 0 and by op 1: one writer is allowed, later changes are mutations"
            " (op 0 is 'mm')",
        ),
        (
            changed("ops", 1, "writes", to=[1]),
            "writes_donated",
            (1, 1),
            "graph: tensor 1 is donated and written by op 1: only tensors that no op writes can be donated",
        ),
        (
            changed("ops", 0, "after", to=[1]),
            "cycle",
            (0, 1),
            "graph: cycle: each of these ops must run before the next and the last before the first: 0 -> 1"
            " (op 0 is 'mm')",
        ),
        (
            changed("ops", 0, "reads", to=[2]),
            "cycle",
            (0,),
            "graph: cycle: op 0 uses tensor 2, which it writes itself: take it out of what op 0 reads and mutates, or "
            "give the result a tensor of its own (op 0 is 'mm')",
        ),
        (
            changed("tensors", 1, "bytes", to=-4),
            "sizes",
            (1,),
            "graph: tensors[1].bytes is -4, expected 0 or more",
        ),
        (
            changed("ops", 0, "workspace_bytes", to=-4),
            "sizes",
            (0,),
            "graph: ops[0].workspace_bytes is -4, expected 0 or more",
        ),
        (
            changed("tensors", 1, "bytes", to=2**62),
            "sizes",
            (1,),
            "graph: tensors[1].bytes is 4611686018427387904: the sum of all sizes passes 2^62 bytes there",
        ),
        (
            changed("ops", 0, "workspace_bytes", to=2**62),
            "sizes",
            (0,),
            "graph: ops[0].workspace_bytes is 4611686018427387904: the sum of all sizes passes 2^62 bytes there",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_broken_rule_is_named_with_its_ids(content: object, rule: str, ids: tuple[int, ...], message: str) -> None:
    error = error_of(content)
    assert str(error) == message
    assert (error.rule, error.ids) == (rule, ids)


def test_sizes_beyond_64_bits_are_rejected() -> None:
    for size in (2**63, -(2**63) - 1, 10**30):
        assert "tensors[0].bytes is " in str(error_of(changed("tensors", 0, "bytes", to=size)))


def test_a_program_order_that_breaks_a_dependency_is_rejected() -> None:
    b = Graph.builder()
    t = b.tensor(4)
    b.op("use", reads=[t])
    b.op("make", writes=[t])
    with pytest.raises(GraphError) as error:
        b.build()
    assert str(error.value) == (
        "graph: the program order breaks a dependency: op 0 needs op 1, which stands later: number the ops in an "
        "order in which they can run (op 1 is 'make', op 0 is 'use')"
    )
    assert (error.value.rule, error.value.ids) == ("program_order", (1, 0))


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (np.array([0, 1, 3]), "graph: tensors[2].writer is 3, expected an op from 0 to 1, or -1: no op writes it"),
        (np.array([0, -2, 1]), "graph: tensors[1].writer is -2, expected an op from 0 to 1, or -1"),
        (np.array([0, 1]), "graph: tensors[].writer has 2 entries, expected 3: one per tensor, as in tensor_bytes"),
        (np.array([0.0, 1, 1]), "graph: tensors[0].writer is from an array of float64, expected an id"),
        ([0, None, 1], "graph: tensors[1].writer is None, expected an id"),
    ],
)
def test_a_writer_that_does_not_fit_is_named(writer: object, message: str) -> None:
    with pytest.raises(GraphError) as error:
        Graph.from_arrays(tensor_bytes=[1, 2, 3], reads=[[], [0]], writer=writer)
    assert str(error.value).startswith(message)


def test_writes_and_writer_are_not_given_together() -> None:
    with pytest.raises(TypeError, match="writes and writer say the same: give one of them"):
        Graph.from_arrays(tensor_bytes=[1], reads=[[]], writes=[[0]], writer=[0])


def test_a_long_cycle_is_cut_short_in_the_message_but_not_in_the_ids() -> None:
    after = [[v + 1] for v in range(999)] + [[0]]
    with pytest.raises(GraphError) as error:
        Graph.from_arrays(tensor_bytes=[], reads=[[]] * 1000, writes=[[]] * 1000, after=after, op_names=["op"] * 1000)
    assert sorted(error.value.ids) == list(range(1000))
    assert "... (1000 in all)" in str(error.value)
    assert len(str(error.value)) < 600
