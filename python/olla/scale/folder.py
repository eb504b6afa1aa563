"""Storage of graphs and results: a local folder, or any that fsspec reaches."""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from olla.base import files
from olla.base.files import naming
from olla.errors import GraphError, OllaError
from olla.graph import Graph

_PATTERN = "*?["  # what makes a path one
_TAKEN, _NO_LOCK = -1, -2


class Folder:
    """A folder of files that appear whole or not at all.

    Attributes:
        path: a local path, or a URL such as "s3://bucket/plans".

    Raises:
        OllaError: it cannot be made, or nothing here reaches it.

    Example:
        >>> import tempfile
        >>> folder = Folder(tempfile.mkdtemp())
        >>> folder.write("a.json", b"{}")
        >>> folder.read("a.json"), folder.read("b.json"), folder.names()
        (b'{}', None, ['a.json'])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path).rstrip("/") or "/"
        self._remote: Any = None
        try:
            if is_url(self.path):
                self._remote, self._root = _reached(self.path)
                self._remote.makedirs(self._root, exist_ok=True)
            else:
                os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise OllaError(f"{self.path}: no folder can be made there: {error.strerror or error}") from error

    def place(self, name: str) -> str:
        """Return the path of one of its files."""
        return f"{self.path.rstrip('/')}/{name}"

    def has(self, name: str) -> bool:
        """Return whether a file is there."""
        if self._remote is None:
            return os.path.exists(self.place(name))
        return bool(self._remote.exists(f"{self._root}/{name}"))

    def read(self, name: str) -> bytes | None:
        """Return what a file holds; None where there is none."""
        try:
            if self._remote is None:
                with open(self.place(name), "rb") as file:
                    return file.read()
            return bytes(self._remote.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file, through gzip where the name ends in `.gz`: beside its place, then renamed.

        Raises:
            OSError: it cannot be written.
        """
        if self._remote is None:
            files.write(self.place(name), data)
            return
        temporary = f"{self._root}/.olla-{secrets.token_hex(8)}.tmp"
        try:
            self._remote.pipe_file(temporary, files.packed(name, data))
            self._remote.mv(temporary, f"{self._root}/{name}")
        except BaseException:
            with suppress(Exception):
                self._remote.rm_file(temporary)
            raise

    @contextmanager
    def claimed(self, name: str, *, wait: bool) -> Iterator[bool]:
        """Hold a name of a local folder, alone among all that ask; a process that ends, however it does, lets go.

        Args:
            name: what is held.
            wait: until whoever holds it lets go.

        Yields:
            Whether it is held here. Where nothing can be locked, as behind a URL, everybody holds everything.
        """
        place = f"{self.path}/.{name}.lock"
        file = _NO_LOCK if self._remote is not None else _locked(place, wait)
        try:
            yield file != _TAKEN
        finally:
            if file >= 0:
                with suppress(FileNotFoundError):
                    os.unlink(place)
                os.close(file)

    def names(self) -> list[str]:
        """Return the names of its files, sorted."""
        found = os.listdir(self.path) if self._remote is None else self._remote.ls(self._root, detail=False)
        names = (str(path).rsplit("/", 1)[-1] for path in found)
        return sorted(name for name in names if not name.startswith("."))


def _locked(place: str, wait: bool) -> int:
    """Return a file that is locked here, `_TAKEN` where others have it, or `_NO_LOCK` where the system locks none."""
    while True:
        try:
            file = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return _NO_LOCK
        locked = _TAKEN
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(file), os.stat(place)):
                locked = file
                return file
        except BlockingIOError:
            return _TAKEN
        except FileNotFoundError:  # who had it has just removed it
            pass
        except OSError:
            return _NO_LOCK
        finally:
            if locked != file:
                os.close(file)


def is_url(path: str) -> bool:
    """Return whether a path is for fsspec.

    Example:
        >>> is_url("s3://bucket/graph.json.gz"), is_url("graphs/one.json")
        (True, False)
    """
    return "://" in path


def load(path: str) -> Graph:
    """Read a graph file, local or by URL.

    Raises:
        GraphError: as `Graph.load`; the message starts with the path.
    """
    if not is_url(path):
        return Graph.load(path)
    remote, place = _reached(path)
    with tempfile.TemporaryDirectory(prefix="olla-") as folder:
        copy = os.path.join(folder, "graph")
        try:
            remote.get_file(place, copy)
        except OSError as error:
            raise GraphError(f"{path}: cannot be read: {error}", rule="file") from error
        with naming(path):
            return Graph.from_dict(files.read_json(copy, GraphError))


def graphs_of(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the graph files that paths, URLs and patterns name: each once, those of a pattern sorted.

    Raises:
        OllaError: a pattern names no file.

    Example:
        >>> graphs_of(["b.json", "a.json", "b.json"])
        ['b.json', 'a.json']
    """
    found: list[str] = []
    for path in [os.fspath(path) for path in paths]:
        if not any(character in path for character in _PATTERN) or os.path.exists(path):
            found.append(path)
            continue
        if is_url(path):
            remote, pattern = _reached(path)
            matches = [remote.unstrip_protocol(match) for match in remote.glob(pattern)]
        else:
            matches = glob.glob(path, recursive=True)
        if not matches:
            raise OllaError(f"{path}: no file has such a name; the pattern is compared with local files and URLs alike")
        found += sorted(matches)
    return list(dict.fromkeys(found))


def _reached(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path there."""
    try:
        remote, place = import_module("fsspec.core").url_to_fs(url)
    except ImportError as error:
        remedy = "pip install fsspec, and what its protocol needs, such as s3fs or gcsfs"
        raise OllaError(f"{url}: cannot be reached: {error}; {remedy}") from error
    except ValueError as error:  # an unknown protocol
        raise OllaError(f"{url}: cannot be reached: {error}") from error
    return remote, place
