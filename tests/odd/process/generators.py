"""Generators of random numbers that a step makes, seeds, sets back or is given."""

from __future__ import annotations

from typing import Any

from tests.odd.loops import Loop, odd, rows, steady, train
from tests.support.pytorch.steps import nn, square, torch


def noisy(draw: Any) -> Any:
    """A loss of a batch with noise in it."""
    return lambda model, x: square(model, x + draw())


def noise(generator: Any) -> Any:
    return torch.rand(4, 6, generator=generator)


@steady
def a_generator_that_stands_outside() -> Loop:
    generator = torch.Generator().manual_seed(3)
    return train(loss=noisy(lambda: noise(generator)))


@steady
def a_generator_seeded_between_steps() -> Loop:
    generator = torch.Generator()
    return train(loss=noisy(lambda: noise(generator)), change=lambda i: generator.manual_seed(i // 2))


@steady
def torchs_own_generator_by_name() -> Loop:
    return train(loss=noisy(lambda: noise(torch.default_generator)))


@odd
def a_generator_made_in_the_step() -> Loop:
    return train(loss=noisy(lambda: noise(torch.Generator().manual_seed(7))))


@odd
def a_generator_seeded_in_the_step() -> Loop:
    generator = torch.Generator()
    return train(loss=noisy(lambda: noise(generator.manual_seed(7))))


@odd
def a_generator_seeded_in_the_step_as_it_was_before() -> Loop:
    generator = torch.Generator().manual_seed(7)
    return train(loss=noisy(lambda: noise(generator.manual_seed(7))))


@odd
def a_generator_seeded_behind_its_draw() -> Loop:
    generator = torch.Generator()

    def draw() -> Any:
        drawn = noise(generator)
        generator.manual_seed(7)
        return drawn

    return train(loss=noisy(draw))


@odd
def a_generator_seeded_by_a_number_of_the_step() -> Loop:
    generator, number = torch.Generator(), [0]
    return train(loss=noisy(lambda: noise(generator.manual_seed(number[0]))), change=lambda i: number.__setitem__(0, i))


@odd
def a_generator_set_back_after_its_draw() -> Loop:
    generator = torch.Generator()

    def draw() -> Any:
        state = generator.get_state()
        drawn = noise(generator)
        generator.set_state(state)
        return drawn

    return train(loss=noisy(draw))


@odd
def a_generator_of_an_object_seeded_in_a_method() -> Loop:
    class Noise:
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(7)

        def draw(self) -> Any:
            self.generator.manual_seed(7)
            return noise(self.generator)

    return train(loss=noisy(Noise().draw))


@odd
def a_copy_of_a_generator() -> Loop:
    generator = torch.Generator()
    return train(loss=noisy(lambda: noise(generator.clone_state())))


@odd
def a_generator_in_an_attribute_replaced_between_steps() -> Loop:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.generator = nn.Linear(6, 3), torch.Generator().manual_seed(1)

        def forward(self, x: Any) -> Any:
            return self.layer(x + noise(self.generator))

    model = Noisy()

    def replace(i: int) -> None:
        if i == 2:
            model.generator = torch.Generator().manual_seed(9)

    return train(model, change=replace, batch=rows)
