"""Search for the largest size that fits: peaks are nearly affine in n, so interpolation closes a bracket fast."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_GROWTH = 4  # beyond the largest size tried, at once
_MOST_N = 2**40


def next_size(
    tried: Sequence[tuple[int, bool, int | None]],
    memory_bytes: int,
    *,
    bisect: bool = False,
    among: Sequence[int] | None = None,
) -> int | None:
    """Return the size to try next, or None where one that fits and the next one, which does not, are known.

    Sizes above one that does not fit count as too large.

    Args:
        tried: (n, whether it fits, its peak in bytes if known), by rising n.
        memory_bytes: that there is.
        bisect: take the middle of what is left, whatever the peaks say.
        among: rising sizes of which the one next to that is tried; None: all.

    Complexity: where peaks are affine, two or three more sizes; with `bisect` the logarithm of what is left.

    Example:
        >>> next_size([(1, True, 15), (2, True, 25)], 100)
        8
        >>> next_size([(1, True, 15), (2, True, 25), (9, True, 95), (10, False, 105)], 100) is None
        True
        >>> next_size([(4, False, 300)], 100)
        2
        >>> next_size([(1, True, 15), (12, False, 125)], 100, among=[1, 6, 8, 12])
        8
    """
    high = min((n for n, fits, _ in tried if not fits), default=None)
    low = max((n for n, fits, _ in tried if fits and (high is None or n < high)), default=0)
    if among is not None:
        between = [n for n in among if n > low and (high is None or n < high)]
        if not between:
            return None
        at = None if bisect or high is None else _guess([t for t in tried if t[0] <= high], memory_bytes)
        return between[len(between) // 2] if at is None else min((abs(n - at), n) for n in between)[1]
    if high is None:
        further = min(max(_guess(tried, memory_bytes) or _MOST_GROWTH * low, low + 1), _MOST_GROWTH * low)
        return further if further <= _MOST_N else None
    if high - low <= 1:
        return None
    guess = None if bisect else _guess([t for t in tried if t[0] <= high], memory_bytes)
    if guess is None:
        guess = (low + high) // 2
    return min(max(guess, low + 1), high - 1)


def _guess(tried: Sequence[tuple[int, bool, int | None]], memory_bytes: int) -> int | None:
    """Return where the line through the two largest sizes with a peak meets the memory."""
    known = [(n, peak) for n, _, peak in tried if peak is not None]
    if len(known) < 2:
        return None
    (n0, peak0), (n1, peak1) = known[-2:]
    if peak1 <= peak0:
        return None
    return n1 + (memory_bytes - peak1) * (n1 - n0) // (peak1 - peak0)
