"""The backend "olla" of torch.compile: Inductor with olla's decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from olla.inductor.compat import compat
from olla.inductor.kernels import inlining
from olla.inductor.saving import saved_inputs
from olla.inductor.settings import patches

_OURS = ("budget", "max_slowdown", "minimise", "device", "max_recomputed", "chunked_loss", "segment", "host_budget")


def backend(module: Any, inputs: Any, *, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Any:
    """Compile a graph with Inductor and olla's decisions; ``torch.compile(model, backend="olla")`` calls this.

    Args:
        module, inputs: the graph module that dynamo captured and its example inputs.
        mode: as of ``torch.compile``: "reduce-overhead", "max-autotune", ...
        options: ``budget``, ``max_slowdown``, ``minimise``, ``device``, ``max_recomputed``,
            ``chunked_loss``, ``segment``, ``host_budget`` as of `olla.inductor.enable`; ``mode``, since
            torch.compile takes no mode beside options; all others are Inductor's own.

    Returns:
        The compiled function.

    Raises:
        ValueError: an option has a value that it cannot have, or is gone.

    Example:
        >>> import torch
        >>> step = torch.compile(torch.nn.Linear(2, 1), backend="olla", options={"max_slowdown": 0.05})
    """
    if (options or {}).get("kernels", "inductor") != "inductor":
        from olla.aten import backend as aten

        return aten.backend_of(options or {})(module, inputs)
    if "arena" in (options or {}):
        raise ValueError(
            f'arena={options["arena"]!r} is no option of the backend "olla" any more, since it raised the peak of all '  # type: ignore[index]
            "models measured: leave it out. olla.pool and olla.compile run steps at planned addresses"
        )
    ours = {name: value for name, value in (options or {}).items() if name in _OURS}
    others = {name: value for name, value in (options or {}).items() if name not in _OURS}
    mode = others.pop("mode", mode)
    decisions = patches(**ours)
    for name in {saved_inputs.HOOK, *inlining.THRESHOLDS} & others.keys():  # the user's own
        decisions.pop(name, None)
    return compat.compile_graph(module, inputs, mode=mode, options=others, patches=decisions)
