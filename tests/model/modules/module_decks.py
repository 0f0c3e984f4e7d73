"""Decks with modules of users, and the plain torch loop that their runs are compared with."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.deck.sections.optimizer import AdamWTable
from hpctrain.model.modules.module_call import make_call
from tests.engines import Trainer
from tests.model.modules import models

STEPS = 3
MODELS = Path(models.__file__)
OPTIMIZER = """
[optimizer]
clip = 0.7
weight_decay = 0.1
[optimizer.adamw]
epsilon = 3e-5
[learning_rate]
peak = 3e-3
warmup = 2
[communication]
bucket_bytes = 20000
"""
"""Keys of an optimizer that `plain_loop` repeats, with several small buckets."""
DECK = (
    """
[run]
steps = 20
[model]
module = "{module}"
blocks = "{blocks}"
vocabulary = 61
{more}
[model.arguments]
{arguments}
[data]
tokens = "none"
[batch]
global_size = 8
micro_size = 2
sequence = 32
"""
    + OPTIMIZER
)
LLAMA = {
    "vocab_size": models.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
}
"""Sizes of a small Llama."""
GPT2 = {
    "vocab_size": models.VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of a small GPT-2 without dropout."""


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    logits = outputs.logits if hasattr(outputs, "logits") else outputs[0]
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")


def plain_loop(
    training: Trainer,
    model: nn.Module,
    weights: dict[str, Tensor],
    steps: int = STEPS,
    micro: int = 2,
    loss: Callable[[Any, Tensor], Tensor] = loss_of,
    counted: Callable[[Tensor], Tensor] = lambda targets: targets,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[list[float]], nn.Module]:
    """Losses and gradient norms of torch's AdamW, in double precision, from these weights, on the samples of
    a trainer that has not begun; micro-batches of some samples are those of BatchNorm.
    """
    model = model.to(dtype).train()
    named = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in weights.items():
            named[name].copy_(value)
    for name, parameter in named.items():
        if any(fnmatchcase(name, pattern) for pattern in training.deck.model.frozen):
            parameter.requires_grad_(False)
    keys, batch = training.deck.optimizer, training.deck.batch.global_size
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": keys.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    rule = keys.rule
    assert isinstance(rule, AdamWTable)
    optimizer = torch.optim.AdamW(groups, betas=(rule.beta1, rule.beta2), eps=rule.epsilon)
    figures = []
    for step in range(steps):
        read = list(training.step.batches.step(step * batch, batch, 0, 1, micro))
        count = sum(int((counted(each.targets) >= 0).sum()) for each in read)
        optimizer.zero_grad()
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        total = 0.0
        for each in read:
            made = loss(make_call(model, ("tokens",))(each.fields), each.targets) / count
            made.backward()
            total += made.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, keys.clip)
        for group in optimizer.param_groups:
            group["lr"] = training.engine.control.learning_rate.at(step, batch)
        optimizer.step()
        figures.append([total, norm.item()])
    return figures, model


def whole_parameters(training: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().float().clone() for name, value in training.parameters().items()}
