"""What torchrun starts in a test: a wrapped model, trained in both ways by every rank."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.ranks.parallel import trained


def main(folder: Path) -> None:
    """Train, and write whether both ways are equal into a file of this rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    eager, ours = trained(rank, "eager", steps=4), trained(rank, "olla", steps=4, disk_cache=False)
    equal = all(eager[what] == ours[what] for what in ("losses", "tensors"))
    (folder / f"rank{rank}").write_text(f"{'equal' if equal else 'different'}, {ours['report'][0]} misses")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
