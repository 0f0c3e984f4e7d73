"""The same model in a pipeline of torch.distributed.pipelining over gloo, to be measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.stage import _PipelineStageBase

from hpctrain.bench.torch_model import TorchModel, loss_of
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.place import split_by_flops
from hpctrain.errors import HpctrainError
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.action import Action, Schedule
from hpctrain.pipeline.split import spans_of

PIPELINE_RIVALS = ("torch-pipeline", "torch-interleaved")


def pipeline_step(name: str, deck: Deck, world: World, split: Sequence[int]) -> Callable[[], None]:
    """One optimizer step of the deck's global batch by torch's 1F1B, or its interleaved schedule.

    Every rank is a stage. `split` are the blocks of each part of ours; where torch has another number of
    parts, these are by FLOPs, too. Clipping is left out and embedding and head are never tied, to torch's
    advantage. HpctrainError for a deck of any other layout, or one that torch's schedule does not take.
    """
    assert deck.model.vocabulary is not None
    shape, layout = replace(ModelShape.of(deck, deck.model.vocabulary), tied=False), deck.layout
    interleaved = name == "torch-interleaved"
    chunks = max(2, layout.chunks) if interleaved else 1
    parts = chunks * world.size
    count = deck.batch.global_size // deck.batch.micro_size
    if layout.pipeline != world.size:
        raise HpctrainError(f"--against {name}: needs a deck whose layout.pipeline is the number of ranks")
    if interleaved and count % world.size:
        raise HpctrainError(
            f"--against {name}: needs micro-batches in a multiple of the {world.size} stages, not {count}"
        )
    if parts > shape.layers:
        raise HpctrainError(f"--against {name}: needs a deck of {parts} layers or more, not {shape.layers}")
    torch.manual_seed(deck.run.seed)
    dtype, device = Precision.of(deck).storage, torch.device("cpu")
    mine = range(world.rank, parts, world.size)
    form = Schedule(((Action("F", 0, chunks - 1),),) * world.size)
    if len(split) != parts:
        split = split_by_flops(deck.with_keys(layout={"split": None}), shape, form)
    modules = [TorchModel(shape, span).to(dtype) for span in spans_of(form, split, world.rank)]
    stages: list[_PipelineStageBase] = [
        PipelineStage(module, part, parts, device) for part, module in zip(mine, modules, strict=True)
    ]

    schedule = (
        ScheduleInterleaved1F1B(stages, count, loss_of)
        if interleaved
        else Schedule1F1B(stages[0], count, loss_of)
    )
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    tokens = torch.randint(shape.vocabulary, (deck.batch.global_size, shape.sequence + 1))
    inputs = (tokens[:, :-1],) if world.rank == 0 else ()
    targets = tokens[:, 1:] if world.rank == world.size - 1 else None

    def step() -> None:
        schedule.step(*inputs, target=targets, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return step
