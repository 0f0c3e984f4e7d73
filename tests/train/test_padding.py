"""Tests that padding has no effect: rows of any length give the same steps for the same conversations.

Modules: data/row_lengths.py, and its use in model/mixtures/router.py, model/mixtures/mixture.py,
parallel/fp8/quantized_matmul.py and train/step.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.bench.peers.mixtral import mixtral
from hpctrain.comm.world import World
from hpctrain.data.batches import MASKED, Batches, SequenceSource
from hpctrain.data.conversations import ConversationSource
from hpctrain.data.tokens import TokenFile
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.model.mixtures.router import Router
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.layout_verification import NOISE_STD
from hpctrain.train.routing import ROUTING_FILE
from hpctrain.train.routing_file import RoutingFile
from hpctrain.train.run import run_deck
from hpctrain.train.step import StepResult
from tests.data.chats import write_rows
from tests.data.preparing import prepare_rows
from tests.engines import DECK, LLAMA, Trainer, small_deck
from tests.train.test_mixture_layouts import KEYS, MODELS

VOCABULARY = 61
LENGTHS = (48, 96, 192)
ROW_LENGTHS = [47, 5, 30, 12, 1, 40, 22, 33]


@dataclass
class ShortRows(SequenceSource):
    """Random conversations of several lengths, one per row."""

    length: int
    count: int = 64

    def real_tokens(self, index: int) -> int:
        return ROW_LENGTHS[index % len(ROW_LENGTHS)]

    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        random, real = torch.Generator().manual_seed(index), self.real_tokens(index)
        tokens, targets = torch.zeros(self.length, dtype=torch.int64), torch.full((self.length,), MASKED)
        window = torch.randint(1, VOCABULARY, (real + 1,), generator=random)
        tokens[:real], targets[:real] = window[:-1], window[1:]
        targets[: real // 3] = MASKED
        return tokens, targets


@dataclass
class Steps:
    """Results of some steps, with the gradients and the state after them."""

    results: list[StepResult]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    routers: dict[str, Tensor]


def trainer_of(world: World, deck: Deck, source: SequenceSource) -> Trainer:
    single = world.single_rank_world()
    engine = build_engine(deck, single, make_mesh(deck, single), noise_std=NOISE_STD)
    return Trainer(deck, engine, Batches(source, 1))


def steps(world: World, length: int, *keys: str) -> Steps:
    """Return two steps with rows of a length. The second step depends on the update of the first one."""
    run = trainer_of(world, small_deck(*keys, f"batch.sequence={length}"), ShortRows(length))
    results = run.train(2)
    routers = (
        module for part in run.engine.stage.models for module in part.modules() if isinstance(module, Router)
    )
    state = {f"{module.name} {kind}": value for module in routers for kind, _, value in module.state()}
    return Steps(results, run.gradients(), run.parameters(), state)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Check that differences are small compared with the largest element of each tensor.

    Tensors of queries and keys are compared with the largest element of the values.
    """
    for name, value in actual.items():
        of_values = name.replace("query", "value").replace("key", "value")
        scale = float(expected[of_values].abs().max())
        assert float((value - expected[name]).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("model", MODELS)
def test_steps_do_not_depend_on_the_length_of_rows(world: World, model: str) -> None:
    keys = (*KEYS, *MODELS[model], "batch.micro_size=4", "data.pack=false")
    first, *others = [steps(world, length, *keys) for length in LENGTHS]
    experts = [name for name in first.results[0].statistics if name.startswith("router/")]
    assert experts and all(result.metrics["balance_loss"] > 0 for result in first.results[1:])
    for other in others:
        for ours, reference in zip(other.results, first.results, strict=True):
            assert ours.metrics == pytest.approx(reference.metrics, rel=1e-5)
            assert ours.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
            for name in experts:  # tokens of each expert, and those that were dropped
                assert torch.equal(ours.statistics[name][:-1], reference.statistics[name][:-1])
        assert_close(other.gradients, first.gradients, 1e-4)
        assert_close(other.parameters, first.parameters, 1e-5)
        assert all(torch.equal(value, first.routers[name]) for name, value in other.routers.items())
    if model == "capacity":
        assert float(first.results[0].statistics[experts[0]][-2]) > 0


@pytest.mark.parametrize("recipe", ["tensor", "delayed", "row"])
def test_fp8_scales_do_not_depend_on_padding(world: World, recipe: str) -> None:
    """Their statistics do not depend on it either, although padding has larger activations than tokens."""
    keys = (*LLAMA, "precision.compute=fp8", f"precision.fp8={recipe}", "data.pack=false")
    actual = []
    for length in (48, 96):
        run = trainer_of(world, small_deck(*keys, f"batch.sequence={length}"), ShortRows(length))
        table = run.engine.stage.models[0].table
        with torch.no_grad():
            table[0] = 50.0
        run.engine.stage.layer_context.statistics.detailed_step = True
        actual.append(run.train(2))
    for ours, reference in zip(*actual, strict=True):
        assert ours.metrics == pytest.approx(reference.metrics, rel=1e-5)
        assert ours.grad_norm == pytest.approx(reference.grad_norm, rel=1e-4)
        for name, values in ours.statistics.items():
            if name.startswith("fp8 scales"):
                assert torch.equal(values, reference.statistics[name]), name
            if name.startswith("fp8 lost"):
                assert values[2] == reference.statistics[name][2], name


def test_mixtral_with_an_attention_mask(world: World) -> None:
    """The loss and the gradients of a step equal those of transformers with an attention mask."""
    pytest.importorskip("transformers")
    keys = (*LLAMA, "model.layers=1", "model.experts.count=4", "model.experts.mlp=24", "model.tied=false")
    more = ("model.experts.balance_loss=0.1", "batch.micro_size=8", "optimizer.clip=0", "data.pack=false")
    for length in (48, 96):
        deck = small_deck(*keys, *more, f"batch.sequence={length}")
        run = trainer_of(world, deck, ShortRows(length))
        reference = mixtral(run.engine.shape, "eager")
        reference.load_state_dict(mixtral_names(run.parameters(), 1))
        (micro,) = run.step.read_share(run.state, 8).micro_batches
        assert micro.lengths is not None
        mask = (torch.arange(length) < micro.lengths.values.unsqueeze(1)).long()
        labels = micro.targets.roll(1, 1).masked_fill(micro.targets.roll(1, 1) < 0, -100)
        output = reference(micro.tokens, attention_mask=mask, labels=labels)
        output.loss.backward()
        (result,) = run.train(1)
        balance = result.metrics["balance_loss"]
        assert balance * 2 == pytest.approx(output.aux_loss.item(), rel=1e-5)
        assert result.loss + 0.1 * balance == pytest.approx(output.loss.item(), rel=1e-5)
        named = mixtral_names(run.gradients(), 1)
        assert_close(
            named, {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}, 1e-4
        )


def mixtral_names(ours: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return the tensors of a mixture by the names that transformers uses for Mixtral."""
    named = {
        "model.embed_tokens.weight": ours["embedding.tokens.weight"],
        "model.norm.weight": ours["final_norm.weight"],
        "lm_head.weight": ours["head.weight"],
    }
    for layer in range(layers):
        old, new = f"blocks.{layer}", f"model.layers.{layer}"
        named[f"{new}.input_layernorm.weight"] = ours[f"{old}.attention_norm.weight"]
        named[f"{new}.post_attention_layernorm.weight"] = ours[f"{old}.feed_forward_norm.weight"]
        for part, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
            named[f"{new}.self_attn.{letter}_proj.weight"] = ours[f"{old}.attention.{part}.weight"]
        named[f"{new}.mlp.gate.weight"] = ours[f"{old}.feed_forward.router.weight"]
        experts = f"{old}.feed_forward.experts"
        named[f"{new}.mlp.experts.gate_up_proj"] = ours[f"{experts}.gate_up.weight"].flatten(1, 2)
        named[f"{new}.mlp.experts.down_proj"] = ours[f"{experts}.down.weight"]
    return named


CASE: dict[str, Any] = {
    "model.family": "llama",
    "model.hidden": 32,
    "model.heads": 4,
    "model.vocabulary": 257,
    "model.experts.count": 4,
    "model.initial_std": 0.2,
    "model.experts.balance_loss": 0.01,
    "run.seed": 5,
    "batch.micro_size": 8,
    "data.pack": False,
}


def prepare_conversations(world: World, folder: Path) -> Path:
    """Prepare a token file of eight conversations of several lengths."""
    rows = [{"prompt": f"question {n}?", "response": f"answer {n} {'x' * n}"} for n in range(8)]
    source = write_rows(folder / "c.jsonl", rows)
    prepare_rows(world.single_rank_world(), folder / "c.h5", [source], kind="chat", template="raw")
    return folder / "c.h5"


def test_recorded_routing_has_no_choices_for_padding(world: World, tmp_path: Path) -> None:
    keys = [f"{name}={json.dumps(value)}" for name, value in CASE.items() if name != "model.vocabulary"]
    keys += [
        f"data.tokens={prepare_conversations(world, tmp_path)}",
        "data.validation=0",
        "batch.sequence=40",
    ]
    keys += ["run.steps=1", "model.experts.record_routing=8", "model.vocabulary="]
    (tmp_path / "deck.toml").write_text(DECK)
    losses = []
    for name, routing_path in (("first", None), ("second", tmp_path / "first" / ROUTING_FILE)):
        folder = tmp_path / name
        arguments = [*keys, f"run.dir={folder}"]
        alone = world.single_rank_world()
        assert run_deck(alone, tmp_path / "deck.toml", arguments, routing_path=routing_path) == 0
        actual = RoutingFile.read(folder / ROUTING_FILE)
        assert actual.choices.shape == (2, 8, 40, 2)
        real = (actual.choices >= 0).all(3).sum(2)
        assert sorted(real[0].tolist()) == sorted(real[1].tolist()) == [20 + n for n in range(8)]
        assert ((actual.choices == -1).all(3).sum(2) == 40 - real).all()
        losses.append(read_metrics(folder / "metrics.jsonl")[0]["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("pack", [False, True])
def test_balance_loss_does_not_depend_on_row_length(world: World, tmp_path: Path, pack: bool) -> None:
    """It is the sum of transformers' balance loss over the layers, for rows of any length, packed or not."""
    mixtral_file = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    path = prepare_conversations(world, tmp_path)
    keys = [f"{name}={json.dumps(value)}" for name, value in CASE.items()]
    balance_losses = []
    for length in (40, 160):
        deck = small_deck(*keys, f"batch.sequence={length}")
        conversations = ConversationSource(TokenFile(path), length, 0.0, "train", pack)
        single = world.single_rank_world()
        run = Trainer(deck, build_engine(deck, single, make_mesh(deck, single)), Batches(conversations, 5))
        if length == 160 and not pack:
            reference = mixtral(run.engine.shape, "eager")
            reference.load_state_dict(mixtral_names(run.parameters(), 2))
            (micro,) = run.step.read_share(run.state, 8).micro_batches
            assert micro.lengths is not None
            mask = (torch.arange(length) < micro.lengths.values.unsqueeze(1)).long()
            logits = reference(micro.tokens, attention_mask=mask, output_router_logits=True).router_logits
            of_layers = [mixtral_file.load_balancing_loss_func((each,), 4, 2, mask) / 2 for each in logits]
            assert sum(each.item() for each in of_layers) == pytest.approx(2.2438466, rel=1e-6)
        balance_losses.append(run.step.evaluate(run.step.batches, conversations.count)["balance_loss"])
    assert balance_losses == pytest.approx([2.2438466, 2.2438466], rel=1e-6)
