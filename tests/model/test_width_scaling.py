"""muP: multipliers, deviations and rates in closed form, a model of plain torch that has them, and layouts.

deck/sections/model.py, too.
"""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.checkpoint.same_model import require_same_model
from hpctrain.comm.world import World
from hpctrain.deck.sections.model import MUP_OPTIMIZERS, parametrization_problems
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.model.parameters.initialize import deviation
from hpctrain.model.part import parameter_list
from hpctrain.model.shape import ModelShape
from hpctrain.model.width_scaling import LEARNING_RATE_FACTORS, WidthScaling
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.layout_verification import verify_layout
from hpctrain.train.scaled_down_deck import scale_down_family
from tests.engines import LLAMA, by_rank_0, reference, small_deck, trainer

MUP = ("model.parametrization=mup", "model.base_width=8", "model.base_head_size=2")
"""Of a model of width 32, and heads of 4."""
EXPERTS = (*LLAMA, "model.experts.count=4", "model.experts.mlp=24", "model.tied=false")
LAYOUTS = {
    "tensor": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "zero": ("layout.zero=3",),
    "pipeline": ("layout.pipeline=2",),
    "ring": ("layout.context=2",),
    "exchanged": ("layout.context=2", "layout.context_form=all_to_all", "layout.zero=1"),
    "files": ("memory.optimizer=disk", "layout.zero=2"),
}


@pytest.mark.parametrize("width", [16, 64])
def test_what_a_width_changes_is_what_the_table_says(width: int) -> None:
    """Table 8 of arXiv 2203.03466 and, of routers, table 3; `m` times the width of the base, of 16."""
    model = {"hidden": width, "base_width": 16, "head_size": width // 4, "base_head_size": 4}
    deck = small_deck().with_keys(model={**model, "parametrization": "mup", "initial_std": 0.5, "layers": 8})
    m = width / 16
    shape = ModelShape.of(deck, 61)
    deviations = {"normal": 0.5 / sqrt(m), "residual": 0.125 / sqrt(m), "table": 0.5, "router": 0.5 / m}
    for initial, expected in deviations.items():
        assert deviation(shape, initial) == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]
    adam = {"normal": 1 / m, "residual": 1 / m, "table": 1.0, "router": 1 / m, "ones": 1.0, "zeros": 1.0}
    sgd = {"normal": 1.0, "residual": 1.0, "table": m, "router": 1 / m, "ones": m, "zeros": m}
    root = {"original": 1.0, "adamw-rms": 1 / sqrt(m)}
    muon = {name: {"normal": each, "residual": each, "router": each / sqrt(m)} for name, each in root.items()}
    by = WidthScaling.of(deck)
    of_size = dict.fromkeys(("adamw", "adafactor", "adam-mini", "lion", "schedule-free"), adam)
    for optimizer, rates in {**of_size, "sgd": sgd, **muon}.items():
        assert {initial: by.learning_rate_factor(initial, optimizer) for initial in rates} == rates  # type: ignore[arg-type]
    assert by.of_logits == 1 / m
    # 1 / d, and at the base's d of 4 as usual: a constant of sqrt(4).
    assert by.of_scores / sqrt(width // 4) == pytest.approx(2 / (width // 4), rel=1e-12)


def test_every_optimizer_that_is_allowed_has_rates() -> None:
    assert {*MUP_OPTIMIZERS, "original", "adamw-rms"} == {*LEARNING_RATE_FACTORS, "muon"}


@pytest.mark.parametrize("optimizer", ["adafactor", "adam-mini"])
def test_rates_by_role_reach_what_is_updated_in_blocks(world: World, optimizer: str) -> None:
    """First steps from the same weights, of a width 4 times the base's, beside those at the base."""
    keys = (*EXPERTS, f"optimizer.name={optimizer}", "optimizer.weight_decay=0", "optimizer.clip=0")
    at_base = ("model.parametrization=mup", "model.base_width=32")
    moved = []
    for widths in (at_base, MUP):
        run = trainer(world, small_deck(*keys, *widths, "learning_rate.warmup=0"))
        before = {name: each.detach().clone() for name, each in run.parameters().items()}
        run.train_step()
        moved.append({name: run.parameters()[name].detach() - each for name, each in before.items()})
    base, wide = moved
    for name, step in base.items():
        hidden = step.dim() > 1 and name.startswith("blocks")
        found = wide[name].square().mean().sqrt() / step.square().mean().sqrt()
        assert found == pytest.approx(0.25 if hidden else 1.0, rel=0.15), name


@pytest.mark.parametrize("family", [(), EXPERTS], ids=["gpt2", "mixture"])
def test_parameters_begin_and_are_updated_by_their_role(world: World, family: tuple[str, ...]) -> None:
    """Measured on tensors: spread of values over that of the same model in the standard parametrization."""
    keys = (*family, "model.vocabulary=300")
    ours, usual = (
        {p.shard.name: p for p in parameter_list(build_engine(deck, world, make_mesh(deck, world)).model)}
        for deck in (small_deck(*keys, *MUP), small_deck(*keys))
    )
    assert ours.keys() == usual.keys()
    hidden = 0
    for name, parameter in ours.items():
        matrix = parameter.dim() > 1 and not name.startswith(("embedding", "head"))
        factor = 0.25 if name.endswith("router.weight") else 0.5 if matrix else 1.0
        assert torch.allclose(parameter, usual[name] * factor, rtol=1e-6, atol=0), name
        assert parameter.learning_rate_factor == (0.25 if matrix else 1.0), name
        hidden += matrix
    assert hidden == (2 * (4 + 3) if family else 2 * 6)


def test_what_muon_leaves_to_adamw_has_the_rates_of_that(world: World) -> None:
    """All but attention, of a mixture four times as wide; steps of 0.2 sqrt(width) are half as large. A norm
    that is named stays AdamW's.
    """
    deck = small_deck(
        *EXPERTS, *MUP, "optimizer.name=muon", 'optimizer.muon.matrices=["blocks.*.attention*"]'
    )
    for parameter in parameter_list(build_engine(deck, world, make_mesh(deck, world)).model):
        name = parameter.shard.name
        hidden = parameter.dim() > 1 and name.startswith("blocks")
        expected = 0.5 if hidden and ".attention." in name else 0.25 if hidden else 1.0
        assert parameter.learning_rate_factor == expected, name


@pytest.mark.parametrize("family", [(), EXPERTS, (*LLAMA, "model.query_key_norm=head")], ids=str)
def test_at_the_base_nothing_changes(world: World, family: tuple[str, ...]) -> None:
    base = ("model.parametrization=mup", "model.base_width=32")
    runs = [trainer(world, small_deck(*family, *keys)) for keys in ((), base)]
    losses = [[step.loss for step in run.train(3)] for run in runs]
    assert losses[0] == losses[1]
    plain, scaled = (run.parameters() for run in runs)
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)


