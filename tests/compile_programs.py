"""Small training programs for torch.compile, each with something that a wrong rewriting would get wrong.

A program takes what compiles a function, runs a few steps and returns every tensor a user could look at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from steps import nn, torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Compile = Callable[[Any], Any]
Program = Callable[[Compile], list[Any]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def leaf(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def data(*shape: int, seed: int = 4) -> torch.Tensor:
    return leaf(*shape, seed=seed).detach()


def mlp(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), *middle, nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))


def trained(compile: Compile, model: nn.Module, inputs: list[Any], loss: Any = None) -> list[Any]:
    """Train for a step per input: losses, and what they make of parameters, gradients and buffers."""
    loss = loss or (lambda model, x: model(x).square().mean())
    step = compile(lambda *args: loss(model, *args))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for given in inputs:
        optimizer.zero_grad()
        result = step(*(given if isinstance(given, tuple) else (given,)))
        result.backward()
        optimizer.step()
        losses.append(result.detach())
    return [*losses, *parameters, *(p.grad for p in parameters), *model.buffers()]


def graded(compile: Compile, function: Any, *args: torch.Tensor) -> list[Any]:
    """Call a function of tensors, and differentiate everything it returns."""
    results = compile(function)(*args)
    results = results if isinstance(results, tuple) else (results,)
    sum(r.sum() * (i + 2) for i, r in enumerate(results) if r.requires_grad).backward()
    return [*(r.detach() for r in results), *(a.grad for a in args)]


@program
def dropout(compile: Compile) -> list[Any]:
    return trained(compile, mlp(nn.Dropout(0.3)), [data(16, 8, seed=i) for i in range(3)])


@program
def batch_norm(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2)
    return trained(compile, nn.Sequential(*layers, nn.BatchNorm2d(4)), [data(2, 3, 8, 8, seed=i) for i in range(3)])


@program
def batch_norm_called_twice(compile: Compile) -> list[Any]:
    norm = nn.BatchNorm1d(8)
    return trained(compile, norm, [data(16, 8)], lambda m, x: (m(x).sin() * m(x.cos()).exp()).mean())


@program
def channels_last(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.GELU(), nn.ConvTranspose2d(4, 4, 3), nn.GroupNorm(2, 4), nn.AvgPool2d(2)
    return trained(compile, nn.Sequential(*layers), [data(2, 3, 8, 8).to(memory_format=torch.channels_last)])


@program
def in_place_operators(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).sin()
        y.mul_(2).add_(1)
        z = y.exp() + y
        z[:, 0] = 3
        z[:, 1:3].mul_(2)
        z.masked_fill_(z > 2, 0.5)
        return (z @ w).relu_()

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


@program
def views_as_results(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x @ w).tanh()
        return y, y.t(), y[:, 2:5], y.view(-1), y.unsqueeze(0).expand(3, 8, 8), x.t(), (y * w).exp()[0]

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


@program
def a_result_twice_and_an_input(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x * w).sin().exp()
        return y, y, x, y.detach(), (y.cos() * w).sum()

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


@program
def a_result_changed_by_the_user(compile: Compile) -> list[Any]:
    """What forward returned is changed in place before backward, where eager training allows that."""
    x, w = leaf(8, 8), leaf(8, 8, seed=5)
    y, z = compile(lambda x, w: ((x * w).sum(1), (x @ w).cos()))(x, w)
    y.add_(3)
    (y.sum() * 2 + z.exp().sum()).backward()
    return [y.detach(), z.detach(), x.grad, w.grad]


class Counting(nn.Module):
    """Uses a buffer, changes it, and uses it again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        z = (y * self.scale.clone()).sin().exp()
        self.scale.mul_(0.9).add_(y.detach().mean(0))
        self.count += 1
        w = (z * self.scale.clone()).cos() / self.count
        self.scale.add_(1)
        return w.tanh()


