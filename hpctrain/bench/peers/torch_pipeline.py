"""The same model in a pipeline of torch.distributed.pipelining over gloo, to be measured against."""

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

from hpctrain.bench.peers.torch_model import TorchModel, loss_of
from hpctrain.bench.peers.torch_training import PeerRank, PeerStep, TorchTraining, TorchUpdate
from hpctrain.bench.peers.training_peers import pipeline_parts
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.layer_placement import split_by_flops
from hpctrain.model.part import LayerRange
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.action import Action, Schedule
from hpctrain.pipeline.generate import generate_schedule


def peer(name: str, deck: Deck, place: PeerRank, split: Sequence[int]) -> PeerStep:
    """One optimizer step of the deck's global batch by torch's 1F1B ("torch-pipeline"), its interleaved
    schedule ("torch-interleaved") or ZB-V ("torch-zbv").

    Every rank is a stage. `split` are the blocks of each part of ours; where torch has another number of
    parts, these are by FLOPs, too.
    """
    training = TorchTraining(deck)
    shape, parts = training.shape, pipeline_parts(name, deck, place.size)
    mine = list(range(place.rank, parts, place.size))
    if name == "torch-zbv":
        mine = [place.rank, parts - 1 - place.rank]
    blocks = split if len(split) == parts else _by_flops(deck, shape, place.size, parts, name == "torch-zbv")
    spans = [
        LayerRange(first, last, part == 0, part == parts - 1)
        for part, (first, last) in enumerate(pairwise(accumulate(blocks, initial=0)))
    ]
    modules = [training.filled(TorchModel(shape, spans[part])) for part in mine]
    tied = _tied(modules) if shape.tied else None
    # Of a table that two stages hold, one counts in the norm.
    own = [
        p for module in modules for p in module.parameters() if p is not tied or spans[mine[0]].has_embedding
    ]
    update = TorchUpdate(training, modules, stored=True, counted=own, squares=_of_all_stages)
    stages: list[_PipelineStageBase] = [
        PipelineStage(module, part, parts, torch.device("cpu"))
        for part, module in zip(mine, modules, strict=True)
    ]

    def loss_share(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_of(logits, targets) / training.count

    # Torch scales the gradients of each stage afterwards, those of a table that two stages share twice.
    schedule: Schedule1F1B | ScheduleInterleaved1F1B | ScheduleZBVZeroBubble
    if name == "torch-pipeline":
        schedule = Schedule1F1B(stages[0], training.count, loss_share, scale_grads=False)
    elif name == "torch-interleaved":
        schedule = ScheduleInterleaved1F1B(stages, training.count, loss_share, scale_grads=False)
    else:
        schedule = ScheduleZBVZeroBubble(stages, training.count, loss_share, scale_grads=False)
    last = parts - 1 in mine
    holders = torch.distributed.new_group([0, place.size - 1])

    def step() -> float | None:
        micro_batches = list(training.micro_batches())
        inputs = (torch.cat([micro.tokens for micro in micro_batches]),) if place.rank == 0 else ()
        targets = torch.cat([micro.targets for micro in micro_batches]) if last else None
        losses: list[Tensor] = []
        schedule.step(*inputs, target=targets, losses=losses if last else None, return_outputs=False)
        if tied is not None:
            assert tied.grad is not None
            torch.distributed.all_reduce(tied.grad, group=holders)
        update()
        return float(torch.stack(losses).detach().sum()) if losses else None

    return step


def _by_flops(deck: Deck, shape: ModelShape, stages: int, parts: int, in_v: bool) -> Sequence[int]:
    """Blocks of each part, as a run of ours would have them in such a schedule."""
    form = Schedule(((Action("F", 0, parts // stages - 1),),) * stages)
    if in_v:
        form = generate_schedule("zb-v", stages, 2 * stages)
    return split_by_flops(deck.with_keys(layout={"split": None}), shape, form)


def _tied(modules: Sequence[TorchModel]) -> Tensor | None:
    """This rank's table, where another rank has it too; where both are here, they become one."""
    embeddings = [module.embedding for module in modules if module.embedding is not None]
    heads = [module.head for module in modules if module.head is not None]
    if embeddings and heads:
        heads[0].weight = embeddings[0].weight
        return None
    if embeddings:
        return embeddings[0].weight
    return heads[0].weight if heads else None


def _of_all_stages(squares: Tensor) -> Tensor:
    torch.distributed.all_reduce(squares)
    return squares
