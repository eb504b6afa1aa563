"""Distributions check their arguments, as in a fresh process: ``torch.compile`` turns that off until it ends."""

import pytest


@pytest.fixture(autouse=True)
def checked_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``torch._dynamo`` sets when it first compiles is set back for each of these tests."""
    from torch.distributions import Distribution

    monkeypatch.setattr(Distribution, "_validate_args", True)
