"""What a module's own code makes of a step in plain torch, with nothing of ours around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.data.batches import MicroBatch
from hpctrain.engine.built_engine import Engine
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.modules.initial_values import HOST, seeded_random_numbers
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.module_call import ModuleCall
from hpctrain.model.modules.pipeline.stage_forward import seed_random_numbers
from hpctrain.objective.objective import LossFunction
from hpctrain.train.outputs import outputs_of
from hpctrain.train.trainer import Trainer


class PlainStep(NamedTuple):
    """The loss of a step, what the parts of a module give for its first micro-batches, and the gradient of
    each parameter that is trained, by name: as before an update, of each that was expected to be counted. Of
    what was counted are loss and norm.
    """

    loss: float
    outputs: Sequence[Mapping[str, Sequence[Tensor]]]
    gradients: Mapping[str, Tensor]
    norm: float


def bare_module(engine: Engine, seed: int) -> nn.Module:
    """A module as its own code builds it, untouched."""
    architecture = engine.architecture
    assert isinstance(architecture, ModuleArchitecture)
    with seeded_random_numbers(seed):
        return architecture.build(HOST)


def plain_module(engine: Engine, weights: Mapping[str, Tensor], seed: int) -> nn.Module:
    """The same with these weights, in their format."""
    module = bare_module(engine, seed)
    module.to(next(iter(weights.values())).dtype).train()
    ours = [segment.parameter for bucket in engine.stage.buckets for segment in bucket.segments]
    frozen = {parameter.shard.name for parameter in ours if not parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
            parameter.requires_grad_(name not in frozen)
    return module


def plain_step(trainer: Trainer, weights: Mapping[str, Tensor], watched: int = 1) -> PlainStep:
    """Of the next step of a trainer on one rank, which has these `weights`; outputs of its first `watched`
    micro-batches.
    """
    step, engine, batch = trainer.step, trainer.engine, trainer.deck.batch.global_size
    module = plain_module(engine, weights, trainer.deck.run.seed)
    call = call_in(engine, module)
    read = list(step.batches.step(trainer.state.samples, batch, 0, 1, step.micro_size))
    sums = torch.zeros(len(engine.objective.metrics), dtype=torch.float64)
    count = sum(map(engine.objective.count, read))
    outputs = []
    with torch.random.fork_rng(devices=[]):
        for number, micro in enumerate(read):
            dropout = step.dropout_source(trainer.state, number)
            if dropout is not None:
                seed_random_numbers(dropout)
            with outputs_of({module: lambda: True} if number < watched else {}) as given:
                losses = losses_of(engine, micro)(call(micro.fields))
            outputs += [given] if number < watched else []
            sums += torch.stack([metric.double() for metric in losses.metrics])
            losses.total.backward()
    metrics = {
        name: total / count for name, total in zip(engine.objective.metrics, sums.tolist(), strict=True)
    }
    counted = engine.objective.normalize(metrics)
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / count
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    norm = float(sum(gradient.square().sum() for gradient in gradients.values())) ** 0.5 / counted
    return PlainStep(metrics["loss"], outputs, gradients, norm)


def call_in(engine: Engine, module: nn.Module) -> ModuleCall:
    """The way in which a run calls its module, of this one."""
    assert isinstance(engine.architecture, ModuleArchitecture)
    return engine.architecture.call(module)


def losses_of(engine: Engine, micro: MicroBatch) -> LossFunction:
    """The sums of a micro-batch, of what a module gives."""
    return engine.objective.loss_function(ModelInputs(micro.fields, engine.positions), torch.ones(()))
