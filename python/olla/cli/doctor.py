"""`olla doctor`: is everything here that planning and running steps needs? Every part is tried, not looked up."""

from __future__ import annotations

import argparse
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from olla.base import human_bytes, visible
from olla.base.folders import cache_folder, own_folder
from olla.base.packages import missing
from olla.errors import OllaError

WELL, LACKING = 0, 1  # exit statuses
_OLDEST_TORCH = (2, 11)


class _Absent(Exception):
    """Something is not here, and need not be; the message says what that means."""


def doctor(_: argparse.Namespace) -> int:
    """Run `olla doctor`; return the exit status: 0, or 1 where something fails."""
    import olla

    print(f"olla {olla.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    status = WELL
    for name, found, words in _findings():
        print(visible(f"  {found:<7}  {name:<10}  {words}"), flush=True)
        status = LACKING if found == "failed" else status
    return status


def _findings() -> Iterator[tuple[str, str, str]]:
    """Return what was tried, how it went ("ok", "none", "failed"), and what there is, or how to get it."""
    parts: dict[str, Callable[[], str]] = {
        "planner": _planner, "HiGHS": _highs, "cache": _cache, "torch": _torch, "GPU": _gpu, "step": _step,
    }  # fmt: skip
    for name, part in parts.items():
        try:
            yield name, "ok", part()
        except _Absent as why:
            yield name, "none", str(why)
        except (OllaError, ImportError, OSError, RuntimeError) as error:
            yield name, "failed", " ".join(f"{error}".split())


def _plan_two_ops(method: str) -> None:
    import olla

    builder = olla.Graph.builder("doctor")
    first, second = builder.tensor(64), builder.tensor(8)
    builder.op("first", writes=[first])
    builder.op("second", reads=[first], writes=[second])
    graph = builder.build()
    olla.check(graph, olla.plan(graph, method=method))


def _planner() -> str:
    _plan_two_ops("auto")
    return f"orders, lays out and checks; numpy {metadata.version('numpy')}, numba {metadata.version('numba')}"


def _highs() -> str:
    _plan_two_ops("ilp")
    return f"solves; highspy {metadata.version('highspy')}"


def _cache() -> str:
    folder = cache_folder()
    own_folder(folder)
    kept = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{folder}: {human_bytes(kept)} kept, {human_bytes(shutil.disk_usage(folder).free)} free"


def _torch_module() -> Any:
    try:
        import torch
    except ImportError as error:
        raise _Absent(f"{missing('torch', 'torch')}, to capture and run steps") from error
    return torch


def _torch() -> str:
    torch = _torch_module()
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST_TORCH:
        raise OllaError(f"torch {torch.__version__} is too old, 2.11 or later is needed: pip install -U torch")
    return f"torch {torch.__version__}"


def _gpu() -> str:
    torch = _torch_module()
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise _Absent(f"torch is {built} and sees no GPU: steps are captured and planned for one, and run on the CPU")
    free, total = torch.cuda.mem_get_info()
    return f"{torch.cuda.get_device_name()}: {human_bytes(total)}, {human_bytes(free)} free"


def _step() -> str:
    """Train two steps as planned, at planned addresses, beside an ordinary loop."""
    import olla

    torch = _torch_module()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def loss(model: Any, batch: Any) -> Any:
        return model(batch).square().mean()

    results: list[list[Any]] = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.ones(8, 16, device=device)
        if planned:
            step = olla.compile(model, optimizer=optimizer, loss=loss)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for _ in range(2):
                    step(batch)
            if not step.report().in_arena:
                raise OllaError(" ".join(str(warning.message) for warning in told))
        for _ in range(0 if planned else 2):
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    if not all(torch.equal(one, other) for one, other in zip(*results, strict=True)):
        raise OllaError("a planned step has other results than an ordinary one: please report this, with what is above")
    return f"captured, planned and run at planned addresses on the {device}: equal to the ordinary loop, bit for bit"
