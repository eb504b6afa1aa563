"""Files: read within a limit whatever they are, written whole or not at all, wherever a path leads."""

from __future__ import annotations

import errno
import gzip
import json
import os
import pty
import resource
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olla
from olla import Graph, GraphError, OllaError, Plan, PlanError
from olla.layout import read_buffers, requests, write_offsets
from olla.layout.layout import Buffers
from tests.support.plans import training_step
from tests.support.samples import FULL

ONE = np.zeros(1, dtype=np.int64)
TRACE = requests.Trace(np.array([100, 50]), np.array([1, 2]))
PLAN = olla.plan(training_step(), time_limit=1.0)
SAVE: dict[str, Callable[[Path], None]] = {
    "graph": lambda path: training_step().save(path),
    "plan": lambda path: PLAN.save(path),
    "layout": lambda path: write_offsets(path, Buffers(["a"], ONE, ONE, ONE), ONE),
    "trace": lambda path: TRACE.save(path),
    "places": lambda path: TRACE.place(64, 1.0, 0).save(path),
}
LOAD: dict[str, Callable[[str], Any]] = {
    "graph": Graph.load,
    "plan": Plan.load,
    "buffers": read_buffers,
    "places": lambda path: requests.load(path, 64),
}
every_kind = pytest.mark.parametrize("kind", SAVE)


def olla_command(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "olla", *args], capture_output=True, text=True, timeout=120, check=False, **options
    )


def write_soon(path: Path, data: bytes) -> threading.Thread:
    """Write to a fifo, as the other side of a process substitution does."""
    os.mkfifo(path)
    thread = threading.Thread(target=path.write_bytes, args=(data,))
    thread.start()
    return thread


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Let this process have 2 GiB more than it has: a reader that knows no limit fails here, not the machine."""
    status = Path("/proc/self/statm")
    if not status.is_file():
        pytest.skip("needs /proc")
    most = int(status.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + 2**31
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


# Reading


def test_a_bomb_of_8_gib_is_refused_with_its_size_and_what_to_set(tmp_path: Path) -> None:
    path = tmp_path / "g.json.gz"
    path.write_bytes(gzip.compress(bytes(2**20)) * 2**13)
    done = olla_command(
        "plan", str(path), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    size = f"{path.stat().st_size:,}"
    assert f"{path}: is gzip of {size} bytes that unpacks to more than the 1,073,741,824 bytes" in done.stderr
    assert "OLLA_MAX_FILE_BYTES=4GiB" in done.stderr


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("kind", LOAD)
def test_every_reader_keeps_to_the_limit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLA_MAX_FILE_BYTES", "1MiB")
    (tmp_path / "long").write_bytes(b" " * (2**20 + 1))
    (tmp_path / "bomb").write_bytes(gzip.compress(b" " * (2**20 + 1)))
    for path, message in (
        (tmp_path / "long", "is 1,048,577 bytes long, more than the 1,048,576 bytes that olla reads"),
        (tmp_path / "bomb", "that unpacks to more than the 1,048,576 bytes that olla reads"),
        (Path("/dev/zero"), "does not end within the 1,048,576 bytes that olla reads"),
    ):
        with pytest.raises(OllaError) as caught:
            LOAD[kind](str(path))
        assert str(caught.value).startswith(f"{path}: ")
        assert message in str(caught.value)


@pytest.mark.usefixtures("little_memory")
def test_a_fifo_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLA_MAX_FILE_BYTES", "100000")
    os.mkfifo(tmp_path / "fifo")
    endless = subprocess.Popen(["sh", "-c", f"exec yes > {tmp_path}/fifo"], stderr=subprocess.DEVNULL)
    with endless, pytest.raises(GraphError, match="fifo: does not end within the 100,000 bytes"):
        Graph.load(tmp_path / "fifo")


def test_a_file_as_long_as_the_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(FULL).encode()
    monkeypatch.setenv("OLLA_MAX_FILE_BYTES", str(len(text)))
    for data in (text, gzip.compress(text, 9)):
        (tmp_path / "g").write_bytes(data)
        assert Graph.load(tmp_path / "g").to_dict() == FULL


def test_a_limit_that_is_no_size_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training_step().save(tmp_path / "g.json")
    monkeypatch.setenv("OLLA_MAX_FILE_BYTES", "lots")
    with pytest.raises(GraphError, match="OLLA_MAX_FILE_BYTES 'lots' is no number of bytes"):
        Graph.load(tmp_path / "g.json")


def test_fifos_and_standard_input_that_end_are_read(tmp_path: Path) -> None:
    text = gzip.compress(json.dumps(FULL).encode())
    thread = write_soon(tmp_path / "fifo", text)
    assert Graph.load(tmp_path / "fifo").to_dict() == FULL
    thread.join()
    training_step().save(tmp_path / "g.json.gz")
    for command in (f"zcat {tmp_path}/g.json.gz | olla plan /dev/stdin", f"olla plan <(zcat {tmp_path}/g.json.gz)"):
        script = command.replace("olla", f"{sys.executable} -m olla")
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert "two layers: 6 ops" in done.stdout


def test_buffers_and_places_are_read_from_fifos_and_through_gzip(tmp_path: Path) -> None:
    placed = TRACE.place(64, 1.0, 0)
    placed.save(tmp_path / "placed.csv.gz")
    data = (tmp_path / "placed.csv.gz").read_bytes()
    assert data.startswith(b"\x1f\x8b")
    thread = write_soon(tmp_path / "fifo", gzip.decompress(data))
    for path in (tmp_path / "placed.csv.gz", tmp_path / "fifo"):
        assert requests.load(path, 64).offsets.tolist() == placed.offsets.tolist()
    thread.join()
    assert read_buffers(tmp_path / "placed.csv.gz").size.tolist() == [100, 50]


# Writing


@every_kind
def test_a_new_file_honours_umask_and_an_old_one_keeps_its_mode(kind: str, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        SAVE[kind](tmp_path / "out")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640
    (tmp_path / "out").chmod(0o604)
    SAVE[kind](tmp_path / "out")
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o604
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@every_kind
def test_a_symbolic_link_stays_and_its_target_is_written(kind: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("link", "link"):  # to nothing, then to a file
        if not (tmp_path / name).is_symlink():
            (tmp_path / name).symlink_to("there/out")
        SAVE[kind](tmp_path / name)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "there" / "out").is_file()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["out"]


@every_kind
def test_a_fifo_is_written_to_and_stays(kind: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append((tmp_path / "fifo").read_bytes()), daemon=True)
    thread.start()
    SAVE[kind](tmp_path / "fifo")
    thread.join(10)
    SAVE[kind](tmp_path / "file")
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert len(got[0]) == (tmp_path / "file").stat().st_size


def device(path: Path, minor: int) -> Path:
    """Make a device node of our own: a writer that replaces what it should write to, as root, spoils no other."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        with open(path, "wb"):
            pass
    except OSError:
        pytest.skip("device nodes cannot be made here")
    return path


