"""Does a rewritten graph compute what the original does? Values are numbered by what computes them; no planner code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from olla.check.values import fail, numbered, residents, used

if TYPE_CHECKING:
    from olla.graph import Graph, Rules

Ids = NDArray[np.int32]


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
            "rewrite_missing": an op never runs; "rewrite_repeated": an op is recomputed that must not be;
            "rewrite_inputs": an op reads other values; "rewrite_results": it writes other tensors than it may;
            "rewrite_end": the step ends otherwise.

    Complexity:
        O(ops + tensors + uses) of both graphs.
    """
    if not len(origin) == len(rerun) == rewritten.num_ops or len(tensor_origin) != rewritten.num_tensors:
        fail("rewrite_lengths", "the origins of ops and tensors do not fit the rewritten graph")
    for ids, limit in ((origin, original.num_ops), (tensor_origin, original.num_tensors)):
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= limit):
            fail("rewrite_lengths", f"an origin is not below {limit}")
    inputs, results, final = numbered(original)
    _check_tensors(original, rewritten, tensor_origin)
    _check_runs(original, origin, rerun, rules)

    own = np.full(original.num_ops, -1, dtype=np.int64)  # op of the rewritten graph that runs in its own place
    own[origin[rerun == 0]] = np.flatnonzero(rerun == 0)
    resident = residents(rewritten)
    held = np.where(resident, tensor_origin, -1).tolist()
    lasts, sizes, source_sizes = resident.tolist(), rewritten.tensor_bytes.tolist(), original.tensor_bytes.tolist()
    mutates = original.mutates.to_lists()
    lists = (rewritten.reads.to_lists(), rewritten.writes.to_lists(), rewritten.mutates.to_lists())
    rows = enumerate(zip(origin.tolist(), rerun.tolist(), *lists, strict=True))
    for i, (v, how, reads, writes, changed) in rows:
        if how == 3 and (own[v] < 0 or own[v] not in rewritten.after.of(i)):  # in every order
            fail("rewrite_repeated", f"op {i} draws the numbers of op {v} again, but need not come after it", i, v)
        wanted, made = inputs[v], [*results[v].items()]
        if how == 2:
            wanted, made = _saved_inputs(original, v, inputs[v], results[v], rules), made[:1]
        if used(reads, changed, held) != wanted:
            fail("rewrite_inputs", f"op {i} stands for op {v}, but reads other values than that op", i, v)
        targets = [*writes, *dict.fromkeys(changed)]
        allowed = set(mutates[v]) if how != 2 else set()
        takes_over = len(changed) > len(allowed)
        if len(targets) != len(made) or (takes_over and not (rules.in_place[v] and len(made) == 1)):
            fail("rewrite_results", f"op {i} stands for op {v}, but writes {len(targets)} tensors", i, v)
        for t, (of, value) in zip(targets, made, strict=True):
            if takes_over and lasts[t]:
                fail("rewrite_results", f"op {i} overwrites resident tensor {t}", i, t)
            held[t] = value
            if sizes[t] != source_sizes[of]:
                fail("rewrite_results", f"op {i} puts a result into tensor {t}, which has another size", i, t)
    ends = np.array(held, dtype=np.int64)
    if not np.array_equal(ends[rewritten.outputs], final[original.outputs]):
        fail("rewrite_end", "an output of the rewritten graph ends with another value")
    lasting = np.flatnonzero(resident)
    if len(wrong := lasting[ends[lasting] != final[tensor_origin[lasting]]]):
        fail("rewrite_end", f"resident tensor {wrong[0]} ends with another value than in the original", wrong[0])


def _saved_inputs(graph: Graph, v: int, inputs: list[int], results: dict[int, int], rules: Rules) -> list[int]:
    """Return the values a FIRST_RESULT rerun reads: inputs of the op, and results it saved."""
    if rules.rerun[v] not in (2, 3):
        return []
    tensors = dict.fromkeys((*graph.reads.of(v).tolist(), *graph.mutates.of(v).tolist()))
    value_of = dict(zip(tensors, inputs, strict=True)) | {t: results[t] for t in graph.writes.of(v).tolist()}
    return list(dict.fromkeys(value_of[t] for t in rules.rerun_reads.of(v).tolist()))


def _check_tensors(original: Graph, rewritten: Graph, tensor_origin: Ids) -> None:
    if not np.array_equal(rewritten.tensor_bytes, original.tensor_bytes[tensor_origin]):
        fail("rewrite_tensor", "a tensor of the rewritten graph has another size than the one it stands for")
    kept, given = tensor_origin[residents(rewritten)], np.flatnonzero(residents(original))
    if not np.array_equal(np.sort(kept), given):
        fail("rewrite_tensor", "the rewritten graph has other resident tensors than the original")
    if not np.array_equal(rewritten.donated, original.donated[tensor_origin] & residents(rewritten)):
        fail("rewrite_tensor", "the rewritten graph has other donated tensors than the original")


def _check_runs(original: Graph, origin: Ids, rerun: NDArray[np.uint8], rules: Rules) -> None:
    """Every op runs; none that may not be, or that changes what lasts, is recomputed; random ops keep their order."""
    counts = np.bincount(origin, minlength=original.num_ops)
    if len(missing := np.flatnonzero(counts == 0)):
        fail("rewrite_missing", f"op {missing[0]} of the original never runs", int(missing[0]))
    resident = residents(original)
    own = rerun == 0
    twice = np.flatnonzero(np.bincount(origin[own], minlength=original.num_ops) > 1)
    if len(twice):
        fail("rewrite_repeated", f"op {twice[0]} runs twice in its own place", int(twice[0]))
    for i in np.flatnonzero(~own):
        v = int(origin[i])
        lasting = rerun[i] != 2 and bool(resident[original.mutates.of(v)].any())
        allowed = rerun[i] == rules.rerun[v] or (rerun[i] == 2 and rules.rerun[v] == 3)
        if not allowed or lasting or (rerun[i] == 1 and original.random[v]):
            fail("rewrite_repeated", f"op {v} is recomputed as op {i}, which it must not be", int(i), v)
    drawn = origin[own & original.random[origin]]
    if np.any(np.diff(drawn) <= 0):
        fail("rewrite_repeated", "random ops left their program order")
