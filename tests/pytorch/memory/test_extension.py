"""The compiled allocator in the user's cache, made by a stand-in for the compiler."""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from pathlib import Path

import pytest

from olla.errors import ReplayError

torch = pytest.importorskip("torch")
from olla.pytorch.memory import extension  # noqa: E402

pytestmark = pytest.mark.torch

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "stand-in {version}"; exit 0; fi
echo run >> "{log}"
sleep {seconds}
while [ "$1" != -o ]; do shift; done
echo "module by {version}" > "$2"
echo 'x.cpp:1: error: {message}' >&2
exit {status}
"""


class Compiler:
    """A script in place of the compiler that counts its runs."""

    def __init__(self, folder: Path) -> None:
        self.path, self.log = folder / "c++", folder / "runs"
        self.set()

    def set(self, version: int = 1, seconds: float = 0, status: int | str = 0, message: str = "") -> None:
        self.path.write_text(
            COMPILER.format(version=version, log=self.log, seconds=seconds, status=status, message=message)
        )
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    @property
    def num_runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.is_file() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler.path))
    monkeypatch.setenv("OLLA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(extension, "private_folder", lambda: tmp_path / "private")
    return compiler


def test_a_module_is_compiled_once_with_a_message(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "olla"):
        path = extension.build("cpu")
    assert path.is_relative_to(extension.cache_folder())
    assert f"against torch {torch.__version__}" in caplog.text
    assert extension.build("cpu") == path
    assert compiler.num_runs == 1
    assert sorted(path.parent.iterdir()) == [path]


def test_a_damaged_module_is_compiled_again(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    path = extension.build("cpu")
    good = path.read_bytes()
    path.write_bytes(good[:5])
    with caplog.at_level(logging.WARNING, "olla"):
        assert extension.build("cpu") == path
    assert "is damaged" in caplog.text
    assert path.read_bytes() == good
    assert compiler.num_runs == 2


def test_another_compiler_torch_or_source_means_another_module(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {extension.build("cpu")}
    compiler.set(version=2)
    paths.add(extension.build("cpu"))
    monkeypatch.setattr(torch.version, "git_version", "0" * 40)
    paths.add(extension.build("cpu"))
    sources = tmp_path / "native"
    sources.mkdir()
    for source in extension.SOURCES.iterdir():
        (sources / source.name).write_text(source.read_text() + "\n")
    monkeypatch.setattr(extension, "SOURCES", sources)
    paths.add(extension.build("cpu"))
    assert len(paths) == compiler.num_runs == 4


def test_builds_at_the_same_time_do_not_disturb_each_other(compiler: Compiler) -> None:
    compiler.set(seconds=0.3)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(extension.build("cpu"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.num_runs == 4
    assert len(paths) == 4
    assert sorted(paths[0].parent.iterdir()) == sorted(set(paths))
    assert extension.build("cpu") in paths


def test_a_failed_build_shows_the_compilers_errors_and_leaves_nothing(compiler: Compiler) -> None:
    compiler.set(status=1, message="no concepts here")
    with pytest.raises(ReplayError, match=r"(?s)C\+\+20 compiler is needed.*no concepts here"):
        extension.build("cpu")
    assert list((extension.cache_folder() / "replay").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_module_in_a_folder_of_another_user_is_not_loaded(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    kept = extension.build("cpu")
    for owned in (kept, kept.parent, kept.parent.parent):
        os.chown(owned, 65534, 65534)
        with caplog.at_level(logging.WARNING, "olla"):
            path = extension.build("cpu")
        assert owned == kept or path != kept
        assert f"{owned} belongs to nobody" in caplog.text
        assert "set OLLA_CACHE_DIR to a folder of yours" in caplog.text
        assert path.stat().st_uid == path.parent.stat().st_uid == 0
        os.chown(owned, 0, 0)
        caplog.clear()
    assert kept.is_file()


def test_a_module_in_a_folder_that_others_can_write_to_is_not_loaded(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    kept = extension.build("cpu")
    kept.parent.chmod(0o777)
    with caplog.at_level(logging.WARNING, "olla"):
        paths = {extension.build("cpu") for _ in range(2)}
    assert kept not in paths
    assert len(paths) == 1
    assert compiler.num_runs == 2  # once for this process
    assert f"others can write to {kept.parent} (owner {kept.owner()}, mode 0777)" in caplog.text
    assert "the allocator is compiled for this process alone" in caplog.text
    (path,) = paths
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_module_that_others_can_write_to_is_compiled_again(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    before = os.umask(0)
    try:
        path = extension.build("cpu")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in list(path.parents)[:2]] == [0o700] * 2
    path.chmod(0o777)
    with caplog.at_level(logging.WARNING, "olla"):
        assert extension.build("cpu") == path
    assert f"others can write to {path}" in caplog.text
    assert compiler.num_runs == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "cause", ["No space left on device", "Disk quota exceeded", "Cannot allocate memory", "Read-only file system"]
)
def test_what_a_compiler_lacked_is_named_and_no_other_compiler_asked_for(compiler: Compiler, cause: str) -> None:
    compiler.set(status=1, message=f"expected ;' >&2; echo '/usr/bin/ld: final link failed: {cause}")
    with pytest.raises(ReplayError) as caught:
        extension.build("cpu")
    assert f"final link failed: {cause}" in str(caught.value)
    assert "TMPDIR" in str(caught.value)
    assert "GCC" not in str(caught.value)


def test_a_compiler_that_is_killed_is_said(compiler: Compiler) -> None:
    compiler.set(status="$(kill -9 $$)", message="")
    with pytest.raises(ReplayError, match=r"(?s)lacked disk or memory.*SIGKILL"):
        extension.build("cpu")


def test_a_compiler_that_crashes_lacks_no_memory(compiler: Compiler) -> None:
    compiler.set(status="$(kill -SEGV $$)", message="")
    with pytest.raises(ReplayError, match=r"(?s)cannot compile the allocator.*SIGSEGV ended it"):
        extension.build("cpu")


def test_a_compiler_that_cannot_be_run_is_named(compiler: Compiler) -> None:
    compiler.path.write_bytes(b"\x7fELF no program")
    with pytest.raises(ReplayError, match=f"{re.escape(str(compiler.path))} cannot be run: Exec"):
        extension.build("cpu")


def test_no_compiler_names_what_to_install(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(ReplayError, match=r"'no-such-compiler', is not there.*apt install g\+\+"):
        extension.build("cpu")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ReplayError, match=r"none of c\+\+, g\+\+, clang\+\+ is on the PATH.*apt install g\+\+"):
        extension.build("cpu")


def test_missing_python_headers_name_what_to_install(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    with pytest.raises(ReplayError, match=r"headers are not in /nowhere.*python3-dev"):
        extension.build("cpu")


def test_a_cache_that_cannot_be_written_names_the_variable(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OLLA_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ReplayError, match="Set OLLA_CACHE_DIR to a folder to write to"):
        extension.build("cpu")


def test_a_device_without_allocator_is_refused(compiler: Compiler) -> None:
    with pytest.raises(ReplayError, match="planned addresses on 'mps' are not supported"):
        extension.build("mps")


def headers(folder: Path, line: str) -> Path:
    """Write c10 headers that declare what our CUDA allocator passes on, and one line more."""
    names = ("allocate", "recordStream", "getContextForPointer", "markCaptureBegin")
    body = "".join(f"  virtual void {name}(\n    int x) = 0;\n" for name in names)
    for name, declared in extension._ALLOCATORS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = f"{declared}\n  virtual ~X() = default;\n{body}  // virtual int old();\n{line}\n}};\n"
        (folder / name).write_text(text)
    return folder


def test_unknown_virtual_functions_of_a_torch_are_refused(tmp_path: Path) -> None:
    extension.check_virtuals(headers(tmp_path, "  virtual void init(int count) {}"))
    with pytest.raises(ReplayError, match=r"does not know: becomeNew\. Update olla"):
        extension.check_virtuals(headers(tmp_path, "  virtual std::pair<int, int> becomeNew(\n      int count) {}"))
    (tmp_path / "cuda" / "CUDACachingAllocator.h").write_text("")
    with pytest.raises(ReplayError, match="no 'class CUDAAllocator '"):
        extension.check_virtuals(tmp_path)


def test_the_installed_torch_has_only_virtual_functions_that_are_passed_on() -> None:
    extension.check_virtuals(Path(extension.cpp_extension.include_paths()[0]) / "c10")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_told_so(compiler: Compiler) -> None:
    with pytest.raises(ReplayError, match="is built without CUDA"):
        extension.build("cuda")


def test_a_module_that_does_not_load_is_named(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_modules", {})
    with pytest.raises(ReplayError, match=r"does not load.*Remove .*cpu-"):
        extension.load_module("cpu")


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable in ("OLLA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert extension.cache_folder() == tmp_path / "home" / ".cache" / "olla"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert extension.cache_folder() == tmp_path / "xdg" / "olla"
    monkeypatch.setenv("OLLA_CACHE_DIR", os.path.join("~", "own"))
    assert extension.cache_folder() == tmp_path / "home" / "own"
