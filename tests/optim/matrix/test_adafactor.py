"""Compare Adafactor with its authors' formulas in NumPy, with torch's, and with its plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.errors import HpctrainError
from hpctrain.optim.matrix.adafactor import Adafactor
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.train.control import StepDecision
from hpctrain.train.memory_ledger import MemoryLedger
from hpctrain.train.resume_check import replaced_optimizer_state
from tests.engines import DECK, LLAMA, small_deck, trainer
from tests.optim.block_rules import DECAY, ten_updates

NAME = "optimizer.name=adafactor"


def rules(momentum: float) -> MatrixRules:
    return MatrixRules(Adafactor(momentum, DECAY))


@pytest.mark.parametrize(
    ("dtype", "momentum"), [(torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.float32, 0.8)], ids=str
)
def test_ten_updates_are_those_of_the_authors(world: World, dtype: torch.dtype, momentum: float) -> None:
    """Compare with algorithms 4 and 5 of arXiv 1804.04235 with a given rate, for each stacked matrix."""
    rows: dict[tuple[str, int], np.ndarray] = {}
    columns: dict[tuple[str, int], np.ndarray] = {}
    means: dict[str, np.ndarray] = {}

    def update(name: str, weights: np.ndarray, gradient: np.ndarray, t: int, rate: float) -> np.ndarray:
        decay = 1 - t**-0.8
        squares = gradient**2 + 1e-30
        matrices = [gradient] if gradient.ndim < 3 else list(gradient.reshape(-1, *gradient.shape[-2:]))
        steps = []
        for number, (matrix, square) in enumerate(
            zip(matrices, squares.reshape(len(matrices), *matrices[0].shape), strict=True)
        ):
            key = name, number
            if matrix.ndim == 1:
                rows[key] = variance = decay * rows.get(key, 0.0) + (1 - decay) * square
            else:
                rows[key] = decay * rows.get(key, 0.0) + (1 - decay) * square.sum(1)
                columns[key] = decay * columns.get(key, 0.0) + (1 - decay) * square.sum(0)
                variance = np.outer(rows[key], columns[key]) / rows[key].sum()
            step = matrix / np.sqrt(variance)
            steps.append(step / max(1.0, np.sqrt((step**2).mean())))
        step = rate * np.stack(steps).reshape(gradient.shape)
        if momentum:
            means[name] = step = momentum * means.get(name, 0.0) + (1 - momentum) * step
        return weights * (1 - DECAY * rate * (gradient.ndim > 1)) - step

    optimizer = ten_updates(world, dtype, rules(momentum), update)
    kinds = {each.kind for each in optimizer.state() if each.kind.startswith("optimizer/")}
    names = {"row", "column", "exp_avg_sq", "updates"} | ({"exp_avg"} if momentum else set())
    assert kinds == {f"optimizer/{name}" for name in names}
    assert all((each.values == 10).all() for each in optimizer.state() if each.kind == "optimizer/updates")
    shapes = {
        each.kind: each.shard.shape
        for each in optimizer.state()
        if each.shard.name == "experts" and each.kind != "model"
    }
    assert shapes["optimizer/row"] == (3, 2, 4, 1) and shapes["optimizer/column"] == (3, 2, 1, 5)


def test_steps_are_those_of_torch(world: World) -> None:
    """Torch multiplies the rate by the size of a parameter and limits it. Both are undone here."""
    rate = 1e-3
    copies: dict[str, torch.nn.Parameter] = {}
    theirs: dict[str, torch.optim.Adafactor] = {}

    def update(name: str, weights: np.ndarray, gradient: np.ndarray, t: int, own: float) -> np.ndarray:
        if gradient.ndim > 2:
            flat = gradient.reshape(-1, *gradient.shape[-2:])
            parts = [each(f"{name}.{index}", part, t) for index, part in enumerate(flat)]
            step = np.stack(parts).reshape(gradient.shape)
        else:
            step = each(name, gradient, t)
        return weights * (1 - DECAY * own * (gradient.ndim > 1)) - own * step

    def each(name: str, gradient: np.ndarray, t: int) -> np.ndarray:
        if name not in copies:
            copies[name] = torch.nn.Parameter(torch.ones(gradient.shape, dtype=torch.float64))
            theirs[name] = torch.optim.Adafactor(
                [copies[name]], lr=rate, eps=(1e-30, 1e-3), weight_decay=0.0, foreach=False
            )
        parameter = copies[name]
        parameter.data.fill_(1.0)
        parameter.grad = torch.from_numpy(gradient)
        theirs[name].step()
        return (1.0 - parameter.detach().numpy()) / min(rate, t**-0.5)

    ten_updates(world, torch.float32, rules(0.0), update)


def test_state_is_a_row_and_a_column_of_each_matrix() -> None:
    """Test a Llama without biases: embedding, head, 2 blocks of 4 + 3 matrices, and 5 norms."""
    deck = small_deck(NAME, "model.family=llama", "model.mlp=48", "model.tied=false")
    matrices = [(61, 32)] * 2 + [(32, 32)] * 8 + [(48, 32)] * 4 + [(32, 48)] * 2
    numbers = sum(n + m + 1 for n, m in matrices) + 5 * (32 + 1)
    assert plan_memory(deck, 1, 61).largest.memory.optimizer == 4 * numbers
    mean = small_deck(NAME, "model.family=llama", "model.mlp=48", "model.tied=false", "optimizer.beta1=0.9")
    elements = sum(n * m for n, m in matrices) + 5 * 32
    assert plan_memory(mean, 1, 61).largest.memory.optimizer == 4 * (numbers + elements)


def test_conflicting_keys_are_refused() -> None:
    for key, sentence in {
        "communication.server.mode=sync": "optimizer.name=adafactor: conflicts with .*servers split",
        "optimizer.beta2=0.9": "optimizer.beta2=0.9: has no effect with optimizer.name",
    }.items():
        with pytest.raises(HpctrainError, match=sentence) as error:
            parse_deck(DECK, [NAME, key])
        assert len(error.value.problems) == 1
    assert small_deck(NAME).value("optimizer.adafactor.beta1") == 0.0
    decks = small_deck(NAME, "optimizer.beta1=0.9"), small_deck(NAME)
    assert not replaced_optimizer_state(decks[1], decks[0], Path("x.h5"))
    with pytest.raises(HpctrainError, match=r"beta1=0.9: x\.h5 holds no momentum \(optimizer"):
        replaced_optimizer_state(*decks, Path("x.h5"))


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_measured_bytes_are_those_of_the_planned_rank(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, zero: int
) -> None:
    """Ranks that own less may hold other amounts."""
    deck = small_deck(*LLAMA, f"optimizer.name={name}", f"layout.zero={zero}")
    training, planned = trainer(world, deck), plan_memory(deck, world.size, 61)
    ledger = MemoryLedger(training, planned, mpi_tmp_path)
    own = ledger.measure()
    monkeypatch.setattr(ledger, "measure", lambda: replace(own, other=(1 << 50) // max(1, own.optimizer)))
    ledger.at_end(StepDecision())
    told, (measured,) = planned.stages[0].memory, ledger.accounts
    for kind in ("parameter", "gradient", "optimizer"):
        assert getattr(measured, kind) == getattr(told, kind), kind
