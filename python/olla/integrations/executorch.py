"""ExecuTorch programs whose memory `olla.layout` plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from olla.errors import PlanError
from olla.layout.layout import layout

if TYPE_CHECKING:
    from executorch.exir.memory_planning import MemoryAlgoResult, MemoryPlanningAlgorithmSuite

Spec: TypeAlias = Any  # executorch.exir.tensor.TensorSpec
Algorithm: TypeAlias = "Callable[..., MemoryAlgoResult]"

_DEFAULT_MEMORY = 1  # as ExecuTorch numbers memories; 0 holds the constants
_ANYWHERE = -1


def memory_planning(*, time_limit: float = 5.0, seed: int = 0) -> MemoryPlanningAlgorithmSuite:
    """Return what ExecuTorch's `MemoryPlanningPass` takes as `memory_planning_algo`.

    ExecuTorch's own greedy placement and that of `olla.layout` are both made for each memory of the program, and the
    smaller one is kept: a program never needs more than before.

    Args:
        time_limit: seconds for each memory of the program; most are proved optimal in a fraction of a second.
        seed: of the random choices.

    Returns:
        A suite of two algorithms, greedy and `layout_algorithm`.

    Raises:
        ImportError: the package executorch is missing.

    Example:
        >>> from executorch.exir import ExecutorchBackendConfig
        >>> from executorch.exir.passes import MemoryPlanningPass
        >>> import olla.integrations.executorch
        >>> algorithm = olla.integrations.executorch.memory_planning()
        >>> config = ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(algorithm))
    """
    theirs = _exir()
    return theirs.MemoryPlanningAlgorithmSuite([theirs.greedy, layout_algorithm(time_limit=time_limit, seed=seed)])


def layout_algorithm(*, time_limit: float = 5.0, seed: int = 0, keep_offsets: bool = False) -> Algorithm:
    """Return one algorithm for a `MemoryPlanningAlgorithmSuite` of your own.

    Tensors that another one backs (`storage_base`, of operators in place) lie inside it; memories that a pass has
    chosen (`mem_id`), alignment, padding, and the space that branches and loops take first are those of ExecuTorch.

    Args:
        time_limit: seconds for each memory of the program.
        seed: of the random choices.
        keep_offsets: whether a tensor that has an offset (`mem_offset`) keeps it, such as an input that a driver writes
            at an address of its own. Otherwise offsets that stand there, as after an earlier pass, mean nothing. In a
            suite with `greedy`, which keeps none, the smaller result would win: make it the only algorithm.

    Returns:
        The algorithm, called "olla" in ExecuTorch's log.

    Raises:
        ImportError: the package executorch is missing.

    Example:
        >>> from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite
        >>> suite = MemoryPlanningAlgorithmSuite([layout_algorithm(keep_offsets=True)])
    """
    result_type = _exir().MemoryAlgoResult

    def olla(
        alignment: int, specs: Iterable[Spec], graph_module: Any, graph_signature: Any, extra_padding: int = 0
    ) -> MemoryAlgoResult:
        taken = getattr(graph_module, "input_mem_buffer_sizes", None) or []
        result = result_type({}, [0, 0])
        memories: dict[int, list[Spec]] = {}
        backed = []
        for spec in specs:
            spec.realign(alignment)
            if spec.storage_base is None:
                memories.setdefault(_DEFAULT_MEMORY if spec.mem_id is None else spec.mem_id, []).append(spec)
            else:
                backed.append(spec)
        result.bufsizes = [0] * max([2, *(memory + 1 for memory in memories)])
        for memory, roots in memories.items():
            first = taken[memory] if len(taken) > memory else 0
            offsets, height = _place(roots, first, alignment, keep_offsets, time_limit, seed)
            for spec, offset in zip(roots, offsets, strict=True):
                result.spec_dict[spec] = _answer(memory, offset)
            result.bufsizes[memory] = height + extra_padding
        for spec in backed:
            result.spec_dict[spec] = _inside(spec, result)
        return result

    return olla


def _exir() -> Any:
    try:
        from executorch.exir import memory_planning
    except ImportError as error:
        raise ImportError(f'needs the package executorch ({error}): pip install "olla-planner[executorch]"') from error
    return memory_planning


def _place(
    roots: Sequence[Spec], first: int, alignment: int, keep_offsets: bool, time_limit: float, seed: int
) -> tuple[list[int], int]:
    """Place the tensors of one memory behind its first bytes, which are taken; return offsets and the memory's size."""
    start = -(-first // alignment) * alignment  # ExecuTorch's sizes are multiples already
    has_offset = [keep_offsets and spec.mem_offset is not None for spec in roots]
    fixed = [spec.mem_offset - start if has else _ANYWHERE for spec, has in zip(roots, has_offset, strict=True)]
    for spec, has, place in zip(roots, has_offset, fixed, strict=True):
        if has and place < 0:
            raise PlanError(
                f"a tensor of shape {list(spec.shape)} is to stay at byte {spec.mem_offset}, but the first {start} "
                "bytes of its memory belong to branches and loops of the program: give it another mem_offset",
                rule="fixed",
            )
    found = layout(
        [spec.lifetime[0] for spec in roots],
        [spec.lifetime[1] + 1 for spec in roots],  # ExecuTorch's are closed on both sides
        [spec.allocated_memory for spec in roots],
        alignment=alignment,
        fixed=fixed if any(has_offset) else None,
        num_threads=1,  # the same program gives the same offsets
        time_limit=time_limit,
        seed=seed,
    )
    return [start + int(offset) for offset in found.offsets], start + found.height_bytes


def _answer(memory: int, offset: int) -> Any:
    """Say where a tensor lies. One object per memory: ExecuTorch's verifier wants one for tensors that share bytes."""
    return _exir().SpecAllocResult(mem_id=memory, mem_obj_id=0, mem_offset=offset)


def _inside(spec: Spec, result: MemoryAlgoResult) -> Any:
    """Return the place of a tensor inside the one that backs it, which another may back in turn."""
    offset, base, seen = 0, spec, set[int]()
    while base.storage_base is not None:
        if id(base) in seen:
            raise PlanError(f"a tensor of shape {list(spec.shape)} is backed by itself", rule="storage_base")
        seen.add(id(base))
        offset += base.storage_base_offset
        if base.storage_base_offset + base.allocated_memory > base.storage_base.allocated_memory:
            raise PlanError(
                f"a tensor of {base.allocated_memory} bytes at byte {base.storage_base_offset} does not fit into the "
                f"{base.storage_base.allocated_memory} bytes of the tensor that backs it",
                rule="storage_base",
            )
        base = base.storage_base
    if base not in result.spec_dict:
        raise PlanError(
            f"a tensor of shape {list(spec.shape)} is backed by one that is not planned with it", rule="storage_base"
        )
    place = result.spec_dict[base]
    return _answer(place.mem_id, place.mem_offset + offset)
