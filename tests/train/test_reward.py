"""Reward models and critics train alike on every layout: losses, figures and gradients of the run's own step
beside those of plain torch in double precision.

Tests, through the run's own step, of objective/reward.py, post/critic_loss.py, objective/scores.py and
parallel/scalar_head.py; of scores of all sequences in train/token_scores.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from hpctrain.bench.peers.torch_model import TorchModel
from hpctrain.comm.world import World
from hpctrain.data.batches import MASKED, Batches, MicroBatch, MicroBatchRequest
from hpctrain.data.order import Integers, SampleOrder
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import build_engine
from hpctrain.engine.choices.function_choice import choose_functions
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.objective.objective import Objective
from hpctrain.post.critic_loss import ClippedValue
from hpctrain.train.layout_verification import NOISE_STD, _pieces
from hpctrain.train.token_scores import values_of
from hpctrain.train.trainer import Trainer
from tests.engines import LLAMA, by_rank_0, small_deck
from tests.train.test_documents import Gradients

LENGTH, PAIRS = 32, 12
CENTERING, MARGIN, CLIP = 0.05, 0.3, 0.2
KEYS = (
    *("objective.kind=reward", "batch.global_size=8", "data.validation=0", "model.dropout=0"),
    *(f"objective.margin={MARGIN}", f"objective.centering={CENTERING}"),
)
FAMILIES: dict[str, tuple[str, ...]] = {"gpt2": (), "llama": LLAMA}
LAYOUTS: dict[int, list[tuple[str, ...]]] = {
    1: [(), ("batch.micro_size=4",), ("batch.micro_size=8", "memory.recompute=full")],
    2: [
        (),
        ("layout.tensor=2",),
        ("layout.tensor=2", "layout.sequence_parallel=true", "batch.micro_size=4"),
        ("layout.context=2", "layout.context_form=ring"),
        ("layout.context=2", "layout.context_form=all_to_all", "memory.recompute=selective"),
        ("layout.pipeline=2",),
        ("layout.pipeline=2", "layout.schedule=zb-h1"),
        ("layout.zero=1",),
        ("layout.zero=3", "memory.recompute=full"),
    ],
    4: [
        ("layout.tensor=2", "layout.sequence_parallel=true", "layout.context=2", "layout.context_form=ring"),
        ("layout.pipeline=2", "layout.zero=2"),
    ],
}


@dataclass
class Answers(SyntheticSource):
    """Pairs of answers of other lengths, one behind the other of which is preferred; those of some rows end
    where the row is cut. With what a reward model may be told of pairs, and a critic of tokens.
    """

    fields: tuple[str, ...] = ("margin",)

    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        """See Sequences."""
        tokens, targets = super().sequence(index)
        targets = targets.clone()
        begin, end = 3 + index // 2 % 5, LENGTH if index % 5 == 0 else 12 + index % 7
        targets[:begin] = targets[end:] = MASKED
        return tokens, targets

    def micro_batches(
        self, requests: Iterable[MicroBatchRequest], upcoming: Iterable[MicroBatchRequest]
    ) -> Iterator[MicroBatch]:
        batch_requests = list(requests)
        micro_batches = super().micro_batches(batch_requests, upcoming)
        for each, micro in zip(batch_requests, micro_batches, strict=True):
            found = {name: torch.zeros(micro.targets.shape) for name in self.fields}
            for row, index in enumerate(each.indices.tolist()):
                for name, field in found.items():
                    field[row] = 0.25 * (index // 2 % 4) if name == "margin" else told(name, index)
                    if name != "margin":
                        field[row][micro.targets[row] < 0] = torch.nan
            yield replace(micro, fields={**micro.fields, **found})


def told(name: str, index: int) -> Tensor:
    """Random, and returns such that half of the values move away from them."""
    random = torch.Generator().manual_seed(2 * index + (name == "values"))
    return 0.5 * torch.randn(LENGTH, generator=random)


class PairOrder(SampleOrder):
    """Pairs in an order, each with its rows in theirs."""

    def at(self, indices: Integers) -> Integers:
        """See SampleOrder."""
        return 2 * super().at(indices // 2) + indices % 2


def make_trainer(world: World, deck: Deck, objective: Objective | None = None) -> Trainer:
    """That of a run, on these answers, for an objective of its own if any."""
    deck = choose_functions(deck, world)
    engine = build_engine(deck, world, make_mesh(deck, world), noise_std=NOISE_STD)
    engine.objective = engine.objective if objective is None else objective
    fields = ("margin",) if objective is None else ("returns", "values")
    source = Answers(LENGTH, deck.model.vocabulary or 0, 2 * PAIRS, fields=fields)
    return Trainer(deck, engine, Batches(source, 1, PairOrder(PAIRS, 1)))


def plain_model(trainer: Trainer) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """In plain torch, of the weights of a run on one rank; its parameters by our names."""
    shape = trainer.engine.shape
    weights = {shard.name: piece for shard, piece in _pieces(trainer.engine, gradients=False)}
    model = TorchModel(shape)
    model.head = nn.Linear(shape.hidden, 1, bias=False)
    model.double()
    names = {"embedding.weight": "embedding.tokens.weight", "positions.weight": "embedding.positions.weight"}
    names |= {"head.weight": "score.weight"}
    parameters = {names.get(name, name): each for name, each in model.named_parameters()}
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name].view(parameter.shape))
    return model, parameters


@dataclass
class Expected:
    """Of the first step."""

    figures: dict[str, float]
    count: int
    gradients: dict[str, Tensor]
    scores: Tensor


def batch_of(trainer: Trainer, deck: Deck) -> MicroBatch:
    (whole,) = trainer.step.batches.step(0, deck.batch.global_size, 0, 1, deck.batch.global_size)
    return whole


def expected_reward(world: World, deck: Deck) -> Expected:
    """Pair by pair, by the papers."""
    trainer = make_trainer(world.single_rank_world(), on_one_rank(deck).with_keys(machine={"compile": False}))
    model, parameters = plain_model(trainer)
    batch = batch_of(trainer, deck)
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    for pair in range(len(batch.tokens) // 2):
        rewards = []
        for row in (2 * pair, 2 * pair + 1):
            # The last token of an answer is behind the place that predicts it, where the row has that.
            (places,) = torch.nonzero(batch.targets[row] >= 0, as_tuple=True)
            end = min(int(places[-1]) + 1, LENGTH - 1)
            rewards.append(model(batch.tokens[row : row + 1, : end + 1])[0, -1, 0])
        chosen, rejected = rewards
        least = MARGIN + float(batch.fields["margin"][2 * pair, 0])
        loss = -torch.log(torch.sigmoid(chosen - rejected - least)) + CENTERING * (chosen + rejected) ** 2
        pairs.append((loss, chosen, rejected))
    losses, chosen, rejected = (torch.stack(each) for each in zip(*pairs, strict=True))
    losses.mean().backward()
    figures = {
        "loss": losses.mean(),
        "accuracy": (chosen > rejected).double().mean(),
        "margin": (chosen - rejected).mean(),
        "chosen": chosen.mean(),
        "rejected": rejected.mean(),
    }
    return _expected(trainer, model, parameters, batch, figures)


def expected_value(world: World, deck: Deck) -> Expected:
    """Token by token."""
    alone = on_one_rank(deck).with_keys(machine={"compile": False})
    trainer = make_trainer(world.single_rank_world(), alone, ClippedValue(CLIP))
    model, parameters = plain_model(trainer)
    batch = batch_of(trainer, deck)
    values = model(batch.tokens)[..., 0]
    losses, clipped, seen = [], 0, []
    for row, place in torch.nonzero(batch.targets >= 0).tolist():
        value, old = values[row, place], float(batch.fields["values"][row, place])
        back = float(batch.fields["returns"][row, place])
        held = value.clamp(old - CLIP, old + CLIP)
        free, limited = (value - back) ** 2, (held - back) ** 2
        losses.append(0.5 * (limited if limited > free else free))
        clipped += bool(limited > free)
        seen.append(value)
    mean = torch.stack(losses).mean()
    mean.backward()
    share = torch.tensor(clipped / len(losses))
    assert 0.1 < share < 0.9
    figures = {"loss": mean, "value": torch.stack(seen).mean(), "clip_share": share}
    return _expected(trainer, model, parameters, batch, figures)


def _expected(
    trainer: Trainer,
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    batch: MicroBatch,
    figures: dict[str, Tensor],
) -> Expected:
    gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
    assert gradients.keys() == parameters.keys()
    source = trainer.step.batches.source
    assert isinstance(source, Answers)
    with torch.no_grad():
        every = torch.stack([source.sequence(index)[0] for index in range(source.count)])
        scores = model(every)[..., 0]
    told = {name: float(value.detach()) for name, value in figures.items()}
    return Expected(told, int((batch.targets >= 0).sum()), gradients, scores)


def assert_alike(trainer: Trainer, right: Expected, pairs: int | None, layout: Sequence[str]) -> None:
    """One step has these figures, and gradients which are those of a mean over so many pairs, or tokens."""
    found = Gradients(trainer)
    trainer.hooks.append(found)
    result = trainer.train_step()
    assert result.tokens == right.count, layout
    figures = {name: value for name, value in result.metrics.items() if name in right.figures}
    assert figures == pytest.approx(right.figures, rel=1e-5, abs=1e-6), layout
    larger = 1.0 if pairs is None else right.count / pairs
    assert found.pieces
    squares = 0.0
    for shard, piece in found.pieces:
        gradient = right.gradients[shard.name]
        squares += float(gradient.square().sum())
        own = larger * piece.double().view(-1)
        difference = own - shard.take(gradient.view(shard.shape)).reshape(-1)
        largest = float(gradient.abs().max())
        assert largest > 1e-4 or shard.name.endswith("key.bias")  # which softmax does not see
        assert float(difference.abs().max()) <= 1e-5 * max(largest, 0.01), (layout, shard.name)
    norm = sum(float(each.square().sum()) for each in right.gradients.values()) ** 0.5
    assert result.grad_norm == pytest.approx(norm, rel=1e-5), layout


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_are_learned_alike(world: World, family: str) -> None:
    keys = (*FAMILIES[family], *KEYS)
    right = by_rank_0(world, lambda: expected_reward(world, small_deck(*keys)))
    for layout in LAYOUTS.get(world.size, []):
        trainer = make_trainer(world, small_deck(*keys, *layout))
        assert_alike(trainer, right, 4, layout)
        trainer.engine.close()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_learned_alike(world: World, family: str) -> None:
    keys = (*FAMILIES[family], *KEYS)
    right = by_rank_0(world, lambda: expected_value(world, small_deck(*keys)))
    for layout in LAYOUTS.get(world.size, []):
        trainer = make_trainer(world, small_deck(*keys, *layout), ClippedValue(CLIP))
        assert_alike(trainer, right, None, layout)
        trainer.engine.close()


@pytest.mark.mpi(min_size=1)
def test_scores_of_all_sequences(world: World) -> None:
    keys = (*LLAMA, *KEYS)
    right = by_rank_0(world, lambda: expected_reward(world, small_deck(*keys)))
    for layout in LAYOUTS.get(world.size, []):
        trainer = make_trainer(world, small_deck(*keys, *layout))
        found = torch.cat(list(values_of(trainer.step, trainer.step.batches)))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), right.scores, rtol=1e-5, atol=1e-5)
        trainer.engine.close()