class Plain:
    """GPT-2 with the multipliers of muP in double precision: nothing of ours but weights by our names."""

    def __init__(self, weights: dict[str, Tensor], layers: int, heads: int, m: float, head_m: float) -> None:
        self.w = {name: each.detach().double().requires_grad_() for name, each in weights.items()}
        self.layers, self.heads, self.m, self.head_m = layers, heads, m, head_m

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        w, (batch, length) = self.w, tokens.shape
        x = w["embedding.tokens.weight"][tokens] + w["embedding.positions.weight"][:length]
        for block in (f"blocks.{i}" for i in range(self.layers)):
            y = self.norm(x, f"{block}.attention_norm")
            q, k, v = (
                self.linear(y, f"{block}.attention.{part}")
                .view(batch, length, self.heads, -1)
                .transpose(1, 2)
                for part in ("query", "key", "value")
            )
            # 1 / d, times what makes it 1 / sqrt(d) where d is that of the base.
            scores = q @ k.transpose(2, 3) * sqrt(q.shape[-1] / self.head_m) / q.shape[-1]
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
            y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
            x = x + self.linear(y, f"{block}.attention.output")
            y = self.linear(self.norm(x, f"{block}.feed_forward_norm"), f"{block}.feed_forward.up")
            x = x + self.linear(functional.gelu(y, approximate="tanh"), f"{block}.feed_forward.down")
        logits = self.norm(x, "final_norm") @ w["embedding.tokens.weight"].t() / self.m
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].t() + self.w[f"{name}.bias"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_steps_are_those_of_a_model_of_plain_torch(world: World, optimizer: str) -> None:
    """Four times as wide as the base, with rates by parameter and decay by the rate of the step."""
    decay, keys = 0.1, (*MUP, f"optimizer.name={optimizer}", "optimizer.clip=0")
    # Of keys' biases the gradient is nothing but rounding, which a larger epsilon hides.
    keys += ("optimizer.epsilon=1e-6",) if optimizer == "adamw" else ()
    ours = trainer(world, small_deck(*keys, f"optimizer.weight_decay={decay}"))
    plain = Plain(ours.parameters(), layers=2, heads=8, m=4.0, head_m=2.0)
    groups: list[dict[str, Any]] = []
    for name, values in plain.w.items():
        hidden = values.dim() == 2 and not name.startswith("embedding")
        factor = {"adamw": 1 / 4 if hidden else 1.0, "sgd": 1.0 if hidden else 4.0}[optimizer]
        groups.append({"params": [values], "factor": factor, "decay": decay * (values.dim() == 2)})
    theirs = (
        torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
        if optimizer == "adamw"
        else torch.optim.SGD(groups, weight_decay=0.0)
    )
    for number in range(3):
        (micro,) = ours.step.batches.step(number * 8, 8, 0, 1, 8)
        loss = plain.loss(micro.tokens, micro.targets)
        theirs.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        found = ours.train_step()
        assert found.loss == pytest.approx(loss.item(), rel=1e-6)
        for group in theirs.param_groups:
            group["lr"] = found.learning_rate * group["factor"]
            group["params"][0].data.mul_(1 - found.learning_rate * group["decay"])
        theirs.step()
    for name, values in ours.parameters().items():
        wanted = plain.w[name].detach().numpy()
        np.testing.assert_allclose(values.detach().numpy(), wanted, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [(), EXPERTS], ids=["gpt2", "mixture"])
def test_layouts_train_the_model_of_one_rank(world: World, layout: str, family: tuple[str, ...]) -> None:
    deck = small_deck(*MUP, *family, *LAYOUTS[layout])
    alone = by_rank_0(world, lambda: [step.loss for step in reference(world, deck).train(3)])
    run = trainer(world, deck)
    assert [step.loss for step in run.train(3)] == pytest.approx(alone, rel=1e-5)
    run.engine.close()


@pytest.mark.mpi(min_size=2, max_size=2)
def test_the_miniature_of_a_layout_is_as_many_times_wider(world: World) -> None:
    deck = small_deck(*MUP, "layout.zero=2", "optimizer.name=sgd")
    small = scale_down_family(deck)
    assert WidthScaling.of(small) == WidthScaling(4.0, 2.0)
    assert "layout check passed" in verify_layout(deck, world, make_mesh(deck, world))


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_run_goes_on_from_another_layout(world: World, mpi_tmp_path: Path) -> None:
    """Buckets that are laid out by rates on the one, cut into slices on the other."""
    decks = [small_deck(*MUP), small_deck(*MUP, "layout.zero=3")]
    through = trainer(world, decks[0])
    losses = [step.loss for step in through.train(4)]
    first = trainer(world, decks[0])
    first.train(2)
    checkpoints = Checkpoints(decks[0].with_keys(run={"dir": str(mpi_tmp_path)}), first.engine, {})
    checkpoints.save(first.state)
    checkpoints.finish()
    second = trainer(world, decks[1])
    path = next(mpi_tmp_path.rglob("*.h5"))
    second.state = Checkpoints(decks[1], second.engine, {}).restore(path)
    assert [step.loss for step in second.train(2)] == pytest.approx(losses[2:], rel=1e-6)


def test_a_run_goes_on_in_the_same_parametrization_alone() -> None:
    before, path = small_deck(*MUP), Path("step.h5")
    require_same_model(before, before, path)
    others = {
        (MUP[0], "model.base_width=16", MUP[2]): "model.base_width=16: step.h5 was trained with 8, ",
        (): 'was trained with "mup", ',
    }
    for keys, sentence in others.items():
        with pytest.raises(HpctrainError, match=sentence):
            require_same_model(small_deck(*keys), before, path)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (("model.base_width=8",), 'has no effect without model.parametrization = "mup" (leave it out)'),
        (("model.base_head_size=8",), 'has no effect without model.parametrization = "mup"'),
        (MUP[:1], "learning_rate.peak was tuned (with 32, the value of model.hidden, muP changes nothing)"),
        (MUP[:2], "(use 4 if wider models have more heads, 1 if they have wider heads)"),
        ((MUP[0], "model.base_width=32", MUP[2]), "must be model.head_size = 4 with model.base_width"),
        (
            (*MUP, "optimizer.name=muon", 'optimizer.muon.matrices=["*"]'),
            "rate of embedding.tokens.weight has no known",
        ),
        (
            (*MUP, *LLAMA, "optimizer.name=sgd", "model.query_key_norm=head"),
            'no known rule (use "all" or "none")',
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(keys: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(HpctrainError) as error:
        small_deck(*keys)
    (problem,) = error.value.problems
    assert sentence in problem


def test_an_optimizer_of_which_no_rule_is_known_is_refused() -> None:
    deck = small_deck(*MUP)
    other = deck.with_keys(optimizer={"name": "another"})
    (problem,) = parametrization_problems(other)
    assert (problem.key, problem.sentence.startswith("is unsupported")) == ("optimizer.name", True)
