"""Files, plain or gzip: read within a limit and with clear errors, written whole or not at all."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import secrets
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

from olla.base.text import parse_bytes
from olla.errors import OllaError

LIMIT = "OLLA_MAX_FILE_BYTES"  # the environment variable
MAX_BYTES = 2**30  # of a file, unpacked: some five million ops; as JSON objects they take twenty times as much

_GZIP_MAGIC = b"\x1f\x8b"
_STEP = 2**20


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Put the source (a file, or "graph") before the message of every olla error raised inside."""
    try:
        yield
    except OllaError as error:
        raise type(error)(f"{source}: {error}", rule=error.rule, ids=error.ids) from error.__cause__


@contextmanager
def _access(done: str, error: type[OllaError]) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as cause:  # the latter of a NUL in the path
        raise error(f"cannot be {done}: {getattr(cause, 'strerror', None) or cause}", rule="file") from cause


def read(path: str | os.PathLike[str], error: type[OllaError]) -> bytearray:
    """Read a file, a fifo or standard input; gzip is recognised by its first bytes, not by the file's name.

    Args:
        path: the file.
        error: class of what is raised.

    Returns:
        The bytes, unpacked: at most 1 GiB, or what OLLA_MAX_FILE_BYTES says ("4GiB").

    Raises:
        error: the file cannot be read, is longer or has no end, or its gzip is damaged. See `naming` for its name.
    """
    most = _limit(error)
    remedy = f"the {most:,} bytes that olla reads; if it is the right file, set {LIMIT}, such as {LIMIT}=4GiB"
    with _access("read", error), open(path, "rb") as file:
        facts = os.fstat(file.fileno())
        data = _take(file, most)
    if len(data) > most:
        if stat.S_ISREG(facts.st_mode) and facts.st_size > most:
            raise error(f"is {facts.st_size:,} bytes long, more than {remedy}", rule="file")
        raise error(f"does not end within {remedy}", rule="file")
    if not data.startswith(_GZIP_MAGIC):
        return data
    num_packed = len(data)
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
            data = _take(packed, most)
    except (OSError, EOFError, zlib.error) as cause:
        raise error(f"is damaged gzip: {cause}; copy or write the file again", rule="file") from cause
    if len(data) > most:
        raise error(f"is gzip of {num_packed:,} bytes that unpacks to more than {remedy}", rule="file")
    return data


def _limit(error: type[OllaError]) -> int:
    wanted = os.environ.get(LIMIT)
    if not wanted:
        return MAX_BYTES
    try:
        return parse_bytes(wanted, LIMIT)
    except OllaError as cause:
        raise error(str(cause), rule="file") from cause


def _take(stream: BinaryIO | gzip.GzipFile, most: int) -> bytearray:
    """Read to the end, or one byte further than the most, step by step: memory is taken for what is there."""
    data = bytearray()
    while piece := stream.read(min(_STEP, most + 1 - len(data))):
        data += piece
    return data


def read_json(path: str | os.PathLike[str], error: type[OllaError]) -> object:
    """Read a JSON file, see `read`; return what `json.loads` makes of it.

    Raises:
        error: the file cannot be read, is too long, is not UTF-8 or not JSON. See `naming` for its name.
    """
    data = read(path, error)
    if not data:
        raise error("is empty, expected JSON text or gzip of it", rule="file")
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise error(f"is not UTF-8 text: byte {cause.start} is 0x{data[cause.start]:02x}", rule="file") from cause
    except RecursionError as cause:
        raise error("is nested too deep to be read", rule="file") from cause
    except ValueError as cause:
        raise error(f"is not JSON, or was cut off: {cause}", rule="file") from cause


