"""Turn whatever goes wrong while a step is traced into one CaptureError that says what to change."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from olla.errors import FIRST_STEP, MISUSE, CaptureError

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


class DecidingValue(GuardOnDataDependentSymNode):
    """Python asks for a value, and not only to raise an error.

    Args:
        cond: the value, as sympy has it.
        origin: the operator whose result it is.
        phase: in which it is asked for.
    """

    def __init__(self, cond: Any, origin: str, phase: str) -> None:
        super().__init__(cond)
        self.origin = origin
        self.phase = phase


_BEHIND_STEP = " If the number is for a log, return the tensor from the step, and read it behind the step."
_WITHOUT_VALUES = " Use torch.where or masking by multiplication, or take that part out of the step."
# A function, or a part of a line, on the way to an error -> what lets the step through.
_REMEDIES = {
    "_compute_mask_indices": "SpecAugment draws with numpy: set model.config.apply_spec_augment = False.",
    "skip_the_layer": "Layers cannot be left out at random: set model.config.layerdrop = 0.0.",
    "layerdrop": "Layers cannot be left out at random: set layerdrop to 0.0 in the configuration of the model.",
    "labels.masked_select(labels_mask)": (
        "Compute the loss from the logits with torch.nn.functional.ctc_loss, which takes padded labels."
    ),
    "label_index = (labels >= 0)": 'Set model.config.problem_type = "single_label_classification".',
    "self.config.pad_token_id in input_ids": (
        "Pass attention_mask in with the batch: without one, transformers looks for padding in input_ids to warn of it."
    ),
    "linear_sum_assignment": "Match before the step, without gradients, and pass the indices in with the batch.",
}


def check_loss(loss: Any, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise a CaptureError unless autograd can start from ``loss``."""
    if not parameters:
        raise CaptureError(
            "no parameter of the model requires a gradient: nothing to train. Pass loss=None to capture inference."
        )
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"loss(model, batch) returned a {type(loss).__name__}, expected a scalar tensor. "
            "For a transformers model: loss=lambda model, batch: model(**batch).loss",
            rule=MISUSE,
        )
    if loss.numel() != 1 or not loss.dtype.is_floating_point:
        raise CaptureError(
            f"loss(model, batch) returned a {loss.dtype} tensor of shape {tuple(loss.shape)}, "
            "expected one floating-point number. Reduce it with .mean() or .sum().",
            rule=MISUSE,
        )
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient: "
            "look for torch.no_grad(), .detach() or .item() on the way to it.",
            rule=MISUSE,
        )


def check_gradients(grads: Mapping[str, torch.Tensor]) -> None:
    """Raise a CaptureError for gradients that no captured update can use."""
    for name, grad in grads.items():
        if grad.layout != torch.strided:
            raise CaptureError(f"the gradient of {name} is sparse. Use a dense gradient (sparse=False).")
    if not grads:
        raise CaptureError("no parameter that requires a gradient gets one: the loss does not depend on them.")


@contextlib.contextmanager
def explained(phase: Callable[[], str], model: torch.nn.Module) -> Iterator[None]:
    """Wrap a trace: every exception leaves as a CaptureError that names the phase, the place and the remedy."""
    try:
        yield
    except CaptureError as error:
        remedy = _remedy(error, model)
        if not remedy:
            raise
        raise CaptureError(f"{error}{remedy}", rule=error.rule) from error
    except Exception as error:
        if not _needs_values(error):
            raise _failed(error, phase(), model) from error
        when = error.phase if isinstance(error, DecidingValue) else phase()
        if when == "update":
            raise CaptureError(
                f"the optimizer decides by values of its own state{_place(error)}, which are not there while a step is "
                "captured. Use one that does not, such as AdamW, or capturable=True on an accelerator."
            ) from error
        remedy = _remedy(error, model) or (_BEHIND_STEP if _reads_number(error) else _WITHOUT_VALUES)
        raise CaptureError(
            f"the {when} pass needs the values of tensors, which are not there while a step is captured"
            f"{_place(error)}: {_needed(error)}.{remedy}"
        ) from error


def _failed(error: Exception, phase: str, model: torch.nn.Module) -> CaptureError:
    if isinstance(error, TypeError) and "SymFloat" in str(error):
        return CaptureError(
            f"the step uses a number read from a tensor (.item(), float()){_place(error)}, which is not known while a "
            "step is captured. Return the tensor, and read it behind the step."
        )
    message = (str(error).strip().splitlines() or [""])[0]
    return CaptureError(
        f"tracing the {phase} pass failed{_place(error)}: {type(error).__name__}: {message.rstrip('.')[:300]}."
        f"{_remedy(error, model) or ' Check that the same step runs ordinarily on this model and batch.'}"
    )


