"""Runs on datasets of users take the steps of a plain torch loop over the same samples.

Also data/corpus.py, objective/factory.py, model/modules/module_call.py, model/modules/module_buffers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.data.corpus import open_corpus, resolve_vocabulary
from hpctrain.data.order import SampleOrder
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.optimizer import AdamWTable
from hpctrain.deck.sources import toml_value
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.train.layout_verification import NOISE_STD
from tests.engines import Trainer, by_rank_0
from tests.model.modules.tensor_parallel.test_apply_plan import whole_parameters
from tests.train import sets

STEPS = 10
SETS = Path(__file__).with_name("sets.py")
DECK = """
[run]
steps = 20
seed = 7
evaluate_sequences = 2
[model]
module = "{file}:{module}"
{model}
[data]
dataset = "{file}:{dataset}"
validation = 0.1
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
    """A module, a dataset, how one is called with what the other gives, and the loss of it; and a plan."""

    module: Callable[[], nn.Module]
    dataset: Callable[[], Any]
    model: str
    data: str
    batch: Callable[[list[Any]], dict[str, Tensor]]
    call: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    loss: Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, float]]
    plan: Mapping[str, Any] = MappingProxyType({})


VIT_PLAN = {
    "vit.layers.*.attention": "gather",
    "vit.layers.*.attention.[qkv]_proj": {"split": "column", "unit": 8},
    "vit.layers.*.attention.o_proj": "row",
    "vit.layers.*.mlp.fc1": "column",
    "vit.layers.*.mlp.fc2": "row",
}
BERT_PLAN = {
    "bert.embeddings.word_embeddings": "vocabulary",
    "cls.predictions.decoder": "vocabulary",
    "bert.encoder.layer.*.attention.self": "gather",
    "bert.encoder.layer.*.attention.self.query": {"split": "column", "unit": 8},
    "bert.encoder.layer.*.attention.self.key": {"split": "column", "unit": 8},
    "bert.encoder.layer.*.attention.self.value": {"split": "column", "unit": 8},
    "bert.encoder.layer.*.attention.output.dense": "row",
    "bert.encoder.layer.*.intermediate.dense": "column",
    "bert.encoder.layer.*.output.dense": "row",
}
MLP_PLAN = {"layers.0": "column", "layers.1": "row", "last": "gathered column"}


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
        weighted, MLP_PLAN,
    ),
    "vit": Kind(
        sets.vit, sets.Images, 'blocks = "vit.layers.*"', "", stacked,
        lambda module, batch: module(pixel_values=batch["pixel_values"]).logits, classes, VIT_PLAN,
    ),
    "bert": Kind(
        sets.bert, sets.Sentences, 'blocks = "bert.encoder.layer.*"', f'collate = "{SETS}:padded"',
        sets.padded,
        lambda module, batch: module(batch["input_ids"], attention_mask=batch["attention_mask"]).logits,
        classes, BERT_PLAN,
    ),
}  # fmt: skip


def deck_of(kind: str, *overrides: str) -> Deck:
    own = KINDS[kind]
    names = {"module": own.module.__name__, "dataset": own.dataset.__name__}
    model = f"{own.model}\nplan = {toml_value(dict(own.plan))}" if own.plan else own.model
    return parse_deck(DECK.format(file=SETS, model=model, data=own.data, **names), overrides)


def trainer(world: World, deck: Deck) -> Trainer:
    corpus = open_corpus(deck, world)
    deck = resolve_vocabulary(deck, corpus)
    engine = build_engine(deck, world, make_mesh(deck, world), noise_std=NOISE_STD)
    return Trainer(deck, engine, corpus.train)


