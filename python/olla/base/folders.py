"""Folders that later processes find again: what is loaded from them runs, so only the user may have a say in it."""

from __future__ import annotations

import atexit
import functools
import grp
import logging
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_REMEDY = "set OLLA_CACHE_DIR to a folder of yours"
_logger = logging.getLogger("olla")


class NotTrusted(PermissionError):
    """Others than the user and root can change what a folder holds, or where a path leads."""


def cache_folder() -> Path:
    """Return the folder for what later processes use again: OLLA_CACHE_DIR, XDG_CACHE_HOME/olla or ~/.cache/olla.

    Where there is no home folder: one of this process, with a warning.

    Example:
        >>> cache_folder().is_absolute()
        True
    """
    own = os.environ.get("OLLA_CACHE_DIR")
    try:
        place = Path(own or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()
    except RuntimeError:  # neither HOME nor an entry in the user database
        return _without_home()
    return place if own else place / "olla"


@functools.cache
def _without_home() -> Path:
    place = private_folder()
    _logger.warning("no home folder is known: what is compiled and planned is kept for this process alone; %s", _REMEDY)
    return place


@functools.cache
def private_folder() -> Path:
    """Make a folder for this process alone; it goes when the process ends."""
    place = Path(tempfile.mkdtemp(prefix="olla-"))
    process = os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # not a fork of it
            shutil.rmtree(place, ignore_errors=True)

    atexit.register(remove)
    return place


def own_folder(place: Path) -> None:
    """Make a folder for the user alone, and those above it that are missing, and check that it is to be trusted.

    Raises:
        NotTrusted: see `check_own`.
        OSError: it cannot be made.
    """
    missing = [folder for folder in (place, *place.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    check_own(place)


def check_own(path: Path) -> None:
    """Check that only the user and root can change what a file or a folder holds, and where its path leads.

    Folders above may be open to all where they are sticky, as /tmp is; a group may write where it is the user's own.

    Raises:
        NotTrusted: names the file or folder, its owner, its mode and the remedy.
        OSError: it is not there.
    """
    way = list(_way(path))
    for place in way:
        facts = place.lstat()
        mode = f"{stat.S_IMODE(facts.st_mode):04o}"
        if facts.st_uid not in (0, os.geteuid()):
            raise NotTrusted(f"{place} belongs to {_name(facts.st_uid)} (mode {mode}), not to you: {_REMEDY}")
        is_sticky = place != way[-1] and facts.st_mode & stat.S_ISVTX
        if not stat.S_ISLNK(facts.st_mode) and not is_sticky and _others_can_write(facts):
            owner = f"(owner {_name(facts.st_uid)}, mode {mode})"
            raise NotTrusted(f"others can write to {place} {owner}: chmod go-w it, or {_REMEDY}")


def _way(path: Path) -> Iterator[Path]:
    """Yield every folder and symbolic link by which a path is reached, and last what it leads to."""
    path.stat()  # raises where links go round in a circle
    place, rest = Path(), list(reversed(path.absolute().parts))
    while rest:
        place = place / rest.pop()
        yield place
        if place.is_symlink():
            rest += reversed(place.readlink().parts)
            place = place.parent


def _others_can_write(facts: os.stat_result) -> bool:
    if facts.st_mode & stat.S_IWOTH:
        return True
    if not facts.st_mode & stat.S_IWGRP:
        return False
    try:  # a group that has the user's name and no other member is the user
        group, user = grp.getgrgid(facts.st_gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return True
    return group.gr_name != user or not set(group.gr_mem) <= {user}


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
