"""Modules of users take the steps of a plain torch loop, on one rank and on data ranks.

Also model/modules/module_architecture.py, model/modules/initial_values.py, and what autograd saves of
parameters that are gathered again (sharding/gather.py).
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.inputs import ModelInputs
from hpctrain.train.step import TrainState
from tests.engines import by_rank_0, reference, trainer
from tests.model.modules import models
from tests.model.modules.module_decks import DECK, LLAMA, MODELS, STEPS, loss_of, plain_loop, whole_parameters

KINDS: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "gpt": (models.gpt, "layers.*", "", "layers = 3"),
    "odd": (models.odd, "blocks.*", 'buffers = "average"', ""),
    "llama": (
        lambda: models.llama(**LLAMA),
        "model.layers.*",
        "",
        "\n".join(f"{key} = {value}" for key, value in LLAMA.items()),
    ),
}
LAYOUTS = {
    "zero 0": (),
    "zero 1": ("layout.zero=1",),
    "zero 2": ("layout.zero=2", "memory.recompute=full"),
    "zero 3": ("layout.zero=3",),
    # Where ranks do not see each other's memory, buckets take turns in it.
    "zero 3, apart": ("layout.zero=3", "communication.transport=mpi"),
    "zero 3, recomputed": (
        *("layout.zero=3", "communication.transport=mpi"),
        *("memory.recompute=full", "batch.micro_size=1"),
    ),
}


def deck_of(kind: str, *overrides: str) -> Deck:
    _, blocks, more, arguments = KINDS[kind]
    text = DECK.format(module=f"{MODELS}:{kind}", blocks=blocks, more=more, arguments=arguments)
    return parse_deck(text, overrides)


def assert_equal_steps(world: World, kind: str, *overrides: str) -> None:
    """A run of a layout takes the steps of the plain loop."""
    training = trainer(world, deck_of(kind, *overrides))
    weights = whole_parameters(training)
    micro = training.deck.batch.micro_size
    figures, model = plain_loop(training, KINDS[kind][0](), weights, micro=micro)
    found = [[result.loss, result.grad_norm] for result in training.train(STEPS)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(figures), rtol=1e-5, atol=0.0)
    expected = dict(model.named_parameters())
    here = whole_parameters(training)
    assert here.keys() == expected.keys()
    for name, value in here.items():
        theirs = expected[name].detach()
        assert (value - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name
    # Of what is never used the bias is not decayed, and stays.
    stays = ("frozen.*", "never.bias", *training.deck.model.frozen)
    stayed = {name for name, value in weights.items() if torch.equal(value, here[name])}
    assert stayed == {name for name in weights if any(fnmatchcase(name, each) for each in stays)}


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_takes_the_steps_of_a_plain_loop(world: World, kind: str) -> None:
    assert_equal_steps(world, kind)
    assert_equal_steps(world, kind, "memory.recompute=full")


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["gpt", "odd"])  # Llama is in tests/train/test_stock.py
def test_data_ranks_take_the_steps_of_a_plain_loop(world: World, kind: str, layout: str) -> None:
    assert_equal_steps(world, kind, *LAYOUTS[layout])


FROZEN = "['embed.*', 'positions', 'scale', 'layers.[01].*']", "['layers.1.*', 'norm.bias']"


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "frozen", ["['embed.*', 'positions', 'scale', 'layers.[01].*']", "['layers.1.*', 'norm.bias']"]
)
def test_what_is_frozen_stays(world: World, frozen: str, recompute: str) -> None:
    zero = 3 if world.size > 1 else 0
    layout = f"layout.zero={zero}", f"memory.recompute={recompute}"
    assert_equal_steps(world, "gpt", f"model.frozen={frozen}", *layout)


@pytest.mark.mpi(min_size=1, max_size=1)
def test_blocks_that_are_computed_again_keep_their_input_alone(world: World) -> None:
    """Besides what one of them saves while it is computed again."""
    kept: dict[tuple[str, int], int] = {}
    for recompute, layers in product(("none", "full"), (3, 5)):
        overrides = f"memory.recompute={recompute}", f"model.arguments={{layers = {layers}}}"
        training = trainer(world, deck_of("gpt", *overrides))
        training.train(1)
        kept[recompute, layers] = training.activations.bytes or 0
    of_two = 2 * 2 * 32 * 32 * 4  # blocks, samples, tokens, features, bytes
    assert kept["full", 5] - kept["full", 3] == of_two
    assert kept["none", 5] - kept["none", 3] > 10 * of_two
    assert kept["full", 3] < kept["none", 3] / 2


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_may_use_other_parameters(world: World, zero: int) -> None:
    """Buckets of a parameter each: one rank has a gradient in its backward pass, the other at its end."""
    assert_equal_steps(world, "odd", "communication.bucket_bytes=100", f"layout.zero={zero}")


@pytest.mark.mpi(min_size=1, max_size=1)
def test_a_module_without_blocks_takes_the_steps_too(world: World) -> None:
    assert_equal_steps(world, "gpt", "model.blocks=")


CHANGES = {
    "sgd": ("optimizer.epsilon=", "optimizer.name=sgd", "optimizer.sgd.momentum=0.9", "layout.zero=3"),
    "lion": ("optimizer.epsilon=", "optimizer.name=lion", "learning_rate.peak=1e-4", "layout.zero=1"),
    "schedule-free": ("optimizer.name=schedule-free", "learning_rate.decay=constant", "layout.zero=2"),
    "muon": (
        *("optimizer.epsilon=", "optimizer.name=muon", "optimizer.muon.matrices=['layers.*.weight']"),
        *("optimizer.muon.newton_schulz=fp32", "optimizer.muon.newton_schulz_steps=1", "layout.zero=3"),
    ),
    # Without the bias of keys, whose gradient is rounding, of which it makes as much as of any other.
    "adafactor": (
        *("optimizer.name=adafactor", "optimizer.epsilon=", "layout.zero=2"),
        "model.frozen=['layers.*.attention.qkv.bias']",
    ),
    "adam-mini": ("optimizer.name=adam-mini", "layout.zero=1"),
    "z-loss": ("stability.z_loss=0.01", "layout.zero=3"),
    "dropout": ("model.arguments={dropout = 0.2}", "layout.zero=3", "memory.recompute=full"),
    "on disk": ("memory.optimizer=disk", "memory.parameters=disk", "layout.zero=3"),
    "kept": ("memory.keep_gathered=1", "layout.zero=3"),
    "a rank each": ("layout.zero_group=1", "layout.zero=2"),
    "fp16": ("precision.compute=fp16", "layout.zero=3"),
    "bf16": ("precision.compute=bf16", "layout.zero=2"),
}


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("change", CHANGES)
def test_data_ranks_take_the_steps_of_one(world: World, mpi_tmp_path: Path, change: str) -> None:
    deck = deck_of("gpt", *CHANGES[change], f"memory.offload_dir={mpi_tmp_path}")

    def alone() -> list[list[float]]:
        whole = deck.with_keys(memory={"optimizer": "device", "parameters": "device", "keep_gathered": 0})
        return [[each.loss, each.grad_norm] for each in reference(world, whole).train(4)]

    expected = torch.tensor(by_rank_0(world, alone))
    training = trainer(world, deck)
    found = torch.tensor([[each.loss, each.grad_norm] for each in training.train(4)])
    half = deck.precision.compute != "fp32"
    torch.testing.assert_close(found, expected, rtol=2e-2 if half else 1e-5, atol=0.0)
    assert len(set(found[:, 0].tolist())) == 4
    training.engine.close()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_sums_of_a_users_loss_are_divided_by_its_counts(world: World) -> None:
    # With so large an epsilon, a step of AdamW follows the scale of gradients.
    own = f"model.loss={MODELS}:every_second", "optimizer.epsilon=0.1", "optimizer.clip=0.2"
    training = trainer(world, deck_of("gpt", *own))
    weights = whole_parameters(training)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return loss_of((outputs[0][:, ::2],), targets[:, ::2])

    loop = {"steps": 4, "loss": loss, "counted": lambda targets: targets[:, ::2]}
    figures, model = plain_loop(training, models.gpt(), weights, **loop)
    found = [[result.loss, result.grad_norm] for result in training.train(4)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(figures), rtol=1e-5, atol=0.0)
    expected = dict(model.named_parameters())
    for name, value in whole_parameters(training).items():
        step = (expected[name].detach() - weights[name]).abs().max()
        assert (value - expected[name].detach()).abs().max() <= 1e-3 * step + 1e-7, name
    source = training.step.batches
    assert training.evaluate(source, 4)["loss"] == pytest.approx(training.evaluate(source, 4)["loss"])


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("whose", ["first", "average"])
def test_buffers_are_those_of_the_first_rank_or_the_mean(world: World, whose: str) -> None:
    training = trainer(world, deck_of("odd", f"model.buffers={whose}"))
    weights = whole_parameters(training)
    statistics = []
    for rank in range(world.size):
        model = models.odd().train()
        named = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, value in weights.items():
                named[name].copy_(value)
        for each in training.step.batches.step(0, 8, rank, world.size, 2):
            model(each.tokens, use_cache=False)
        statistics.append(torch.cat((model.norm.running_mean, model.norm.running_var)))
    training.train(1)
    module = training.engine.stage.models[0].module
    found = torch.cat((module.norm.running_mean, module.norm.running_var))
    expected = statistics[0] if whose == "first" else (statistics[0] + statistics[1]) / 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(statistics[0], statistics[1], rtol=1e-3)
    assert int(module.norm.num_batches_tracked) == 2


@pytest.mark.mpi(min_size=1, max_size=1)
def test_the_partition_function_has_its_gradient(world: World) -> None:
    training = trainer(world, deck_of("gpt", "stability.z_loss=0.05"))

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        squares = outputs[0].logsumexp(-1).square() * (targets >= 0)
        return loss_of(outputs, targets) + 0.05 * squares.sum()

    figures, _ = plain_loop(training, models.gpt(), whole_parameters(training), steps=3, loss=loss)
    found = training.train(3)
    assert [each.grad_norm for each in found] == pytest.approx([norm for _, norm in figures], rel=1e-5)
    assert all(each.loss < total - 0.1 for each, (total, _) in zip(found, figures, strict=True))


@pytest.mark.mpi(min_size=1, max_size=1)
def test_masks_are_of_the_sample_and_the_step(world: World) -> None:
    training = trainer(world, deck_of("gpt", "model.arguments={dropout = 0.5}"))
    state, part = training.state, training.engine.stage.models[0]
    positions = torch.arange(32)

    def logits(state: TrainState, micro_batch: int, training_too: bool = True) -> Tensor:
        source = training.step.dropout_source(state, micro_batch) if training_too else None
        with torch.set_grad_enabled(training_too):
            inputs = ModelInputs.of_tokens(torch.zeros(32, 2, dtype=torch.int64), positions, source)
            return part(inputs)[0].detach()

    first = logits(state, 0)
    assert torch.equal(first, logits(state, 0))
    assert not torch.equal(first, logits(state, 1))
    assert not torch.equal(first, logits(TrainState(step=1), 0))
    assert torch.equal(logits(state, 0, False), logits(state, 1, False))


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_function_changes_initial_values(world: World) -> None:
    """The same on all layouts."""
    zero = f"layout.zero={3 if world.size > 1 else 0}"
    own = whole_parameters(trainer(world, deck_of("gpt", zero)))
    changed = trainer(world, deck_of("gpt", zero, f"model.initial={MODELS}:thirds"))
    here = whole_parameters(changed)
    alone = by_rank_0(
        world,
        lambda: whole_parameters(reference(world, deck_of("gpt", f"model.initial={MODELS}:thirds"))),
    )
    assert all(torch.equal(value, alone[name]) for name, value in here.items())
    assert torch.equal(here["embed.weight"], own["embed.weight"] / 3)
    assert len(here["layers.0.norm1.weight"].unique()) == 32
    with pytest.raises(
        HpctrainError, match=r"model\.initial: models\.py:refuses fails: ValueError: not these"
    ):
        trainer(world, deck_of("gpt", f"model.initial={MODELS}:refuses"))
    with pytest.raises(HpctrainError, match=r"model\.initial=.* has no third \(did you mean thirds"):
        trainer(world, deck_of("gpt", f"model.initial={MODELS}:third"))


INITIALS = {
    "other_shape": r"norm\.weight: expected shape \[32\], got \[4, 4\]",
    "deletes": r"missing parameter norm\.weight",
    "adds": r"unexpected parameter norm\.more",
    "unties": r"head\.weight: must be the same parameter as embed\.weight",
    "freezes": r"norm\.weight: became frozen",
    "other_buffer": r"places: expected shape \[32\], got \[1\]",
    "takes_nothing": r"must take the module as its argument: too many positional arguments",
}


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("function", INITIALS)
def test_a_function_that_makes_more_than_values_is_told(world: World, function: str) -> None:
    told = rf"model\.initial: models\.py:{function}.*{INITIALS[function]}"
    with pytest.raises(HpctrainError, match=told):
        trainer(world, deck_of("gpt", f"model.initial={MODELS}:{function}"))
