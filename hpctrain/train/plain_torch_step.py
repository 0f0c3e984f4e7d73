"""Reference step of a user's module in plain PyTorch, without hpctrain's layers, buckets and hooks."""

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
    """Result of a step in plain PyTorch.

    Attributes:
        loss: Loss of the step.
        outputs: Outputs of the submodules for the first micro-batches, by name.
        gradients: Gradient of each trained parameter before the update, by name. It is divided by the
            expected count of the objective; `loss` and `norm` are relative to the actual count.
        norm: Norm of all gradients.
    """

    loss: float
    outputs: Sequence[Mapping[str, Sequence[Tensor]]]
    gradients: Mapping[str, Tensor]
    norm: float


def bare_module(engine: Engine, seed: int) -> nn.Module:
    """Build the module of a run on the CPU, with the weights that its own code initializes."""
    architecture = engine.architecture
    assert isinstance(architecture, ModuleArchitecture)
    with seeded_random_numbers(seed):
        return architecture.build(HOST)


def plain_module(engine: Engine, weights: Mapping[str, Tensor], seed: int) -> nn.Module:
    """Build the module of a run in training mode with given weights, in their dtype."""
    module = bare_module(engine, seed)
    module.to(next(iter(weights.values())).dtype).train()
    parameters = [segment.parameter for bucket in engine.stage.buckets for segment in bucket.segments]
    frozen = {parameter.shard.name for parameter in parameters if not parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
            parameter.requires_grad_(name not in frozen)
    return module


def plain_step(trainer: Trainer, weights: Mapping[str, Tensor], watched: int = 1) -> PlainStep:
    """Compute the next step of a trainer on one rank in plain PyTorch.

    Args:
        trainer: The trainer, on one rank.
        weights: Its weights, by name.
        watched: Number of micro-batches whose outputs are returned.
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
            with outputs_of({module: lambda: True} if number < watched else {}) as module_outputs:
                losses = losses_of(engine, micro)(call(micro.fields))
            outputs += [module_outputs] if number < watched else []
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
    """Return the object that calls a module as a run does."""
    assert isinstance(engine.architecture, ModuleArchitecture)
    return engine.architecture.call(module)


def losses_of(engine: Engine, micro: MicroBatch) -> LossFunction:
    """Return the function that computes the sums of losses of a micro-batch from a module's output."""
    return engine.objective.loss_function(ModelInputs(micro.fields, engine.positions), torch.ones(()))
