"""Modules and datasets that are no text, as users write them: nothing of ours is in here."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class Images:
    """Some of every class."""

    def __init__(self, size: int = 8, count: int = 70) -> None:
        self.size, self.count = size, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        own = np.random.default_rng(index)
        image = own.normal(size=(3, self.size, self.size)).astype(np.float32) + index % 5 * 0.3
        return {"pixel_values": image, "labels": index % 5}


class Points(torch.utils.data.Dataset):
    """What is learned are two numbers of each point; the order is not that of the forward pass."""

    def __len__(self):
        return 90

    def __getitem__(self, index):
        own = np.random.default_rng(index)
        x, scale = own.normal(size=6), own.uniform(0.5, 1)
        return {"answer": torch.tensor([x.sum(), x[0] * scale]).float(), "weight": 1.0 + index % 3,
                "scale": np.float32(scale), "x": x.astype(np.float32)}  # fmt: skip


class Sentences:
    """Of several lengths, some words of which are hidden."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        own = np.random.default_rng(index)
        words = own.integers(5, 40, own.integers(4, 12))
        hidden = own.random(len(words)) < 0.3
        return [np.where(hidden, 4, words), np.where(hidden, words, -100)]


def padded(items, length=None):
    """Of one length in a batch: of the longest in it."""
    longest = length or max(len(words) for words, _ in items)
    shape = len(items), longest
    batch = {"input_ids": torch.zeros(shape, dtype=torch.int64), "labels": torch.full(shape, -100),
             "attention_mask": torch.zeros(shape, dtype=torch.int64)}  # fmt: skip
    for row, (words, labels) in enumerate(items):
        batch["input_ids"][row, : len(words)] = torch.as_tensor(words)
        batch["labels"][row, : len(words)] = torch.as_tensor(labels)
        batch["attention_mask"][row, : len(words)] = 1
    return batch


def padded_to_twelve(items):
    """All batches of one length, as stages of a pipeline need them."""
    return padded(items, 12)


class ResNet(nn.Module):
    """With BatchNorm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.GELU())
            for _ in range(2)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Regression(nn.Module):
    """It takes what it calls by other names than the dataset."""

    def __init__(self, hidden=16):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, hidden) for a in (6, hidden)))
        self.last = nn.Linear(hidden, 2)

    def forward(self, point, /, factor, scale=None):
        assert scale is not None and factor.dim() == 1
        for layer in self.layers:
            point = torch.tanh(layer(point))
        return {"made": self.last(point) * (factor * scale)[:, None]}


def weighted(outputs, batch):
    """A loss that counts weights."""
    squares = (outputs["made"].float() - batch["answer"]).square().mean(-1)
    return (squares * batch["weight"]).sum(), batch["weight"].sum()


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8,
        patch_size=4, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    ))  # fmt: skip


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    ))  # fmt: skip
