"""Origin of the ops of a step: the module that computes them, and the source line that asked for it."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import fx

_CALL = torch.nn.Module._call_impl.__code__  # it runs every module's forward
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_THEIRS, _MODULE, _USERS, _OUTERMOST, _NODE = range(5)  # what a frame runs


class Site(NamedTuple):
    """Where an op comes from; empty where nothing tells.

    Attributes:
        module: path of the module in the model, such as ``"layers.0.linear1"``.
        source: file and line, such as ``"train.py:25"``.
    """

    module: str = ""
    source: str = ""


SITE = "olla_site"  # key of node.meta
_ROOT = re.compile(r"^L\['\w+'\]")  # of a path of modules as torch notes it: the argument that holds the model
_PATH_STEP = re.compile(r"\._modules\['([^']*)'\]|\[(\d+)\]")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def site_of(node: fx.Node) -> Site:
    """Return where a node comes from; of one that torch has recorded (torch.export), what torch noted of it."""
    if SITE in node.meta:
        found: Site = node.meta[SITE]
        return found
    modules = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    trace = _LINE.findall(node.meta.get("stack_trace") or "")
    lines = [(file, line) for file, line in trace if not file.startswith(_LIBRARIES)]
    path = _PATH_STEP.sub(r"\1", _ROOT.sub("", modules[-1])).strip(".") if modules else ""
    return Site(path, f"{_short(lines[-1][0])}:{lines[-1][1]}" if lines else "")


class NodeByNode(fx.Interpreter):
    """Runs a graph that torch has recorded; what its operators are recorded as has the sites of its nodes."""

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        return super().run_node(n)


class Sites:
    """Gives every node that is recorded its site.

    An op of a backward pass has that of the op it is the gradient of: autograd numbers its nodes as the forward pass
    makes them. Where a checkpoint recomputes a module, it is that module.

    Args:
        mode: returns the mode that records, or None before there is one.
        model: whose modules have paths.
        outermost: code that calls the user's own.
    """

    def __init__(self, mode: Callable[[], Any], model: torch.nn.Module, outermost: CodeType) -> None:
        self._mode = mode
        self._outermost = outermost
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._runs: dict[CodeType, int] = {}
        self._of_autograd: dict[int, Site] = {}  # number of an autograd node -> of the op that made it
        self._made: dict[tuple[str, CodeType | None, int], Site] = {}  # equal ones are one object

    def note(self) -> None:
        """Give the nodes that were recorded since the last call the site of the caller."""
        mode = self._mode()
        new = []
        for node in reversed(mode.tracer.graph.nodes) if mode is not None else ():
            if SITE in node.meta or node.op == "placeholder":
                break
            new.append(node)
        if new:
            site = self._here()
            for node in new:
                node.meta[SITE] = site

    def _here(self) -> Site:
        backward: Any = torch._C._current_autograd_node()
        # A checkpoint that recomputes its modules does so with gradients on, and is inside the backward pass.
        if backward is not None and not torch.is_grad_enabled():
            found = self._of_autograd.get(backward._sequence_nr())
            if found is not None:
                return found
        found = self._of_frames()
        self._of_autograd.setdefault(torch.autograd._get_sequence_nr() - 1, found)  # type: ignore[attr-defined]
        return found

    def _of_frames(self) -> Site:
        """Return the innermost module of the model, and the innermost line that is neither torch's nor olla's."""
        path, code, line, runs = "", None, 0, self._runs
        frame = sys._getframe(3)
        while frame is not None and not (path and code):
            what = runs.get(frame.f_code)
            if what is None:
                what = runs[frame.f_code] = self._kind_of(frame.f_code)
            if what == _USERS:
                if code is None:
                    code, line = frame.f_code, frame.f_lineno
            elif what == _NODE:
                return site_of(frame.f_locals["n"])
            elif what == _MODULE:
                path = path or self._paths.get(id(frame.f_locals["self"]), "")
            elif what == _OUTERMOST:
                break
            frame = frame.f_back  # type: ignore[assignment]
        return self._site(path, code, line)

    def _kind_of(self, code: CodeType) -> int:
        if code is NodeByNode.run_node.__code__:
            return _NODE
        if code is _CALL or code is self._outermost:
            return _MODULE if code is _CALL else _OUTERMOST
        file = code.co_filename
        is_standard = file.startswith(_STANDARD) and "-packages" not in file
        return _THEIRS if is_standard or file.startswith((*_LIBRARIES, "<frozen", "<string")) else _USERS

    def _site(self, path: str, code: CodeType | None, line: int) -> Site:
        key = path, code, line
        if key not in self._made:
            self._made[key] = Site(path, "" if code is None else f"{_short(code.co_filename)}:{line}")
        return self._made[key]


def _short(file: str) -> str:
    """Return the path of a file below the working folder or a folder of packages; else its name."""
    folders = sorted({os.getcwd(), *filter(os.path.isabs, sys.path)}, key=len, reverse=True)
    found = next((folder for folder in folders if file.startswith(folder + os.sep)), os.path.dirname(file))
    return file.removeprefix(found).lstrip(os.sep) or file
