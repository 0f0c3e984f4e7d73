"""Decks of small models on layouts drawn at random: whatever a run could have, many kinds of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random

from hpctrain.deck.check import check_deck, world_problems
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.plan.memory_budget import MemoryBudget
from hpctrain.plan.search.layout_tree import LayoutTree
from hpctrain.plan.search.search_space import SearchSpace
from hpctrain.plan.search.tree_nodes import LayoutNode
from hpctrain.plan.time.machine_rates import MachineRates

DECK = """
[run]
steps = 20
[model]
family = "gpt2"
layers = 6
hidden = 512
heads = 8
vocabulary = 4096
[data]
tokens = "none"
[batch]
global_size = 32
sequence = 512
"""

DENSE = ("model.family=gpt2",)
LLAMA = ("model.family=llama", "model.key_value_heads=2", "model.mlp=1536")
MIXTURE = (
    *LLAMA,
    "model.experts.count=8",
    "model.experts.per_token=2",
    "model.experts.shared=1",
    "model.experts.mlp=512",
)
MODELS: Mapping[str, Sequence[str]] = {"dense": DENSE, "llama": LLAMA, "mixture": MIXTURE}

AXES: Mapping[str, Sequence[object]] = {
    "layout.tensor": (1, 1, 2, 4),
    "layout.context": (1, 1, 2),
    "layout.pipeline": (1, 2, 2, 4, 8),
}
KEYS: Mapping[str, Sequence[object]] = {
    "layout.sequence_parallel": ("false", "true"),
    "layout.context_form": ("ring", "all_to_all"),
    "layout.zero": (0, 1, 2, 3),
    "batch.micro_size": (1, 2),
    "memory.recompute": ("none", "selective", "full", "sqrt"),
    "memory.activations": ("keep", "keep", "disk"),
    "memory.optimizer": ("device", "device", "disk"),
    "optimizer.name": ("adamw", "adamw", "sgd", "lion", "muon"),
    "precision.compute": ("fp32", "bf16", "bf16"),
    "model.tied": ("false", "true"),
    "model.vocabulary": (512, 4096, 50_000),
    "batch.sequence": (256, 1024),
}
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("dualpipe-v", 2), ("gpipe", 1))


def draw(random: Random, machine: MachineRates, ranks: int, model: str, *keys: str) -> Deck:
    """A deck that gives all keys of its layout, of some model on so many ranks of a machine."""
    while True:
        values = {key: random.choice(some) for key, some in {**AXES, **KEYS}.items()}
        if values["layout.tensor"] == 1:
            values["layout.sequence_parallel"] = "false"
        schedule, chunks = random.choice(SCHEDULES) if values["layout.pipeline"] != 1 else ("1f1b", 1)
        values |= {"layout.schedule": schedule, "layout.chunks": chunks}
        of_model = int(str(values["layout.tensor"])) * int(str(values["layout.context"]))
        sums = ranks // of_model // int(str(values["layout.pipeline"]))
        if values["layout.zero"] and sums % 2 == 0 and random.random() < 0.3:
            values["layout.zero_group"] = 2
        if model == "mixture":
            values["layout.expert"] = random.choice((1, 2, 4))
            values["layout.expert_tensor"] = random.choice((1, 1, 2))
        written = [f"{key}={value}" for key, value in values.items()]
        try:
            deck = machine.fill_deck(parse_deck(DECK, [*MODELS[model], *written, *keys]))
        except HpctrainError:
            continue
        rounds = deck.batch.global_size // (deck.batch.micro_size * max(1, sums))
        if schedule == "interleaved" and rounds % deck.layout.pipeline:
            continue
        if not check_deck(deck, ranks) and not world_problems(deck, ranks):
            return deck


class Bare(MemoryBudget):
    """Budget of processes in which nothing but the model needs memory."""

    def process_bytes(self, deck: Deck) -> int:
        return 0

    def shared_bytes(self, deck: Deck) -> int:
        return 0


def bare(deck: Deck, ranks: int) -> Bare:
    """Return the budget of the ranks of a deck."""
    assert deck.model.vocabulary
    return Bare(ranks, deck.model.vocabulary)


def layouts(tree: LayoutTree) -> Iterator[LayoutNode]:
    """All that a tree has."""
    nodes = list(tree.roots())
    while nodes:
        node = nodes.pop()
        if isinstance(node, LayoutNode):
            yield node
        else:
            nodes.extend(tree.children(node))


def tree_of(deck: Deck, ranks: int, machine: MachineRates, limit: float) -> LayoutTree:
    """That of a deck whose ranks may hold so many bytes."""
    return LayoutTree(SearchSpace(deck, ranks), machine, bare(deck, ranks), limit)
