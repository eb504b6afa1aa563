"""Every private name of torch that olla uses where Inductor compiles forward, backward and update as one graph.

The rest, and the guard, are in `compat`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from olla.inductor.compat.compat import private

_library: Any = torch.library.Library("olla_whole", "DEF")  # type: ignore[no-untyped-call, unused-ignore]
# Stands for an update's operators while it is decided what to save, and consumes its gradients, which die there. It
# never runs.
_library.define("update(int number, Tensor[] taken, Tensor(a!)? into=None) -> ()")
# Materializes a value, so that backward reads it from memory and does not recompute it.
_library.define("keep(Tensor value) -> Tensor")
_library.impl("keep", lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device), "Meta")
# Copies one seed out of those a step has drawn: C++ kernels hard-code the place of a seed, so that every mask of
# dropout would need a kernel of its own. (Triton kernels take it as an argument.)
_library.define("seed(Tensor seeds, int place) -> Tensor")
_library.impl("seed", lambda seeds, place: seeds.select(0, place).clone(), "CompositeExplicitAutograd")
UPDATE = torch.ops.olla_whole.update.default
KEEP = torch.ops.olla_whole.keep.default
SEED = torch.ops.olla_whole.seed.default


def compile_whole(
    module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a graph that changes its inputs, without gradients, under patches of Inductor's configuration.

    Returns:
        A function of the inputs; it returns a list or tuple of the results.
    """
    _lower_keep()
    with torch.no_grad():
        compiled: Callable[..., Any] = private("torch._inductor.compile_fx", "compile_fx")(
            module, list(inputs), config_patches=dict(patches)
        )
    return compiled


@functools.cache
def _lower_keep() -> None:
    """Tell Inductor how a value is kept: it is written to memory where it is made."""

    def keep(value: Any) -> Any:
        value.realize()
        return value

    private("torch._inductor.lowering", "register_lowering")(KEEP, type_promotion_kind=None)(keep)


def drop_weak_users(scheduler: Any) -> None:
    """Count only readers of a buffer as its users.

    What merely has to run later, as the update of a parameter behind all that reads it, does not keep a buffer from
    being overwritten; the order is fixed by then.
    """
    for buffer in scheduler.name_to_buf.values():
        buffer.users = [user for user in buffer.users if not user.is_weak]
