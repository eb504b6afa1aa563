"""Damaged plans, buffers and traces: sound, or one clear error with file and rule. OLLA_FUZZ: how many."""

import copy
import csv
import functools
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olla
from olla import Graph, OllaError, Plan
from olla.layout import read_buffers, requests, write_offsets
from olla.layout.layout import layout
from olla.layout.requests import NEVER, Trace
from olla.plan.table import text
from tests.support.damage import VALUES, flip_bit, move_chunk, swap_token
from tests.support.fans import idle

NUM_CASES = int(os.environ.get("OLLA_FUZZ", "200"))
SEEDS = st.integers(0, 2**32 - 1)
CELLS = (
    *("", "-1", "0", "1", "7", "+3", "-0", "1.5", "1e3", "x", '"', "0x10", "1_0", "٣", " 2 ", "\0", "nan"),
    *(str(sign * 2**power + more) for power in (31, 62, 63, 64) for sign in (-1, 1) for more in (-1, 0, 1)),
    "9" * 5000,
)
bounded = settings(max_examples=NUM_CASES, derandomize=True, database=None)


@functools.cache
def planned() -> list[tuple[Graph, dict[str, Any]]]:
    """A plan of every kind, as its file says it."""
    graph = idle(4)
    found = []
    for options in ({}, {"minimise": "peak"}, {"minimise": "peak", "swap": True}, {"method": "autoswap"}):
        plan = olla.plan(graph, time_limit=0.3, **options)
        found.append((graph, plan.to_object()))
    return found


def change_value(content: Any, rng: random.Random) -> None:
    """Change one value somewhere in a JSON object."""
    place = content
    while True:
        key: Any = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.2:
            place[key] = copy.deepcopy(rng.choice([rng.choice(VALUES), rng.randrange(8), -rng.randrange(8)]))
            return
        place = place[key]


def require_rule(rule: str, message: str) -> str:
    assert rule, message
    return rule


def require_clear(error: OllaError, path: Path, data: bytes) -> str:
    """Return the rule of an error that a person can act on."""
    message, name = str(error), str(path)
    assert message.startswith(name), (data, message)
    assert message.isprintable(), (data, message)
    assert len(message) < len(name) + 500, (data, message)
    return require_rule(error.rule, message)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_a_damaged_plan_is_read_or_gives_one_clear_error(folder: Path) -> None:
    rules: set[str] = set()

    @bounded
    @given(SEEDS)
    def damage(seed: int) -> None:
        rng = random.Random(seed)
        graph, content = rng.choice(planned())
        data = json.dumps(content).encode()
        if rng.random() < 0.6:
            content = json.loads(data)
            for _ in range(rng.randrange(1, 3)):
                change_value(content, rng)
            data = json.dumps(content).encode()
        else:
            for _ in range(rng.randrange(1, 3)):
                data = rng.choice([swap_token, swap_token, flip_bit, move_chunk])(data, rng)
        path = folder / "damaged.json"
        path.write_bytes(data)
        try:
            plan = Plan.load(path)
        except OllaError as error:
            rules.add(require_clear(error, path, data))
            return
        assert text(plan, True)
        plan.save(folder / "again.json")
        assert (folder / "again.json").read_bytes()
        try:
            olla.check(graph, plan)
        except OllaError as error:
            rules.add(require_rule(error.rule, str(error)))
        rules.add("valid")

    damage()
    assert {"valid", "file", "type", "missing"} <= rules  # or this test would prove little


def small_table(rng: random.Random, header: list[str]) -> list[list[str]]:
    """Buffers of a few steps, as rows of text under a header."""
    rows = [header]
    for i in range(rng.randrange(6)):
        lower = rng.randrange(5)
        cells = {
            "id": str(i),
            "lower": str(lower),
            "upper": str(lower + rng.randrange(4)),
            "size": str(rng.randrange(40)),
        }
        rows.append([cells.get(name, rng.choice(["", "-1", "0", "16"])) for name in header])
    return rows


def damaged_table(rows: list[list[str]], rng: random.Random) -> bytes:
    """Change cells of a table, drop or add some, or damage its bytes."""
    rows = [list(row) for row in rows]
    for _ in range(rng.randrange(3)):
        row = rng.choice(rows)
        if row and rng.random() < 0.8:
            row[rng.randrange(len(row))] = rng.choice(
                [rng.choice(CELLS), str(rng.randrange(8)), str(16 * rng.randrange(4))]
            )
        else:
            rows += rng.choice([[], [list(row)]])
            row[:] = rng.choice([[*row, "1"], row[:-1], row])
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator=rng.choice(["\n", "\r\n"])).writerows(rows)
    data = file.getvalue().encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        data = rng.choice([flip_bit, move_chunk])(data, rng)
    return data


