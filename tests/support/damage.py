"""Damage to the text of a file, and values that do not belong there."""

import random
import re
from typing import Any

TOKEN = re.compile(rb'"[^"]*"|-?[0-9][-+.0-9eE]*|true|false|null|[][{}:,]')
INSTEAD = [
    *(
        b"",
        b"null",
        b"true",
        b"false",
        b"[]",
        b"{}",
        b"[[]]",
        b'""',
        b'"x"',
        b'"\\ud800"',
        b'"\xff"',
        b"\\",
        b"[" * 3000,
    ),
    *(b"0", b"-0", b"-1", b"1", b"2", b"1.0", b"-2.5", b"1e3", b"1e308", b"1e999", b"NaN", b"Infinity", b"-Infinity"),
    *(b"2147483647", b"2147483648", b"-2147483649", b"4611686018427387904", b"4611686018427387905"),
    *(b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"9" * 40, b"9" * 5000),
    *(
        b'"bytes"',
        b'"reads"',
        b'"writes"',
        b'"mutates"',
        b'"after"',
        b'"kind"',
        b'"update"',
        b'"version"',
        b'"outputs"',
    ),
]
VALUES: list[Any] = [None, True, -1, 0, 2**31, 2**62, 2**63, 10**30, 0.5, "x", [], [[]], {}]


def swap_token(data: bytes, rng: random.Random) -> bytes:
    """Put another token, from the list or from elsewhere in the file, in the place of one."""
    tokens = list(TOKEN.finditer(data))
    if not tokens:
        return data
    token = rng.choice(tokens)
    instead = rng.choice(INSTEAD) if rng.random() < 0.7 else rng.choice(tokens).group()
    return data[: token.start()] + instead + data[token.end() :]


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    """Flip one bit."""
    at = rng.randrange(len(data) or 1)
    return data[:at] + bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]


def move_chunk(data: bytes, rng: random.Random) -> bytes:
    """Cut the end off, delete a chunk, or insert one from elsewhere."""
    first, last, at = sorted(rng.randrange(len(data) + 1) for _ in range(3))
    return rng.choice([data[:first], data[:first] + data[last:], data[:at] + data[first:last] + data[at:]])
