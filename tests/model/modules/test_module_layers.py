"""Modules that change their inputs, buffers, parameters or gradients train correctly, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from tests.engines import Trainer, trainer
from tests.model.modules.module_decks import DECK, plain_loop, whole_parameters

HERE, STEPS = Path(__file__), 3


class Row(nn.Module):
    def __init__(self, hidden: int, habit: str) -> None:
        super().__init__()
        self.norm, self.linear, self.habit = nn.BatchNorm1d(hidden), nn.Linear(hidden, hidden), habit
        if habit == "hooks":
            self.linear.weight.register_hook(lambda gradient: 2 * gradient)
        if habit == "hooks behind":
            assert isinstance(self.norm.weight, nn.Parameter)
            self.norm.weight.register_post_accumulate_grad_hook(_third)

    def forward(self, x: Tensor) -> Tensor:
        if self.habit == "writes":
            with torch.no_grad():
                self.linear.weight.clamp_(-0.05, 0.05)
        y = self.linear(self.norm(x.clone().flatten(0, 1)).view(x.shape).tanh())
        if self.habit == "in place":
            x += y
            return x
        return x + y


def _third(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad /= 3


class Habits(nn.Module):
    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit, self.embed = habit, nn.Embedding(61, 16)
        self.rows = nn.ModuleList(Row(16, habit) for _ in range(3))
        self.head = nn.Linear(16, 61)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for row in self.rows if self.habit == "frozen norms" else ():
            row.get_submodule("norm").eval()
        return self

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        x = self.embed(tokens) * 1.5
        for row in self.rows:
            x = row(x)
        if self.habit == "borrows":
            x = x @ self.rows[0].get_parameter("linear.weight")
        return (self.head(x),)


def build(habit: str = "none") -> nn.Module:
    return Habits(habit)


def deck_of(habit: str, *overrides: str) -> Deck:
    text = DECK.format(
        module=f"{HERE}:build", blocks="rows.*", more='buffers = "first"', arguments=f'habit = "{habit}"'
    )
    return parse_deck(text, ("batch.sequence=8", *overrides))


def assert_steps_of_torch(world: World, habit: str, *overrides: str) -> tuple[Trainer, nn.Module]:
    training = trainer(world, deck_of(habit, *overrides))
    micro = training.deck.batch.micro_size
    figures, model = plain_loop(training, build(habit), whole_parameters(training), STEPS, micro)
    found = [[result.loss, result.grad_norm] for result in training.train(STEPS)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(figures), rtol=1e-5, atol=0.0)
    return training, model


def buffers_of(training: Trainer) -> dict[str, Any]:
    return dict(training.engine.model.module.named_buffers())  # type: ignore[attr-defined]


@pytest.mark.parametrize("habit", ["none", "frozen norms", "hooks", "in place", "borrows"])
@pytest.mark.mpi(max_size=1)
def test_habits_are_those_of_torch(world: World, habit: str) -> None:
    assert_steps_of_torch(world, habit)


@pytest.mark.mpi(max_size=1)
def test_hooks_behind_all_additions_are_called_of_each_micro_batch(world: World) -> None:
    assert_steps_of_torch(world, "hooks behind", "batch.micro_size=8")


@pytest.mark.parametrize("habit", ["none", "hooks", "frozen norms"])
@pytest.mark.mpi(max_size=1)
def test_what_is_computed_again_changes_no_buffer(world: World, habit: str) -> None:
    training, model = assert_steps_of_torch(world, habit, "memory.recompute=full")
    found = buffers_of(training)
    for name, expected in model.named_buffers():
        torch.testing.assert_close(found[name].double(), expected.double(), rtol=1e-5, atol=1e-7)
    seen = 0 if habit == "frozen norms" else STEPS * 4
    assert int(found["rows.0.norm.num_batches_tracked"]) == seen


REFUSED = {
    "in place": (
        ("memory.recompute=full",),
        r"rows.0: changes its input in place, which conflicts with",
    ),
    "writes": (
        ("precision.compute=bf16",),
        r"changes its parameter rows.0.linear.weight .* bfloat16",
    ),
}


@pytest.mark.parametrize("habit", REFUSED)
@pytest.mark.mpi(max_size=1)
def test_what_would_be_lost_is_refused(world: World, habit: str) -> None:
    keys, told = REFUSED[habit]
    with pytest.raises(HpctrainError, match=told):
        trainer(world, deck_of(habit, *keys)).train(1)


CUT = ("layout.zero=3", "communication.transport=mpi")


@pytest.mark.mpi(min_size=2, max_size=2)
def test_of_parameters_that_come_and_go_too(world: World) -> None:
    for habit in ("in place", "writes"):
        with pytest.raises(HpctrainError, match=r"with layout.zero = 3"):
            trainer(world, deck_of(habit, *CUT)).train(1)
    (lost,) = trainer(world, deck_of("borrows", *CUT)).train(1)
    assert lost.skipped or lost.loss != lost.loss
    assert_steps_of_torch(world, "hooks", *CUT)
