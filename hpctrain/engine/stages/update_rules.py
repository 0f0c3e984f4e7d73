"""Optimizer of a deck and its update rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.optimizer import (
    AdafactorTable,
    AdamMiniTable,
    AdamWTable,
    LionTable,
    MuonTable,
    ScheduleFreeTable,
    SgdTable,
)
from hpctrain.host.device import on_host
from hpctrain.model.part import ModelPart, parameter_list
from hpctrain.model.width_scaling import set_learning_rate_factors
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.lion import Lion
from hpctrain.optim.matrix.adafactor import Adafactor
from hpctrain.optim.matrix.adam_mini import AdamMini
from hpctrain.optim.matrix.matrix_optimizer import MatrixOptimizer
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.optim.matrix.muon import Muon
from hpctrain.optim.offload import CopyStreams, MemoryLocation, OffloadedOptimizer
from hpctrain.optim.optimizer import Agreement, Optimizer, ResidentOptimizer, UpdateRule
from hpctrain.optim.schedule_free import ScheduleFree
from hpctrain.optim.sgd import SGD
from hpctrain.sharding.bucket import Bucket, FlatAllocator
from hpctrain.sharding.compression.methods import CompressionSettings


def compression_settings(deck: Deck) -> CompressionSettings:
    """Return the settings of a deck from which its compressed reductions are made."""
    return CompressionSettings(deck.communication, deck.optimizer.rule, deck.run.seed)


def _adamw(deck: Deck) -> UpdateRule:
    keys, decay = deck.optimizer.rule, deck.optimizer.weight_decay
    assert isinstance(keys, AdamWTable | MuonTable)
    return AdamW((keys.beta1, keys.beta2), keys.epsilon, decay, compression_settings(deck).momentum_after)


def _sgd(deck: Deck) -> UpdateRule:
    keys = deck.optimizer.rule
    assert isinstance(keys, SgdTable)
    return SGD(
        keys.momentum, keys.nesterov, deck.optimizer.weight_decay, compression_settings(deck).momentum_after
    )


def _lion(deck: Deck) -> UpdateRule:
    keys = deck.optimizer.rule
    assert isinstance(keys, LionTable)
    return Lion((keys.beta1, keys.beta2), deck.optimizer.weight_decay)


def _schedule_free(deck: Deck) -> UpdateRule:
    keys = deck.optimizer.rule
    assert isinstance(keys, ScheduleFreeTable)
    return ScheduleFree((keys.beta1, keys.beta2), keys.epsilon, deck.optimizer.weight_decay)


def _muon(deck: Deck) -> MatrixRules:
    keys = deck.optimizer.rule
    assert isinstance(keys, MuonTable)
    dtype = torch.bfloat16 if keys.newton_schulz == "bf16" else torch.float32
    rule = Muon(
        keys.momentum, keys.nesterov, deck.optimizer.weight_decay, keys.newton_schulz_steps, dtype, keys.match
    )
    return MatrixRules(rule, keys.matrices, _adamw(deck), keys.others_rate)


def _adafactor(deck: Deck) -> MatrixRules:
    keys = deck.optimizer.rule
    assert isinstance(keys, AdafactorTable)
    return MatrixRules(Adafactor(keys.beta1, deck.optimizer.weight_decay))


def _adam_mini(deck: Deck) -> MatrixRules:
    keys = deck.optimizer.rule
    assert isinstance(keys, AdamMiniTable)
    return MatrixRules(AdamMini((keys.beta1, keys.beta2), keys.epsilon, deck.optimizer.weight_decay))


RULES: Mapping[str, Callable[[Deck], UpdateRule | MatrixRules]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "lion": _lion,
    "schedule-free": _schedule_free,
    "muon": _muon,
    "adafactor": _adafactor,
    "adam-mini": _adam_mini,
}
"""Functions that make the update rule of a deck, by `optimizer.name`."""


def assign_settings(deck: Deck, models: Sequence[ModelPart]) -> None:
    """Set how each parameter of the model parts is updated, before they are in buckets. Local."""
    set_learning_rate_factors(models, deck)
    rule = RULES[deck.optimizer.name](deck)
    if isinstance(rule, MatrixRules):
        rule.assign([parameter for model in models for parameter in parameter_list(model)])


def make_optimizer(
    deck: Deck,
    buckets: Sequence[Bucket],
    allocate: FlatAllocator | None,
    device: torch.device,
    agreement: Agreement,
) -> Optimizer:
    """Return the deck's optimizer. Collective over the ranks of the mesh.

    Args:
        deck: The deck.
        buckets: Buckets whose parameters are updated.
        allocate: Makes the memory of the state; None for the device.
        device: Device of the run, also in a plan, whose buckets have no device.
        agreement: Context of operations that may fail on one rank alone.
    """
    rule, memory = RULES[deck.optimizer.name](deck), deck.memory
    if allocate is None and isinstance(rule, MatrixRules):
        return MatrixOptimizer(rule, buckets)
    assert not isinstance(rule, MatrixRules)  # the check of the deck refuses it
    if allocate is None:
        return ResidentOptimizer(rule, buckets)
    streams = None if on_host(device) else CopyStreams()
    computing: MemoryLocation = "gpu" if streams else "host"
    location = computing if memory.parameters == "device" else memory.parameters
    return OffloadedOptimizer(rule, buckets, allocate, memory.offload_buffer, agreement, location, streams)
