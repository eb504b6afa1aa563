"""All odd loops; importing this fills the register."""

import importlib
from pathlib import Path

from tests.odd.loops import REGISTER

__all__ = ["REGISTER"]

for _path in sorted(Path(__file__).parent.glob("*/*.py"), key=lambda path: path.name):
    importlib.import_module(f"{__package__}.{_path.parent.name}.{_path.stem}")