def test_damaged_buffers_are_laid_out_or_give_one_clear_error(folder: Path) -> None:
    rules: set[str] = set()

    @bounded
    @given(SEEDS)
    def damage(seed: int) -> None:
        rng = random.Random(seed)
        header = [
            "id",
            "lower",
            "upper",
            "size",
            *rng.choice([[], ["fixed"], ["preferred"], ["fixed", "preferred", "more"]]),
        ]
        path = folder / "damaged.csv"
        path.write_bytes(data := damaged_table(small_table(rng, header), rng))
        try:
            buffers = read_buffers(path)
        except OllaError as error:
            rules.add(require_clear(error, path, data))
            return
        try:
            found = layout(
                buffers.lower, buffers.upper, buffers.size,
                fixed=buffers.fixed, preferred=buffers.preferred, num_threads=1, time_limit=0.05,
            )  # fmt: skip
        except OllaError as error:
            rules.add(require_rule(error.rule, str(error)))
            return
        write_offsets(folder / "placed.csv", buffers, found.offsets)
        again = read_buffers(folder / "placed.csv", offsets=True)
        assert again.ids == buffers.ids
        assert again.offset is not None
        layout(again.lower, again.upper, again.size, fixed=again.offset, time_limit=0.0)  # no two overlap
        rules.add("valid")

    damage()
    assert {"valid", "file", "sizes"} <= rules  # or this test would prove little


def test_a_damaged_trace_is_loaded_or_gives_one_clear_error(folder: Path) -> None:
    rules: set[str] = set()

    @settings(bounded, max_examples=3 * NUM_CASES)  # one damage in some hundred makes a size of 0
    @given(SEEDS)
    def damage(seed: int) -> None:
        rng = random.Random(seed)
        m = rng.randrange(6)
        freed = [rng.choice([NEVER, min(k + 1 + rng.randrange(2 * m), 2 * m - 1)]) for k in range(m)]
        sizes = np.array([rng.randrange(1, 200) for _ in range(m)], dtype=np.int64)
        path = folder / "requests.csv"
        Trace(sizes, np.array(freed, dtype=np.int64)).place(16, 0.0, 0).save(path)
        rows = list(csv.reader(path.read_text().splitlines()))
        path.write_bytes(data := damaged_table(rows, rng))
        try:
            placed = requests.load(path, 16)
        except OllaError as error:
            rules.add(require_clear(error, path, data))
            return
        require_sound(placed)
        rules.add("valid")

    damage()
    assert {"valid", "file", "sizes", "alignment", "lifetimes"} <= rules


def require_sound(placed: requests.Placed) -> None:
    """What the readers of a placed trace count on."""
    m = len(placed.num_bytes)
    alive = placed.upper > placed.lower
    assert np.all(placed.num_bytes >= 1)
    assert np.all((placed.offsets >= 0) == alive)
    assert np.all(placed.lower[alive] >= 0)
    assert np.all(placed.upper[alive] <= m)
    assert placed.arena_bytes >= placed.load_bytes >= 0
    blocks = [
        (placed.lower[k], placed.upper[k], placed.offsets[k], placed.offsets[k] + placed.num_bytes[k]) for k in range(m)
    ]
    for i in np.flatnonzero(alive).tolist():
        for j in np.flatnonzero(alive).tolist():
            a, b = blocks[i], blocks[j]
            assert i == j or a[0] >= b[1] or b[0] >= a[1] or a[2] >= b[3] or b[2] >= a[3], (i, j)


HEADER = "id,lower,upper,size,offset\n"


@pytest.mark.parametrize(
    ("rows", "rule", "words"),
    [
        ("0,0,2,16,0\n1,1,2,16,0\n", "fixed", "buffer 0 at [0, 16) and buffer 1"),
        ("0,0,2,16,0\n1,1,3,16,16\n", "lifetimes", "request 1 is alive from 1 to 3, expected a time within 0 to 2"),
        ("0,-1,2,16,0\n1,1,2,16,16\n", "lifetimes", "request 0 is alive from -1"),
        ("0,0,2,0,0\n1,1,2,16,0\n", "sizes", "a size is 0"),
        ("0,0,2,4611686018427387904,0\n1,1,2,16,0\n", "sizes", "2^62"),
        ("0,0,2,16,8\n1,1,2,16,32\n", "alignment", "multiples of 16"),
        ("0,0,2,16,-1\n1,1,2,16,32\n", "alignment", "multiples of 16"),
        ("0,0,2,16,x\n1,1,2,16,32\n", "file", "line 2: offset is 'x'"),
        ("0,0,2,16,0\n2,1,2,16,32\n", "file", "positions 0 to 1"),
    ],
)
def test_a_trace_that_breaks_a_rule_is_refused_with_that_rule(tmp_path: Path, rows: str, rule: str, words: str) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(HEADER + rows)
    with pytest.raises(OllaError) as caught:
        requests.load(path, 16)
    assert caught.value.rule == rule
    assert str(caught.value).startswith(str(path))
    assert words in str(caught.value)


def test_a_trace_without_offsets_says_how_to_get_them(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    Trace(np.array([10]), np.array([1])).save(path)
    with pytest.raises(OllaError, match=r"olla layout .* --alignment 16"):
        requests.load(path, 16)