def plain_loop(
    training: Trainer, kind: str, weights: Mapping[str, Tensor], data_ranks: int
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses and norms of torch's AdamW in double precision, and the state at the end, from these weights,
    over micro-batches of the order of samples. Statistics are those of data ranks' own micro-batches.
    """
    own, deck = KINDS[kind], training.deck
    module, dataset = own.module().double().train(), own.dataset()
    named = dict(module.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in weights.items():
            named[name].copy_(value)
    trained = list(module.parameters())
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": deck.optimizer.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    rule, size, micro = deck.optimizer.rule, deck.batch.global_size, deck.batch.micro_size
    assert isinstance(rule, AdamWTable)
    optimizer = torch.optim.AdamW(groups, betas=(rule.beta1, rule.beta2), eps=rule.epsilon)
    held_out = int(deck.data.validation * len(dataset))
    order = SampleOrder(len(dataset) - held_out, deck.run.seed)
    figures = []
    for step in range(STEPS):
        samples = order.at(np.arange(step * size, (step + 1) * size)).tolist()
        batches = [
            own.batch([dataset[index] for index in samples[k : k + micro]]) for k in range(0, size, micro)
        ]
        sums, counts, of_ranks = [], [], []
        before = {name: value.clone() for name, value in module.named_buffers()}
        for rank in range(data_ranks):
            for name, value in module.named_buffers():
                value.data.copy_(before[name])  # of which autograd is not to know
            for batch in batches[rank::data_ranks]:
                total, count = own.loss(own.call(module, batch), batch)
                sums.append(total)
                counts.append(count)
            of_ranks.append({name: value.clone().double() for name, value in module.named_buffers()})
        for name, value in module.named_buffers():
            each = torch.stack([buffers[name] for buffers in of_ranks])
            value.data.copy_(each.mean(0) if deck.model.buffers == "average" else each[0])
        loss = torch.stack(sums).sum() / sum(counts)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, deck.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = training.engine.control.learning_rate.at(step, size)
        optimizer.step()
        figures.append([loss.item(), norm.item()])
    state = {name: value for name, value in module.named_buffers() if name in module.state_dict()}
    return figures, {name: value.detach() for name, value in (*module.named_parameters(), *state.items())}


def assert_equal_steps(world: World, kind: str, *overrides: str) -> None:
    deck = deck_of(kind, *overrides)
    training = trainer(world, deck)
    weights = whole_parameters(training, world)
    data_ranks = world.size // (deck.layout.pipeline * deck.layout.tensor)
    figures, expected = by_rank_0(world, lambda: plain_loop(training, kind, weights, data_ranks))
    found = [[result.loss, result.grad_norm] for result in training.train(STEPS)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(figures), rtol=1e-5, atol=0.0)
    every = whole_parameters(training, world)
    for name, value in (*every.items(), *kept(training).items()):
        theirs = expected[name]
        assert (value - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name
    names = {name for of_rank in world.everyone.all_gather_object([*kept(training)]) for name in of_rank}
    assert names | every.keys() == expected.keys()
    assert training.state.samples == STEPS * 8


def kept(training: Trainer) -> dict[str, Tensor]:
    """The buffers that this rank keeps."""
    parts: Any = training.engine.stage.models
    return {
        shard.name: value.view(shard.shape)
        for part in parts
        for _, shard, value in part.module_buffers.state()
    }


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_takes_the_steps_of_a_plain_loop(world: World, kind: str) -> None:
    assert_equal_steps(world, kind)


ON_TWO = {
    "data": (),
    "ZeRO-3": ("layout.zero=3", "memory.recompute=full"),
    "ZeRO-1": ("layout.zero=1", "batch.micro_size=4"),
    "1F1B": ("layout.pipeline=2",),
    "ZB-H1": ("layout.pipeline=2", "layout.schedule=zb-h1"),
    "tensor": ("layout.tensor=2",),
}
FIXED = f"data.collate={SETS}:padded_to_twelve"


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", ON_TWO)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_take_the_steps_of_a_plain_loop(world: World, kind: str, layout: str) -> None:
    changes = ON_TWO[layout]
    if layout == "tensor" and not KINDS[kind].plan:
        pytest.skip("it has no layers that a plan splits")
    if kind == "bert" and "layout.pipeline=2" in changes:
        changes = *changes, FIXED
    assert_equal_steps(world, kind, *changes)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_statistics_are_averaged(world: World) -> None:
    assert_equal_steps(world, "ResNet", "model.buffers=average")


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_cut_take_the_steps_of_a_plain_loop(world: World, kind: str) -> None:
    assert_equal_steps(world, kind, "layout.zero=3")


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("kind", [kind for kind, own in KINDS.items() if own.plan])
def test_stages_of_tensor_ranks_take_the_steps_of_a_plain_loop(world: World, kind: str) -> None:
    more = [FIXED] if kind == "bert" else []
    if kind == "Regression":
        # Between its blocks features are to be whole.
        more = [f"model.plan={toml_value({'layers.0': 'gathered column', 'layers.1': 'row of whole input'})}"]
    assert_equal_steps(world, kind, "layout.pipeline=2", "layout.tensor=2", *more)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("kind", ["Regression", "vit"])
def test_evaluation_counts_every_sample_once(world: World, kind: str) -> None:
    """Of seven held out in micro-batches of two or three, where one rank has a row that does not count."""
    training = trainer(
        world, deck_of(kind, "batch.global_size=6", "batch.micro_size=3", "run.evaluate_sequences=6")
    )
    corpus = open_corpus(training.deck, world)
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
    part: Any = trainer(world, deck_of("Regression")).engine.stage.models[0]
    shapes = {
        name: (list(field.shape), field.dtype, field.device.type)
        for name, field in part.architecture.example(4).items()
        for name, field in part.architecture.example(4).items()
    }
    assert shapes == {
        "answer": ([4, 2], torch.float32, "meta"),
        "weight": ([4], torch.float32, "meta"),
        "scale": ([4], torch.float32, "meta"),
        "x": ([4, 6], torch.float32, "meta"),
    }
