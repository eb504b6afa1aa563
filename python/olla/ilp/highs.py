"""Finds HiGHS in the installed highspy: its shared library where the wheel has one, its extension elsewhere."""

import importlib.util
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from olla._core import Solver
from olla.base import Progress
from olla.errors import SolverError

if TYPE_CHECKING:
    from olla.ilp.extension import HighsExtension

# The ways to HiGHS, the first that is there is taken. Tests name one to go it where another would be taken.
WAYS = ("library", "extension")

_OLDEST = (1, 15)
_REMEDY = 'pip install --upgrade "highspy>=1.15"'
_PATTERNS = ("libhighs.so*", "libhighs*.dylib")
_FOLDERS = (".", "lib", "lib64", ".libs", "../highspy.libs")


def solver(time_limit: float, seed: int, progress: Progress | None, *, num_threads: int = 1) -> Solver:
    """Return HiGHS with its limits, for a program of the core.

    Raises:
        SolverError: HiGHS is missing or too old.
    """
    highs = find_highs()
    return Solver(highs=highs, time_limit=time_limit, seed=seed, num_threads=num_threads, progress=progress)


def find_highs() -> "str | HighsExtension":
    """Find HiGHS in the installed highspy; highspy is imported only where it brings no shared library.

    Returns:
        The path of the shared library, or what runs HiGHS through highspy's extension.

    Raises:
        SolverError: highspy is not installed, older than 1.15, or cannot be imported.

    Example:
        >>> bool(find_highs())
        True
    """
    spec = importlib.util.find_spec("highspy")
    if spec is None or spec.origin is None:
        raise SolverError(f"the package highspy, which brings the HiGHS solver, is not installed: {_REMEDY}")
    version = metadata.version("highspy")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
        raise SolverError(f"highspy {version} is too old, 1.15 or later is needed: {_REMEDY}")
    package = Path(spec.origin).parent
    library = _library(package) if "library" in WAYS else None
    return library if library is not None else _extension(version, package)


def _library(package: Path) -> str | None:
    """Return the path of the shared library in highspy's folder, if there is one."""
    found = (path for folder in _FOLDERS for pattern in _PATTERNS for path in sorted((package / folder).glob(pattern)))
    path = next(found, None)
    return None if path is None else str(path.resolve())


def _extension(version: str, package: Path) -> "HighsExtension":
    """Return what runs HiGHS through highspy's extension.

    Raises:
        SolverError: it cannot be imported, or lacks what is needed of it.
    """
    try:
        from olla.ilp.extension import HighsExtension
    except (ImportError, AttributeError) as error:
        raise SolverError(
            f"highspy {version} in {package} brings no HiGHS library ({' or '.join(_PATTERNS)}), and its extension "
            f"cannot be used ({error}): pip install --force-reinstall highspy"
        ) from error
    return HighsExtension()
