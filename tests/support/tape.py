"""Records training steps op by op, the way PyTorch records them: the building blocks of the generated graphs.

The forward pass, then the backward pass in reverse with the activations the forward pass saved, then one in-place
update after another for every parameter. Views are folded into their storages, gradients add up where a tensor was used
twice, batch norm counts its steps in place. The op patterns were read off captured steps of GPT-2 (eager attention,
dropout, AdamW), ResNet-50 and GoogLeNet (momentum SGD).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import olla

Optimizer = Literal["adam", "sgd", "none"]
ITEM_BYTES = 4  # float32, like the captured steps


class Tape:
    """Records ops into a graph; remembers for each the closure that records its backward ops.

    Tensors are ids of the graph. A tensor's gradient is the tensor ``gradient[t]``, once some later op has given one.
    """

    def __init__(self, name: str) -> None:
        self.builder = olla.Graph.builder(name)
        self.bytes: list[int] = []  # of tensor t
        self.parameters: list[int] = []
        self.gradient: dict[int, int] = {}
        self.num_ops = 0
        self._kind = "forward"
        self._backward: list[Callable[[], None]] = []

    def tensor(self, num_bytes: int, kind: str = "temporary") -> int:
        """Add a tensor of num_bytes bytes and return its id."""
        self.bytes.append(num_bytes)
        return self.builder.tensor(num_bytes, kind=kind)

    def parameter(self, num_items: int) -> int:
        """Add a parameter of num_items float32 items and return its id."""
        self.parameters.append(self.tensor(num_items * ITEM_BYTES, "parameter"))
        return self.parameters[-1]

    def op(self, name: str, reads: Sequence[int] = (), *sizes: int, draws: bool = False, flops: int = 0) -> list[int]:
        """Record an op that reads tensors and writes new ones of the given sizes in bytes; return the new tensors."""
        writes = [self.tensor(size) for size in sizes]
        self._record(name, reads, writes, (), draws, flops)
        return writes

    def in_place(self, name: str, target: int, *reads: int, draws: bool = False) -> None:
        """Record an op that overwrites the tensor target, like PyTorch's ops whose names end in an underscore."""
        self._record(name, (target, *reads), (), (target,), draws, 0)

    def _record(
        self, name: str, reads: Sequence[int], writes: Sequence[int], mutates: Sequence[int], draws: bool, flops: int
    ) -> None:
        self.num_ops += 1
        moved = sum(self.bytes[t] for t in (*reads, *writes, *mutates))
        self.builder.op(
            name, reads=reads, writes=writes, mutates=mutates, kind=self._kind, flops=flops, moved_bytes=moved,
            random=draws, recomputable=not draws, target=f"aten.{name}.default",
        )  # fmt: skip

    def on_backward(self, closure: Callable[[], None]) -> None:
        """Keep the backward ops of the op just recorded for later."""
        self._backward.append(closure)

    def give(self, tensor: int, gradient: int) -> None:
        """Give a tensor a gradient; a second one is added to the first, into new memory."""
        if tensor in self.gradient:
            (gradient,) = self.op("add", (self.gradient[tensor], gradient), self.bytes[tensor])
        self.gradient[tensor] = gradient

    def backward(self, loss: int) -> None:
        """Record the backward pass from the loss."""
        self._kind = "backward"
        (self.gradient[loss],) = self.op("ones_like", (loss,), self.bytes[loss])
        while self._backward:
            self._backward.pop()()

    def update(self, optimizer: Optimizer, clip: bool) -> None:
        """Record one update per parameter, all of them after the backward pass, in the order of the parameters."""
        self._kind = "update"
        trained = [p for p in self.parameters if p in self.gradient] if optimizer != "none" else []
        if clip and trained:
            self._clip([self.gradient[p] for p in trained])
        for p in trained:
            (self._adam if optimizer == "adam" else self._sgd)(p, self.gradient[p])

    def _clip(self, gradients: list[int]) -> None:
        norms = [self.op("linalg_vector_norm", (g,), ITEM_BYTES)[0] for g in gradients]
        (value,) = self.op("stack", norms, len(norms) * ITEM_BYTES)
        for name in ("linalg_vector_norm", "add", "reciprocal", "mul", "clamp"):
            (value,) = self.op(name, (value,), ITEM_BYTES)
        for g in gradients:
            self.in_place("mul_", g, value)

    def _adam(self, parameter: int, gradient: int) -> None:
        mean, square = (self.tensor(self.bytes[parameter], "optimizer_state") for _ in range(2))
        self.in_place("lerp_", mean, gradient)
        self.in_place("mul_", square)
        self.in_place("addcmul_", square, gradient)
        (root,) = self.op("sqrt", (square,), self.bytes[parameter])
        self.in_place("div_", root)
        self.in_place("add_", root)
        self.in_place("addcdiv_", parameter, mean, root)

    def _sgd(self, parameter: int, gradient: int) -> None:
        momentum = self.tensor(self.bytes[parameter], "optimizer_state")
        self.in_place("mul_", momentum)
        self.in_place("add_", momentum, gradient)
        self.in_place("add_", parameter, momentum)

    # -- layers: each records its forward ops, keeps its backward ops for later and returns its output

    def linear(self, x: int, rows: int, fan_in: int, fan_out: int) -> int:
        """Record x @ weight + bias; x has rows x fan_in items."""
        weight, bias = self.parameter(fan_in * fan_out), self.parameter(fan_out)
        flops = 2 * rows * fan_in * fan_out
        (y,) = self.op("addmm", (weight, bias, x), rows * fan_out * ITEM_BYTES, flops=flops)

        def backward() -> None:
            dy = self.gradient.pop(y)
            (dx,) = self.op("mm", (weight, dy), self.bytes[x], flops=flops)
            (self.gradient[weight],) = self.op("mm", (x, dy), self.bytes[weight], flops=flops)
            (self.gradient[bias],) = self.op("sum", (dy,), self.bytes[bias])
            self.give(x, dx)

        self.on_backward(backward)
        return y

    def layer_norm(self, x: int, rows: int, width: int) -> int:
        """Record a layer normalisation of rows x width items."""
        weight, bias = self.parameter(width), self.parameter(width)
        y, mean, scale = self.op(
            "native_layer_norm", (weight, bias, x), self.bytes[x], rows * ITEM_BYTES, rows * ITEM_BYTES
        )

        def backward() -> None:
            reads = (weight, bias, x, mean, scale, self.gradient.pop(y))
            sizes = (self.bytes[x], self.bytes[weight], self.bytes[bias])
            dx, self.gradient[weight], self.gradient[bias] = self.op("native_layer_norm_backward", reads, *sizes)
            self.give(x, dx)

        self.on_backward(backward)
        return y

    def dropout(self, x: int) -> int:
        """Record a dropout that keeps its mask, one byte per item."""
        y, mask = self.op("native_dropout", (x,), self.bytes[x], self.bytes[x] // ITEM_BYTES, draws=True)

        def backward() -> None:
            self.give(x, self.op("native_dropout_backward", (mask, self.gradient.pop(y)), self.bytes[x])[0])

        self.on_backward(backward)
        return y

    def add(self, x: int, y: int) -> int:
        """Record x + y into new memory."""
        (z,) = self.op("add", (x, y), self.bytes[x])

        def backward() -> None:
            dz = self.gradient.pop(z)
            self.give(x, dz)
            self.give(y, dz)

        self.on_backward(backward)
        return z

    def gelu(self, x: int) -> int:
        """Record the tanh form of GELU as GPT-2 writes it: eight pointwise ops, eleven backward."""
        size = self.bytes[x]
        (half,) = self.op("mul", (x,), size)
        (cube,) = self.op("pow", (x,), size)
        (scaled,) = self.op("mul", (cube,), size)
        (inner,) = self.op("add", (x, scaled), size)
        (argument,) = self.op("mul", (inner,), size)
        (tanh,) = self.op("tanh", (argument,), size)
        (gate,) = self.op("add", (tanh,), size)
        (y,) = self.op("mul", (half, gate), size)

        def backward() -> None:
            dy = self.gradient.pop(y)
            (dgate,) = self.op("mul", (half, dy), size)
            (dhalf,) = self.op("mul", (gate, dy), size)
            (dargument,) = self.op("tanh_backward", (tanh, dgate), size)
            (dinner,) = self.op("mul", (dargument,), size)
            (dcube,) = self.op("mul", (dinner,), size)
            (square,) = self.op("pow", (x,), size)
            (slope,) = self.op("mul", (square,), size)
            (dx_cube,) = self.op("mul", (dcube, slope), size)
            (dx_inner,) = self.op("add", (dinner, dx_cube), size)
            (dx_half,) = self.op("mul", (dhalf,), size)
            self.give(x, self.op("add", (dx_inner, dx_half), size)[0])

        self.on_backward(backward)
        return y

    def attention(self, qkv: int, mask: int, score_bytes: int) -> int:
        """Record eager attention with dropout; queries, keys and values share one storage."""
        size = self.bytes[qkv] // 3
        (query,) = self.op("mul", (qkv,), size)
        (key,) = self.op("mul", (qkv,), size)
        (score,) = self.op("bmm", (query, key), score_bytes)
        (masked,) = self.op("add", (mask, score), score_bytes)
        (weight,) = self.op("_safe_softmax", (masked,), score_bytes)
        (keep,) = self.op("empty_like", (weight,), score_bytes)
        self.in_place("bernoulli_", keep, draws=True)
        self.in_place("div_", keep)
        (kept,) = self.op("mul", (weight, keep), score_bytes)
        (mixed,) = self.op("bmm", (qkv, kept), size)
        (y,) = self.op("clone", (mixed,), size)

        def backward() -> None:
            dy = self.gradient.pop(y)
            (dvalue,) = self.op("bmm", (kept, dy), size)
            (dkept,) = self.op("bmm", (qkv, dy), score_bytes)
            (dweight,) = self.op("mul", (keep, dkept), score_bytes)
            (dscore,) = self.op("_softmax_backward_data", (weight, dweight), score_bytes)
            (dkey,) = self.op("bmm", (query, dscore), size)
            (dquery,) = self.op("bmm", (key, dscore), size)
            parts = [self.op("mul", (d,), size)[0] for d in (dkey, dquery)]
            parts[0:1] = self.op("clone", (parts[0],), size)
            parts += self.op("clone", (dvalue,), size)
            self.give(qkv, self.op("cat", parts, 3 * size)[0])

        self.on_backward(backward)
        return y

    def embedding(self, weight: int, ids: int, num_bytes: int) -> int:
        """Record a look-up of rows of weight."""
        (y,) = self.op("embedding", (weight, ids), num_bytes)

        def backward() -> None:
            reads = (ids, self.gradient.pop(y))
            self.give(weight, self.op("embedding_dense_backward", reads, self.bytes[weight])[0])

        self.on_backward(backward)
        return y

    def project(self, x: int, weight: int, num_bytes: int) -> int:
        """Record x @ weight without bias; the weight may be another layer's as well."""
        (y,) = self.op("mm", (weight, x), num_bytes)

        def backward() -> None:
            dy = self.gradient.pop(y)
            self.give(weight, self.op("mm", (x, dy), self.bytes[weight])[0])
            self.give(x, self.op("mm", (weight, dy), self.bytes[x])[0])

        self.on_backward(backward)
        return y

    def cross_entropy(self, logits: int, labels: int) -> int:
        """Record the loss over the logits."""
        size = self.bytes[logits]
        (log,) = self.op("_log_softmax", (logits,), size)
        loss, weight = self.op("nll_loss_forward", (labels, log), ITEM_BYTES, ITEM_BYTES)

        def backward() -> None:
            (dlog,) = self.op("nll_loss_backward", (labels, log, weight, self.gradient.pop(loss)), size)
            self.give(logits, self.op("_log_softmax_backward_data", (log, dlog), size)[0])

        self.on_backward(backward)
        return loss

    def convolution(self, x: int, fan_in: int, fan_out: int, kernel: int, num_items: int) -> int:
        """Record a convolution without bias; num_items: items of the output."""
        weight = self.parameter(fan_in * fan_out * kernel * kernel)
        flops = 2 * num_items * fan_in * kernel * kernel
        (y,) = self.op("convolution", (weight, x), num_items * ITEM_BYTES, flops=flops)

        def backward() -> None:
            reads = (weight, x, self.gradient.pop(y))
            sizes = (self.bytes[x], self.bytes[weight])
            dx, self.gradient[weight] = self.op("convolution_backward", reads, *sizes, flops=2 * flops)
            self.give(x, dx)

        self.on_backward(backward)
        return y

    def batch_norm(self, x: int, channels: int) -> int:
        """Record a batch normalisation; its step counter is incremented in place, its output has new memory."""
        weight, bias = self.parameter(channels), self.parameter(channels)
        size = self.bytes[weight]
        mean, variance, count = (self.tensor(n, "buffer") for n in (size, size, 8))
        self.in_place("add_", count)
        self.op("empty", (), 0)
        y, saved, scale = self.op("native_batch_norm", (weight, bias, mean, variance, x), self.bytes[x], size, size)

        def backward() -> None:
            reads = (weight, mean, variance, x, saved, scale, self.gradient.pop(y))
            sizes = (self.bytes[x], size, size)
            dx, self.gradient[weight], self.gradient[bias] = self.op("native_batch_norm_backward", reads, *sizes)
            self.give(x, dx)

        self.on_backward(backward)
        return y

    def relu_(self, x: int) -> int:
        """Record a rectifier in place."""
        self.in_place("relu_", x)

        def backward() -> None:
            (self.gradient[x],) = self.op("threshold_backward", (x, self.gradient[x]), self.bytes[x])

        self.on_backward(backward)
        return x

    def add_(self, x: int, y: int) -> int:
        """Record x += y."""
        self.in_place("add_", x, y)
        self.on_backward(lambda: self.give(y, self.gradient[x]))
        return x

    def max_pool(self, x: int, num_items: int) -> int:
        """Record a pooling that keeps its indices, eight bytes per item."""
        y, indices = self.op("max_pool2d_with_indices", (x,), num_items * ITEM_BYTES, num_items * 8)

        def backward() -> None:
            reads = (x, indices, self.gradient.pop(y))
            self.give(x, self.op("max_pool2d_with_indices_backward", reads, self.bytes[x])[0])

        self.on_backward(backward)
        return y

    def cat(self, parts: Sequence[int]) -> int:
        """Record a concatenation; the parts' gradients are views of the whole's."""
        (y,) = self.op("cat", parts, sum(self.bytes[p] for p in parts))

        def backward() -> None:
            dy = self.gradient.pop(y)
            for part in parts:
                self.give(part, dy)

        self.on_backward(backward)
        return y

    def mean(self, x: int, num_bytes: int) -> int:
        """Record a mean over the positions of an image."""
        (y,) = self.op("mean", (x,), num_bytes)
        self.on_backward(lambda: self.give(x, self.op("div", (self.gradient.pop(y),), self.bytes[x])[0]))
        return y
