"""The user's random number generators: a step may draw from existing ones, and may not set their states."""

from __future__ import annotations

import itertools

import torch

from olla.errors import CaptureError
from olla.pytorch.guards.object_parts import no_modes

SETTERS = frozenset({"manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset"})


class Generators:
    """The generators that a step may draw from.

    A trace draws nothing, so states do not advance. Before code that may set one runs, each generator gets a seed of
    ours that no user has; a different state found later was set by the step.
    """

    def __init__(self) -> None:
        shared = (torch.default_generator, *torch.cuda.default_generators)
        self._known: dict[int, torch.Generator] = {id(g): g for g in shared}
        self._own: dict[int, torch.Generator] = {}
        self._before: dict[int, torch.Tensor] = {}  # of those that are watched
        self._ours: dict[int, torch.Tensor] = {}
        self._begun = self._watches = False
        self._seeds = itertools.count(0x5EED_0F_011A)

    def add(self, generator: torch.Generator) -> None:
        """Note a generator that is there before the step draws."""
        if id(generator) not in self._known:
            self._known[id(generator)] = self._own[id(generator)] = generator
            self._set_new()

    def begin(self) -> None:
        """Note that the trace begins: until ``restore``, generators may have states of ours."""
        self._begun = True
        self._set_new()

    def watch(self) -> None:
        """Find out whether the step sets the state of one of them."""
        self._watches = True
        self._set_new()

    def draws(self, generator: torch.Generator) -> None:
        """Note that an operator of the step draws from a generator.

        Raises:
            CaptureError: the step has made it, or set its state.
        """
        if id(generator) not in self._known:
            raise CaptureError(
                "the step makes a random number generator: it would begin where it was in the step before. Make it "
                "outside the step."
            )
        self.check()
        if id(generator) in self._before:
            self._set(generator)

    def check(self) -> None:
        """Raise a CaptureError if the step has set the state of a generator."""
        for key, ours in self._ours.items():
            with no_modes():
                is_ours = torch.equal(self._own[key].get_state(), ours)
            if not is_ours:
                raise CaptureError(
                    "the step seeds a random number generator or sets its state, which a planned step would not do "
                    "again: do that before the step is called"
                )

    def restore(self) -> None:
        """Give the generators the states back that they had."""
        with no_modes():
            for key, state in self._before.items():
                self._own[key].set_state(state)
        self._before.clear()
        self._ours.clear()

    def _set_new(self) -> None:
        for key, generator in self._own.items():
            if self._begun and self._watches and key not in self._before:
                self._set(generator)

    def _set(self, generator: torch.Generator) -> None:
        with no_modes():
            self._before.setdefault(id(generator), generator.get_state())
            generator.manual_seed(next(self._seeds))
            self._ours[id(generator)] = generator.get_state()
