"""The `olla` command."""

from olla.cli.parser import main

__all__ = ["main"]