def _needs_values(error: Exception) -> bool:
    """Whether something asked for the values of tensors: numpy does so in words only."""
    return isinstance(error, _DATA_DEPENDENT) or ".numpy() is not supported for tensor subclasses" in str(error)


def _reads_number(error: BaseException) -> bool:
    """Whether the user's line makes a Python number of a tensor, as for a log."""
    return any(sign in _place(error) for sign in (".item(", "float(", "int(", ".tolist("))


def _needed(error: BaseException) -> str:
    """Say what a value is needed for."""
    if isinstance(error, DecidingValue):
        return (
            f"the value of {error.origin} decides what is computed (a branch that only raises an error is taken: "
            "compare the tensor itself, without int() or float(), and let the error leave the step)"
        )
    return (
        "a branch, a loop or a shape depends on them (if tensor, .nonzero(), a boolean mask as an index, float(tensor))"
    )


def _remedy(error: BaseException, model: torch.nn.Module) -> str:
    """Return what is known to help with a model that fails in this place."""
    frames = traceback.extract_tb(error.__traceback__)
    for sign, remedy in _REMEDIES.items():
        if any(sign in (frame.line or "") or sign == frame.name for frame in frames):
            return f" {remedy}"
    files = [frame.filename.replace("\\", "/") for frame in frames]
    experts = any("Experts" in type(module).__name__ for module in model.modules())
    if experts and hasattr(model, "set_experts_implementation") and any("/transformers/" in file for file in files):
        return (
            " Experts of transformers can be captured with "
            'model.set_experts_implementation("batched_mm"), or with "grouped_mm" in bfloat16.'
        )
    if any(file.endswith("/torch/amp/grad_scaler.py") for file in files):
        return " A GradScaler skips steps by values of gradients: train in bfloat16, which needs none."
    return ""


def _place(error: BaseException) -> str:
    """Name the last line outside torch that the exception passed through."""
    inside = ("/torch/", "/olla/pytorch/", "/contextlib.py", "<string>")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename.replace("\\", "/") for part in inside):
            return f" ({frame.filename}:{frame.lineno}, {frame.line})"
    return ""


def check_modes(trains: bool) -> None:
    """Raise a CaptureError for modes of torch in which a step cannot be captured as it would run."""
    if trains and not torch.is_grad_enabled():
        raise CaptureError(
            "gradients are switched off (torch.no_grad() or torch.set_grad_enabled(False)) where a training step is "
            "called: switch them on, or leave the loss out for inference.",
            rule=MISUSE,
        )
    if torch._C._len_torch_dispatch_stack() > 0:
        raise CaptureError(
            "a TorchDispatchMode is active, which sees no operator of a planned step: leave it before the step."
        )
    if any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
        raise CaptureError(
            "a TorchFunctionMode is active, which a planned step would not ask at every call: leave it before the step."
        )
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise CaptureError(
            "hooks for saved tensors are active (torch.autograd.graph), which a planned step does not call: leave them "
            "before the step."
        )


def check_inputs(leaves: Iterable[tuple[str, Any]]) -> None:
    """Raise a CaptureError for tensors of a batch through which gradients would leave the step."""
    for name, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.is_conj() or leaf.is_neg()):
            raise CaptureError(f"{name} is a conjugate or negative view: pass .resolve_conj().resolve_neg() of it.")
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise CaptureError(
                f"{name} requires a gradient, which would end at the step. Compute it inside the loss function, or "
                "pass it detached and call requires_grad_() there."
            )


