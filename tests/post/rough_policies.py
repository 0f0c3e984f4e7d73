"""Policies for tests: small models that answer prompts of bytes, with trainers of a run on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.data.corpus import open_corpus, resolve_vocabulary
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.rank_partition import CRITIC
from hpctrain.engine.build import assemble, build_engine
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.choices.function_choice import choose_functions
from hpctrain.engine.choices.kernel_choice import choose_kernels
from hpctrain.engine.layout.engine_spec import make_engine_spec
from hpctrain.engine.layout.model_placement import place_models
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.engine.stage_values import initialize
from hpctrain.parallel.shards import Shard
from hpctrain.post.policy_trainer import PolicyTrainer
from hpctrain.post.rewards.reward_interface import Reward, Sample
from hpctrain.post.rewards.rewards import Rewards
from hpctrain.train.hook import Hook
from hpctrain.train.layout_verification import NOISE_STD, _pieces
from hpctrain.train.trainer import TrainerParts
from tests.data.chats import write_rows
from tests.data.preparing import prepare_rows

DECK = """
[run]
steps = 8
evaluate_every = 0
dir = "{folder}/{name}"
[model]
family = "llama"
layers = 2
hidden = 32
heads = 8
key_value_heads = 2
mlp = 48
initial_std = 0.15
[data]
tokens = "{folder}/prompts.h5"
validation = 0
[objective]
kind = "ppo"
beta = 0.3
[policy]
reward = ["exact-match", "regular-expression:b"]
weights = [0.7, -0.4]
tokens = 10
stops = {stops}
samples = 2
rollout = 12
epochs = 2
clip_low = 0.08
clip_high = 0.1
[batch]
global_size = 6
micro_size = 3
sequence = 24
[learning_rate]
peak = 1e-2
warmup = 0
decay = "constant"
[optimizer]
clip = 0.5
[optimizer.adamw]
epsilon = 1e-3
[communication]
bucket_bytes = 20000
[checkpoint]
every = 0
"""
STOPS = [chr(code) for code in range(ord("A"), ord("Z"))]
"""One in ten bytes: of an answer's ten, about as many end by these as by their length."""


def prompts(world: World, folder: Path) -> Path:
    """A file of prompts of other lengths. Collective."""
    if world.rank == 0:
        rows = [{"prompt": "what comes?"[: 2 + 5 * number % 9], "answer": "b"} for number in range(24)]
        source = write_rows(folder / "prompts.jsonl", rows)
        prepare_rows(
            world.single_rank_world(), folder / "prompts.h5", [source], kind="prompts", template="raw"
        )
    world.everyone.barrier()
    return folder


@pytest.fixture
def folder(world: World, mpi_tmp_path: Path) -> Path:
    """With the prompts, for all ranks."""
    return prompts(world, mpi_tmp_path)


def policy_deck(folder: Path, name: str, *overrides: str) -> Deck:
    """The deck above, whose run is of this name, with changes."""
    return parse_deck(DECK.format(folder=folder, name=name, stops=STOPS), overrides)


class Judge(Reward):
    """Judges by letters and by length, without any process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        return [judged(self.name, each.completion, each.token_count) for each in samples]


def judged(name: str, text: str, tokens: int) -> float:
    """What an answer is worth."""
    return sum(map(ord, text)) % 11 / 5 - 1 if name == "letters" else tokens / 4


SEEDS = {"policy": 1, CRITIC: 2}
REWARDS = {"letters": 0.7, "length": -0.4}


def policy_trainer(world: World, deck: Deck) -> PolicyTrainer:
    """That of a run, in which policy, reference and critic have weights of their own, of which no two tensors
    are alike.
    """
    corpus = open_corpus(deck, world)
    deck = settled(world, deck)
    seat = place_models(deck, world)
    own = choose_kernels(seat.deck, seat.world, seat.mesh)
    spec = make_engine_spec(own, seat.world, seat.mesh)
    engine = assemble(own, seat.world, seat.mesh, spec, NOISE_STD, seat.stage_builder)
    trainer = PolicyTrainer(TrainerParts(deck, engine, corpus, None, lambda: None, seat))
    for name, each in engines(trainer).items():
        initialize(each.world, each.architecture, each.stage, deck.run.seed + SEEDS[name], NOISE_STD)
    assert trainer.rollout_builder is not None
    trainer.rollout_builder.rewards = Rewards([(Judge(name), weight) for name, weight in REWARDS.items()])
    return trainer


def settled(world: World, deck: Deck) -> Deck:
    """With what is known of it once its run begins."""
    return choose_functions(resolve_vocabulary(deck, open_corpus(deck, world)), world)


def first_engine(world: World, deck: Deck) -> Engine:
    """Of a settled deck, with the weights that its run begins with, which are the reference's."""
    return build_engine(deck, world, make_mesh(deck, world), noise_std=NOISE_STD)


def engines(trainer: PolicyTrainer) -> dict[str, Engine]:
    """Those that this rank has of those that are trained, by name."""
    own = {} if trainer.placement.idle else {"policy": trainer.engine}
    return {**own, **trainer.engine.auxiliary_engines}


Pieces = list[tuple[Shard, Tensor]]


def pieces(engine: Engine, gradients: bool = False) -> Pieces:
    """Copies of this rank's pieces of parameters, or of their gradients."""
    return [(shard, piece.clone()) for shard, piece in _pieces(engine, gradients=gradients)]


@dataclass
class EveryGradient(Hook):
    """Of each step, those of the policy, then those of its critic, before they are clipped."""

    trainer: PolicyTrainer

    def __post_init__(self) -> None:
        self.steps: list[dict[str, Pieces]] = []

    def before_update(self) -> None:
        """Copy them: of the engine that is about to be updated."""
        if not self.steps or len(self.steps[-1]) == len(engines(self.trainer)):
            self.steps.append({})
        name = list(engines(self.trainer))[len(self.steps[-1])]
        self.steps[-1][name] = pieces(engines(self.trainer)[name], gradients=True)


def whole(parts: Pieces) -> dict[str, Tensor]:
    """Tensors by name, of all their pieces."""
    return {shard.name: piece.view(shard.shape) for shard, piece in parts}
