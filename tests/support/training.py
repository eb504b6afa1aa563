"""Training steps as graphs: a chain of layers with dropout, and a language model with a large vocabulary."""

from __future__ import annotations

from olla import Graph


def training_chain(num_layers: int = 8, num_bytes: int = 1_000_000) -> Graph:
    """Layers of a product, an in-place activation and dropout, their backward, and one weight each, updated last."""
    b = Graph.builder("training chain")
    x = b.tensor(num_bytes, kind="input")
    layers = []
    for i in range(num_layers):
        weight = b.tensor(1000, kind="parameter")
        y, out, mask = b.tensor(num_bytes), b.tensor(num_bytes), b.tensor(num_bytes // 4)
        moved = 2 * num_bytes
        b.op(f"mm_{i}", reads=[x, weight], writes=[y], kind="forward", target="aten.mm.default", moved_bytes=moved)
        b.op(f"relu_{i}", reads=[y], mutates=[y], kind="forward", target="aten.relu_.default", moved_bytes=moved)
        b.op(
            f"dropout_{i}",
            reads=[y],
            writes=[out, mask],
            kind="forward",
            target="aten.native_dropout.default",
            moved_bytes=moved,
            random=True,
            recomputable=False,
        )
        layers.append((x, weight, y, mask))
        x = out
    gradient = b.tensor(num_bytes)
    b.op("loss", reads=[x], writes=[gradient], kind="backward", moved_bytes=2 * num_bytes)
    updates = []
    for i, (inp, weight, y, mask) in reversed(list(enumerate(layers))):
        d1, d2, d3, dw = b.tensor(num_bytes), b.tensor(num_bytes), b.tensor(num_bytes), b.tensor(1000)
        back = {"kind": "backward", "moved_bytes": 2 * num_bytes}
        drop, relu = "aten.native_dropout_backward.default", "aten.threshold_backward.default"
        b.op(f"dropout_backward_{i}", reads=[gradient, mask], writes=[d1], target=drop, **back)
        b.op(f"relu_backward_{i}", reads=[d1, y], writes=[d2], target=relu, **back)
        b.op(f"weight_{i}", reads=[inp, d2], writes=[dw], target="aten.mm.default", **back)
        b.op(f"input_{i}", reads=[d2, weight], writes=[d3], target="aten.mm.default", **back)
        updates.append((weight, dw))
        gradient = d3
    for weight, dw in updates:
        b.op("update", reads=[weight, dw], mutates=[weight], kind="update", target="aten.add_.Tensor")
    return b.build()


ROWS, WIDTH, CLASSES = 64, 16, 4000
LOGITS = 4 * ROWS * CLASSES


class LanguageModel:
    """A graph: layers, a product with a large vocabulary, cross-entropy, backward, an update of the weight."""

    def __init__(self, *, bias: bool = True, scaled_by_loss: bool = False, weights: bool = False, keep: bool = False):
        b = self.builder = Graph.builder("language model")
        self.weight = b.tensor(4 * WIDTH * CLASSES, kind="parameter")
        self.bias = [b.tensor(4 * CLASSES, kind="parameter")] if bias else []
        self.target = b.tensor(8 * ROWS, kind="input")
        inputs = [b.tensor(4 * ROWS * WIDTH) for _ in range(5)]
        for i, x in enumerate(inputs):
            b.op(f"layer_{i}", reads=inputs[i - 1 : i] if i else [], writes=[x], moved_bytes=8 * ROWS * WIDTH)
        x = inputs[-1]
        logits, probs, through, back = (b.tensor(LOGITS) for _ in range(4))
        self.logits, self.loss, total, one = logits, b.tensor(4), b.tensor(4), b.tensor(4)
        name = "aten.addmm.default" if bias else "aten.mm.default"
        flops, moved = 2 * ROWS * WIDTH * CLASSES, LOGITS + 4 * ROWS * WIDTH + 4 * WIDTH * CLASSES
        product = {"flops": flops, "moved_bytes": moved}
        read = [self.weight, *self.bias, x]
        b.op("head", reads=read, writes=[logits], target=name, shape=(ROWS, CLASSES), kind="forward", **product)
        softmax = {"target": "aten._log_softmax.default", "shape": (ROWS, CLASSES), "moved_bytes": 2 * LOGITS}
        b.op("log_softmax", reads=[logits], writes=[probs], **softmax)
        of_classes = [b.tensor(4 * CLASSES, kind="parameter")] if weights else []
        nll = [self.target, probs, *of_classes]
        b.op("loss", reads=nll, writes=[self.loss, total], target="aten.nll_loss_forward.default", moved_bytes=16)
        b.op("ones", reads=[self.loss], writes=[one], target="aten.mul" if scaled_by_loss else "aten.ones_like.default")
        two = b.tensor(4)
        b.op("scale", reads=[one], writes=[two], target="aten.mul.Tensor")
        nll = [*nll, total, two]
        grad = {"shape": (ROWS, CLASSES), "kind": "backward"}
        target = "aten.nll_loss_backward.default"
        b.op("loss_grad", reads=nll, writes=[through], target=target, moved_bytes=2 * LOGITS, **grad)
        target = "aten._log_softmax_backward_data.default"
        b.op("logits_grad", reads=[probs, through], writes=[back], target=target, moved_bytes=3 * LOGITS, **grad)
        self.weight_grad, self.input_grad = b.tensor(4 * WIDTH * CLASSES), b.tensor(4 * ROWS * WIDTH)
        mm = {"target": "aten.mm.default", "kind": "backward", **product}
        b.op("weight_grad", reads=[x, back], writes=[self.weight_grad], shape=(CLASSES, WIDTH), **mm)
        b.op("input_grad", reads=[self.weight, back], writes=[self.input_grad], shape=(ROWS, WIDTH), **mm)
        if bias:
            bias_grad = b.tensor(4 * CLASSES)
            shape = (1, CLASSES)
            b.op(
                "bias_grad",
                reads=[back],
                writes=[bias_grad],
                target="aten.sum.dim_IntList",
                shape=shape,
                kind="backward",
            )
            b.op("bias_update", reads=[bias_grad, *self.bias], mutates=self.bias, kind="update")
        g = self.input_grad
        for i in reversed(range(1, 5)):
            d = b.tensor(4 * ROWS * WIDTH)
            b.op(f"layer_grad_{i}", reads=[g, inputs[i - 1]], writes=[d], kind="backward")
            g = d
        b.op("update", reads=[self.weight, self.weight_grad], mutates=[self.weight], kind="update")
        b.output(self.loss)
        if keep:
            b.output(logits)

    def build(self) -> Graph:
        return self.builder.build()