@program
def a_buffer_used_changed_and_used(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    return trained(compile, Counting(), [data(4, 8, seed=i) for i in range(3)])


@program
def a_changed_input(compile: Compile) -> list[Any]:
    state, w = data(8, 8).clone(), leaf(8, 8)

    def function(state: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        before = (state.clone() * w).exp().sin()
        state.add_(before.detach().mean())
        return (before * (state.clone() + w)).tanh()

    results = [compile(function)(state, w)]
    results[0].sum().backward()
    return [*(r.detach() for r in results), state, w.grad]


@program
def a_changed_input_with_gradient(compile: Compile) -> list[Any]:
    x, w = leaf(8, 8), leaf(8, 8, seed=5)

    def function(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        z = (y.clone() * w).exp()
        y.mul_(w)
        return (z + y).sin()

    y = x * 2
    result = compile(function)(y, w)
    (result.sum() + y.sum()).backward()
    return [result.detach(), y.detach(), x.grad, w.grad]


@program
def a_changed_view_of_an_input(compile: Compile) -> list[Any]:
    state, w = data(8, 8).clone(), leaf(8, 8)

    def function(state: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (state.clone() * w).sin().exp()
        state[2:4].add_(1)
        state.t()[1].zero_()
        return (y * state.clone()).tanh()

    result = compile(function)(state, w)
    result.sum().backward()
    return [result.detach(), state, w.grad]


@program
def two_inputs_of_one_storage(compile: Compile) -> list[Any]:
    base, w = data(16, 8).clone(), leaf(8, 8)

    def function(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (a.clone() * w).exp()
        b.add_(1)
        return (y.sin() * b.clone()).tanh()

    result = compile(function)(base[:8], base[4:12], w)
    result.sum().backward()
    return [result.detach(), base, w.grad]


@program
def an_average_of_weights(compile: Compile) -> list[Any]:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("mean", torch.zeros(32, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(self.inner[0].weight, alpha=0.1)
            return self.inner(x) * self.mean.clone().sum()

    return trained(compile, Averaged(), [data(4, 8, seed=i) for i in range(3)])


@program
def tied_weights(compile: Compile) -> list[Any]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.inner = nn.Embedding(64, 8), mlp(nn.Dropout(0.1))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            return (x + self.inner(x)) @ self.embedding.weight.t()

    tokens = torch.arange(32).view(4, 8) * 7 % 64
    loss = lambda m, t: functional.cross_entropy(m(t).flatten(0, 1), t.flatten())  # noqa: E731
    return trained(compile, Tied(), [tokens, tokens.flip(0)], loss)


class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ w).exp().clamp(max=5)
        ctx.save_for_backward(x, w, y)
        mask = y > 1
        ctx.mark_non_differentiable(mask)
        return y, mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        x, w, y = ctx.saved_tensors
        scaled = grad * y * 1.5
        return scaled @ w.t(), x.t() @ scaled


@program
def a_custom_function(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, mask = Steep.apply(x.sin(), w)
        return torch.where(mask, y.cos(), y * 2).exp()

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


class Noisy(torch.autograd.Function):
    """Draws in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin() * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * torch.rand_like(x) + torch.randn_like(grad)


@program
def a_custom_function_that_draws_in_backward(compile: Compile) -> list[Any]:
    torch.manual_seed(7)
    found = graded(compile, lambda x: (Noisy.apply(x.exp()) * torch.rand_like(x)).tanh(), leaf(8, 8))
    return [*found, torch.rand(1)]


@program
def checkpoints(compile: Compile) -> list[Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(), mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.first, x, use_reentrant=False)
            return checkpoint(self.second, x + y, use_reentrant=False).exp()

    return trained(compile, Checkpointed(), [data(4, 8, seed=i) for i in range(2)])


@program
def a_checkpoint_with_dropout(compile: Compile) -> list[Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(nn.Dropout(0.4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    return trained(compile, Checkpointed(), [data(16, 8, seed=i) for i in range(2)])


@program
def draws_of_many_kinds(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * torch.bernoulli(torch.full_like(x, 0.5)) + torch.randn(8, 8)
        y = y.sin() + torch.randint(0, 5, (8, 8)) * x + torch.normal(0.0, 1.0, (8, 8))
        return (functional.dropout(y.exp(), 0.5) * torch.randperm(8)).tanh() + functional.rrelu(y, training=True)

    torch.manual_seed(9)
    return [*graded(compile, function, leaf(8, 8)), torch.rand(1)]


@program
def strided_inputs(compile: Compile) -> list[Any]:
    base, other = leaf(8, 16), leaf(8, 1, seed=6)
    x, y = base.t()[::2], other.expand(8, 8)
    result = compile(lambda x, y: ((x @ y).sin() * x.exp()).softmax(1))(x, y)
    result.square().sum().backward()
    return [result.detach(), base.grad, other.grad]


@program
def sizes_that_change(compile: Compile) -> list[Any]:
    inputs = []
    for size in (4, 6, 9):
        inputs.append(data(size, 8))
        torch._dynamo.maybe_mark_dynamic(inputs[-1], 0)
    loss = lambda m, x: (m(x) * x.shape[0] / (x.shape[0] - 1.5)).square().mean()  # noqa: E731
    return trained(compile, mlp(nn.Dropout(0.2)), inputs, loss)


@program
def sizes_inside_that_change(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).sin()
        half = y.shape[0] // 2
        y = torch.cat([y[:half].exp(), y[half:] * half, y.new_ones(half, 8) * x.mean()])
        return y.view(-1, 4).cumsum(0).tanh() * float(y.shape[0])

    compiled = compile(function)
    found = []
    for size in (4, 6, 10):
        x, w = leaf(size, 8), leaf(8, 8, seed=5)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        result = compiled(x, w)
        result.sum().backward()
        found += [result.detach(), x.grad, w.grad]
    return found


@program
def inference(compile: Compile) -> list[Any]:
    model = mlp(nn.Dropout(0.2)).eval()
    compiled = compile(model)
    with torch.no_grad():
        found = [compiled(data(4, 8)), compiled(data(4, 8, seed=9))]
    with torch.inference_mode():
        found.append(compiled(data(4, 8)).clone())
    loss = compiled(data(4, 8)).sum()
    loss.backward()
    return [*found, loss.detach(), *(p.grad for p in model.parameters())]


@program
def gradients_that_are_off_for_a_part(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = (x @ w).softmax(1)
        y = (x @ w).sin().exp()
        return (y - target).square() * y.detach() + (x * w).detach()

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


@program
def graph_breaks(compile: Compile) -> list[Any]:
    first, second = mlp(nn.Dropout(0.2)), mlp()

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            torch._dynamo.graph_break()
            z = self.second(y + x).exp()
            if z.sum() > 0:
                return z.tanh() * y
            return z - y

    return trained(compile, Broken(), [data(4, 8, seed=i) for i in range(2)])


@program
def forward_without_backward(compile: Compile) -> list[Any]:
    x, w = leaf(8, 8), leaf(8, 8, seed=5)
    compiled = compile(lambda x, w: ((x @ w).sin().exp() * w).tanh())
    first, second = compiled(x, w), compiled(x * 2, w)
    del first
    third = compiled(x, w * 3)
    third.sum().backward()
    second.sum().backward()
    return [second.detach(), third.detach(), x.grad, w.grad]


@program
def backward_twice(compile: Compile) -> list[Any]:
    x, w = leaf(8, 8), leaf(8, 8, seed=5)
    with torch._functorch.config.patch(donated_buffer=False):
        result = compile(lambda x, w: ((x @ w).sin().exp() * w).tanh())(x, w)
        result.sum().backward(retain_graph=True)
        (result * 2).sum().backward()
    return [result.detach(), x.grad, w.grad]


@program
def a_result_that_is_not_used(compile: Compile) -> list[Any]:
    x, w = leaf(8, 8), leaf(8, 8, seed=5)
    _, second, third = compile(lambda x, w: ((x @ w).sin(), (x * w).exp().sin(), w.cos()))(x, w)
    (grad,) = torch.autograd.grad(second.sum(), w, retain_graph=False)
    return [second.detach(), third.detach(), grad]


@program
def gathers_and_scatters(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        values, index = (x @ w).sin().topk(4, 1)
        y = torch.zeros_like(x).scatter_add(1, index, values.exp())
        y = y.index_put((index[0], index[1]), values[0], accumulate=True)
        return y.gather(1, index) + x.sort(1).values[:, :4] * x.argmax(1, keepdim=True) + y.cummax(1).values[:, :4]

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


@program
def attention(compile: Compile) -> list[Any]:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = model(x).view(2, 4, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind()
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).exp().mean()

    torch.manual_seed(0)
    return trained(compile, nn.Linear(16, 48), [data(2, 4, 16)], loss)


@program
def autocast(compile: Compile) -> list[Any]:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    return trained(compile, mlp(), [data(4, 8)], loss)


@program
def a_recurrence(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    cell = nn.GRUCell(8, 8)

    def loss(cell: Any, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(4, 8)
        for step in x.unbind():
            state = cell(step, state)
        return state.exp().mean()

    return trained(compile, cell, [data(5, 4, 8)], loss)


@program
def complex_numbers(compile: Compile) -> list[Any]:
    return graded(compile, lambda x, w: torch.fft.irfft(torch.fft.rfft(x.sin()) * w.sum()).exp(), leaf(8, 8), leaf(4))


@program
def empty_and_single_elements(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * s).sin().exp(), (x.sum() + s).cos(), torch.cat([x, s.view(1, 1).expand(1, 8).exp()])

    return graded(compile, function, leaf(0, 8), leaf(1).squeeze().detach().requires_grad_())


@program
def derivatives_inside(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda row: ((row @ w).sin().exp()).sum()))(x)
        return slopes.tanh() * x

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


class Seen(torch.autograd.Function):
    """Counts in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        ctx.count = count
        ctx.save_for_backward(x)
        count.add_(1)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.count.add_(10)
        return grad * x.exp(), None


@program
def a_buffer_changed_in_backward(compile: Compile) -> list[Any]:
    count, x = torch.zeros(()), leaf(8, 8)
    result = compile(lambda x, count: Seen.apply(x.sin(), count).tanh() * x)(x, count)
    result.sum().backward()
    return [result.detach(), count, x.grad]


@program
def checks_on_values(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).sin()
        torch._assert_async((y < 2).all(), "too large")
        return (y + 2).log().exp()

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


@program
def hooks(compile: Compile) -> list[Any]:
    x, w = leaf(8, 8), leaf(8, 8, seed=5)
    w.register_hook(lambda grad: grad * 2)
    result = compile(lambda x, w: ((x @ w).sin().exp() * w).tanh())(x, w)
    result.register_hook(lambda grad: grad.cos())
    result.sum().backward()
    return [result.detach(), x.grad, w.grad]


@program
def parameters_frozen_between_steps(compile: Compile) -> list[Any]:
    model = mlp()
    compiled = compile(lambda x: model(x).square().mean())
    found = []
    for frozen in (False, True, False):
        model[0].weight.requires_grad_(not frozen)
        loss = compiled(data(4, 8))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return found


@program
def double_precision_and_halves(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x.double() @ w.double()).sin().exp()
        return (y.to(torch.bfloat16).float() * x).to(torch.float64).tanh() + (y > 1) * y.round().to(torch.int32)

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


@program
def a_second_derivative(compile: Compile) -> list[Any]:
    """Refused by compiled code, whoever divides the graph."""
    x = leaf(8, 8)
    (first,) = torch.autograd.grad(compile(lambda x: (x.sin().exp() * x).tanh())(x).sum(), x, create_graph=True)
    with contextlib.suppress(RuntimeError):
        first.sum().backward()
    return [first.detach()]


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Run a block with a random state of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        yield
