"""Does the replay of generated CUDA code on fake tensors tell what torch's caching allocator will need?

    python bench/inductor/bench_cuda_replay.py --markdown bench/results/inductor/cuda_replay.md

Fifteen training steps under the backend's default, on a GPU or under its stand-in (docs/cuda.md): the peak that
`replay` finds, which runs nothing on the device, beside what two steps of training allocate. What libraries allocate
for themselves is named apart: cuBLAS keeps a workspace per thread that uses it, forward's and autograd's. Requested is
what is allocated without the allocator's rounding: of a block of a megabyte or more it splits nothing off that is
smaller than one. Exit status: 0; 1 if something could not be compiled, or the two differ by more than 1 %.
"""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench and tests

from bench.inductor.bench_compile import MEBI
from bench.inductor.cuda_peaks import measure
from bench.support.harness import Report
from olla.inductor.compat import compat
from olla.inductor.compat.compat import config
from olla.inductor.settings import patches
from olla.inductor.simulate.step import replay
from tests.support.pytorch import compile_cases, standing

COLUMNS = ["model", "allocated MiB", "requested MiB", "replayed MiB", "workspaces MiB"]
COLUMNS += ["replayed and workspaces, beside requested, %", "beside allocated, %"]
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
    with compat.uncached(), standing.without_times(), standing.without_triton(), config.patch(patches()):
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
        try:
            with config.patch(patches()):
                found = measure(name, "full")
            peak = replayed(name)
        except Exception:
            traceback.print_exc()
            missing.append(name)
            continue
        share, of_allocated = ((peak + extra) / num - 1 for num in (found.requested_bytes, found.peak_bytes))
        row = [found.peak_bytes / MEBI, found.requested_bytes / MEBI, peak / MEBI, extra / MEBI]
        page.rows.append([name, *row, 100 * share, 100 * of_allocated])
        apart += [name] if abs(share) > TOLERANCE else []
        print(f"{name}: {100 * share:.2f} %", file=sys.stderr, flush=True)
    page.summary["apart by more than 1 %"] = "; ".join(apart) or "none"
    page.summary["not measured"] = "; ".join(missing) or "-"
    page.print()
    if arguments.markdown:
        page.save(arguments.markdown)
    return 1 if missing or apart else 0


if __name__ == "__main__":
    sys.exit(main())
