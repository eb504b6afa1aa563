"""Folders from which something is loaded: nobody but the user may have a say in what is there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from olla.base.folders import NotTrusted, cache_folder, check_own, own_folder

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that holds one file, two folders down."""
    own_folder(tmp_path / "cache" / "replay")
    (tmp_path / "cache" / "replay" / "module.so").write_text("module")
    (tmp_path / "cache" / "replay" / "module.so").chmod(0o700)
    return tmp_path / "cache" / "replay"


def test_folders_are_made_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        own_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    made = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in made] == [0o700] * 3


def test_what_is_the_users_alone_is_trusted(place: Path) -> None:
    check_own(place)
    check_own(place / "module.so")
    place.parent.chmod(0o1777)  # as /tmp: others may add, not replace
    check_own(place)
    place.chmod(0o755)
    check_own(place / "module.so")
    (place.parent / "link").symlink_to("replay")
    check_own(place.parent / "link" / "module.so")


def test_what_others_can_write_to_is_not_trusted(place: Path) -> None:
    def refused(changed: Path, mode: int, path: Path, where: Path | None = None) -> None:
        before = stat.S_IMODE(changed.stat().st_mode)
        changed.chmod(mode)
        with pytest.raises(NotTrusted) as caught:
            check_own(path)
        owner, remedy = f"(owner {changed.owner()}, mode {mode:04o})", "set OLLA_CACHE_DIR to a folder of yours"
        assert str(caught.value) == f"others can write to {where or changed} {owner}: chmod go-w it, or {remedy}"
        changed.chmod(before)

    for mode in (0o777, 0o702, 0o1777):
        refused(place, mode, place)
    refused(place.parent, 0o777, place)
    refused(place / "module.so", 0o722, place / "module.so")
    aside = place.parent.parent / "aside"
    aside.mkdir(mode=0o700)
    (aside / "link").symlink_to(place)
    refused(aside, 0o777, aside / "link" / "module.so")  # who owns the link says where it leads
    refused(place.parent, 0o777, aside / "link" / "module.so")


@as_root
@pytest.mark.parametrize("part", ["parent", "folder", "file", "link"])
def test_what_belongs_to_another_user_is_not_trusted(part: str, place: Path) -> None:
    (place.parent / "link").symlink_to("replay")
    owned = {"parent": place.parent, "folder": place, "file": place / "module.so", "link": place.parent / "link"}[part]
    os.chown(owned, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(NotTrusted, match=rf"{owned} belongs to \w+ \(mode 0\d+\), not to you: set OLLA_CACHE_DIR"):
        check_own(place.parent / "link" / "module.so")


@as_root
def test_a_group_of_ones_own_may_write_and_no_other(place: Path) -> None:
    place.chmod(0o770)
    check_own(place)  # of the group root, which has no other member
    os.chown(place, 0, STRANGER)
    with pytest.raises(NotTrusted, match="others can write to"):
        check_own(place)


@as_root
def test_what_root_has_prepared_is_trusted_by_all(tmp_path: Path) -> None:
    os.seteuid(STRANGER)
    try:
        check_own(Path("/usr/bin"))
    finally:
        os.seteuid(0)


NO_HOME: Callable[[str], str] = """
import os, pwd
def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {{uid}}")
pwd.getpwuid = unknown
del os.environ["HOME"]
{}
""".format


def without_home(program: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("OLLA_CACHE_DIR", "XDG_CACHE_HOME")}
    environment["OLLA_DISK_CACHE"] = "1"
    command = [sys.executable, "-c", NO_HOME(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def test_without_a_home_folder_a_folder_of_the_process_is_used() -> None:
    program = "from olla.base.folders import *; c = cache_folder(); own_folder(c / 'x'); print(c, c == cache_folder())"
    done = without_home(program)
    assert done.returncode == 0, done.stderr
    place, same = done.stdout.split()
    assert same == "True"
    assert not Path(place).exists()
    assert done.stderr.count("no home folder is known") == 1
    assert "set OLLA_CACHE_DIR" in done.stderr


@pytest.mark.torch
def test_without_a_home_folder_a_step_runs() -> None:
    if metadata.version("torch").startswith(("2.11.", "2.12.")):
        pytest.skip("torch itself cannot be used by a user without a name")
    pytest.importorskip("torch")
    program = (
        "import torch, olla\n"
        "step = olla.compile(torch.nn.Linear(3, 3), loss=lambda m, x: m(x).square().mean(), arena=False)\n"
        "print(step(torch.ones(2, 3)).item() == step(torch.ones(2, 3)).item())"
    )
    done = without_home(program)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert "no home folder is known" in done.stderr


def test_the_cache_folder_is_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLA_CACHE_DIR", "relative")
    assert cache_folder() == Path.cwd() / "relative"