def packed(name: str, data: bytes) -> bytes:
    """Return the bytes of a file: through gzip where its name ends in `.gz`, the same bytes for the same data."""
    return gzip.compress(data, compresslevel=6, mtime=0) if name.lower().endswith(".gz") else data


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, through gzip where the name ends in `.gz`; it appears whole or not at all.

    It is written beside its place, under a name nobody can guess, and then renamed. A file that is replaced passes its
    mode on; a symbolic link stays, what it leads to is written. A device, a fifo or a path such as /dev/stdout is no
    file to replace: the bytes go there.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    name = os.fsdecode(path)
    data = packed(name, data)
    stream = stream_of(name)
    if stream is None:
        _replace(os.path.realpath(name), data)
        return
    if isinstance(stream, int):
        for printed in (sys.stdout, sys.stderr):
            if printed is not None:
                printed.flush()  # what was printed before comes before
        descriptor = os.dup(stream)
    else:
        descriptor = os.open(stream, os.O_WRONLY)
    with open(descriptor, "wb") as file:
        file.write(data)


def stream_of(path: str | os.PathLike[str]) -> int | str | None:
    """Return where bytes for a path go that is no file to replace.

    Returns:
        The number of an open file for a path such as /dev/stdout or /dev/fd/3, the path of a device or a fifo, None
        for a file or a place where one may be made.

    Example:
        >>> stream_of("/dev/stdout"), stream_of("/dev/null"), stream_of("plan.json")
        (1, '/dev/null', None)
    """
    name = place = os.fsdecode(path)
    open_files = {os.path.realpath(folder) for folder in ("/dev/fd", "/proc/self/fd")}
    for _ in range(40):  # links in a row: as many as Linux follows
        folder, last = os.path.split(place)
        if last.isdecimal() and os.path.realpath(folder) in open_files:
            return int(last)
        if not os.path.islink(place):
            break
        place = os.path.join(folder, os.readlink(place))
    try:
        mode = os.stat(name).st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else name


JSON = (".json", ".json.gz")
CSV = (".csv", ".csv.gz")


def require_ending(path: str | os.PathLike[str], known: Sequence[str], error: type[OllaError]) -> None:
    """Refuse a file whose name promises another format; a name without an ending promises none.

    Args:
        path: the file.
        known: endings of names, lower case.
        error: class of what is raised.

    Raises:
        error: the name has another ending. See `naming` for the name.
    """
    name = os.path.basename(os.fsdecode(path)).lower()
    if "." in name.lstrip(".") and not name.endswith(tuple(known)) and stream_of(path) is None:
        raise error(f"has an unknown ending, expected {' or '.join(known)}", rule="file")


def may_write(place: str | os.PathLike[str]) -> bool:
    """Return whether this process may write to a file or make one in a folder."""
    return os.access(place, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _replace(place: str, data: bytes) -> None:
    """Write a file beside its place and rename it; a file of that name passes its mode and, where allowed, owner on."""
    old = None
    with suppress(FileNotFoundError):
        old = os.stat(place)
    if old is not None and not may_write(place):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
    temporary = os.path.join(os.path.dirname(place), f".olla-{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o666 if old is None else 0o600), "wb") as file:
            if old is not None:
                with suppress(OSError):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
                os.fchmod(file.fileno(), old.st_mode & 0o777)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # or a crash of the machine leaves an empty file under the new name
        os.replace(temporary, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path: str | os.PathLike[str], content: object, error: type[OllaError]) -> None:
    """Write what `json.dumps` takes as a JSON file, see `write`. The same content gives the same bytes.

    Raises:
        error: the file cannot be written, or its name does not end in .json or .json.gz. See `naming` for its name.
    """
    require_ending(path, JSON, error)
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
    with _access("written", error):
        write(path, data)


def read_csv(path: str | os.PathLike[str], error: type[OllaError]) -> io.TextIOWrapper:
    """Read a CSV file, see `read`: UTF-8, with or without a byte order mark.

    Returns:
        What `csv.reader` takes; it decodes while it is read.

    Raises:
        error: the file cannot be read or is too long. See `naming` for its name.
    """
    return io.TextIOWrapper(io.BytesIO(read(path, error)), encoding="utf-8-sig", newline="")


def write_csv(
    path: str | os.PathLike[str], header: Sequence[str], rows: Iterable[Sequence[object]], error: type[OllaError]
) -> None:
    """Write a CSV file, see `write`.

    Raises:
        error: the file cannot be written, or its name does not end in .csv or .csv.gz. See `naming` for its name.
    """
    require_ending(path, CSV, error)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    with _access("written", error):
        write(path, text.getvalue().encode("utf-8"))
