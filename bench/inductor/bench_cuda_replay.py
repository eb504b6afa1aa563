"""Does the replay of generated CUDA code on fake tensors tell what torch's caching allocator will need?

    python bench/inductor/bench_cuda_replay.py --markdown bench/results/inductor/cuda_replay.md

Fifteen training steps under the backend's default, on a GPU or under its stand-in (docs/cuda.md): the peak that
`replay` finds, which runs nothing on the device, beside what bench_compile.py found allocated. What libraries allocate
for themselves is named apart: cuBLAS keeps a workspace per thread that uses it, forward's and autograd's. Exit status:
0; 1 if something could not be compiled.
"""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.inductor.bench_compile import FOLDERS, MEBI, Case
from bench.support.harness import REPOSITORY, Report
from olla.inductor.compat import compat
from olla.inductor.compat.compat import inductor_settings
from olla.inductor.settings import patches
from olla.inductor.simulate.step import replay
from tests.support.pytorch import compile_cases, standing

COLUMNS = ["model", "allocated MiB", "replayed MiB", "workspaces MiB", "replayed and workspaces, beside allocated, %"]
TOLERANCE = 0.01


def workspaces() -> int:
    """Return the bytes that cuBLAS keeps for a training step."""
    layer = torch.nn.Linear(256, 256, device="cuda")
    layer(torch.ones(256, 256, device="cuda", requires_grad=True)).sum().backward()
    del layer
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def replayed(name: str) -> int:
    """Return the peak of a model's step under the backend's default, of fake tensors."""
    example, state_bytes = compile_cases.build(name, "full", "cuda")
    with compat.uncached(), standing.without_times(), standing.without_triton(), inductor_settings(patches()):
        return replay(example.model, example.batch, example.loss, state_bytes=state_bytes).peak_bytes


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", choices=list(compile_cases.CASES_ON_GPU))
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    page = Report("What the replay of CUDA code tells, beside torch's allocator", COLUMNS)
    page.summary["device"] = torch.cuda.get_device_name()
    extra, missing, apart = workspaces(), [], []
    for name in arguments.cases or compile_cases.CASES_ON_GPU:
        case = Case(name, REPOSITORY / FOLDERS["cuda"], device="cuda")
        try:
            if not case.find("olla"):
                raise RuntimeError("not measured")
            peak = replayed(name)
        except Exception:
            traceback.print_exc()
            missing.append(name)
            continue
        allocated = case.found["olla"]["peak_bytes"]
        share = (peak + extra) / allocated - 1
        page.rows.append([name, allocated / MEBI, peak / MEBI, extra / MEBI, 100 * share])
        apart += [name] if abs(share) > TOLERANCE else []
        print(f"{name}: {100 * share:.2f} %", file=sys.stderr, flush=True)
    page.summary["apart by more than 1 %"] = "; ".join(apart) or "none"
    page.summary["not measured"] = "; ".join(missing) or "-"
    page.print()
    if arguments.markdown:
        page.save(arguments.markdown)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
