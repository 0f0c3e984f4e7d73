"""Runs on datasets that users bring take the steps of a plain torch loop over the same samples.

Of engine/corpus.py, objective/choose.py and model/foreign/arguments.py, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.data.order import SampleOrder
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import build_engine, make_mesh
from hpctrain.engine.corpus import open_corpus, settle_vocabulary
from hpctrain.train.verify import ROUGHNESS
from tests.engines import Trainer
from tests.train import sets

STEPS = 10
SETS = Path(__file__).with_name("sets.py")
DECK = """
[run]
steps = 20
seed = 7
[model]
module = "{file}:{module}"
{model}
[data]
dataset = "{file}:{dataset}"
{data}
[batch]
global_size = 8
micro_size = 2
[optimizer]
clip = 0.7
weight_decay = 0.1
epsilon = 3e-5
[learning_rate]
peak = 3e-3
warmup = 2
[communication]
bucket_bytes = 2000
"""


class Kind(NamedTuple):
    """A module, a dataset, how one is called with what the other gives, and the loss of it."""

    module: Callable[[], nn.Module]
    dataset: Callable[[], Any]
    model: str
    data: str
    batch: Callable[[list[Any]], dict[str, Tensor]]
    call: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    loss: Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, float]]


def stacked(items: list[Any]) -> dict[str, Tensor]:
    batch = torch.utils.data.default_collate(items)
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def classes(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    labels = batch["labels"]
    total = functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, float((labels >= 0).sum())


def weighted(made: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    total, count = sets.weighted({"made": made.double()}, batch)
    return total, float(count)


KINDS = {
    "ResNet": Kind(
        sets.ResNet, sets.Images, 'blocks = "blocks.*"\nbuffers = "first"', "", stacked,
        lambda module, batch: module(batch["pixel_values"]), classes,
    ),
    "Regression": Kind(
        sets.Regression, sets.Points, f'blocks = "layers.*"\nloss = "{SETS}:weighted"',
        'inputs = ["x", "weight", "scale"]', stacked,
        lambda module, batch: module(batch["x"], batch["weight"], scale=batch["scale"])["made"],
        weighted,
    ),
    "vit": Kind(
        sets.vit, sets.Images, 'blocks = "vit.layers.*"', "", stacked,
        lambda module, batch: module(pixel_values=batch["pixel_values"]).logits, classes,
    ),
    "bert": Kind(
        sets.bert, sets.Sentences, 'blocks = "bert.encoder.layer.*"', f'collate = "{SETS}:padded"',
        sets.padded,
        lambda module, batch: module(batch["input_ids"], attention_mask=batch["attention_mask"]).logits,
        classes,
    ),
}  # fmt: skip


def deck_of(kind: str, *overrides: str) -> Deck:
    own = KINDS[kind]
    names = {"module": own.module.__name__, "dataset": own.dataset.__name__}
    return parse_deck(DECK.format(file=SETS, model=own.model, data=own.data, **names), overrides)


def trainer(world: World, deck: Deck) -> Trainer:
    corpus = open_corpus(deck, world)
    deck = settle_vocabulary(deck, corpus)
    engine = build_engine(deck, world, make_mesh(deck, world), roughness=ROUGHNESS)
    return Trainer(deck, engine, corpus.train)


def plain_loop(
    training: Trainer, kind: str, steps: int = STEPS
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses and norms of torch's AdamW in double precision, and the state at the end, from a trainer's
    weights, over micro-batches of the order of samples.
    """
    own, deck = KINDS[kind], training.deck
    module, dataset = own.module().double().train(), own.dataset()
    named = dict(module.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in training.parameters().items():
            named[name].copy_(value)
    trained = list(module.parameters())
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": deck.optimizer.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    keys, size, micro = deck.optimizer, deck.batch.global_size, deck.batch.micro_size
    optimizer = torch.optim.AdamW(groups, betas=(keys.beta1, keys.beta2), eps=keys.epsilon)
    held_out = max(1, int(deck.data.validation * len(dataset)))
    order = SampleOrder(len(dataset) - held_out, deck.run.seed)
    figures = []
    for step in range(steps):
        samples = order.at(np.arange(step * size, (step + 1) * size)).tolist()
        batches = [
            own.batch([dataset[index] for index in samples[k : k + micro]]) for k in range(0, size, micro)
        ]
        sums, counts = zip(*(own.loss(own.call(module, batch), batch) for batch in batches), strict=True)
        loss = torch.stack(sums).sum() / sum(counts)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, keys.clip)
        for group in optimizer.param_groups:
            group["lr"] = training.engine.learning_rate.at(step, size)
        optimizer.step()
        figures.append([loss.item(), norm.item()])
    return figures, module.state_dict()


def assert_equal_steps(world: World, kind: str, *overrides: str) -> None:
    training = trainer(world, deck_of(kind, *overrides))
    figures, expected = plain_loop(training, kind)
    found = [[result.loss, result.grad_norm] for result in training.train(STEPS)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(figures), rtol=1e-5, atol=0.0)
    here = {name: value.detach().clone() for name, value in training.parameters().items()}
    here |= {shard.name: value.view(shard.shape) for _, shard, value in kept(training)}
    for name, value in here.items():
        theirs = expected[name]
        assert (value - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name
    assert training.state.samples == STEPS * 8


def kept(training: Trainer) -> list[Any]:
    part: Any = training.engine.models[0]
    return list(part.kept.state())


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_takes_the_steps_of_a_plain_loop(world: World, kind: str) -> None:
    assert_equal_steps(world, kind)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "layout", [(), ("layout.zero=3", "memory.recompute=full"), ("layout.zero=1", "batch.micro_size=4")]
)
@pytest.mark.parametrize("kind", ["Regression", "vit", "bert"])
def test_data_ranks_take_the_steps_of_a_plain_loop(world: World, kind: str, layout: tuple[str, ...]) -> None:
    assert_equal_steps(world, kind, *layout)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("kind", ["Regression", "vit"])
def test_evaluation_counts_every_sample_once(world: World, kind: str) -> None:
    """Of seven held out in micro-batches of two or three, where one rank has a row that does not count."""
    training = trainer(world, deck_of(kind, "batch.global_size=6", "batch.micro_size=3"))
    corpus = open_corpus(training.deck.with_keys(data={"validation": 0.1}), world)
    assert corpus.validation is not None
    count = corpus.validation.source.count
    assert count in {7, 9}
    own = KINDS[kind]
    module, dataset = own.module().double().eval(), own.dataset()
    module.load_state_dict(training.parameters(), strict=False)
    batch = own.batch([dataset[len(dataset) - count + number] for number in range(7)])
    total, weight = own.loss(own.call(module, batch), batch)
    found = training.evaluate(corpus.validation, 7)["loss"]
    assert found == pytest.approx(total.item() / weight, rel=1e-6)


@pytest.mark.mpi(min_size=1, max_size=1)
def test_parts_know_an_example_without_values(world: World) -> None:
    part: Any = trainer(world, deck_of("Regression")).engine.models[0]
    shapes = {
        name: (list(field.shape), field.dtype, field.device.type) for name, field in part.example(4).items()
    }
    assert shapes == {
        "answer": ([4, 2], torch.float32, "meta"),
        "weight": ([4], torch.float32, "meta"),
        "scale": ([4], torch.float32, "meta"),
        "x": ([4, 6], torch.float32, "meta"),
    }
