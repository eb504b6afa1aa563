"""Files of buffers and of offsets: read back as written, and whatever is wrong is one clear error."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import numpy as np
import pytest

from olla.errors import GraphError, PlanError
from olla.layout import read_buffers, write_offsets
from olla.layout.layout import Buffers, layout

# Files


def test_columns_stand_in_any_order_and_ids_are_any_strings(tmp_path: Path) -> None:
    path = tmp_path / "buffers.csv"
    path.write_text('size,comment,upper,id,lower\n7,x,5,"a,b",-3\n\n0, y,-2,é,-4\n', encoding="utf-8")
    buffers = read_buffers(path)
    assert buffers.ids == ["a,b", "é"]
    assert buffers.lower.tolist() == [-3, -4]
    assert buffers.upper.tolist() == [5, -2]
    assert buffers.size.tolist() == [7, 0]
    assert buffers.size.dtype == np.int64


def test_written_offsets_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    columns = (np.array(column, dtype=np.int64) for column in ([0, 1], [2, 3], [5, 6]))
    buffers = Buffers(['a "quoted", id', "b"], *columns)
    write_offsets(path, buffers, np.array([0, 5]))
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["id", "lower", "upper", "size", "offset"],
        ['a "quoted", id', "0", "2", "5", "0"],
        ["b", "1", "3", "6", "5"],
    ]
    again = read_buffers(path)
    assert again.ids == buffers.ids
    assert np.array_equal(again.size, buffers.size)


def test_a_file_without_buffers_is_an_empty_layout(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("id,lower,upper,size\n")
    buffers = read_buffers(path)
    result = layout(buffers.lower, buffers.upper, buffers.size)
    assert (result.height_bytes, result.load_bytes, result.status, result.fragmentation) == (0, 0, "optimal", 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: needs one column 'id'"),
        ("id,lower,upper\n", "line 1: needs one column 'size'"),
        ("id,lower,upper,size,size\n", "line 1: needs one column 'size'"),
        ("id,lower,upper,size\na,0,1\n", "line 2: 3 cells, but the header has 4"),
        ("id,lower,upper,size\na,0,1,2\nb,0,1.5,2\n", "line 3: upper is '1.5'"),
        ("id,lower,upper,size\na,0,1_0,2\n", "line 2: upper is '1_0'"),
        ("id,lower,upper,size\na,0,,2\n", "line 2: upper is ''"),
        ("id,lower,upper,size\na,0,1,-2\n", "line 2: size is -2"),
        ("id,lower,upper,size\na,0,1,9223372036854775808\n", "line 2: size is '9223372036854775808'"),
        ("id,lower,upper,size\na,0,1,2\na,0,1,2\n", "line 3: id 'a' stands on line 2 already"),
        ('id,lower,upper,size\n"a,0,1,2\n', "cannot be read"),
        ("id,lower,upper,size\na\0,0,1,\0\n", "line 2: size is"),
    ],
)
def test_bad_files_are_rejected_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(GraphError, match=message):
        read_buffers(path)


def test_unreadable_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"id,lower,upper,size\n\xff\xfe,0,1,2\n")
    for name in ("missing.csv", "binary.csv", "."):
        with pytest.raises(GraphError, match="cannot be read"):
            read_buffers(tmp_path / name)


def test_mutated_files_give_buffers_or_one_clear_error(tmp_path: Path) -> None:
    draw = random.Random(3)
    path = tmp_path / "mutated.csv"
    text = b'id,lower,upper,size\nfirst,0,10,512\n"second, quoted",-5,7,1024\n3,2,9,1048576\n'
    num_read = 0
    for _ in range(1500):
        data = bytearray(text)
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(data))
            data[place : place + draw.randrange(3)] = bytes([draw.choice(b'0129,-+"\n\r\0 \xff\xc3eE_.')])
        path.write_bytes(data)
        try:
            buffers = read_buffers(path)
            layout(buffers.lower, buffers.upper, buffers.size)
            num_read += 1
        except (GraphError, PlanError):
            pass
    assert 100 < num_read < 1400


def test_offsets_that_do_not_fit_are_not_written(tmp_path: Path) -> None:
    one = np.zeros(1, dtype=np.int64)
    with pytest.raises(PlanError, match="2 offsets for 1 buffers"):
        write_offsets(tmp_path / "out.csv", Buffers(["a"], one, one, one), np.array([0, 1]))
    with pytest.raises(PlanError, match="cannot be written"):
        write_offsets(tmp_path / "no" / "out.csv", Buffers(["a"], one, one, one), one)
