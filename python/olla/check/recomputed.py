"""Does a rewritten graph compute what the original does? Values are numbered by what computes them; no planner code."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from olla.errors import PlanError

if TYPE_CHECKING:
    from olla.graph import Graph, Rules

Ids = NDArray[np.int32]


def _fail(rule: str, message: str, *ids: int) -> NoReturn:
    raise PlanError(message, rule=rule, ids=tuple(map(int, ids)))


def check_equivalent(
    original: Graph, rewritten: Graph, origin: Ids, rerun: NDArray[np.uint8], tensor_origin: Ids, rules: Rules
) -> None:
    """Raise PlanError unless the rewritten graph leaves the same values where the original does.

    Both graphs are walked in program order; a tensor holds a value, known by the op of the original that makes it.

    Args:
        original: the step as captured.
        rewritten: the graph a plan was made for.
        origin: int32[rewritten.num_ops], the op of the original each op stands for.
        rerun: uint8[rewritten.num_ops], how it runs; see `olla.graph.Rerun`.
        tensor_origin: int32[rewritten.num_tensors], the tensor of the original each tensor has size and start from.
        rules: what the operators of the original allow.

    Raises:
        PlanError: `rule` is "rewrite_lengths"; "rewrite_tensor": a size or a resident tensor differs;
            "rewrite_missing": an op never runs; "rewrite_repeated": an op runs again that must not;
            "rewrite_inputs": an op reads other values; "rewrite_results": it writes other tensors than it may;
            "rewrite_end": the step ends otherwise.

    Complexity:
        O(ops + tensors + uses) of both graphs.
    """
    if (
        len(origin) != rewritten.num_ops
        or len(rerun) != rewritten.num_ops
        or len(tensor_origin) != rewritten.num_tensors
    ):
        _fail("rewrite_lengths", "the origins of ops and tensors do not fit the rewritten graph")
    for ids, limit in ((origin, original.num_ops), (tensor_origin, original.num_tensors)):
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= limit):
            _fail("rewrite_lengths", f"an origin is not below {limit}")
    inputs, results, tensor_of, final = _number(original)
    _check_tensors(original, rewritten, tensor_origin)
    _check_runs(original, origin, rerun, rules)

    saved = [_saved_inputs(original, v, inputs[v], results[v], rules) for v in range(original.num_ops)]
    own = np.full(original.num_ops, -1, dtype=np.int64)  # op of the rewritten graph that runs in its own place
    own[origin[rerun == 0]] = np.flatnonzero(rerun == 0)
    resident = _residents(rewritten)
    held = np.full(rewritten.num_tensors, -1, dtype=np.int64)
    held[resident] = tensor_origin[resident]
    for i in range(rewritten.num_ops):
        v = int(origin[i])
        if rerun[i] == 3:
            _check_replay(rewritten, own, i, v)
        wanted, made = (inputs[v], results[v]) if rerun[i] != 2 else (saved[v], results[v][:1])
        changed = rewritten.mutates.of(i).tolist()
        seen = list(dict.fromkeys(int(held[t]) for t in (*rewritten.reads.of(i).tolist(), *changed)))
        if seen != wanted:
            _fail("rewrite_inputs", f"op {i} stands for op {v}, but reads other values than that op", i, v)
        targets = [*rewritten.writes.of(i).tolist(), *dict.fromkeys(changed)]
        allowed = set(original.mutates.of(v).tolist()) if rerun[i] != 2 else set()
        takes_over = len(changed) > len(allowed)
        if len(targets) != len(made) or (takes_over and not (rules.in_place[v] and len(made) == 1)):
            _fail("rewrite_results", f"op {i} stands for op {v}, but writes {len(targets)} tensors", i, v)
        for t, value in zip(targets, made, strict=True):
            if takes_over and resident[t]:
                _fail("rewrite_results", f"op {i} overwrites resident tensor {t}", i, t)
            held[t] = value
            if rewritten.tensor_bytes[t] != original.tensor_bytes[tensor_of[value]]:
                _fail("rewrite_results", f"op {i} puts a result into tensor {t}, which has another size", i, t)
    _check_end(original, rewritten, tensor_origin, held, final, resident)


def _number(graph: Graph) -> tuple[list[list[int]], list[list[int]], list[int], NDArray[np.int64]]:
    """Return the values each op uses and makes, the tensor of each value, and what each tensor holds at the end."""
    held = np.arange(graph.num_tensors, dtype=np.int64)  # at the start: a value of its own
    tensor_of = list(range(graph.num_tensors))
    inputs, results = [], []
    for v in range(graph.num_ops):
        changed = graph.mutates.of(v).tolist()
        inputs.append(list(dict.fromkeys(int(held[t]) for t in (*graph.reads.of(v).tolist(), *changed))))
        made = []
        for t in dict.fromkeys((*graph.writes.of(v).tolist(), *changed)):
            held[t] = len(tensor_of)
            made.append(len(tensor_of))
            tensor_of.append(t)
        results.append(made)
    return inputs, results, tensor_of, held


def _saved_inputs(graph: Graph, v: int, inputs: list[int], results: list[int], rules: Rules) -> list[int]:
    """Return the values a FIRST_RESULT rerun reads: inputs of the op, and results it saved."""
    if rules.rerun[v] not in (2, 3):
        return []
    used = list(dict.fromkeys((*graph.reads.of(v).tolist(), *graph.mutates.of(v).tolist())))
    written = graph.writes.of(v).tolist()
    value_of = {**dict(zip(used, inputs, strict=True)), **dict(zip(written, results, strict=False))}
    return list(dict.fromkeys(value_of[t] for t in rules.rerun_reads.of(v).tolist()))


def _residents(graph: Graph) -> NDArray[np.bool_]:
    resident = np.ones(graph.num_tensors, dtype=np.bool_)
    resident[graph.writes.item] = False
    return resident


def _check_tensors(original: Graph, rewritten: Graph, tensor_origin: Ids) -> None:
    if not np.array_equal(rewritten.tensor_bytes, original.tensor_bytes[tensor_origin]):
        _fail("rewrite_tensor", "a tensor of the rewritten graph has another size than the one it stands for")
    kept, given = tensor_origin[_residents(rewritten)], np.flatnonzero(_residents(original))
    if not np.array_equal(np.sort(kept), given):
        _fail("rewrite_tensor", "the rewritten graph has other resident tensors than the original")
    if not np.array_equal(rewritten.donated, original.donated[tensor_origin] & _residents(rewritten)):
        _fail("rewrite_tensor", "the rewritten graph has other donated tensors than the original")


def _check_runs(original: Graph, origin: Ids, rerun: NDArray[np.uint8], rules: Rules) -> None:
    """Every op runs; again only if its operator may and it changes nothing that lasts; random ops keep their order."""
    counts = np.bincount(origin, minlength=original.num_ops)
    if len(missing := np.flatnonzero(counts == 0)):
        _fail("rewrite_missing", f"op {missing[0]} of the original never runs", int(missing[0]))
    resident = _residents(original)
    own = rerun == 0
    twice = np.flatnonzero(np.bincount(origin[own], minlength=original.num_ops) > 1)
    if len(twice):
        _fail("rewrite_repeated", f"op {twice[0]} runs twice in its own place", int(twice[0]))
    for i in np.flatnonzero(~own):
        v = int(origin[i])
        lasting = rerun[i] != 2 and bool(resident[original.mutates.of(v)].any())
        allowed = rerun[i] == rules.rerun[v] or (rerun[i] == 2 and rules.rerun[v] == 3)
        if not allowed or lasting or (rerun[i] == 1 and original.random[v]):
            _fail("rewrite_repeated", f"op {v} runs again as op {i}, which it must not", int(i), v)
    drawn = origin[own & original.random[origin]]
    if np.any(np.diff(drawn) <= 0):
        _fail("rewrite_repeated", "random ops left their program order")


def _check_replay(rewritten: Graph, own: NDArray[np.int64], i: int, v: int) -> None:
    """What draws numbers again comes after the run that drew them, in every order."""
    if own[v] < 0 or own[v] not in rewritten.after.of(i):
        _fail("rewrite_repeated", f"op {i} draws the numbers of op {v} again, but need not come after it", i, v)


def _check_end(
    original: Graph,
    rewritten: Graph,
    tensor_origin: Ids,
    held: NDArray[np.int64],
    final: NDArray[np.int64],
    resident: NDArray[np.bool_],
) -> None:
    if not np.array_equal(held[rewritten.outputs], final[original.outputs]):
        _fail("rewrite_end", "an output of the rewritten graph ends with another value")
    lasting = np.flatnonzero(resident)
    wrong = lasting[held[lasting] != final[tensor_origin[lasting]]]
    if len(wrong):
        _fail("rewrite_end", f"resident tensor {wrong[0]} ends with another value than in the original", int(wrong[0]))
