"""Modules and losses as users write them, each with a fault seen in the wild, and right ones beside them."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, HIDDEN = 31, 16


class Right(nn.Module):
    """What the wrong ones change."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.rate = rate

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + functional.dropout(torch.tanh(layer(x)), self.rate, self.training)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


class Unusual(Right):
    """A part that gives a view, one that is called twice, and a parameter without an element."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, HIDDEN))
        self.turned = Turned()

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.turned(self.turned(super().hidden(tokens)))
        return x + self.empty.sum()


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class OwnGenerator(Right):
    """Masks of a generator of its own: the same on all data ranks, and no seed of the run's is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = super().hidden(tokens)
        return x * (torch.rand(x.shape, generator=self.generator) < 0.9)


class SameMasks(Right):
    """The generator is begun anew in each pass, from the same number."""

    def hidden(self, tokens: Tensor) -> Tensor:
        torch.manual_seed(0)
        return functional.dropout(super().hidden(tokens), 0.1, self.training)


class OfNumpy(Right):
    def hidden(self, tokens: Tensor) -> Tensor:
        return super().hidden(tokens) * float(np.random.random() + 0.5)  # noqa: NPY002


class OfPython(Right):
    def hidden(self, tokens: Tensor) -> Tensor:
        return super().hidden(tokens) * (random.random() + 0.5)


class Counter(Right):
    """Warms up by a counter that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def hidden(self, tokens: Tensor) -> Tensor:
        self.passes += 1
        return super().hidden(tokens) * min(1.0, self.passes / 10)


class Cache(Right):
    """A running mean that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = None

    def hidden(self, tokens: Tensor) -> Tensor:
        x = super().hidden(tokens)
        now = x.detach().mean((0, 1))
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return x - self.mean


class Harmless(Right):
    """Counts its passes, and does nothing with that."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def hidden(self, tokens: Tensor) -> Tensor:
        self.passes += 1
        return super().hidden(tokens)


class InPlace(Right):
    """Clips its input where it lies: the loss sees other tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.clamp_(max=VOCABULARY // 2))


class TiedByMemory(Right):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.data = self.embed.weight.data


class ByRank(Right):
    """Another computation on another rank."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = super().hidden(tokens)
        return x if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0" else x * 1.5


class Detached(Right):
    """A parameter that is cut off the graph."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.norm(x + torch.tanh(functional.linear(x, self.layers[0].weight.detach())))


class Infinite(Right):
    def hidden(self, tokens: Tensor) -> Tensor:
        return super().hidden(tokens).exp().exp().exp().exp()


class OtherBlocks(Right):
    """One rank leaves a block out: its parameters are gathered there by nobody."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            if number == 0 or os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
                x = x + torch.tanh(layer(x))
        return self.norm(x)


def summed(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    targets = batch["targets"].flatten()
    loss = functional.cross_entropy(outputs.flatten(0, 1), targets, ignore_index=-1, reduction="sum")
    return loss, int((targets >= 0).sum())


def weighted(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The count is a sum of weights."""
    targets = batch["targets"].flatten()
    losses = functional.cross_entropy(outputs.flatten(0, 1), targets, ignore_index=-1, reduction="none")
    weights = (targets >= 0) * (1.5 + targets % 3)
    return (losses * weights).sum(), weights.sum()


def averaged(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """A mean and the count of what it is the mean of."""
    total, count = summed(outputs, batch)
    return total / count, count


def averaged_alone(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """A mean, which counts as one."""
    total, count = summed(outputs, batch)
    return total / count, 1


def changes_targets(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Sums of squares of logits whose mean over the batch is taken away: samples are not by themselves."""
    total, count = summed(outputs - outputs.mean((0, 1)), batch)
    return total, count


class Wide(nn.Module):
    """Layers with an inner width that tensor ranks share, each with one fault if it is split so."""

    def __init__(self, kind: str = "", hidden: int = HIDDEN, heads: int = 4) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.norm, self.inner_norm = nn.LayerNorm(hidden), nn.LayerNorm(2 * hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.kind == "local":
            x = x + torch.outer(torch.arange(x.shape[1]) * 0.1, torch.arange(x.shape[2])).to(x)
        y = functional.gelu(self.up(self.norm(x)))
        if self.kind == "softmax":
            y = y.softmax(-1)
        if self.kind == "mean":
            y = y - y.mean(-1, keepdim=True)
        if self.kind == "norm":
            y = functional.layer_norm(y, y.shape[-1:])
        if self.kind == "scale":
            y = y * y.shape[-1] ** -0.5
        if self.kind == "gate":
            y = y * self.gate
        if self.kind == "position":
            y = y + torch.arange(y.shape[1], device=y.device)[:, None] * 0.1
        if self.kind == "first":
            y = torch.cat((y[..., :8] * 2, y[..., 8:]), -1)
        return self.head(x + self.down(y))


class Normalized(Right):
    """A norm with running statistics, which are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(HIDDEN)

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.statistics(super().hidden(tokens).transpose(1, 2)).transpose(1, 2)
