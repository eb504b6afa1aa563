"""Kinds of training that people do, each with what they change between steps."""

from __future__ import annotations

from typing import Any

import transformers

from tests.odd.loops import (
    Loop,
    adam,
    at,
    must,
    odd,
    rows,
    steady,
    train,
)
from tests.support.pytorch.steps import nn, torch

functional = nn.functional


def tokens(i: int, length: int = 6) -> Any:
    return torch.randint(20, (2, length), generator=torch.Generator().manual_seed(i))


def text(i: int) -> dict[str, Any]:
    return {"input_ids": tokens(i), "labels": tokens(i)}


def gpt2(**settings: Any) -> Any:
    sizes: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0, **settings)
    return transformers.GPT2LMHeadModel(config)


def bert(**settings: Any) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=16, **settings))


def loss_of(model: Any, batch: Any) -> Any:
    return model(**batch).loss


def language(model: Any, change: Any = None, **settings: Any) -> Loop:
    return train(model, loss_of, change, batch=text, optimizer=adam, num_steps=4, **settings)


@steady
def gpt2_as_it_is() -> Loop:
    return language(gpt2())


@must
def gpt2_in_eval_mode_and_back() -> Loop:
    model = gpt2()
    return language(model, lambda i: model.train(i != 2))


@must
def gpt2_with_dropout_changed_in_its_layers() -> Loop:
    model = gpt2()

    def change(i: int) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1 if i < 2 else 0.0

    return language(model, change)


@must
def gpt2_with_another_attention() -> Loop:
    model = gpt2(attn_pdrop=0.0)
    return language(model, at(2, lambda: model.set_attn_implementation("eager")))


@odd
def gpt2_with_its_cache_switched_on() -> Loop:
    model = gpt2()
    return language(model, at(2, lambda: setattr(model.config, "use_cache", True)))


@odd
def gpt2_returning_hidden_states_by_its_configuration() -> Loop:
    model = gpt2()
    loss = lambda m, b: (lambda o: o.loss + sum(h.mean() for h in o.hidden_states or ()))(m(**b))  # noqa: E731
    return train(
        model, loss, at(2, lambda: setattr(model.config, "output_hidden_states", True)), batch=text, num_steps=4
    )


@odd
def gpt2_whose_embeddings_are_untied() -> Loop:
    model = gpt2()
    untie = lambda: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight.detach().clone()))  # noqa: E731
    return language(model, at(2, untie))


@odd
def gpt2_whose_embeddings_are_resized() -> Loop:
    model = gpt2()
    return language(model, at(2, lambda: model.resize_token_embeddings(24)))


@odd
def gpt2_with_gradient_checkpointing_from_step_2() -> Loop:
    model = gpt2()
    return language(model, at(2, model.gradient_checkpointing_enable))


@must
def bert_with_a_loss_for_masked_words() -> Loop:
    model = bert()
    batch = lambda i: {**text(i), "attention_mask": torch.ones(2, 6).long(), "token_type_ids": torch.zeros(2, 6).long()}  # noqa: E731
    return train(model, loss_of, lambda i: model.train(i % 2 == 0), batch=batch, optimizer=adam, num_steps=4)


@odd
def bert_with_another_activation_in_its_layers() -> Loop:
    model = bert()
    layer = model.bert.encoder.layer[0].intermediate
    return language(model, at(2, lambda: setattr(layer, "intermediate_act_fn", nn.Tanh())))


@must
def curriculum_by_the_length_of_sequences() -> Loop:
    length = [4]
    loss = lambda m, b: m(b["input_ids"][:, : length[0]], labels=b["labels"][:, : length[0]]).loss  # noqa: E731
    return train(gpt2(), loss, lambda i: length.__setitem__(0, 4 + i // 2), batch=text, num_steps=4)


class Reader(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.body, self.head = kind(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x)[0])


def recurrent(kind: Any, change: Any = None) -> Loop:
    model = Reader(kind)
    return train(model, change=change and (lambda i: change(model, i)), batch=lambda i: rows(i, 2, 4, 6))


for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    odd(lambda kind=_kind: recurrent(kind), f"{_kind.__name__}_as_it_is", must_be_equal=True, may_round=True)
    odd(
        lambda kind=_kind: recurrent(kind, lambda m, i: m.body.weight_hh_l0.requires_grad_(i < 2)),
        f"{_kind.__name__}_with_a_frozen_weight",
        may_round=True,
    )


@odd(may_round=True)
def state_of_an_lstm_carried_by_the_user() -> Loop:
    model: Any = nn.LSTM(6, 5)
    state = [torch.zeros(1, 2, 5), torch.zeros(1, 2, 5)]

    def loss(model: Any, x: Any) -> Any:
        y, (h, c) = model(x, tuple(state))
        return y.square().mean(), h, c

    def after(i: int, result: Any) -> None:
        state[:] = [t.detach() for t in result[1:]]

    return train(model, loss, batch=lambda i: rows(i, 4, 2, 6), after=after)
