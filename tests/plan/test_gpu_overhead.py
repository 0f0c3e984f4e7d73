"""What a plan for GPUs adds to tensors, against closed forms, and what a chosen layout leaves free.

Tests of plan/gpu_overhead.py, and of train/gpu_memory.py beside it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.comm.world import World
from hpctrain.costs.memory_account import GPU_MEMORY_KINDS, MemoryAccount
from hpctrain.host.memory import MemoryLimit
from hpctrain.plan.gpu_overhead import CONTEXT_BYTES, communicator_bytes
from hpctrain.plan.memory_demand import MemoryDemand
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.plan.plan_text import memory_table
from hpctrain.plan.search.search import _fits
from hpctrain.train import gpu_memory
from hpctrain.train.gpu_memory import warn_of_missing_memory
from hpctrain.units import format_bytes
from tests.engines import small_deck, trainer

MIB = 1 << 20


@pytest.mark.parametrize(
    ("axis", "ranks", "expected"),
    [
        ("data", 1, 0),
        ("data", 2, 24 * 12),
        ("data", 8, 24 * 2 * 12 + 8 * 32),
        ("data", 512, 24 * 2 * 12 + 8 * 32),
        ("pipeline", 2, 24 * 12 + 8 * 12),
        ("pipeline", 16, 24 * 2 * 12 + 8 * 32 + 8 * 2 * 12),
        ("expert", 1, 0),
        ("expert", 8, 24 * 2 * 12 + 8 * 32 + 32 * 7 * 12),
    ],
)
def test_buffers_of_a_communicator(axis: str, ranks: int, expected: int) -> None:
    assert communicator_bytes(planned_group((axis,), 0, ranks, Ledger())) == expected * MIB


def test_only_a_plan_for_gpus_counts_what_no_tensor_takes() -> None:
    layout = "layout.pipeline=2", "batch.global_size=16"
    cpu, gpu = (plan_memory(small_deck(*layout, f"run.device={d}"), 8, 61) for d in ("cpu", "cuda"))
    assert not any(f"{kind}_bytes" in json.dumps(cpu.row()) for kind in GPU_MEMORY_KINDS)
    assert "NCCL" not in " ".join(memory_table(cpu))
    data = 24 * 2 * 12 + 4 * 32  # of four ranks; data x context uses the same communicator
    account = gpu.stages[0].memory
    assert account.runtime == CONTEXT_BYTES + (data + 24 * 12 + 8 * 12) * MIB
    assert account.fragmented == (account.activation + account.buffer + account.other) // 32
    assert account.row()["runtime_bytes"] == account.runtime
    table = " ".join(memory_table(gpu))
    assert "CUDA and NCCL" in table and format_bytes(account.runtime) in table
    staged = small_deck(*layout, "run.device=cuda", "communication.transport=mpi")
    assert plan_memory(staged, 8, 61).stages[0].memory.runtime == CONTEXT_BYTES


def test_a_chosen_layout_leaves_a_reserve() -> None:
    demand = MemoryDemand("a node", 1, 97, MemoryLimit("GPU 0", 100, "on GPU 0"), 0.05)
    assert demand.fits and not _fits(demand) and "5% of it reserved" in str(demand)
    assert _fits(replace(demand, needed=95)) and "reserved" not in str(replace(demand, needed=95))
    assert _fits(replace(demand, reserve=0.0))


@pytest.mark.mpi(max_size=1)
def test_a_gpu_with_less_memory_than_planned_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = trainer(world, small_deck()).engine.mesh
    planned = MemoryAccount(parameter=7_000_000_000, runtime=2_000_000_000)
    with caplog.at_level(logging.WARNING, "hpctrain"):
        warn_of_missing_memory(world, mesh, planned)
        monkeypatch.setattr(gpu_memory, "on_host", lambda _: False)
        for available in (7_000_000_000, 6_000_000_000):
            monkeypatch.setattr(gpu_memory, "available_bytes_of_gpu", lambda _, size=available: size)
            warn_of_missing_memory(world, mesh, planned)
    (record,) = caplog.records
    assert "has 6 GB for tensors" in record.getMessage() and "needs 7 GB" in record.getMessage()
