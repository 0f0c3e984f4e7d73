"""Engines for tests: decks of small models on any layout, on random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.engine.registry import RecordedStatistics
from hpctrain.engine.stages.stage import Stage
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import bucket_layouts
from hpctrain.sharding.replication import Replications
from hpctrain.train import trainer as trainer_module
from hpctrain.train.layout_verification import NOISE_STD
from hpctrain.train.step import StepResult

DECK = """
[run]
steps = 20
[model]
family = "gpt2"
layers = 2
hidden = 32
heads = 8
vocabulary = 61
initial_std = 0.1
[data]
tokens = "none"
[batch]
global_size = 8
micro_size = 2
sequence = 32
[learning_rate]
peak = 1e-2
warmup = 2
[communication]
bucket_bytes = 20000
[machine]
compile = false
"""

Result = TypeVar("Result")

LLAMA = ("model.family=llama", "model.key_value_heads=2", "model.mlp=48")


def small_deck(*overrides: str) -> Deck:
    """The deck above with changes."""
    return parse_deck(DECK, overrides)


def alone(world: World) -> LayerContext:
    """The groups of a layout of one rank."""
    mesh = Mesh(world.single_rank_world(), {})
    return LayerContext(tensor=mesh.group("tensor"), context=mesh.group("context"))


class Trainer(trainer_module.Trainer):
    """The run's own trainer on random tokens, of which a share that varies by sequence is masked.

    Its first step is watched as a run's is, and no two of its tensors are alike at the start.
    """

    def train(self, steps: int) -> list[StepResult]:
        """Further steps at the deck's batch."""
        return [self.train_step() for _ in range(steps)]

    def gradients(self) -> dict[str, Tensor]:
        """This rank's piece of every gradient, by name."""
        return {
            segment.parameter.shard.name: segment.view(flat)
            for bucket in self.engine.stage.synchronizer.buckets
            for flat in [bucket.gather_owned(bucket.owned_gradients)]
            for segment in bucket.segments
        }

    def parameters(self) -> dict[str, Tensor]:
        """This rank's piece of every parameter, by name."""
        return {
            segment.parameter.shard.name: segment.view(flat)
            for bucket in self.engine.stage.buckets
            for flat in [bucket.gather_owned(bucket.owned_values)]
            for segment in bucket.segments
        }


def trainer(world: World, deck: Deck, masked: float = 0.2) -> Trainer:
    """A trainer of the deck on all ranks of the world, with padded rows if conversations are not packed."""
    engine = build_engine(deck, world, make_mesh(deck, world), noise_std=NOISE_STD)
    documents = 0.15 if deck.data.document_mask else 0.0
    padding = 0.0 if deck.data.pack else 0.25
    source = SyntheticSource(
        deck.batch.sequence, deck.model.vocabulary or 0, masked=masked, documents=documents, padding=padding
    )
    return Trainer(deck, engine, Batches(source, 1))


def reference(world: World, deck: Deck, masked: float = 0.2) -> Trainer:
    """The same deck on one rank; every rank that calls this computes it by itself."""
    return trainer(world.single_rank_world(), on_one_rank(deck), masked)


def by_rank_0(world: World, compute: Callable[[], Result]) -> Result:
    """What rank 0 computes by itself, on all ranks: they share few cores. Collective."""
    shared: Result = world.everyone.broadcast_object(compute() if world.rank == 0 else None)
    return shared


def one_thread() -> None:
    """Sums must not depend on the machine's cores."""
    torch.set_num_threads(1)


def make_buckets(
    units: Iterable[Sequence[Sequence[Parameter]]],
    replications: Replications,
    dtype: torch.dtype,
    bucket_bytes: int,
    trained: bool = True,
) -> list[Bucket]:
    """Buckets without a deck, with gradients in fp32. Arguments as in `bucket_layouts` and Bucket."""
    layouts = bucket_layouts(units, replications, bucket_bytes)
    return [Bucket(layout, dtype, torch.float32, trained) for layout in layouts]


def record_statistics(_: RecordedStatistics, stage: Stage, __: Deck) -> None:
    """Let all layers record statistics, in place of `RecordedStatistics.attach`."""
    stage.statistics = stage.layer_context.statistics