@every_kind
def test_a_device_node_is_written_to_and_stays(kind: str, tmp_path: Path) -> None:
    null = device(tmp_path / "null", minor=3)
    SAVE[kind](null)
    assert stat.S_ISCHR(null.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["null"]


def plan_to_standard_output(folder: Path, stdout: int) -> str:
    """Run `olla plan -o stdout --json` with a link like /dev/stdout; return the status in the summary it prints."""
    training_step().save(folder / "g.json")
    if not (folder / "stdout").is_symlink():
        (folder / "stdout").symlink_to("/proc/self/fd/1" if Path("/proc/self/fd").is_dir() else "/dev/fd/1")
    command = [sys.executable, "-m", "olla", "plan", str(folder / "g.json"), "-o", str(folder / "stdout"), "--json"]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 0
    return str(json.loads(done.stderr)["status"])  # standard output is the plan alone


def test_standard_output_is_a_place_whatever_it_is(tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as file:
        file.write(b'"before"\n')
        file.flush()
        assert plan_to_standard_output(tmp_path, file.fileno()) == "optimal"
        file.write(b'"after"\n')  # the caller's file is still the one that has this name
    first, plan, last = (tmp_path / "out").read_text().splitlines()
    assert (first, json.loads(plan)["format"], last) == ('"before"', "olla-plan", '"after"')
    reader, writer = os.pipe()
    assert plan_to_standard_output(tmp_path, writer) == "optimal"
    os.close(writer)
    with open(reader) as pipe:
        assert json.loads(pipe.read())["format"] == "olla-plan"
    leader, follower = pty.openpty()
    thread = threading.Thread(target=lambda: os.read(leader, 2**20), daemon=True)
    thread.start()
    assert plan_to_standard_output(tmp_path, follower) == "optimal"
    thread.join(10)
    os.close(leader)
    os.close(follower)


@every_kind
def test_a_full_device_is_reported_with_its_name(kind: str, tmp_path: Path) -> None:
    full = device(tmp_path / "full", minor=7)
    with pytest.raises(OllaError) as caught:
        SAVE[kind](full)
    assert str(caught.value) == f"{full}: cannot be written: No space left on device"
    assert stat.S_ISCHR(full.stat().st_mode)


def test_a_full_disk_is_reported_and_leaves_the_old_file(tmp_path: Path) -> None:
    own_mounts = ["unshare", "--mount", "sh", "-c"]  # seen by no other process, gone with this one
    mount = f"mount -t tmpfs -o size=16k none {tmp_path}"
    try:
        subprocess.run([*own_mounts, mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nothing can be mounted here")
    script = (
        f"{mount} && echo old > {tmp_path}/plan.json && head -c 12000 /dev/zero > {tmp_path}/rest\n"
        f"{sys.executable} -m olla plan /dev/stdin -o {tmp_path}/plan.json\n"
        f"echo $?; ls -A {tmp_path}; cat {tmp_path}/plan.json"
    )
    builder = Graph.builder("many")
    for _ in range(2000):
        builder.op("op", writes=[builder.tensor(8)])
    graph = json.dumps(builder.build().to_dict())
    done = subprocess.run([*own_mounts, script], input=graph, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == f"olla: error: {tmp_path}/plan.json: cannot be written: No space left on device\n"
    assert done.stdout.split() == ["2", "plan.json", "rest", "old"]


@contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """Let every write that makes a file longer than this fail; Python ignores SIGXFSZ."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@every_kind
def test_a_write_that_fails_half_way_leaves_the_old_file_and_nothing_else(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    with no_file_beyond(10), pytest.raises(OllaError) as caught:
        SAVE[kind](path)
    assert str(caught.value) == f"{path}: cannot be written: {os.strerror(errno.EFBIG)}"
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@every_kind
def test_an_interrupt_leaves_the_old_file_and_nothing_else(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    path.write_text("old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                SAVE[kind](path)
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_lies_at_a_guessed_temporary_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / f".g.json.{os.getpid()}.tmp").symlink_to("precious")
    training_step().save(tmp_path / "g.json")
    assert (tmp_path / "precious").read_text() == "precious"
    assert Graph.load(tmp_path / "g.json").name == "two layers"
    assert not (tmp_path / "g.json").is_symlink()


def test_two_saves_never_use_one_temporary_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (used.append(os.fspath(a)), replace(a, b)))
    for _ in range(3):
        training_step().save(tmp_path / "g.json")
    assert len(set(used)) == 3


def test_a_name_as_long_as_names_may_be_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("g" * 250 + ".json")
    training_step().save(path)
    assert Graph.load(path).name == "two layers"


@contextmanager
def without_privileges() -> Iterator[None]:
    """Let root, who may read and write everything, be another user for a while."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@every_kind
def test_a_write_protected_file_is_not_replaced(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path lies in a folder that is closed to others
        path = Path(folder) / "out"
        path.write_text("old")
        path.chmod(0o444)
        os.chmod(folder, 0o777)
        with without_privileges(), pytest.raises(OllaError) as caught:
            SAVE[kind](path)
        assert str(caught.value) == f"{path}: cannot be written: Permission denied"
        assert path.read_text() == "old"
        assert [path.name for path in Path(folder).iterdir()] == ["out"]


@pytest.mark.parametrize("kind", LOAD)
def test_a_file_that_may_not_be_read_is_said(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in"
        path.touch(mode=0)
        os.chmod(folder, 0o755)
        with without_privileges(), pytest.raises(OllaError) as caught:
            LOAD[kind](str(path))
        assert str(caught.value) == f"{path}: cannot be read: Permission denied"


def test_errors_keep_their_class(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"out\.json: cannot be written"):
        SAVE["graph"](tmp_path / "no" / "out.json")
    for kind, name in (("plan", "out.json"), ("layout", "out.csv"), ("trace", "out.csv"), ("places", "out.csv")):
        with pytest.raises(PlanError, match=rf"{name}: cannot be written"):
            SAVE[kind](tmp_path / "no" / name)


@pytest.mark.parametrize("kind", ["graph", "plan"])
@pytest.mark.parametrize("ending", [".jsn", ".json.xz", ".pkl", ".csv", ".gz"])
def test_a_name_of_another_format_is_refused_before_anything_is_written(kind: str, ending: str, tmp_path: Path) -> None:
    with pytest.raises(OllaError, match=r"has an unknown ending, expected \.json or \.json\.gz"):
        SAVE[kind](tmp_path / f"out{ending}")
    assert list(tmp_path.iterdir()) == []
    for name in ("out", "out.v2.JSON", "OUT.JSON.GZ"):
        SAVE[kind](tmp_path / name)
    assert (tmp_path / "OUT.JSON.GZ").read_bytes().startswith(b"\x1f\x8b")
