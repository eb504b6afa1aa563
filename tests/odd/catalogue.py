"""All odd loops; importing this fills the register."""

import importlib
from pathlib import Path

from .loops import REGISTER

__all__ = ["REGISTER"]

for _path in sorted(Path(__file__).parent.glob("*.py")):
    if _path.stem != "__main__":
        importlib.import_module(f".{_path.stem}", __package__)
