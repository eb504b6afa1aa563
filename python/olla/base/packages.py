"""Optional packages: one sentence says that one is missing, and how to get it."""

from __future__ import annotations

import importlib.util


def missing(package: str, extra: str) -> ModuleNotFoundError:
    """Return the error that says that a package is missing; `name` is the package.

    Args:
        package: name of the module, such as torch.
        extra: the extra of olla that installs it.

    Example:
        >>> print(missing("torch", "torch"))
        torch is not installed: pip install "olla-planner[torch]"
    """
    return ModuleNotFoundError(f'{package} is not installed: pip install "olla-planner[{extra}]"', name=package)


def require(package: str, extra: str) -> None:
    """Raise the error of `missing` unless a package can be found.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise missing(package, extra)
