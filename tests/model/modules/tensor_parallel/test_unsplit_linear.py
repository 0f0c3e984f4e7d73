"""Linear layers of a module that hpctrain computes: all ways to call them, and gradients inside a pass.

Also what engine/choices/kernel_choice.py and parallel/matmul.py do with such layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.costs.layer_bytes.linear_bytes import planned_converted_bytes
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value
from hpctrain.engine.choices.measured_products import products_of
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.model.part import converted_bytes
from hpctrain.parallel.kernels.timing import MatmulPass
from hpctrain.plan.engine import build_within_memory
from hpctrain.plan.memory_plan import plan_memory
from tests.engines import by_rank_0, trainer
from tests.model.modules.module_decks import DECK, loss_of, plain_loop, whole_parameters
from tests.model.modules.pipeline.test_stage_forward import of_all_stages

HERE, STEPS = Path(__file__), 4


class Field(nn.Module):
    """Goes along the force of an energy, which is differentiated within its forward pass, and by a second
    one, of which the force alone is used; one of its layers is used by its weight, too.
    """

    def __init__(self, hidden: int, forces: bool) -> None:
        super().__init__()
        self.forces = forces
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, 3, bias=False)
        self.again = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        moved = self.again(x.tanh())
        moved += functional.linear(x, self.again.weight)  # in place in the output of a layer
        if not self.forces:
            return x - 0.3 * self.down(torch.sin(self.up(x))).square().sum(-1, keepdim=True) + moved
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.down(torch.tanh(self.up(at))).square().sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=True)
            other = self.down(torch.sin(self.up(at))).square().sum()
            (told,) = torch.autograd.grad(other, at)
        return x - 0.3 * force + 0.1 * told + moved


class Inner(nn.Module):
    def __init__(self, hidden: int, forces: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, hidden)
        self.fields = nn.ModuleList(Field(hidden, forces) for _ in range(3))
        self.lone, self.head = nn.Linear(hidden, hidden), nn.Linear(hidden, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(tokens)
        x = hidden
        for field in self.fields:
            x = field(x)
        of_one, of_none = self.lone(x[0, 0]), self.lone(x[:, :0]).sum()  # no rows, or none of rows
        return {"logits": self.head(functional.normalize(x, dim=-1) * 3 + of_one) + of_none, "hidden": hidden}


def inner(hidden: int = 16, forces: bool = True) -> nn.Module:
    return Inner(hidden, forces)


def of_logits(outputs: Any, targets: Tensor) -> Tensor:
    return loss_of((outputs["logits"],), targets)


def penalty(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss that has a gradient in it."""
    return _penalized(outputs, batch["targets"], True), (batch["targets"] >= 0).sum()


