import csv
import gzip
import json
import re
from pathlib import Path

import pytest

from olla import Graph, GraphError
from olla.graph.columns import COMMUNICATION_FIELDS
from tests.support import oracle
from tests.support.samples import FULL, changed

FORMATS = Path(__file__).parents[2] / "docs" / "formats.md"


@pytest.mark.parametrize("name", ["g.json", "g.json.gz"])
def test_a_saved_graph_loads_equal_and_the_same_graph_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    graph = Graph.from_dict(FULL)
    graph.save(tmp_path / name)
    first = (tmp_path / name).read_bytes()
    assert first.startswith(b"\x1f\x8b" if name.endswith(".gz") else b"{")
    loaded = Graph.load(str(tmp_path / name))
    assert loaded.to_dict() == FULL
    loaded.save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_gzip_is_recognised_whatever_the_name(tmp_path: Path) -> None:
    (tmp_path / "g.json").write_bytes(gzip.compress(json.dumps(FULL).encode()))
    assert Graph.load(tmp_path / "g.json").to_dict() == FULL


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph.from_dict(FULL)
    graph.save(tmp_path / "g.json")

    def full_disk(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(GraphError, match=r"g\.json: cannot be written: No space left on device"):
        Graph.builder().build().save(tmp_path / "g.json")
    assert [path.name for path in tmp_path.iterdir()] == ["g.json"]
    assert Graph.load(tmp_path / "g.json").digest == graph.digest


def test_saving_into_a_missing_folder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"g\.json: cannot be written: No such file or directory"):
        Graph.builder().build().save(tmp_path / "missing" / "g.json")


FILES = {
    "empty": (b"", "is empty, expected JSON text or gzip of it"),
    "no json": (b"hello", "is not JSON, or was cut off: Expecting value: line 1 column 1 (char 0)"),
    "truncated": (json.dumps(FULL).encode()[:-9], "is not JSON, or was cut off: "),
    "nested": (b'{"format": ' + b"[" * 100_000, "is nested too deep to be read"),
    "huge number": (b'{"version": ' + b"9" * 5000 + b"}", "is not JSON, or was cut off: Exceeds the limit"),
    "not utf-8": (b'{"name": "\xff"}', "is not UTF-8 text: byte 10 is 0xff"),
    "utf-16": (json.dumps(FULL).encode("utf-16"), "is not UTF-8 text: byte 0 is 0xff"),
    "nan": (
        json.dumps(changed("ops", 0, "seconds", to=float("nan"))).encode(),
        "ops[0].seconds is nan, expected a finite",
    ),
    "float": (
        json.dumps(changed("tensors", 0, "bytes", to=1e300)).encode(),
        "tensors[0].bytes is 1e+300, expected a whole",
    ),
    "truncated gzip": (gzip.compress(json.dumps(FULL).encode())[:-9], "is damaged gzip: "),
    "gzip of nothing": (gzip.compress(b""), "is empty, expected JSON text or gzip of it"),
    "gzip with rubbish": (gzip.compress(json.dumps(FULL).encode()) + b"rubbish", "is damaged gzip: "),
    "gzip header only": (b"\x1f\x8b", "is damaged gzip: "),
}


@pytest.mark.parametrize("case", FILES)
def test_an_unreadable_file_is_one_clear_error_that_starts_with_its_name(case: str, tmp_path: Path) -> None:
    data, message = FILES[case]
    path = tmp_path / "g.json"
    path.write_bytes(data)
    with pytest.raises(GraphError) as error:
        Graph.load(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_are_graph_errors(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"none\.json: cannot be read: No such file or directory"):
        Graph.load(tmp_path / "none.json")
    with pytest.raises(GraphError, match="cannot be read: Is a directory"):
        Graph.load(tmp_path)
    with pytest.raises(GraphError, match="cannot be read: embedded null byte"):
        Graph.load("g\0.json")


def examples(language: str) -> list[str]:
    """The code blocks of the page on file formats."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", FORMATS.read_text(encoding="utf-8"), re.DOTALL)
    return found


def test_the_documented_graph_is_what_the_page_says(tmp_path: Path) -> None:
    (example,) = examples("json")
    (tmp_path / "g.json").write_text(example, encoding="utf-8")
    graph = Graph.load(tmp_path / "g.json")
    assert (graph.name, graph.resident_bytes) == ("one layer", 440)
    live = oracle.live_bytes(graph, range(3))
    assert (max(live), graph.op_names[live.index(max(live))]) == (880, "backward")


def test_every_documented_key_is_read_and_every_key_read_is_documented() -> None:
    page = FORMATS.read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    documented = {key for row in rows for key in re.findall(r"`(\w+)`", row[0])}
    version_1 = {*FULL, *FULL["tensors"][0], *FULL["tensors"][1], *FULL["ops"][0], *FULL["ops"][1]}
    assert documented == version_1 | {f.key for f in COMMUNICATION_FIELDS} | {"module", "source"}


def test_the_documented_layout_is_a_best_one() -> None:
    question, answer = ([*csv.DictReader(example.splitlines())] for example in examples("csv"))
    assert question == [{key: row[key] for key in ("id", "lower", "upper", "size")} for row in answer]
    lower, upper, size, offset = ([int(row[key]) for row in answer] for key in ("lower", "upper", "size", "offset"))
    for a in range(3):
        for b in range(a):
            apart_in_time = upper[a] <= lower[b] or upper[b] <= lower[a]
            assert apart_in_time or offset[a] + size[a] <= offset[b] or offset[b] + size[b] <= offset[a]
    assert max(map(sum, zip(offset, size, strict=True))) == oracle.best_height(lower, upper, size) == 8
