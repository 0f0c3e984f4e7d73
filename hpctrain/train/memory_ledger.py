"""Predicted and measured memory of a run, compared at its end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hpctrain.costs.bucket_bytes import gradient_bytes, pool_bytes, state_bytes, value_bytes
from hpctrain.costs.live_activations import ActivationKeeper, LiveActivations
from hpctrain.costs.memory_account import MemoryAccount
from hpctrain.costs.update_bytes import update_bytes
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.stages.stage import Stage
from hpctrain.errors import failing_as
from hpctrain.files import write_text
from hpctrain.host.device import on_host
from hpctrain.host.device_memory import fragmented_bytes, runtime_bytes
from hpctrain.memory.recompute import Recompute
from hpctrain.model.part import converted_bytes
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.plan.plan_text import comparison_table
from hpctrain.sharding.gather import Gatherer
from hpctrain.train.control import StepDecision
from hpctrain.train.hook import Hook
from hpctrain.train.step_seconds import StepSeconds

if TYPE_CHECKING:
    from hpctrain.train.trainer import Trainer

PLAN_FILE = "plan.json"


class ActivationPeak(Hook):
    """Hook that measures the peak activation memory in the first step only, since counting takes time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.bytes: int | None = None

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:  # noqa: ARG002
        """Count the bytes of saved activations during the step, if no step has been counted."""
        if self.bytes is not None:
            yield
            return
        engines = trained_engines(self.engine)
        keepers = [each for engine in engines for each in _activation_keepers(engine)]
        modules = (model for each in engines for model in each.stage.models if isinstance(model, nn.Module))
        buffers = [buffer for module in modules for buffer in module.buffers()]

        def parameters() -> list[Tensor]:
            buckets = (bucket for engine in engines for bucket in engine.stage.buckets)
            return [bucket.values for bucket in buckets if bucket.values is not None]

        with LiveActivations(lambda: [*buffers, *parameters()], *keepers) as live:
            yield
        self.bytes = live.peak


def trained_engines(engine: Engine) -> list[Engine]:
    """Return an engine and the engines of its auxiliary models."""
    return [engine, *engine.auxiliary_engines.values()]


def _activation_keepers(engine: Engine) -> Iterator[ActivationKeeper | None]:
    """Yield the parts of an engine that keep activations outside of the autograd graph."""
    layer_context = engine.stage.layer_context
    yield layer_context.weight_gradients
    if isinstance(layer_context.saved_policy, Recompute):
        yield from (layer_context.saved_policy, layer_context.saved_policy.store)
    if isinstance(engine.stage.residency, Gatherer):
        yield engine.stage.residency


@dataclass
class OtherMemory:
    """Memory of a run that its engine does not own.

    Attributes:
        stages: Stages of models that are not trained, such as a reference model.
        cache: Peak of the key-value cache, in bytes.
    """

    stages: Sequence[Stage] = ()
    cache: int = 0


def _fullness(account: MemoryAccount) -> tuple[int, int]:
    """Return the sort key by which the fullest rank of a stage is found, as in a plan.

    Parameters and their state count first, since ranks may own uneven shares. `other` is left out, since it
    varies at random.
    """
    placed = account.parameter + account.gradient + account.optimizer
    return placed, account.total - account.other


class MemoryLedger(Hook):
    """Hook that compares the predicted with the measured memory at the end of a run, and writes `plan.json`.

    Attributes:
        trainer: Trainer of the run.
        predicted: Predicted memory of all ranks.
        folder: Folder of the run.
        seconds: Predicted and measured seconds of a step, which `plan.json` contains as well, if any.
        accounts: Measured memory of the fullest rank of each pipeline stage; empty before the end.
    """

    def __init__(
        self, trainer: Trainer, predicted: MemoryPlan, folder: Path, seconds: StepSeconds | None = None
    ) -> None:
        self.trainer, self.predicted, self.folder, self.seconds = trainer, predicted, folder, seconds
        self.accounts: list[MemoryAccount] = []

    def measure(self) -> MemoryAccount:
        """Return the peak memory of this rank. `other` is the part of the measured peak that is not known."""
        engine, other = self.trainer.engine, self.trainer.other_memory()
        world = engine.world
        trained = [each.stage for each in trained_engines(engine)]
        stages = [*trained, *other.stages]
        layers = [layer for stage in stages for model in stage.models for layer in model.layers]
        working = sum(update_bytes(stage.optimizer) for stage in trained) if on_host(world.device) else 0
        known = MemoryAccount(
            sum(value_bytes(stage.buckets) for stage in stages) + converted_bytes(layers),
            sum(gradient_bytes(stage.buckets) for stage in trained),
            sum(state_bytes(stage.state(), stage.buckets) for stage in trained),
            self.trainer.activations.bytes or 0,
            other.cache,
            sum(pool_bytes(stage.buckets) for stage in stages) + world.buffer_bytes + working,
        )
        return replace(
            known,
            other=max(0, world.peak_bytes - known.total),
            runtime=runtime_bytes(world.device),
            fragmented=fragmented_bytes(world.device),
        )

    def at_end(self, decision: StepDecision) -> None:  # noqa: ARG002
        """Measure the memory of all ranks, and write it to `plan.json`."""
        world = self.trainer.world
        stages = world.everyone.all_gather_object((self.trainer.stage, self.measure()))
        self.accounts = [
            max((account for stage, account in stages if stage == number), key=_fullness)
            for number in range(len(self.predicted.stages))
        ]
        with world.agreement():
            if world.rank == 0:
                self.write()

    def table(self) -> list[str]:
        """Return a table of predicted and measured memory of the fullest stage.

        The fullest stage is found with the predicted `other`, since its measured value varies more between
        ranks than stages differ.
        """
        stages, accounts = self.predicted.stages, self.accounts
        known = [
            account.total - account.other + stage.memory.other
            for stage, account in zip(stages, accounts, strict=True)
        ]
        number = known.index(max(known))
        return comparison_table(self.predicted, number, accounts[number])

    def write(self) -> None:
        """Write `plan.json`: the predicted memory, and the measured memory once it is known."""
        measured = {"measured": [account.row() for account in self.accounts]} if self.accounts else {}
        time = {} if self.seconds is None else {"time": self.seconds.row()}
        text = json.dumps({"predicted": self.predicted.row(), **measured, **time}, indent=1)
        path = self.folder / PLAN_FILE
        with failing_as(f"{path}: cannot be written"):
            write_text(path, text + "\n")
