"""Runs in which some samples are poisoned: random tokens, or a rate far too high, or both."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.optim.schedule import LearningRate
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.run import run_deck
from hpctrain.train.step import ReadBatches, Step, StepResult, TrainState
from hpctrain.train.trainer import Trainer
from tests.data.preparing import prepare

BATCH = 16
SKIP = ("stability.spike=skip", "stability.spike_window=16", "stability.spike_factor=8.0")
BACK = ("stability.spike=rollback", *SKIP[1:], "stability.spike_back=4")
DECK = """
[run]
title = "poisoned"
steps = 120
evaluate_sequences = 64
seed = 3
[model]
family = "llama"
layers = 2
hidden = 32
heads = 4
[data]
tokens = "{folder}/tokens.h5"
validation = 0.1
[batch]
global_size = 16
micro_size = 4
sequence = 32
[learning_rate]
peak = 1e-2
warmup = 10
[communication]
bucket_bytes = "20 kB"
[machine]
peak_flops = 1e10
"""


def make_deck(world: World, folder: Path) -> Path:
    """A deck in `folder` whose tokens are a random chain's, which a small model soon knows; collective."""
    if world.rank == 0:
        generator = np.random.default_rng(5)
        chain = generator.dirichlet(np.full(24, 0.25), size=24).cumsum(1).tolist()
        letters, at = [], 0
        for draw in generator.random(100_000).tolist():
            at = min(bisect_left(chain[at], draw), 23)
            letters.append(97 + at)
        (folder / "text.txt").write_bytes(bytes(letters))
        (folder / "deck.toml").write_text(DECK.format(folder=folder))
    world.everyone.barrier()
    prepare(world, folder / "tokens.h5", [str(folder / "text.txt")])
    return folder / "deck.toml"


class Poison:
    """Poisons the steps that begin with the samples numbered `at`, whichever step reads them."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        at: Sequence[int],
        rank: int | None = None,
        tokens: bool = True,
        loud: bool = False,
    ) -> None:
        """Random `tokens`, which are in no text, on all ranks of the data axis or on one, and 50 times the
        rate on all of them.

        Where it is `loud`, losses there are so large that they are spikes early in a run.
        """
        self.at, self.rank, self.tokens = set(at), rank, tokens
        self.met: list[int] = []
        self.now = False
        read, rate, accumulate = Step.read_share, LearningRate.at, Step.accumulate

        def read_poisoned(step: Step, state: TrainState, batch: int) -> ReadBatches:
            share = read(step, state, batch)
            self.now = state.samples in self.at
            if self.now:
                self.met.append(state.step)
            if self.now and self.tokens and self.rank in {None, step.engine.mesh.coordinate("data")}:
                generator = torch.Generator().manual_seed(state.samples)
                for micro in share.micro_batches:
                    for field in micro.fields.values():
                        field.copy_(torch.randint(0, 97, field.shape, generator=generator))
            return share

        def poisoned_rate(schedule: LearningRate, step: int, batch: int) -> float:
            return rate(schedule, step, batch) * (50 if self.now else 1)

        def accumulate_poisoned(
            step: Step, state: TrainState, batch: int
        ) -> tuple[torch.Tensor, ReadBatches]:
            sums, count = accumulate(step, state, batch)
            if loud and self.now and self.rank in {None, step.engine.mesh.coordinate("data")}:
                sums[0] += 1e6
            return sums, count

        patch.setattr(Step, "accumulate", accumulate_poisoned)
        patch.setattr(Step, "read_share", read_poisoned)
        patch.setattr(LearningRate, "at", poisoned_rate)


class Jump:
    """Has the next step after so many steps begin with the sample of such a number, one after another."""

    def __init__(self, patch: pytest.MonkeyPatch, jumps: Sequence[tuple[int, int]]) -> None:
        self.left = list(jumps)
        make = Trainer.train_step

        def step(trainer: Trainer, batch: int | None = None) -> StepResult:
            if self.left and trainer.state.step == self.left[0][0]:
                trainer.state.samples = self.left.pop(0)[1]
            return make(trainer, batch)

        patch.setattr(Trainer, "train_step", step)


def train(world: World, deck: Path, name: str, *keys: str) -> tuple[int, list[dict[str, Any]]]:
    """Run it in the folder `name` beside it; exit code and rows of metrics."""
    folder = deck.parent / name
    code = run_deck(world, deck, [f"run.dir={folder}", *keys])
    return code, list(read_metrics(folder / "metrics.jsonl"))
