"""Packed documents train as separate ones do: losses and gradients of the run's own step on all layouts,
beside those of plain torch in double precision, which computes each document by itself.

Tests of data.document_mask, of documents in model/transformer.py and parallel/attention/ring.py, and of what
train/layout_verification.py makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.bench.peers.torch_model import TorchModel
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches, MicroBatch, SequenceSource
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import build_engine
from hpctrain.engine.choices.function_choice import choose_functions
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.parallel.shards import Shard
from hpctrain.train.hook import Hook
from hpctrain.train.layout_verification import NOISE_STD, _pieces, compare
from hpctrain.train.scaled_down_deck import scale_down_family
from hpctrain.train.trainer import Trainer
from tests.engines import LLAMA, by_rank_0, small_deck, trainer
from tests.memory.test_recompute import predicted, saved_bytes

VOCABULARY, LENGTH = 61, 32
KEYS = ("data.document_mask=true", "batch.global_size=8", "model.dropout=0")
FAMILIES = {"gpt2": (), "llama": LLAMA}
TENSOR = ("layout.tensor=2",)
LAYOUTS = {
    1: [
        (),
        ("memory.recompute=full",),
        ("memory.recompute=selective",),
        ("memory.recompute=2",),
        ("machine.compile=true",),
        ("machine.compile=true", "memory.recompute=selective"),
        ("batch.micro_size=1",),
    ],
    2: [
        TENSOR,
        (*TENSOR, "layout.sequence_parallel=true", "machine.compile=true"),
        ("layout.context=2", "layout.context_form=ring"),
        ("layout.context=2", "layout.context_form=ring", "memory.recompute=full"),
        ("layout.context=2", "layout.context_form=all_to_all"),
        ("layout.context=2", "layout.context_form=all_to_all", "memory.recompute=selective"),
        ("layout.pipeline=2",),
        ("layout.pipeline=2", "layout.schedule=zb-h1", "memory.recompute=selective"),
        ("layout.zero=3",),
        ("layout.zero=3", "memory.recompute=full"),
    ],
    4: [
        (*TENSOR, "layout.context=2", "layout.context_form=ring", "layout.sequence_parallel=true"),
        ("layout.context=4", "layout.context_form=ring"),
        ("layout.context=2", "layout.context_form=all_to_all", "layout.pipeline=2"),
        ("layout.pipeline=2", "layout.zero=1"),
    ],
}


@dataclass
class Packed(SequenceSource):
    """Windows of one stream of random documents: 0 ends each, and windows cut some."""

    end_of_document: int | None = 0
    length: int = LENGTH
    count: int = 64

    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        """See SequenceSource."""
        random = torch.Generator().manual_seed(1)
        stream = torch.randint(1, VOCABULARY, (self.length * self.count + 1,), generator=random)
        share = torch.rand(len(stream), generator=random)
        stream[share < 0.15] = 0
        stream[: 2 * self.length] = stream[: 2 * self.length].clamp(min=1)  # two rows of one document
        window = stream[index * self.length : (index + 1) * self.length + 1]
        return window[:-1], window[1:]


class Gradients(Hook):
    """This rank's pieces before they are clipped."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.pieces = trainer, list[tuple[Shard, Tensor]]()

    def before_update(self) -> None:
        """Copy them."""
        pieces = _pieces(self.trainer.engine, gradients=True)
        self.pieces += [(shard, piece.clone()) for shard, piece in pieces]


def make_trainer(world: World, deck: Deck) -> Trainer:
    deck = choose_functions(deck, world)
    engine = build_engine(deck, world, make_mesh(deck, world), noise_std=NOISE_STD)
    return Trainer(deck, engine, Batches(Packed(), 1))


def separate(micro_batches: list[MicroBatch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of every document by itself, found token by token."""
    for micro in micro_batches:
        for tokens, targets in zip(micro.tokens, micro.targets, strict=True):
            begin = 0
            for place, token in enumerate(tokens.tolist()):
                if token == 0 or place == LENGTH - 1:
                    wanted = targets[begin : place + 1]
                    assert wanted[-1] == -1 or token != 0
                    yield tokens[begin : place + 1], wanted[: len(wanted) - (token == 0)]
                    begin = place + 1


def expected(world: World, deck: Deck) -> tuple[float, int, dict[str, Tensor]]:
    """Loss, predicted tokens and gradients of the first step by plain torch, of the weights of a run."""
    trainer = make_trainer(world.single_rank_world(), on_one_rank(deck).with_keys(machine={"compile": False}))
    weights = {shard.name: piece for shard, piece in _pieces(trainer.engine, gradients=False)}
    model = TorchModel(trainer.engine.shape).double()
    names = {"embedding.weight": "embedding.tokens.weight", "positions.weight": "embedding.positions.weight"}
    names |= {"head.weight": "embedding.tokens.weight"} if trainer.engine.shape.tied else {}
    parameters = {names.get(name, name): each for name, each in model.named_parameters()}
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name].view(parameter.shape))
    batch = deck.batch.global_size
    losses, count = torch.zeros((), dtype=torch.float64), 0
    for inputs, targets in separate(list(trainer.step.batches.step(0, batch, 0, 1, 2))):
        logits = model(inputs.unsqueeze(0))[0, : len(targets)]
        losses = losses + functional.cross_entropy(logits, targets, reduction="sum")
        count += len(targets)
    (losses / count).backward()
    gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
    return float(losses.detach()) / count, count, gradients


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_separate_documents(world: World, family: str) -> None:
    loss, count, gradients = by_rank_0(world, lambda: expected(world, small_deck(*FAMILIES[family], *KEYS)))
    for layout in LAYOUTS.get(world.size, []):
        trainer = make_trainer(world, small_deck(*FAMILIES[family], *KEYS, *layout))
        found = Gradients(trainer)
        trainer.hooks.append(found)
        result = trainer.train_step()
        assert result.tokens == count, layout
        assert abs(result.loss - loss) <= 1e-6 * loss, layout
        assert found.pieces
        for shard, piece in found.pieces:
            right = gradients[shard.name]
            difference = piece.double().view(-1) - shard.take(right.view(shard.shape)).reshape(-1)
            largest = float(right.abs().max())
            assert largest > 1e-3 or shard.name.endswith("key.bias")  # which softmax does not see
            assert float(difference.abs().max()) <= 1e-6 * max(largest, 0.1), (layout, shard.name)
        trainer.engine.close()


EXPERTS = ("model.experts.count=4", "model.experts.per_token=2", "model.experts.balance_over=sequence")


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", [("layout.context=2",), ("layout.expert=2", *EXPERTS)])
def test_the_check_of_a_layout_has_documents(world: World, layout: tuple[str, ...]) -> None:
    deck = scale_down_family(small_deck(*LLAMA, *KEYS, *layout))
    assert deck.data.document_mask
    for difference in compare(deck, world, make_mesh(deck, world)):
        assert difference.error <= 1e-5, difference


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_bytes_are_those_predicted(world: World, family: str) -> None:
    context = f"layout.context={world.size}"
    for more in ((context,), (context, "layout.context_form=all_to_all"), (f"layout.tensor={world.size}",)):
        for recompute in ("none", "full", "selective"):
            keys = ("data.document_mask=true", *more, f"memory.recompute={recompute}")
            training = trainer(world, small_deck(*FAMILIES[family], *keys))
            assert saved_bytes(training) == predicted(training), (more, recompute)
