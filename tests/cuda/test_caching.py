"""The replayed rules of torch's allocator beside the allocator itself."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from olla.fit.caching import CachingAllocator  # noqa: E402


@pytest.mark.parametrize("largest", [4_000, 3 << 20, 30 << 20])
@pytest.mark.parametrize("seed", range(5))
def test_every_request_allocates_and_reserves_what_torch_does(largest: int, seed: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    if any(before):
        pytest.skip("something is allocated already")
    rng = random.Random(seed)
    rules, tensors = CachingAllocator(), dict[int, Any]()
    sizes = [rng.randint(1, largest) for _ in range(6)]  # steps ask for few sizes, again and again
    for _ in range(600):
        i = rng.randrange(20)
        if tensors.pop(i, None) is not None:
            rules.free(i)
        else:
            size = rng.choice(sizes) if rng.random() < 0.7 else rng.randint(1, largest)
            tensors[i] = torch.empty(size, dtype=torch.uint8, device="cuda")
            rules.allocate(i, size)
        assert torch.cuda.memory_allocated() == rules.allocated_bytes
        assert torch.cuda.memory_reserved() == rules.reserved_bytes
    tensors.clear()
    torch.cuda.empty_cache()
