"""JSON files, plain or gzip: read with clear errors, written so that a crash never leaves half a file."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from olla.errors import OllaError

_GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Put the source (a file, or "graph") before the message of every olla error raised inside."""
    try:
        yield
    except OllaError as error:
        raise type(error)(f"{source}: {error}", rule=error.rule, ids=error.ids) from error.__cause__


def read_json(path: str | os.PathLike[str], error: type[OllaError]) -> object:
    """Read a JSON file; gzip is recognised by its first bytes, not by the file's name.

    Args:
        path: the file.
        error: class of what is raised.

    Returns:
        What `json.loads` returns.

    Raises:
        error: the file cannot be read, its gzip is damaged, it is not UTF-8 or not JSON. See `naming` for its name.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as cause:
        raise error(f"cannot be read: {cause.strerror or cause}", rule="file") from cause
    except ValueError as cause:  # a NUL in the path
        raise error(f"cannot be read: {cause}", rule="file") from cause
    if not data:
        raise error("is empty, expected JSON text or gzip of it", rule="file")
    if data.startswith(_GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as cause:
            raise error(f"is damaged gzip: {cause}; copy or write the file again", rule="file") from cause
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise error(f"is not UTF-8 text: byte {cause.start} is 0x{data[cause.start]:02x}", rule="file") from cause
    except RecursionError as cause:
        raise error("is nested too deep to be read", rule="file") from cause
    except ValueError as cause:
        raise error(f"is not JSON, or was cut off: {cause}", rule="file") from cause


def write_json(path: str | os.PathLike[str], content: object, error: type[OllaError]) -> None:
    """Write a JSON file, through gzip where the name ends in `.gz`. The same content gives the same bytes.

    The file appears whole or not at all: it is written beside its place and then renamed.

    Args:
        path: the file; an older one is replaced.
        content: what `json.dumps` takes.
        error: class of what is raised.

    Raises:
        error: the file cannot be written. See `naming` for its name.
    """
    place = Path(path)
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
    if place.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp") if place.name else place
    try:
        temporary.write_bytes(data)
        os.replace(temporary, place)
    except OSError as cause:
        with suppress(OSError):
            temporary.unlink()
        raise error(f"cannot be written: {cause.strerror or cause}", rule="file") from cause
