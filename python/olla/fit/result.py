"""Result of `olla.fit`: for every size and every way to run the step, its memory and whether that fits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from olla.base.files import naming, write_json
from olla.base.packages import missing
from olla.errors import OllaError
from olla.fit import table

FORMAT = "olla-fit"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to run the step of one size.

    Attributes:
        peak_bytes: most bytes at once: parameters, optimizer state, data and, where planned, the whole arena. None
            where no plan within the memory was found.
        bound_bytes: proved: no plan of this way needs less. None for the eager loop, whose order is what it is.
        seconds: estimated time of a step; None where peak_bytes is.
        added: share of that time that recomputing adds; None where peak_bytes is.
        fits: whether the peak is within the memory.
        proved: whether that is certain; False: no plan was found that fits, and none was ruled out.
        link_bytes: of the messages of all collectives, of one rank; 0 where it does not communicate. None where
            peak_bytes is.
        reserved_bytes: of the eager loop on a GPU: what torch's caching allocator reserves for it, free blocks and
            rounding included. None of other ways, and where ranks communicate.

    Example:
        >>> Way(peak_bytes=10, bound_bytes=8, seconds=1.0, added=0.0, fits=False, proved=False).fits
        False
    """

    peak_bytes: int | None
    bound_bytes: int | None
    seconds: float | None
    added: float | None
    fits: bool
    proved: bool
    link_bytes: int | None = 0
    reserved_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class SizeRow:
    """The step of one size.

    Attributes:
        n: what was given to make_step.
        graph_name: of the captured step.
        num_ops: of it.
        program_peak_bytes: its peak in program order, as every `Plan` of it has: what plans are measured against. The
            eager loop needs as much or more: it keeps gradients until the next `zero_grad`, and updates many parameters
            at once.
        resident_bytes: parameters, optimizer state, buffers and data.
        ways: by name, see Fit; those that were asked for.
        seconds: wall-clock time of "capture" and "plan".
    """

    n: int
    graph_name: str
    num_ops: int
    program_peak_bytes: int
    resident_bytes: int
    ways: Mapping[str, Way]
    seconds: Mapping[str, float]

    def per_second(self, way: str) -> float | None:
        """Return n over the estimated seconds of a step: samples per second where n counts samples."""
        found = self.ways.get(way)
        return self.n / found.seconds if found is not None and found.seconds else None

    @property
    def fastest(self) -> str | None:
        """The way that fits and takes the least time, the simplest of equals; None where none fits."""
        rates = {name: self.per_second(name) or 0.0 for name, way in self.ways.items() if way.fits}
        return max(rates, key=lambda name: rates[name], default=None)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Which sizes of a training step fit a memory, and how; made by `olla.fit`.

    The ways are "eager", the ordinary loop; "planned", its ops in the best order; one for every slowdown, such as
    "5%": the least peak within so much added time; "least": the least peak at whatever time; "budget": what
    `olla.plan(budget=memory)` gives, the least added time that fits.

    Attributes:
        memory_bytes: that there is.
        device: what seconds are estimated for.
        world_size: how many ranks run the step.
        parallel: what they share, as of `olla.capture`; empty: nothing that was asked for here.
        names: of the ways, the simplest first.
        rows: by rising n. Where the largest n was asked for, the sizes tried for it have only the ways that needs.
        exact: the way whose largest n is known exactly: n + 1 was tried, and did not fit; empty if none.
        interrupted: whether it ended early, with the rows there were.
        seconds: wall-clock time in all.
        lengths: of the batches of a run, in their order; empty where none were given.
    """

    memory_bytes: int
    device: str
    names: Sequence[str]
    rows: Sequence[SizeRow]
    exact: str = ""
    world_size: int = 1
    parallel: str = ""
    interrupted: bool = False
    seconds: float = 0.0
    lengths: Sequence[int] = ()

    def largest(self, way: str) -> int | None:
        """Return the largest n tried that fits one way; None where none does.

        Raises:
            ValueError: there is no such way.
        """
        if way not in self.names:
            raise ValueError(f"way is {way!r}, expected one of {', '.join(self.names)}")
        return max((row.n for row in self.rows if way in row.ways and row.ways[way].fits), default=None)

    def share(self, way: str) -> tuple[float, float] | None:
        """Return what share of the lengths fits one way: at least, and at most; None where none were given.

        Longer batches are taken to need more. The two are equal where every length is known to fit or not to: for the
        eager loop, with ``exact=way``, and where the longest fits.

        Raises:
            ValueError: there is no such way.
        """
        fits, too_long = self.largest(way) or 0, self._smallest_too_long(way)
        if not self.lengths:
            return None
        most = sum(n < too_long for n in self.lengths) if too_long is not None else len(self.lengths)
        return sum(n <= fits for n in self.lengths) / len(self.lengths), most / len(self.lengths)

    def first_too_long(self, way: str) -> int | None:
        """Return the place of the first length, counted from 0, that is known not to fit; None where none is.

        Raises:
            ValueError: there is no such way.
        """
        self.largest(way)
        too_long = self._smallest_too_long(way)
        return next((i for i, n in enumerate(self.lengths) if too_long is not None and n >= too_long), None)

    def _smallest_too_long(self, way: str) -> int | None:
        return min((row.n for row in self.rows if way in row.ways and not row.ways[way].fits), default=None)

    @property
    def fastest(self) -> tuple[int, str] | None:
        """The n and the way that train fastest within the memory, by the estimate; None where nothing fits."""
        found = [(row.per_second(name) or 0.0, row.n, name) for row in self.rows if (name := row.fastest) is not None]
        return max(found, key=lambda item: (item[0], -item[1]))[1:] if found else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        rows = [
            {
                **{key: value for key, value in vars(row).items() if key not in ("ways", "seconds")},
                "ways": {name: {**vars(way), "per_second": row.per_second(name)} for name, way in row.ways.items()},
                "fastest": row.fastest,
                "seconds": dict(row.seconds),
            }
            for row in self.rows
        ]
        fastest = self.fastest
        return {
            "format": FORMAT,
            "version": VERSION,
            "memory_bytes": self.memory_bytes,
            "device": self.device,
            "world_size": self.world_size,
            "parallel": self.parallel or None,
            "names": list(self.names),
            "rows": rows,
            "largest": {name: self.largest(name) for name in self.names},
            "exact": self.exact or None,
            "fastest": {"n": fastest[0], "way": fastest[1]} if fastest else None,
            "interrupted": self.interrupted,
            "seconds": self.seconds,
            "lengths": self._of_lengths() if self.lengths else None,
        }

    def _of_lengths(self) -> dict[str, Any]:
        shares = {name: self.share(name) for name in self.names}
        return {
            "lengths": list(self.lengths),
            "share": {name: list(share) for name, share in shares.items() if share is not None},
            "first_too_long": {name: self.first_too_long(name) for name in self.names},
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything as a JSON file.

        Raises:
            OllaError: the file cannot be written, or its name does not end in .json or .json.gz.
        """
        with naming(os.fspath(path)):
            write_json(path, self.to_dict(), OllaError)

    def plot(self, path: str | os.PathLike[str] | None = None, axes: Any = None) -> Any:
        """Draw the peak of every way over n with matplotlib, beside the memory; return the axes.

        Args:
            path: of a picture to write, if any; its ending says which kind (.png, .svg, .pdf).
            axes: of matplotlib, to draw on; new ones if None.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: matplotlib knows no pictures of that ending.
        """
        if axes is None:
            try:
                import matplotlib.pyplot as plt
            except ImportError as cause:
                raise missing("matplotlib", "plot") from cause
            axes = plt.subplots()[1]
        for name in self.names:
            peaks = [(row.n, row.ways[name].peak_bytes) for row in self.rows if name in row.ways]
            points = [(n, peak / 2**30) for n, peak in peaks if peak is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=table.TITLES.get(name, name))
        axes.axhline(self.memory_bytes / 2**30, linestyle=":", color="gray", label="memory")
        title = self.rows[0].graph_name if self.rows else ""
        axes.set(xlabel="n", ylabel="peak memory, GiB", title=title, ylim=(0, None))
        axes.legend()
        if path is not None:
            axes.figure.savefig(path)
        return axes

    def __str__(self) -> str:
        """Return the table."""
        return table.text(self)
