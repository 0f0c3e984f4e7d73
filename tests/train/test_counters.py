"""Each counter of a run, changed behind its back, is told of by name and has its value again."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from hpctrain.comm.world import World
from hpctrain.engine.built_engine import Engine
from hpctrain.train.counters import Counters
from hpctrain.train.step import TrainState
from tests.engines import small_deck, trainer

OF_STATE = ("step", "samples", "tokens", "skipped")
ALL = (*OF_STATE, "updates", "loss_scale", "good_steps")


@pytest.fixture
def engine(world: World) -> Engine:
    """One whose loss has a scale."""
    return trainer(world.single_rank_world(), small_deck("precision.compute=fp16")).engine


def place(engine: Engine, state: TrainState, name: str) -> tuple[object, str]:
    """Which object has a counter, under which name."""
    if name in OF_STATE:
        return state, name
    if name == "updates":
        return engine.stage.optimizer, name
    return engine.control.loss_scale, {"loss_scale": "value"}.get(name, name)


def values(engine: Engine, state: TrainState) -> dict[str, object]:
    return {name: getattr(*place(engine, state, name)) for name in ALL}


@pytest.mark.parametrize("name", ALL)
def test_what_changed_is_told_and_restore_changed(engine: Engine, name: str) -> None:
    state = TrainState(step=7, samples=56, tokens=900, skipped=1)
    engine.stage.optimizer.updates, engine.control.loss_scale.good_steps = 6, 3
    counters = Counters(engine, state)
    assert counters.restore_changed() == [] and counters.step == 0  # nothing is known yet
    assert counters.record() == [] and counters.step == 8
    before = values(engine, state)
    assert before["loss_scale"] == 65536.0 and len({*map(str, before.values())}) == len(ALL)
    home, own = place(engine, state, name)
    setattr(home, own, getattr(home, own) + 4096)
    (fault,) = counters.restore_changed()
    assert (fault.kind, fault.name, fault.ranks) == ("memory", name, (0,))
    assert values(engine, state) == before
    assert counters.restore_changed() == []


def test_a_step_that_is_counted_wrong_is_counted_right(engine: Engine) -> None:
    state = TrainState()
    counters = Counters(engine, state)
    state.step = 1
    assert counters.record() == []
    state.step, state.samples = 2 + 64, 16
    (fault,) = counters.record()
    assert fault.name == "step"
    assert asdict(state) == {"step": 2, "samples": 16, "tokens": 0, "skipped": 0, "skipped_in_a_row": 0}
    assert counters.step == 3 and counters.restore_changed() == []


def test_what_something_else_changes_is_no_fault(engine: Engine) -> None:
    """As where a run goes back to an earlier step."""
    state = TrainState(step=5)
    counters = Counters(engine, state)
    counters.record()
    counters.discard()
    state.step = 2
    assert counters.restore_changed() == [] and counters.record() == [] and counters.step == 3
