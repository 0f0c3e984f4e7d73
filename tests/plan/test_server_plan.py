"""What servers and workers will hold and send, against what they hold.

Tests of plan/server_plan.py and engine/layout/server_roles.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.engine.layout.server_roles import ServerRoles
from hpctrain.plan.forms import FormPlanner
from hpctrain.plan.server_plan import plan_served, served_bytes
from hpctrain.train.memory_ledger import MemoryLedger
from tests.train.server.served import served, served_deck

KINDS = ("parameter", "gradient", "optimizer", "activation")


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_each_role_holds_what_is_planned(world: World, tmp_path: Path, compute: str) -> None:
    """A worker no state of an optimizer, a server its slices alone, which are all of the model."""
    deck = served_deck("async", 2, f"precision.compute={compute}")
    planned = plan_served(deck, world.size, 61)
    assert planned.ranks_per_stage == [2, 2] and planned.row()["ranks"] == 4
    training = served(world, deck, masked=0.0)
    training.train_step()
    engine, stage = training.engine, training.stage
    held = MemoryLedger(training, planned, tmp_path).measure()
    expected = planned.stages[stage].memory
    for kind in KINDS:
        assert held.kinds()[kind] == expected.kinds()[kind], kind
    assert (expected.optimizer == 0) == (training.worker is not None)
    here = sum(bucket.owned_values.numel() for bucket in engine.stage.buckets) if stage == 0 else 0
    slices = sum(world.everyone.all_gather_object(here))
    assert slices == sum(bucket.length for bucket in engine.stage.buckets) or stage == 1


def test_bytes_of_a_step_by_hand() -> None:
    """Of 100 elements in bf16 with fp32 gradients, two servers and three workers."""
    letters = 2 * (10 + 3) + 4
    assert served_bytes(100, 3, 2, 4, 2) == 3 * (100 * 6 + 8 * letters)
    rows = 3 * (7 * (16 * 6 + 8) + 8 * 2 * 2)
    assert served_bytes(100, 3, 2, 4, 2, rows=[(7, 16)]) == 3 * (100 * 6 + 8 * letters) + rows


def test_a_plan_compares_servers_with_as_many_data_ranks_as_workers() -> None:
    deck = served_deck("sync", 1)
    planner = FormPlanner(4, 61, 1, None, lambda _: 0.0)
    plan = planner.plan(deck)
    assert plan.exact_traffic is not None
    elements = plan_served(deck, 4, 61).parameters_total
    server, worker = plan.form_traffic.stages
    assert server.payload() == {"server": 3 * 8 * elements} and worker.payload() == {"server": 8 * elements}
    (pushed, pulled) = server.steps[0]
    # All pulls pass the server's link one after the other, and behind them the push of who pulled last.
    assert (pushed.traffic.received, pulled.traffic.sent) == (4 * elements, 3 * 4 * elements)
    half = planner.plan(deck.with_keys(precision={"compute": "bf16"}))
    (pushed, pulled) = half.form_traffic.stages[0].steps[0]
    assert (pushed.traffic.received, pulled.traffic.sent) == (3 * 4 * elements, 2 * elements)
    assert plan.exact_traffic.largest.payload()["data x context"] >= 2 * 4 * elements


def test_the_first_ranks_serve() -> None:
    roles = ServerRoles.of(served_deck("stale", 2), 5)
    assert (roles.servers, roles.workers) == (2, 3)
    assert [roles.serves(rank) for rank in range(5)] == [True, True, False, False, False]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_what_makes_no_update_refuses_one(world: World) -> None:
    training = served(world, served_deck("sync", 1))
    if training.worker is not None:
        with pytest.raises(AssertionError, match="updates no parameters"):
            training.engine.stage.optimizer.step(0.1, 1.0)
        gradients = training.engine.stage.buckets[0].gradients
        before = gradients.clone()
        training.engine.stage.synchronizer.end_step(True, 1.0)
        assert torch.equal(gradients, before) and list(training.engine.state()) == []
