"""Modules of multi-token prediction: against autograd in plain torch, on layouts, and their memory.

Tests of objective/multi_token.py beside model/prediction_module.py and model/transformer.py.
Tests of costs/layer_bytes/vocabulary_bytes.py beside objective/multi_token.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.costs.layer_flops import layer_flops, model_flops
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.layer_placement import place_by_flops
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.plan.time.layer_seconds import layer_seconds, layer_sizes
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import parse_machine
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.layout_verification import compare
from hpctrain.train.scaled_down_deck import scale_down_family, with_fp8_products
from hpctrain.train.step import StepResult
from tests.engines import LLAMA, by_rank_0, reference, small_deck, trainer
from tests.plan.test_memory_plan import held
from tests.plan.time.test_machine_rates import FILE

MODULES = (*LLAMA, "model.mtp_layers=2", "objective.mtp_weight=0.4")
HEADS, KEY_VALUE_HEADS, SIZE, LAYERS, DEPTHS, WEIGHT = 8, 2, 4, 2, 2, 0.4


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-5)


def rotated(x: Tensor) -> Tensor:
    """Queries or keys [b, heads, s, d] with halves rotated by their positions."""
    frequencies = 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.arange(x.shape[2])[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def block(weights: dict[str, Tensor], index: int, x: Tensor, mask: Tensor) -> Tensor:
    def of(name: str) -> Tensor:
        return weights[f"blocks.{index}.{name}.weight"]

    def heads(name: str, of_layer: int) -> Tensor:
        projected = functional.linear(normed, of(f"attention.{name}")).unflatten(-1, (of_layer, SIZE))
        return projected.transpose(1, 2).repeat_interleave(HEADS // of_layer, 1)

    normed = norm(x, of("attention_norm"))
    query, key = rotated(heads("query", HEADS)), rotated(heads("key", KEY_VALUE_HEADS))
    scores = (query @ key.mT / SIZE**0.5).masked_fill(~mask, -torch.inf)
    mixed = (scores.softmax(-1) @ heads("value", KEY_VALUE_HEADS)).transpose(1, 2).flatten(2)
    x = x + functional.linear(mixed, of("attention.output"))
    normed = norm(x, of("feed_forward_norm"))
    gate, up = (functional.linear(normed, of(f"feed_forward.{name}")) for name in ("gate", "up"))
    return x + functional.linear(functional.silu(gate) * up, of("feed_forward.down"))


def losses(weights: dict[str, Tensor], tokens: Tensor, targets: Tensor, places: Tensor) -> list[Tensor]:
    """Sums of the losses of depths 0 to 2 of sequences [b, s] with places of tokens in their documents."""
    table, length = weights["embedding.tokens.weight"], tokens.shape[1]
    head = weights.get("head.weight", table)
    position = torch.arange(length)
    begin = position - places
    mask = ((position[:, None] >= position) & (begin[:, :, None] == begin[:, None]))[:, None]
    x = functional.embedding(tokens, table)
    for index in range(LAYERS):
        x = block(weights, index, x, mask)
    hidden = norm(x, weights["final_norm.weight"])
    found = []
    for depth in range(DEPTHS + 1):
        if depth:
            at, used = f"blocks.{LAYERS + depth - 1}", length - depth
            embedded = functional.embedding(tokens[:, depth:], table)
            parts = (
                norm(embedded, weights[f"{at}.embedding_norm.weight"]),
                norm(hidden[:, :used], weights[f"{at}.hidden_norm.weight"]),
            )
            x = functional.linear(torch.cat(parts, -1), weights[f"{at}.projection.weight"])
            x = block(weights, LAYERS + depth - 1, x, mask[:, :, :used, :used])
            hidden = norm(x, weights[f"{at}.final_norm.weight"])
        wanted = targets[:, depth:].clone()
        wanted[begin[:, depth:] != begin[:, : length - depth]] = -1
        logits = functional.linear(hidden, head).flatten(0, 1)
        found.append(functional.cross_entropy(logits, wanted.flatten(), ignore_index=-1, reduction="sum"))
    return found


DEEPSEEK = (
    *("model.family=deepseek-v3", "model.mlp=48", "model.head_size=12", "model.latent.key_value_rank=10"),
    *("model.latent.rotary_size=4", "model.latent.value_size=6", "model.experts.count=4"),
    *("model.experts.shared=1", "model.experts.mlp=16", "model.experts.dense_first=1"),
    *("model.experts.router_groups=2", "model.experts.router_groups_per_token=1", "model.mtp_layers=1"),
)
CASES: dict[str, tuple[str, ...]] = {
    "data": (*MODULES, "layout.zero=1", "data.document_mask=true"),
    "zero": (*MODULES, "layout.zero=3", "memory.recompute=full"),
    "tied-zero": (*MODULES, "model.tied=true", "layout.zero=2"),
    "tensor": (*MODULES, "layout.tensor=2", "model.tied=true", "memory.recompute=selective"),
    "sequence": (*MODULES, "layout.tensor=2", "layout.sequence_parallel=true", "data.document_mask=true"),
    "ring": (*MODULES, "layout.context=2", "layout.context_form=ring"),
    "ring-documents": (*MODULES, "layout.context=2", "data.document_mask=true", "layout.zero=3"),
    "all-to-all": (*MODULES, "layout.context=2", "layout.context_form=all_to_all", "data.document_mask=true"),
    "ring-experts": (*DEEPSEEK, "layout.context=2", "memory.recompute=selective"),
    "experts": (*DEEPSEEK, "layout.expert=2", "layout.zero=3"),
    "experts-tensor": (*DEEPSEEK, "layout.tensor=2", "layout.sequence_parallel=true"),
    "pipeline": (*MODULES, "layout.pipeline=2", "layout.schedule=1f1b"),
    "pipeline-tied": (*MODULES, "layout.pipeline=2", "layout.schedule=zb-h1", "model.tied=true"),
    "interleaved": (*MODULES, "model.layers=4", "layout.pipeline=2", "layout.schedule=interleaved"),
    "v": (*MODULES, "model.layers=4", "layout.pipeline=2", "layout.schedule=zb-v", "model.tied=false"),
    "v-tied": (*MODULES, "model.layers=4", "layout.pipeline=2", "layout.schedule=zb-v", "model.tied=true"),
    "dual": (
        *MODULES,
        "model.layers=4",
        "layout.pipeline=2",
        "layout.schedule=dualpipe-v",
        "model.tied=true",
    ),
    "pipeline-experts": (*DEEPSEEK, "layout.pipeline=2", "memory.recompute=full"),
}
"""Decks on 2 ranks, by name."""
FP8: dict[str, tuple[str, ...]] = {
    "tensor": (*MODULES, "layout.tensor=2", "layout.sequence_parallel=true", "precision.fp8=row"),
    "zero": (*MODULES, "layout.zero=3", "memory.recompute=selective", "precision.fp8=tensor"),
    "pipeline": (*MODULES, "layout.pipeline=2", "layout.schedule=zb-h1", "precision.fp8=tensor"),
}
"""Decks on 2 ranks with products in 8 bits, by name."""
CASES_OF_4: dict[str, tuple[str, ...]] = {
    "zero": (*MODULES, "layout.pipeline=2", "layout.zero=3", "data.document_mask=true"),
    "zero-tied": (*MODULES, "layout.pipeline=2", "layout.zero=3", "model.tied=true"),
    "v-zero": (*MODULES, "model.layers=4", "layout.pipeline=2", "layout.schedule=zb-v", "layout.zero=3"),
    "v-zero-2-tied": (
        *(*MODULES, "model.layers=4", "layout.pipeline=2", "layout.schedule=zb-v"),
        *("layout.zero=2", "model.tied=true"),
    ),
    "tensor": (*MODULES, "layout.pipeline=2", "layout.tensor=2", "layout.sequence_parallel=true"),
    "ring": (*MODULES, "layout.pipeline=2", "layout.context=2", "data.document_mask=true"),
    "ring-tensor": (*MODULES, "layout.context=2", "layout.tensor=2", "layout.sequence_parallel=true"),
}
"""Decks on 4 ranks, by name."""


def check_first_steps(world: World, deck: Deck) -> None:
    """Compare the first steps with those of one rank. Parameters begin with the same bits."""
    small = scale_down_family(deck)
    if deck.precision.compute == "fp8":
        small = with_fp8_products(deck, small)
    for difference in compare(small, world, make_mesh(deck, world)):
        bound = 0.0 if re.fullmatch(r"parameter \S+", difference.name) else 1e-5
        assert difference.error <= bound, difference


@pytest.mark.sampled(4)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", CASES)
def test_first_steps_are_those_of_one_rank(world: World, name: str) -> None:
    check_first_steps(world, small_deck("batch.global_size=4", *CASES[name]))


@pytest.mark.sampled(1)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", FP8)
def test_first_steps_in_8_bits_are_those_of_one_rank(world: World, name: str) -> None:
    check_first_steps(world, small_deck("batch.global_size=4", "precision.compute=fp8", *FP8[name]))


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("name", CASES_OF_4)
def test_first_steps_of_two_axes_are_those_of_one_rank(world: World, name: str) -> None:
    check_first_steps(world, small_deck("batch.global_size=8", *CASES_OF_4[name]))


@pytest.mark.sampled(1)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("tied", ["false", "true"])
def test_five_steps_and_a_checkpoint_of_a_pipeline_are_those_of_one_rank(
    world: World, mpi_tmp_path: Path, tied: str
) -> None:
    """Continue the run of a pipeline on other layouts: a file has the table of both stages once."""
    keys = (*MODULES, f"model.tied={tied}", "model.layers=4", "learning_rate.decay=constant")
    expected = by_rank_0(
        world, lambda: [losses_of(step) for step in reference(world, small_deck(*keys)).train(7)]
    )
    first = ("layout.pipeline=2", "layout.zero=1")
    others = (("layout.pipeline=2", "layout.schedule=zb-v"), ("layout.context=2", "layout.zero=3"))
    path = mpi_tmp_path / "checkpoints/step-00000005.h5"
    for layout in (first, *others):
        deck = small_deck(
            *keys, *layout, f"run.dir={mpi_tmp_path if layout is first else mpi_tmp_path / 'other'}"
        )
        training = trainer(world, deck)
        checkpoints = Checkpoints(deck, training.engine, {})
        if layout is first:
            assert [losses_of(step) for step in training.train(5)] == [near(each) for each in expected[:5]]
            checkpoints.save(training.state)
            checkpoints.finish()
        else:
            training.state = checkpoints.restore(path)
        assert [losses_of(step) for step in training.train(2)] == [near(each) for each in expected[5:]]


def losses_of(step: StepResult) -> tuple[float, float]:
    """Return the losses of the next token and of further ones."""
    return step.loss, step.metrics["mtp_loss"]


def near(losses: tuple[float, float]) -> Any:
    """Return what equals these losses up to rounding."""
    return pytest.approx(losses, rel=1e-5)


SPLITS: dict[str, tuple[str, ...]] = {
    "plain": ("layout.tensor=2",),
    "sequence": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "pipeline": ("layout.pipeline=2",),
    "v": ("layout.pipeline=2", "layout.schedule=zb-v", "model.layers=4", "layout.zero=2"),
    "deferred": ("layout.pipeline=2", "layout.schedule=zb-h1"),
    "ring": ("layout.context=2",),
}
"""Layouts of 2 ranks, by name."""


@pytest.mark.sampled(4)
@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", ["false", "true"])
@pytest.mark.parametrize("split", SPLITS)
def test_memory_is_that_which_is_planned(
    world: World, recompute: str, compute: str, tied: str, split: str
) -> None:
    """Compare activations, gradients, optimizer state and parameters of each stage."""
    layout = SPLITS[split] if world.size > 1 else ()
    more = (f"memory.recompute={recompute}", f"precision.compute={compute}", "batch.global_size=16")
    deck = small_deck(*MODULES, f"model.tied={tied}", *layout, *more)
    training = trainer(world, deck)
    stages = plan_memory(deck, world.size, 61, schedule=training.engine.schedule).stages
    planned = stages[training.engine.mesh.coordinate("pipeline")].memory
    training.train(1)
    training.engine.close()
    assert training.activations.bytes == pytest.approx(planned.activation, rel=0.01)
    if compute == "fp32":
        assert (planned.parameter, planned.gradient, planned.optimizer) == held(training)[:3]


def test_an_evaluation_reports_the_loss_of_the_next_token(world: World) -> None:
    plain, training = (trainer(world, small_deck(*LLAMA, *more)) for more in ((), MODULES))
    weights = plain.parameters()
    assert training.parameters().keys() > weights.keys()
    expected, found = (each.step.evaluate(each.step.batches, 4) for each in (plain, training))
    assert found == expected and "mtp_loss" not in found


def test_count() -> None:
    plain, shape = (ModelShape.of(small_deck(*LLAMA, *more), 61) for more in ((), MODULES))
    blocks = (count(shape).parameters - count(plain).parameters) // 2
    attention, feed_forward = 32 * 32 * 2 + 2 * 32 * 8, 3 * 32 * 48
    matrices = attention + feed_forward + 32 * 64
    assert blocks == matrices + 5 * 32
    flops, of_plain = model_flops(shape), model_flops(plain)
    for_logits, core = 61 * 32, of_plain.core_forward / 2
    added = flops.flops_per_token - of_plain.flops_per_token
    assert added == 3 * 2 * (2 * (matrices + for_logits) + core)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_flops_of_modules_are_in_the_pass_that_computes_them(recompute: str) -> None:
    """Compute the output layer and its gradients forward, the gradients of modules backward."""
    deck = small_deck(*MODULES, f"memory.recompute={recompute}")
    *_, block, last = layer_flops(deck, ModelShape.of(deck, 61))
    plain = small_deck(*LLAMA, f"memory.recompute={recompute}")
    head = layer_flops(plain, ModelShape.of(plain, 61))[-1].forward
    core, projections = 4 * 32 * 32, DEPTHS * 2 * 32 * 64
    forward = DEPTHS * block.forward + projections
    again = DEPTHS * core if recompute == "selective" else 0
    assert last == (
        (1 + DEPTHS) * head + forward,
        forward + DEPTHS * core + again,
        forward - DEPTHS * core,
    )


def test_planned_seconds_of_modules_are_in_the_pass_that_computes_them() -> None:
    """With equal rates a module takes as long as a block, its projection and its three further norms."""
    machine, decks = parse_machine(FILE, ""), [small_deck(*LLAMA), small_deck(*MODULES)]
    at = LayoutSizes.of(decks[0], 1, 8)
    plain, training = (
        [layer_seconds(each, at, machine) for each in layer_sizes(ModelShape.of(deck, 61))] for deck in decks
    )
    block, head, last = training[1], plain[-1], training[-1]
    assert not head.weight_gradient and last.forward["products"] > head.forward["products"]
    for found, of_block in (
        (last.input_gradient, block.input_gradient),
        (last.weight_gradient, block.weight_gradient),
    ):
        share = 1 + 32 * 64 / (2 * 32 * 32 + 2 * 32 * 8 + 3 * 32 * 48)
        assert found["products"] == pytest.approx(DEPTHS * share * of_block["products"], rel=0.15)
    assert last.input_gradient["attention"] == pytest.approx(DEPTHS * block.input_gradient["attention"])


@pytest.mark.parametrize(("modules", "split"), [(0, (4, 4)), (1, (5, 3)), (3, (6, 2))])
def test_the_last_stage_has_fewer_blocks_with_modules(modules: int, split: tuple[int, ...]) -> None:
    deck = small_deck(*LLAMA, "layout.pipeline=2", "model.layers=8", f"model.mtp_layers={modules}")
    assert place_by_flops(deck, ModelShape.of(deck, 61), 1).split == split


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("model.parametrization=mup",), 'model.parametrization = "mup": scales of the modules'),
        (("model.adapters.rank=2",), "[model.adapters]: adapters train a model whose weights exist"),
        (("model.dropout=0.1",), "model.dropout = 0.1: the modules' embeddings have no dropout"),
        (("objective.kind=reward",), 'objective.kind = "next-token" or "sft"'),
        (("model.positions=learned",), 'model.positions = "rotary" or "none"'),
        (("model.mtp_layers=17",), "16"),
        (
            ("batch.sequence=2", "model.mtp_layers=2"),
            "model.mtp_layers=2: must be below batch.sequence = 2",
        ),
        (('model.frozen=["embedding.*"]',), "model.frozen"),
        (("model.mtp_layers=0",), "has no effect"),
    ],
)
def test_wrong_decks_are_refused(more: tuple[str, ...], told: str) -> None:
    with pytest.raises(HpctrainError, match=re.escape(told)):
        small_deck(*MODULES, *more)


@pytest.mark.parametrize("more", [(), ("model.tied=true",), ("data.document_mask=true",)])
def test_loss_and_gradients_are_those_of_autograd(world: World, more: tuple[str, ...]) -> None:
    deck = small_deck(*MODULES, "batch.global_size=2", "optimizer.clip=0", *more)
    training = trainer(world, deck)
    weights = {name: each.clone().requires_grad_() for name, each in training.parameters().items()}
    (micro,) = training.step.batches.step(0, 2, 0, 1, 2)
    tokens, targets = micro.fields["tokens"], micro.fields["targets"]
    documents = micro.documents
    assert (documents is None) == ("data.document_mask=true" not in more)
    places = torch.arange(32).expand(2, -1) if documents is None else documents.places
    main, *further = losses(weights, tokens, targets, places)
    predicted = int((targets >= 0).sum())
    loss = (main + WEIGHT * sum(further) / DEPTHS) / predicted
    loss.backward()
    (result,) = training.train(1)
    assert result.loss == pytest.approx(float(main.detach()) / predicted, rel=1e-5)
    assert result.metrics["mtp_loss"] == pytest.approx(
        float(sum(each.detach() for each in further)) / DEPTHS / predicted, rel=1e-5
    )
    gradients = training.gradients()
    assert gradients.keys() == weights.keys()
    for name, found in gradients.items():
        torch.testing.assert_close(found, weights[name].grad, rtol=1e-5, atol=1e-5, msg=name)
