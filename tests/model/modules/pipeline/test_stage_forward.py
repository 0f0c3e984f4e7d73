"""Modules of users on pipeline stages take the steps of a plain loop on one process, under each schedule.

Also model/modules/part_contents.py, model/modules/module_layers.py, model/modules/module_part.py with a stage
of a module, model/modules/pipeline/stage_split.py, refused splits in model/construction.py, and
plan/silent_part.py.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.costs.bucket_bytes import gradient_bytes, state_bytes, value_bytes
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value
from hpctrain.model.modules.module_part import ModulePart
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.plan.traffic_plan import plan_traffic
from hpctrain.train.outputs import outputs_of
from tests.engines import Trainer, by_rank_0, reference, trainer
from tests.model.modules import staged_models
from tests.model.modules.module_decks import DECK, GPT2, plain_loop, whole_parameters

STEPS = 3
MODELS = Path(__file__).parents[1] / "staged_models.py"
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
}
SHARED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "model.layers.*", SHARED),
    "gpt-2": ("GPT2LMHeadModel", "transformer.h.*", GPT2 | {"n_layer": 4}),
    "qwen 3": ("Qwen3ForCausalLM", "model.layers.*", SHARED),
    "gemma 2": ("Gemma2ForCausalLM", "model.layers.*", SHARED | {"sliding_window": 8}),
    "bert": (
        "BertForMaskedLM",
        "bert.encoder.layer.*",
        SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}
OWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "unscaled": (staged_models.unscaled, "layers.*"),
    "dicts": (staged_models.dicts, "rows.*"),
}
ON_TWO = {
    "1f1b": (),
    "zb-h1": ("layout.schedule=zb-h1",),
    "interleaved": ("layout.schedule=interleaved", "layout.chunks=2"),
    "zb-v": ("layout.schedule=zb-v", "layout.zero=1"),
}

PAIRS = [
    *(("dicts", schedule) for schedule in ON_TWO),
    *(("unscaled", "interleaved"), ("unscaled", "zb-v"), ("bert", "1f1b")),
    # By other schedules they are in tests/train/test_stock.py.
    *(("gpt-2", "interleaved"), ("qwen 3", "interleaved"), ("gemma 2", "zb-v")),
]


def deck_of(kind: str, *overrides: str) -> Deck:
    if kind in OWN:
        module, blocks, arguments = f"{MODELS}:{kind}", OWN[kind][1], ""
    else:
        name, blocks, config = HUGGING_FACE[kind]
        module = f"transformers:{name}"
        arguments = "\n".join(f"{key} = {toml_value(value)}" for key, value in config.items())
    more = 'buffers = "first"' if kind == "dicts" else ""
    text = DECK.format(module=module, blocks=blocks, more=more, arguments=arguments)
    # Steps that do not make much of the rounding of the smallest gradients.
    return parse_deck(text, ["layout.pipeline=2", "optimizer.epsilon=1e-4", *overrides])


def build(kind: str) -> nn.Module:
    if kind in OWN:
        return OWN[kind][0]()
    name, _, config = HUGGING_FACE[kind]
    return staged_models.hugging_face(name, **config)


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    if isinstance(outputs, dict) and "moment" in outputs:
        logits = outputs["logits"]
    else:
        logits = outputs.logits if hasattr(outputs, "logits") else outputs[0]
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")


def of_all_stages(world: World, here: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of all ranks, those that several hold equal."""
    every: dict[str, Tensor] = {}
    for other in world.everyone.all_gather_object(here):
        for name, value in other.items():
            assert torch.equal(every.setdefault(name, value), value), name
    return every


PLAIN: dict[str, tuple[dict[str, Tensor], list[list[float]], nn.Module]] = {}


def plain(training: Trainer, kind: str, weights: dict[str, Tensor]) -> tuple[list[list[float]], nn.Module]:
    """What the plain loop makes of weights, which are the same on all layouts; computed once."""
    if kind not in PLAIN:
        PLAIN[kind] = weights, *plain_loop(training, build(kind), weights, STEPS, loss=loss_of)
    known, figures, model = PLAIN[kind]
    assert known.keys() == weights.keys()
    assert all(torch.equal(value, known[name]) for name, value in weights.items())
    return figures, model