def slope(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss that looks at a gradient."""
    return _penalized(outputs, batch["targets"], False), (batch["targets"] >= 0).sum()


def _penalized(outputs: dict[str, Tensor], targets: Tensor, differentiated: bool) -> Tensor:
    logits, hidden = outputs["logits"], outputs["hidden"]
    (steep,) = torch.autograd.grad(
        logits.square().sum(), hidden, retain_graph=True, create_graph=differentiated
    )
    return of_logits(outputs, targets) + 1e-3 * (steep * (1 if differentiated else hidden)).square().sum()


def of_penalty(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return _penalized(outputs, targets, True)


def of_slope(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return _penalized(outputs, targets, False)


def deck_of(*overrides: str) -> Deck:
    return parse_deck(
        DECK.format(module=f"{HERE}:inner", blocks="fields.*", more="", arguments=""), overrides
    )


def assert_steps_of_torch(
    world: World, *overrides: str, loss: Callable[[Any, Tensor], Tensor] = of_logits
) -> None:
    training = trainer(world, deck_of("batch.sequence=8", *overrides))
    weights = of_all_stages(world, whole_parameters(training))
    micro = training.deck.batch.micro_size
    figures, model = plain_loop(
        training, inner(**(training.deck.model.arguments or {})), weights, STEPS, micro, loss
    )
    found = [[result.loss, result.grad_norm] for result in training.train(STEPS)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(figures), rtol=1e-5, atol=0.0)
    expected = dict(model.named_parameters())
    for name, value in of_all_stages(world, whole_parameters(training)).items():
        theirs = expected[name].detach()
        assert (value - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name


PENALTY, SLOPE = f"model.loss={HERE}:penalty", f"model.loss={HERE}:slope"


@pytest.mark.parametrize("more", [(), ("memory.recompute=full",)])
@pytest.mark.mpi(max_size=1)
def test_gradients_within_a_pass_are_those_of_torch(world: World, more: tuple[str, ...]) -> None:
    assert_steps_of_torch(world, *more)
    assert_steps_of_torch(world, "model.arguments={forces=false}", *more)
    assert_steps_of_torch(world, PENALTY, *more, loss=of_penalty)
    assert_steps_of_torch(world, SLOPE, *more, loss=of_slope)


SPREAD = {
    "zero 1": ("layout.zero=1", "memory.recompute=full"),
    "zero 3": ("layout.zero=3", "communication.transport=mpi"),
}


@pytest.mark.parametrize("layout", SPREAD)
@pytest.mark.mpi(min_size=2, max_size=2)
def test_they_are_so_on_every_layout(world: World, layout: str) -> None:
    assert_steps_of_torch(world, *SPREAD[layout])
    assert_steps_of_torch(world, SLOPE, *SPREAD[layout], loss=of_slope)
    if layout == "zero 1":
        assert_steps_of_torch(world, PENALTY, *SPREAD[layout], loss=of_penalty)
        return
    training = trainer(world, deck_of(PENALTY, *SPREAD[layout]))
    with pytest.raises(HpctrainError, match=r"does not support second derivatives.*layout.zero = 2"):
        training.train(1)


STAGES = {
    "1f1b": ("layout.pipeline=2",),
    "zb-h1": ("layout.pipeline=2", "layout.schedule=zb-h1"),
    "zb-v": ("layout.pipeline=2", "layout.schedule=zb-v"),
}


@pytest.mark.parametrize("layout", STAGES)
@pytest.mark.mpi(min_size=2, max_size=2)
def test_what_is_used_in_two_ways_waits_for_both(world: World, layout: str) -> None:
    assert_steps_of_torch(world, "model.arguments={forces=false}", *STAGES[layout])


@pytest.mark.mpi(min_size=2, max_size=2)
def test_no_gradient_is_taken_through_what_is_split(world: World) -> None:
    plan = 'model.plan={"fields.*.up" = "column", "fields.*.down" = "row"}'
    training = trainer(world, deck_of("layout.tensor=2", plan, "model.blocks="))
    with pytest.raises(HpctrainError, match="split parameters have no gradient inside the module"):
        training.train(1)


THROUGH = ("precision.compute=bf16", "machine.products=fp32")
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}


def gpt2(*overrides: str) -> Deck:
    arguments = "\n".join(f"{key} = {toml_value(value)}" for key, value in GPT2.items())
    text = DECK.format(
        module="transformers:GPT2LMHeadModel", blocks="transformer.h.*", more="", arguments=arguments
    )
    return parse_deck(text, overrides)


@pytest.mark.mpi(max_size=1)
def test_converted_matrices_are_planned(world: World) -> None:
    one, deck = world.single_rank_world(), gpt2(*THROUGH)
    engine, plan = build_within_memory(deck, one, make_mesh(deck, one))
    matrices = [32 * 96, 32 * 32, 32 * 128, 128 * 32] * 2 + [61 * 32]
    without = plan_memory(gpt2(THROUGH[0], "machine.products=library"), 1, 61)
    planned = plan.largest.memory.parameter - without.largest.memory.parameter
    assert planned == planned_converted_bytes(engine.model.layers) == 4 * sum(matrices)
    training = trainer(one, deck)
    by_library = trainer(one, gpt2(THROUGH[0], "machine.products=library"))
    found, expected = ([step.loss for step in each.train(3)] for each in (training, by_library))
    assert found != expected
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0.0)
    assert converted_bytes(training.engine.model.layers) == 4 * sum(matrices)


@pytest.mark.mpi(max_size=1)
def test_what_is_measured_is_what_is_multiplied(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.engine.choices.measured_products.LEAST_FLOPS", 0)
    deck = gpt2()
    found = products_of(deck, make_mesh(deck, world.single_rank_world()), world.device)
    # Conv1D has its matrices transposed, and what is forward of one is an input gradient of that.
    sizes = [(32, 96), (32, 32), (32, 128), (128, 32), (61, 32)]
    passes = ("forward", "input_gradient", "weight_gradient")
    assert {*found} == {MatmulPass(kind, 64, *size) for size in sizes for kind in passes}


def vision(**config: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(2), Rows(), nn.Flatten(1), nn.Linear(5 * 12, 3))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_rows = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.of_rows(x)
        return rows


class Pictures:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        picture = torch.rand(5, 4, 4, generator=torch.Generator().manual_seed(index))
        return {"picture": picture, "kind": picture.sum().long() % 3}


def kinds(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return functional.cross_entropy(outputs, batch["kind"], reduction="sum"), len(outputs)


PICTURES = f"""
[run]
steps = 3
[model]
module = "{HERE}:vision"
loss = "{HERE}:kinds"
[data]
dataset = "{HERE}:Pictures"
inputs = ["picture"]
[batch]
global_size = 8
micro_size = 4
"""


@pytest.mark.mpi(max_size=1)
def test_rows_are_those_of_the_samples(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.engine.choices.measured_products.LEAST_FLOPS", 0)
    deck = parse_deck(PICTURES)
    found = by_rank_0(
        world, lambda: products_of(deck, make_mesh(deck, world.single_rank_world()), world.device)
    )
    assert {each[1:] for each in found} == {(20, 12, 16), (4, 3, 60)}
