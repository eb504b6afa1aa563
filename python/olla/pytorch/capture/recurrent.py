"""LSTMs on a CPU without oneDNN, whose operator hands its backward a workspace that no graph can carry."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher

from olla.pytorch.capture.exclusive import ExclusiveCapture

_here = threading.local()  # .in_lstm: whether an LSTM is traced on this thread


def plain_recurrent_layers(capture: ExclusiveCapture) -> AbstractContextManager[None]:
    """Let what torch has of LSTMs in Python believe that oneDNN is off; its kernel asks for all threads."""
    enabled = torch._C._get_mkldnn_enabled
    return capture.replaced(torch._C, "_get_mkldnn_enabled", lambda: enabled() and not getattr(_here, "in_lstm", False))


def lstm(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what torch.lstm does, by operators; its arguments are those of one of the two overloads of that function."""
    _here.in_lstm = True
    try:
        return _layers(*args)
    finally:
        _here.in_lstm = False


def _layers(data: torch.Tensor, second: Any, third: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run layers with dropout between them one by one: torch's decomposition leaves the dropout out."""
    is_packed = isinstance(second, torch.Tensor)
    hidden, parameters = (third, rest[0]) if is_packed else (second, third)
    has_biases, num_layers, dropout, trains, bidirectional, *batch_first = rest[is_packed:]
    with enable_python_dispatcher():
        if num_layers == 1 or dropout == 0 or not trains:
            data, last_hidden, last_cell = torch.lstm(data, second, third, *rest)
            # The decompositions of torch 2.11 and 2.12 return states with a dimension too many.
            return data, last_hidden.reshape(hidden[0].shape), last_cell.reshape(hidden[1].shape)
        if any(batch_first):
            data = data.transpose(0, 1)  # the order in which dropout draws
        per_layer, directions = len(parameters) // num_layers, 1 + bidirectional
        last: list[Sequence[torch.Tensor]] = []
        for i in range(num_layers):
            own = [h[i * directions : (i + 1) * directions] for h in hidden]
            weights = parameters[i * per_layer : (i + 1) * per_layer]
            given = (data, second, own, weights) if is_packed else (data, own, weights)
            settings = (has_biases, 1, 0.0, trains, bidirectional, *([] if is_packed else [False]))
            data, *states = torch.lstm(*given, *settings)
            last.append(states)
            if i < num_layers - 1:
                data = torch.dropout(data, dropout, True)
        hidden_state, cell_state = (torch.cat(list(states)) for states in zip(*last, strict=True))
        return data.transpose(0, 1) if any(batch_first) else data, hidden_state, cell_state
