"""Peers that train the model in a pipeline of torch.distributed.pipelining with gloo."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from hpctrain.bench.peers.torch_model import TorchModel, mean_loss
from hpctrain.bench.peers.torch_training import PeerRank, PeerStep, TorchTraining, TorchUpdate
from hpctrain.bench.peers.training_peers import pipeline_parts
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.layer_placement import split_by_flops
from hpctrain.model.part import LayerRange
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.action import Action, Schedule
from hpctrain.pipeline.generate import generate_schedule


def peer(name: str, deck: Deck, peer_rank: PeerRank, split: Sequence[int]) -> PeerStep:
    """Return a function that trains one step, with every rank as a stage.

    Args:
        name: Schedule of torch: "torch-pipeline" for 1F1B, "torch-interleaved", or "torch-zbv" for ZB-V.
        deck: Deck to train.
        peer_rank: Rank of this process.
        split: Number of blocks in each part of hpctrain's pipeline. If the schedule has another number of
            parts, blocks are divided by their FLOPs instead.
    """
    training = TorchTraining(deck)
    shape, parts = training.shape, pipeline_parts(name, deck, peer_rank.size)
    local_parts = list(range(peer_rank.rank, parts, peer_rank.size))
    if name == "torch-zbv":
        local_parts = [peer_rank.rank, parts - 1 - peer_rank.rank]
    if len(split) != parts:
        split = _split_by_flops(deck, shape, peer_rank.size, parts, name == "torch-zbv")
    ranges = [
        LayerRange(first, last, part == 0, part == parts - 1)
        for part, (first, last) in enumerate(pairwise(accumulate(split, initial=0)))
    ]
    modules = [training.initialize(TorchModel(shape, ranges[part])) for part in local_parts]
    tied = _tie_weights(modules) if shape.tied else None
    # A table that two stages hold counts once in the norm of the gradients.
    has_embedding = ranges[local_parts[0]].has_embedding
    counted = [p for module in modules for p in module.parameters() if p is not tied or has_embedding]
    update = TorchUpdate(training, modules, keep_masters=True, counted=counted, sum_squares=_sum_over_stages)
    stages: list[_PipelineStageBase] = [
        PipelineStage(module, part, parts, torch.device("cpu"))
        for part, module in zip(local_parts, modules, strict=True)
    ]

    def loss_share(logits: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(logits, targets) / training.count

    # With scale_grads torch would scale the gradient of a table that two parts of a rank share twice.
    schedule: Schedule1F1B | ScheduleInterleaved1F1B | ScheduleZBVZeroBubble
    if name == "torch-pipeline":
        schedule = Schedule1F1B(stages[0], training.count, loss_share, scale_grads=False)
    elif name == "torch-interleaved":
        schedule = ScheduleInterleaved1F1B(stages, training.count, loss_share, scale_grads=False)
    else:
        schedule = ScheduleZBVZeroBubble(stages, training.count, loss_share, scale_grads=False)
    has_loss = parts - 1 in local_parts
    embedding_group = torch.distributed.new_group([0, peer_rank.size - 1])

    def step() -> float | None:
        micro_batches = list(training.micro_batches())
        inputs = (torch.cat([micro.tokens for micro in micro_batches]),) if peer_rank.rank == 0 else ()
        targets = torch.cat([micro.targets for micro in micro_batches]) if has_loss else None
        losses: list[Tensor] = []
        schedule.step(*inputs, target=targets, losses=losses if has_loss else None, return_outputs=False)
        if tied is not None:
            assert tied.grad is not None
            torch.distributed.all_reduce(tied.grad, group=embedding_group)
        update()
        return float(torch.stack(losses).detach().sum()) if losses else None

    return step


def _split_by_flops(deck: Deck, shape: ModelShape, stages: int, parts: int, zb_v: bool) -> Sequence[int]:
    """Return the number of blocks in each part, as hpctrain would divide them for such a schedule."""
    schedule = Schedule(((Action("F", 0, parts // stages - 1),),) * stages)
    if zb_v:
        schedule = generate_schedule("zb-v", stages, 2 * stages)
    return split_by_flops(deck.with_keys(layout={"split": None}), shape, schedule)


def _tie_weights(modules: Sequence[TorchModel]) -> Tensor | None:
    """Return the weight of this rank's embedding or head if another rank holds the other one, otherwise None.

    If this rank holds both, they share one weight from now on.
    """
    embeddings = [module.embedding for module in modules if module.embedding is not None]
    heads = [module.head for module in modules if module.head is not None]
    if embeddings and heads:
        heads[0].weight = embeddings[0].weight
        return None
    if embeddings:
        return embeddings[0].weight
    return heads[0].weight if heads else None


def _sum_over_stages(squares: Tensor) -> Tensor:
    torch.distributed.all_reduce(squares)
    return squares
