"""Modules as users write them, whose blocks pass on more than a tensor. Nothing of ours is in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.model.modules import models

V = models.VOCABULARY


class Unscaled(models.Gpt):
    """Without the parameter that all blocks take."""

    def __init__(self, hidden: int, layers: int, heads: int, sequence: int, dropout: float) -> None:
        super().__init__(hidden, layers, heads, sequence, dropout)
        del self.scale
        self.scale = None


def unscaled(
    hidden: int = 32, layers: int = 4, heads: int = 4, sequence: int = 32, dropout: float = 0.0
) -> nn.Module:
    return Unscaled(hidden, layers, heads, sequence, dropout)


@dataclass
class State:
    x: Tensor
    history: list[Tensor]
    told: str


class DictBlock(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(hidden), nn.Linear(hidden, hidden)
        self.batch_norm = nn.BatchNorm1d(hidden)

    def forward(self, given: dict[str, Any], mask: Tensor) -> dict[str, Any]:
        x = given["state"].x
        y = torch.tanh(self.inner(self.norm(x))) * mask
        y = self.batch_norm(y.transpose(1, 2)).transpose(1, 2)
        state = State(x + y, [*given["state"].history[-1:], y.mean((1, 2))], "block")
        return {"state": state, "mask": mask, "none": None, "number": 3}


class Dicts(nn.Module):
    """Blocks that take and give dicts of dataclasses, with a mask that they pass on; what is embedded is used
    again behind all of them, and so is a figure of each, which what is between changes in place.
    """

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, hidden)
        self.bias = nn.Parameter(torch.randn(hidden) * 0.3)
        self.rows = nn.ModuleList(DictBlock(hidden) for _ in range(layers))
        self.between = nn.ModuleDict({"1": nn.Linear(hidden, hidden), "0": nn.LayerNorm(hidden)})
        self.never = nn.Linear(hidden, 2)
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, V))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        first = self.embed(tokens)
        given = {"state": State(first + self.bias, [], "")}
        mask = (tokens != 3).unsqueeze(-1)
        figures: list[Tensor] = []
        for number, row in enumerate(self.rows):
            assert (mask.sum() >= 0) and given["state"].told in {"", "block"}
            given = row(given, mask)
            assert given["number"] == 3 and given["none"] is None
            mask = given["mask"]
            figures.append(given["state"].history[-1])
            for each in figures:
                each.mul_(0.9)
            given["state"].x.mul_(0.9)
            if str(number) in self.between:
                given["state"].x = given["state"].x + self.between[str(number)](given["state"].x)
        x = given["state"].x + 0.5 * torch.tanh(first)
        moment = torch.stack(figures).sum(0)
        return {"moment": moment, "logits": self.head(x) * (1 + moment[:, None, None])}


def dicts(hidden: int = 16, layers: int = 4) -> nn.Module:
    return Dicts(hidden, layers)


def hugging_face(name: str, **config: Any) -> nn.Module:
    import transformers

    made = getattr(transformers, name)
    return made(made.config_class(**config))
