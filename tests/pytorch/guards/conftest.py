"""Guards of what Dynamo does not follow: torch.compile is switched off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def switched_off() -> Iterator[None]:
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield
