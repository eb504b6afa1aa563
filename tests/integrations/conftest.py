"""Settings that trainers leave behind in a process end with the test."""

import pytest


@pytest.fixture(autouse=True)
def _no_settings_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """TrainingArguments(torch_compile=True) sets variables that compile the models of every later Accelerator."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
