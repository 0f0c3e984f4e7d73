"""A function to learn, and what learns it: plain torch, of which regression.toml makes a run."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

FEATURES = 8


class Function(torch.utils.data.Dataset):
    """Points and a function's values there."""

    def __init__(self, points: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.points = torch.rand(points, FEATURES, generator=random)
        self.values = torch.sin(4 * self.points[:, 0]) + self.points[:, 1] * self.points[:, 2]

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.points[index], "y": self.values[index]}


class Mlp(nn.Sequential):
    """Linear layers, one after the other."""

    def __init__(self, hidden: int, layers: int) -> None:
        sizes = [FEATURES] + [hidden] * layers
        pairs = pairwise(sizes)
        super().__init__(
            *(nn.Sequential(nn.Linear(*pair), nn.GELU()) for pair in pairs), nn.Linear(hidden, 1)
        )


def squares(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The loss: a sum, and the count that it is divided by."""
    difference = outputs.squeeze(-1).float() - batch["y"]
    return difference.square().sum(), len(difference)
