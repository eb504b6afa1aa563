"""Exceptions that olla raises on purpose. Limits (time, gap) are statuses, not errors."""

import traceback

FIRST_STEP = "first_step"  # rule of a CaptureError: one ordinary step mends it
MISUSE = "misuse"  # rule of a CaptureError: the ordinary step fails, too
SPENT = "spent"  # rule of a CaptureError: the capture has used up what the ordinary step needs


class OllaError(Exception):
    """Base of every error olla raises on purpose.

    Attributes:
        rule: short name of the broken rule, for example ``"cycle"``; empty where there is none.
        ids: ops or tensors concerned, in the order the message names them.
    """

    def __init__(self, message: str, *, rule: str = "", ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rule = rule
        self.ids = ids


class GraphError(OllaError):
    """The graph is not a valid training step, or its file is not readable as one."""


class PlanError(OllaError):
    """The plan breaks a rule, or belongs to another graph."""


class BudgetError(OllaError):
    """No plan fits the budget."""


class SolverError(OllaError):
    """A solver is missing, failed, or returned an answer that does not hold."""


class CaptureError(OllaError):
    """The training step cannot be captured as a graph."""


class ReplayError(OllaError):
    """The planned step cannot run at its planned addresses."""


def free_frames(error: BaseException, handled: BaseException | None) -> None:
    """Let go of the frames that a caught exception, and those that led to it, went through, and of their variables.

    Where one of these is the exception, or its traceback, they hold each other until garbage is collected, as in torch
    and in contextlib: the batch and the result of a step, and on a GPU the arena that the result lies in.

    Args:
        error: the exception.
        handled: ``sys.exception()`` of before: the user's own, which is the context of all that is raised meanwhile
            and stays as it is.
    """
    seen = {id(handled)}
    errors: list[BaseException | None] = [error]
    while errors:
        found = errors.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            found.__traceback__ = None
            errors += [found.__cause__, found.__context__]
