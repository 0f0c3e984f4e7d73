"""Runs with matrix optimizers: their decks, their gradients, and how they continue from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.train.checkpoints import Checkpoints
from tests.engines import LLAMA, Trainer, reference, small_deck, trainer

MUON = ("optimizer.name=muon", "learning_rate.peak=1e-2")
EXPERTS = ("model.experts.count=4", "model.experts.per_token=2", "model.experts.mlp=48")


def give_gradients(training: Trainer, step: int) -> None:
    """Set the reduced gradients of all parameters to values that depend on name and step alone."""
    for bucket in training.engine.stage.buckets:
        for segment, values, offset in bucket.owned_segments(bucket.owned_gradients):
            shard = segment.parameter.shard
            generator = torch.Generator().manual_seed(crc32(shard.name.encode()) + step)
            whole = torch.randn(shard.shape, generator=generator) * segment.parameter.requires_grad
            assert isinstance(values, Tensor)
            values.copy_(shard.take(whole).view(-1)[offset : offset + values.numel()])


def losses_after_checkpoint(
    world: World, folder: Path, keys: tuple[str, ...], layout: tuple[str, ...]
) -> tuple[list[float], list[float]]:
    """Return the losses of three steps after a checkpoint of step 2: in the layout, and on one rank.

    Collective. The folder must be the same on all ranks.
    """
    keys = (*LLAMA, *keys, f"run.dir={folder}")
    deck = small_deck(*keys, *layout)
    training = trainer(world, deck)
    training.train(2)
    Checkpoints(deck, training.engine, {}).save(training.state)
    world.everyone.barrier()
    continued = [step.loss for step in training.train(3)]
    alone = reference(world, deck)
    path = folder / "checkpoints/step-00000002.h5"
    alone.state = Checkpoints(small_deck(*keys), alone.engine, {}).restore(path)
    return continued, [step.loss for step in alone.train(3)]
