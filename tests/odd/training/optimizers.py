"""The optimizer changed between steps: settings, groups, state, schedules, and optimizers of one's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler as schedules

from tests.odd.loops import Loop, adam, at, mlp, momentum, must, odd, sgd, steady, train
from tests.support.pytorch.steps import nn, square, torch


def setting(name: str, make: Callable[[Any], Any], key: str, first: Any, second: Any) -> None:
    """Register a loop in which one setting of every parameter group changes, and goes back."""

    def build() -> Loop:
        world = train(optimizer=make)

        def change(i: int) -> None:
            for group in world.optimizer.param_groups:
                group[key] = second if i in (2, 3) else first

        world.change = change
        return world

    odd(build, name, must_be_equal=True, num_captures=3)


def nesterov(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def rmsprop(parameters: Any) -> Any:
    return torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5)


setting("learning_rate", momentum, "lr", 0.1, 0.01)
setting("learning_rate_zero", adam, "lr", 0.01, 0.0)
setting("weight_decay", momentum, "weight_decay", 0.01, 0.1)
setting("weight_decay_from_zero", sgd, "weight_decay", 0, 0.1)
setting("weight_decay_of_adamw", adam, "weight_decay", 0.01, 0.3)
setting("momentum_of_sgd", momentum, "momentum", 0.9, 0.5)
setting("momentum_from_zero", sgd, "momentum", 0.0, 0.9)
setting("dampening", momentum, "dampening", 0.0, 0.5)
setting("nesterov_switched_off", nesterov, "nesterov", True, False)
setting("betas", adam, "betas", (0.9, 0.999), (0.8, 0.99))
setting("second_beta", adam, "betas", (0.9, 0.999), (0.9, 0.9))
setting("eps_of_adam", adam, "eps", 1e-8, 1e-2)
setting("maximize", sgd, "maximize", False, True)
setting("alpha_of_rmsprop", rmsprop, "alpha", 0.99, 0.5)


@odd
def amsgrad_switched_on_with_a_state_that_has_no_maximum() -> Loop:
    world = train(optimizer=adam)
    world.change = at(2, lambda: world.optimizer.param_groups[0].update(amsgrad=True))
    return world


@odd
def differentiable_switched_on() -> Loop:
    world = train()
    world.change = at(2, lambda: world.optimizer.param_groups[0].update(differentiable=True))
    return world


@must
def learning_rate_is_a_tensor_changed_in_place() -> Loop:
    rate = torch.tensor(0.1)
    return train(
        optimizer=lambda p: torch.optim.SGD(p, lr=rate, foreach=False), change=lambda i: rate.fill_(0.1 / (i + 1))
    )


@must
def learning_rate_made_a_tensor() -> Loop:
    world = train()
    world.change = at(2, lambda: world.optimizer.param_groups[0].update(lr=torch.tensor(0.05)))
    return world


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: schedules.StepLR(o, 2, 0.5),
    "cosine_with_restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2),
    "one_cycle": lambda o: schedules.OneCycleLR(o, 0.2, total_steps=8),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "lambda": lambda o: schedules.LambdaLR(o, lambda k: 1 / (k + 1)),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.1, 2), schedules.ExponentialLR(o, 0.5)], milestones=[2]
    ),
}


def scheduled(name: str, make: Callable[[Any], Any]) -> None:
    def build() -> Loop:
        world = train(optimizer=momentum)
        schedule = make(world.optimizer)
        world.after = lambda i, result: schedule.step()
        world.seen = lambda: [group["lr"] for group in world.optimizer.param_groups]
        return world

    odd(build, f"schedule_{name}", must_be_equal=True, num_captures=1)


for _name, _make in SCHEDULES.items():
    scheduled(_name, _make)


@steady
def schedule_on_plateau() -> Loop:
    world = train(optimizer=momentum)
    schedule = schedules.ReduceLROnPlateau(world.optimizer, patience=0, threshold=0.5)
    world.after = lambda i, result: schedule.step(result)
    world.seen = lambda: world.optimizer.param_groups[0]["lr"]
    return world


@odd
def schedule_stepped_inside_the_body() -> Loop:
    holder: list[Any] = []

    def body(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = square(model, x)
        loss.backward()
        optimizer.step()
        holder[0].step()
        return loss

    world = train(body=body)
    holder.append(schedules.ExponentialLR(world.optimizer, 0.5))
    return world


@odd
def group_added() -> Loop:
    model = mlp()
    optimizer = sgd(model[0].parameters())
    add = lambda: optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01, "foreach": False})  # noqa: E731
    return train(model, optimizer=optimizer, change=at(2, add))


@odd
def group_removed() -> Loop:
    model = mlp()
    optimizer = torch.optim.SGD([{"params": m.parameters()} for m in (model[0], model[2])], lr=0.1)
    return train(model, optimizer=optimizer, change=at(2, lambda: optimizer.param_groups.pop()))


@odd
def groups_swapped() -> Loop:
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return train(model, optimizer=optimizer, change=at(2, lambda: optimizer.param_groups.reverse()))


@odd
def parameter_taken_out_of_its_group() -> Loop:
    world = train(optimizer=momentum)
    world.change = at(2, lambda: world.optimizer.param_groups[0]["params"].pop(0))
    return world


@odd
def parameters_of_a_group_in_another_order() -> Loop:
    world = train(optimizer=momentum)
    world.change = at(2, lambda: world.optimizer.param_groups[0]["params"].reverse())
    return world


@odd
def groups_replaced_by_copies() -> Loop:
    world = train(optimizer=momentum)

    def replace() -> None:
        world.optimizer.param_groups = [dict(group, lr=0.02) for group in world.optimizer.param_groups]

    world.change = at(2, replace)
    return world


@must
def state_of_the_optimizer_cleared() -> Loop:
    world = train(optimizer=adam)
    world.change = at(3, lambda: world.optimizer.state.clear())
    return world


@odd
def state_of_one_parameter_deleted() -> Loop:
    world = train(optimizer=adam)
    world.change = at(3, lambda: world.optimizer.state.pop(next(world.model.parameters())))
    return world


@must
def state_changed_in_place() -> Loop:
    world = train(optimizer=momentum)
    world.change = at(3, lambda: [s["momentum_buffer"].mul_(0.5) for s in world.optimizer.state.values()])
    return world


@must
def state_replaced_entry_by_entry() -> Loop:
    world = train(optimizer=adam)

    def replace() -> None:
        for state in world.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] * 0.5

    world.change = at(3, replace)
    return world


@odd
def step_counter_of_adam_set_back() -> Loop:
    world = train(optimizer=adam)
    world.change = at(3, lambda: [s["step"].zero_() for s in world.optimizer.state.values()])
    return world


@odd
def step_counter_of_adam_made_a_number() -> Loop:
    world = train(optimizer=adam)
    world.change = at(3, lambda: [s.update(step=2.0) for s in world.optimizer.state.values()])
    return world


@must
def state_dict_of_the_optimizer_loaded_with_other_settings() -> Loop:
    world = train(optimizer=momentum)

    def load() -> None:
        state = copy.deepcopy(world.optimizer.state_dict())
        state["param_groups"][0] |= {"lr": 0.01, "weight_decay": 0.2}
        world.optimizer.load_state_dict(state)

    world.change = at(3, load)
    return world


@odd
def states_of_two_parameters_made_one_tensor() -> Loop:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    world = train(model, optimizer=momentum)

    def share() -> None:
        states = [world.optimizer.state[m.weight] for m in model]
        states[1]["momentum_buffer"] = states[0]["momentum_buffer"]

    world.change = at(3, share)
    return world


@odd
def defaults_of_the_optimizer_changed() -> Loop:
    world = train(optimizer=momentum)
    world.change = at(2, lambda: world.optimizer.defaults.update(lr=5.0, momentum=0.0))
    return world
