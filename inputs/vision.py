"""A small ResNet, and striped images to classify: plain torch, of which vision.toml makes a run."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 8
SIZE = 16


class Stripes:
    """Noisy images of stripes, whose direction is the class; each is shifted at random when it is read."""

    def __init__(self, images: int) -> None:
        self.images = images

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> dict[str, np.ndarray | int]:
        own = np.random.default_rng(index)  # what this image is
        label = index % CLASSES
        angle, width = np.pi * label / CLASSES, own.uniform(2.0, 4.0)
        shift = np.random.uniform(0, 2 * np.pi)  # noqa: NPY002 - other ones in each epoch
        y, x = np.mgrid[:SIZE, :SIZE]
        wave = np.sin(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / width + shift)
        image = wave * own.uniform(0.3, 1.0, (3, 1, 1)) + own.normal(0, 0.7, (3, SIZE, SIZE))
        return {"pixel_values": image.astype(np.float32), "labels": label}


class Block(nn.Module):
    """Two convolutions, around which there is a way, too."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.first(x)))
        return functional.relu(self.norm2(self.second(y)) + self.around(x))


class ResNet(nn.Module):
    """Blocks of growing width, and a linear layer for the mean of what they find."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        sizes = [width * min(2**number, 4) for number in range(blocks + 1)]
        self.blocks = nn.ModuleList(
            Block(inputs, outputs, 2 if number else 1)
            for number, (inputs, outputs) in enumerate(pairwise(sizes))
        )
        self.head = nn.Linear(sizes[-1], CLASSES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def resnet(width: int = 16, blocks: int = 3) -> nn.Module:
    """The module."""
    return ResNet(width, blocks)


def stripes(images: int) -> Stripes:
    """The dataset."""
    return Stripes(images)
