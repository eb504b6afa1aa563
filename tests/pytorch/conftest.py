"""Nothing of a capture outlives its step, in any test."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is not None:
    from tests.support.pytorch.lifetimes import lifetimes  # noqa: F401

    @pytest.fixture(autouse=True)
    def _nothing_outlives(lifetimes: object) -> None:  # noqa: F811
        pass