def check_modules(model: torch.nn.Module) -> None:
    """Raise a CaptureError for lazy, compiled, scripted, DataParallel and nested DistributedDataParallel modules."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
            raise CaptureError(
                f"{name} has no shape yet, its layer is lazy: run the model on one batch before the capture.",
                rule=FIRST_STEP,
            )
    for name, module in model.named_modules():
        kind, where = type(module).__name__, name or "the model"
        if isinstance(module, torch.nn.DataParallel):
            raise CaptureError(f"{where} is a {kind}: one device is planned. Pass the module inside it (model.module).")
        if name and isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise CaptureError(
                f"{name} is a {kind}, inside the model: wrap the whole model in it, or pass the module inside."
            )
        if isinstance(module, torch._dynamo.OptimizedModule):
            raise CaptureError(
                f"{where} comes from torch.compile, whose kernels cannot be captured one by one. "
                "Pass the module it was made from (model._orig_mod)."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(f"{where} comes from torch.jit, which hides its operators. Pass the module itself.")


def check_replaced(
    model: torch.nn.Module, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Raise a CaptureError where a step has added, removed or replaced a parameter, or added or removed a buffer."""
    now = dict(model.named_parameters())
    changed = [name for name in {**parameters, **now} if parameters.get(name) is not now.get(name)]
    if changed:
        raise CaptureError(
            f"the step replaces, adds or removes {', '.join(changed[:3])}, which a planned step would not do again: "
            "write into the parameter (under torch.no_grad()), or change the model between steps."
        )
    if other := buffers.keys() ^ dict(model.named_buffers()).keys():
        raise CaptureError(
            f"the step adds or removes the buffer {', '.join(sorted(other)[:3])}: register it before the step."
        )


def check_constants(module: fx.GraphModule, inputs: list[tuple[str, torch.Tensor]]) -> None:
    """Raise a CaptureError for constants of a trace that are not constant: the model's own tensors, or fake ones."""
    names = {_memory(t): name for name, t in inputs}
    for node in module.graph.nodes:
        value = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if not isinstance(value, torch.Tensor):
            continue
        if isinstance(value, FakeTensor):
            raise CaptureError(
                "the step uses a tensor that an earlier step left behind (a gradient, or a cache of the model). "
                "Compute it inside the step, or make it a buffer of the model."
            )
        name = names.get(_memory(value))
        if name is not None:
            raise CaptureError(
                f"the step uses {name} in a way that cannot be followed: through a tensor that shares its memory, "
                "or inside a torch.autograd.Function that was not given it. Take it from the model or the batch."
            )


def check_gradients_followed(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise a CaptureError where a gradient went to a parameter itself instead of its stand-in."""
    for name, parameter in parameters:
        if isinstance(parameter.grad, FakeTensor):
            raise CaptureError(
                f"{name} is given to a torch.autograd.Function in a way that cannot be followed: by a reference to its "
                "apply that was made before the step (f = MyFunction.apply). Call MyFunction.apply(...) in the step."
            )


def _memory(tensor: torch.Tensor) -> Any:
    """Return where a tensor lies; another library may have made another storage there."""
    storage = tensor.untyped_storage()
    is_real = not isinstance(tensor, FakeTensor) and tensor.device.type != "meta" and storage.nbytes() > 0
    return storage.data_ptr() if is_real else ("of", storage._cdata)


def check_recomputed(module: fx.GraphModule) -> None:
    """Raise a CaptureError where torch only marked what selective checkpointing is to recompute, and saved it all."""
    if any("recompute" in node.meta for node in module.graph.nodes):
        raise CaptureError(
            f"PyTorch {torch.__version__} does not recompute in a traced step what selective activation checkpointing "
            "tells it to. Leave context_fn out of checkpoint(), or train towards a budget, which chooses what to save."
        )


def check_memory(tensors: Iterable[tuple[str, torch.Tensor, bool]]) -> None:
    """Raise a CaptureError for two tensors that share memory which the step changes: no graph would know.

    Args:
        tensors: the name of each, and whether the step changes it.

    Complexity: O(n log n).
    """
    spans: list[tuple[int, int, int, bool, str]] = []
    for name, tensor, is_changed in tensors:
        if tensor.layout == torch.strided and tensor.numel() > 0:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start, num_bytes = int(tensor.storage_offset()), tensor.element_size()
            storage = tensor.untyped_storage()._cdata
            spans.append((storage, start * num_bytes, (start + int(last) + 1) * num_bytes, is_changed, name))
    spans.sort(key=lambda span: span[:3])
    before = (0, 0, 0, False, "")  # those of this storage that follow each other without a gap, as one
    for span in spans:
        if before[0] == span[0] and span[1] < before[2]:
            if before[3] or span[3]:
                raise CaptureError(
                    f"{before[4]} and {span[4]} share memory but are two tensors, and the step changes it. Give both "
                    "modules the same Parameter to tie them, or copy one of them (.clone()) before the step."
                )
            before = (before[0], before[1], max(before[2], span[2]), before[3], before[4])
        else:
            before = span