def assert_equal_steps(world: World, kind: str, *overrides: str) -> Trainer:
    training = trainer(world, deck_of(kind, *overrides))
    weights = of_all_stages(world, whole_parameters(training))
    figures, model = plain(training, kind, weights)
    found = [[result.loss, result.grad_norm] for result in training.train(STEPS)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(figures), rtol=1e-5, atol=0.0)
    expected = dict(model.named_parameters())
    every = of_all_stages(world, whole_parameters(training))
    assert every.keys() == expected.keys()
    for name, value in every.items():
        theirs = expected[name].detach()
        assert (value - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name
    return training


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(("kind", "schedule"), PAIRS)
def test_two_stages_take_the_steps_of_a_plain_loop(world: World, kind: str, schedule: str) -> None:
    assert_equal_steps(world, kind, *ON_TWO[schedule])


ON_FOUR = {
    "data 2, ZeRO-1": ("layout.data=2", "layout.zero=1"),
    "data 2, ZeRO-3": ("layout.data=2", "layout.zero=3", "layout.schedule=zb-v", "memory.recompute=full"),
    "data 2, ZeRO-2": ("layout.data=2", "layout.zero=2", "layout.schedule=interleaved", "layout.chunks=2"),
    "four stages": ("layout.pipeline=4", "layout.split=[1, 1, 2, 0]", "layout.schedule=zb-h2"),
}


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("dicts", layout) for layout in ON_FOUR),
        *(("gpt-2", "four stages"), ("gemma 2", "data 2, ZeRO-3"), ("bert", "data 2, ZeRO-2")),
    ],
)
def test_four_ranks_take_the_steps_of_a_plain_loop(world: World, kind: str, layout: str) -> None:
    assert_equal_steps(world, kind, *ON_FOUR[layout])


PLANNED = {
    2: [(kind, "layout.zero=1", f"layout.schedule={name}") for kind in ("dicts", "gpt-2") for name in ON_TWO],
    # Of two blocks on a stage, the one that was in use last may stay gathered until the next micro-batch's.
    4: [("unscaled", "layout.zero=3", "layout.split=[3, 3]", "model.arguments={layers = 6}")],
}


@pytest.mark.mpi(min_size=2, max_size=4)
def test_plans_of_stages_are_exact(world: World) -> None:
    for kind, *layout in PLANNED.get(world.size, []):
        chunks = ["layout.chunks=2"] if "layout.schedule=interleaved" in layout else []
        deck = deck_of(kind, *layout, *chunks, "precision.compute=bf16")
        training = trainer(world, deck)
        training.train(1)
        world.ledger.reset()
        training.train(1)
        sent: dict[str, float] = {}
        for entry in world.ledger.rows():
            if entry.bytes:
                sent[entry.axis] = sent.get(entry.axis, 0.0) + entry.bytes
        stage = world.rank // (world.size // 2)
        assert plan_traffic(deck, world.size, 61).stages[stage].payload() == dict(sorted(sent.items()))
        planned = plan_memory(deck, world.size, 61).stages[stage].memory
        buckets = training.engine.stage.buckets
        held = value_bytes(buckets), gradient_bytes(buckets), state_bytes(training.engine.state(), buckets)
        assert (planned.parameter, planned.gradient, planned.optimizer) == held


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize(("kind", "schedule"), [("llama", "zb-h1"), ("qwen 3", "zb-v")])
def test_stages_of_tensor_ranks_take_the_steps_of_a_plain_loop(
    world: World, kind: str, schedule: str
) -> None:
    split = "layout.tensor=2", "model.plan=its own"
    assert_tensor_ranks(world, kind, *split, f"layout.schedule={schedule}")


