"""Every test begins with the same random numbers."""

import pytest


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
