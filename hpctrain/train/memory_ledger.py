"""The memory of a run: what was predicted, what is held, and both side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from hpctrain.comm.world import World
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
from hpctrain.train.seconds import StepSeconds

PLAN_FILE = "plan.json"


class ActivationPeak(Hook):
    """The most bytes that an engine keeps for backward in its first step; counting takes time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.bytes: int | None = None

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:  # noqa: ARG002
        """Count within, unless something has been counted."""
        if self.bytes is not None:
            yield
            return
        engines = trained_engines(self.engine)
        others = [each for engine in engines for each in _keeping(engine)]
        modules = (model for each in engines for model in each.stage.models if isinstance(model, nn.Module))
        buffers = [buffer for module in modules for buffer in module.buffers()]

        def parameters() -> list[Tensor]:
            buckets = (bucket for engine in engines for bucket in engine.stage.buckets)
            return [bucket.values for bucket in buckets if bucket.values is not None]

        with LiveActivations(lambda: [*buffers, *parameters()], *others) as live:
            yield
        self.bytes = live.peak


def trained_engines(engine: Engine) -> list[Engine]:
    """An engine with those that are trained beside it."""
    return [engine, *engine.auxiliary_engines.values()]


def _keeping(engine: Engine) -> Iterator[ActivationKeeper | None]:
    """What of an engine keeps tensors for backward in ways of its own."""
    layer_context = engine.stage.layer_context
    yield layer_context.weight_gradients
    if isinstance(layer_context.saved_policy, Recompute):
        yield from (layer_context.saved_policy, layer_context.saved_policy.store)
    if isinstance(engine.stage.residency, Gatherer):
        yield engine.stage.residency


@dataclass
class OtherMemory:
    """What else a run has in memory: `stages` of models that are only looked at, and the most bytes that a
    `cache` of keys and values had.
    """

    stages: Sequence[Stage] = ()
    cache: int = 0


def _fullness(account: MemoryAccount) -> tuple[int, int]:
    """By what the fullest rank is found, as a plan finds it: by parameters and what belongs to them, of which
    ranks may own uneven shares. `other` differs by chance.
    """
    placed = account.parameter + account.gradient + account.optimizer
    return placed, account.total - account.other


class MemoryLedger(Hook):
    """Enters what this rank holds, by kind; `predicted` is what its deck's plan says of all ranks of `world`,
    of which this one is in a `stage`; where these are not given, the engine's. `seconds`, where a step's are
    planned, stand beside it in `plan.json`; `beside` tells at the end what else the run has.
    """

    def __init__(
        self,
        engine: Engine,
        activations: ActivationPeak,
        predicted: MemoryPlan,
        folder: Path,
        world: World | None = None,
        stage: int | None = None,
        seconds: StepSeconds | None = None,
        beside: Callable[[], OtherMemory] = OtherMemory,
    ) -> None:
        self.seconds, self.beside = seconds, beside
        self.world = engine.world if world is None else world
        self.stage = engine.mesh.coordinate("pipeline") if stage is None else stage
        self.engine, self.activations, self.predicted, self.folder = engine, activations, predicted, folder
        self.accounts: list[MemoryAccount] = []
        """What was measured: of each stage of the pipeline, the rank that held most. Empty before the end."""

    def measure(self) -> MemoryAccount:
        """What this rank has held at the most; `other` is what remains of the peak that the system saw."""
        beside, world = self.beside(), self.engine.world
        trained = [engine.stage for engine in trained_engines(self.engine)]
        stages = [*trained, *beside.stages]
        layers = [layer for stage in stages for model in stage.models for layer in model.layers]
        working = sum(update_bytes(stage.optimizer) for stage in trained) if on_host(world.device) else 0
        known = MemoryAccount(
            sum(value_bytes(stage.buckets) for stage in stages) + converted_bytes(layers),
            sum(gradient_bytes(stage.buckets) for stage in trained),
            sum(state_bytes(stage.state(), stage.buckets) for stage in trained),
            self.activations.bytes or 0,
            beside.cache,
            sum(pool_bytes(stage.buckets) for stage in stages) + world.buffer_bytes + working,
        )
        return replace(
            known,
            other=max(0, world.peak_bytes - known.total),
            runtime=runtime_bytes(world.device),
            fragmented=fragmented_bytes(world.device),
        )

    def at_end(self, order: StepDecision) -> None:  # noqa: ARG002
        """Measure, and write it beside what was predicted."""
        world = self.world
        everyone = world.everyone.all_gather_object((self.stage, self.measure()))
        self.accounts = [
            max((account for at, account in everyone if at == number), key=_fullness)
            for number in range(len(self.predicted.stages))
        ]
        with world.agreement():
            if world.rank == 0:
                self.write()

    def table(self) -> list[str]:
        """Predicted beside measured, of the stage whose ranks held most: with the `other` that is predicted,
        since what the interpreters of two ranks hold differs by more than stages do.
        """
        stages, accounts = self.predicted.stages, self.accounts
        known = [
            account.total - account.other + stage.memory.other
            for stage, account in zip(stages, accounts, strict=True)
        ]
        number = known.index(max(known))
        return comparison_table(self.predicted, number, accounts[number])

    def write(self) -> None:
        """Write `plan.json`: what was predicted, and what was measured once it is known."""
        measured = {"measured": [account.row() for account in self.accounts]} if self.accounts else {}
        time = {} if self.seconds is None else {"time": self.seconds.row()}
        text = json.dumps({"predicted": self.predicted.row(), **measured, **time}, indent=1)
        path = self.folder / PLAN_FILE
        with failing_as(f"{path}: cannot be written"):
            write_text(path, text + "\n")