def assert_tensor_ranks(world: World, kind: str, *overrides: str) -> None:
    """Losses and norms are those of one rank."""
    deck = deck_of(kind, *overrides)

    def alone() -> list[list[float]]:
        whole = deck.with_keys(layout={"pipeline": 1, "chunks": 1, "schedule": "1f1b"}, model={"plan": None})
        return [[each.loss, each.grad_norm] for each in reference(world, whole).train(5)]

    expected = torch.tensor(by_rank_0(world, alone))
    found = torch.tensor([[each.loss, each.grad_norm] for each in trainer(world, deck).train(5)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_submodules_of_all_blocks_of_a_stage_are_watched(world: World) -> None:
    """Each on one stage, with the values of one rank; the last block of a stage where its result arrives."""

    def outputs(training: Trainer) -> dict[str, list[Tensor]]:
        (part,) = training.engine.stage.models
        assert isinstance(part, ModulePart)
        with outputs_of({part.module: part.computing}) as given:
            training.train(1)
        return given

    deck = deck_of("unscaled", "layout.split=[2, 2]")
    on_one = deck.with_keys(layout={"pipeline": 1, "split": None})
    expected = by_rank_0(world, lambda: outputs(reference(world, on_one)))
    first, second = world.everyone.all_gather_object(outputs(trainer(world, deck)))
    assert first.keys() | second.keys() == expected.keys() and not first.keys() & second.keys()
    assert {"layers.0.norm1", "layers.1.mlp.3"} <= first.keys()
    assert {"layers.1", "layers.2.norm1"} <= second.keys()
    for name, values in (first | second).items():
        torch.testing.assert_close(values, expected[name])


FROZEN = {
    "the first stage": "model.frozen=['embed.*', 'positions', 'layers.[01].*']",
    "what is between": "model.frozen=['layers.[12].*', 'norm.bias']",
}


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("frozen", FROZEN)
def test_what_is_frozen_stays(world: World, frozen: str) -> None:
    deck = deck_of("unscaled", FROZEN[frozen], "layout.schedule=zb-v")
    training = trainer(world, deck)
    weights = of_all_stages(world, whole_parameters(training))
    figures, _ = plain_loop(training, build("unscaled"), weights, 3, loss=loss_of)
    found = [[result.loss, result.grad_norm] for result in training.train(3)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(figures), rtol=1e-5, atol=0.0)
    for name, value in of_all_stages(world, whole_parameters(training)).items():
        stays = any(fnmatchcase(name, pattern) for pattern in deck.model.frozen)
        assert torch.equal(value, weights[name]) == stays, name


@pytest.mark.mpi(min_size=2, max_size=2)
def test_no_stage_depends_on_what_others_draw(world: World) -> None:
    """Masks are those of the sample and of the block, wherever a module is cut."""
    dropout = "model.arguments={dropout = 0.3}"
    layouts = ("layout.split=[1, 3]",), ("layout.split=[3, 1]", "layout.schedule=zb-h1"), ON_TWO["zb-v"]
    losses = []
    for layout in layouts:
        training = trainer(world, deck_of("unscaled", dropout, *layout))
        losses.append([result.loss for result in training.train(3)])
        again = [training.evaluate(training.step.batches, 4)["loss"] for _ in range(2)]
        assert again[0] == again[1]
    torch.testing.assert_close(torch.tensor(losses[1:]), torch.tensor(losses[:1] * 2), rtol=1e-5, atol=0.0)
    without = trainer(world, deck_of("unscaled")).train(1)[0].loss
    assert abs(without - losses[0][0]) > 1e-3


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", ["dicts", "gemma 2"])
def test_half_precision_passes_on_what_it_computes(world: World, kind: str) -> None:
    half = "precision.compute=bf16"

    def alone() -> list[float]:
        return [each.loss for each in reference(world, deck_of(kind, half, "layout.pipeline=1")).train(3)]

    expected = by_rank_0(world, alone)
    training = trainer(world, deck_of(kind, half, *ON_TWO["interleaved"]))
    assert training.engine.stage.models[0].dtype == torch.bfloat16
    assert [each.loss for each in training.train(3)] == pytest.approx(expected, rel=2e-3)
