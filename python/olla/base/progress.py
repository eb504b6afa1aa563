"""Progress of long searches: a callback that is told how far they are and may end them."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float, int, int], bool | None]  # (stage, seconds, value, bound); False ends the search


class RememberingProgress:
    """A progress callback that remembers what it answered: who ends one search ends all that follow.

    Attributes:
        error: that it raised: it is its caller's, no failure of a rival.
        ended: whether it answered False.
    """

    def __init__(self, progress: Progress) -> None:
        self.error: Exception | None = None
        self.ended = False
        self._progress = progress

    def __call__(self, stage: str, seconds: float, value: int, bound: int) -> bool | None:
        """Ask the callback."""
        if self.ended:
            return False
        try:
            answer = self._progress(stage, seconds, value, bound)
        except Exception as error:
            self.error = error
            raise
        self.ended = answer is not None and not answer
        return answer


def watched(progress: Progress | None) -> Progress | None:
    """Return the callback so that `olla.base.rivals` knows its errors."""
    return progress if progress is None or isinstance(progress, RememberingProgress) else RememberingProgress(progress)


def ended(progress: Progress | None) -> bool:
    """Return whether a watched callback has ended a search."""
    return isinstance(progress, RememberingProgress) and progress.ended
