"""Runs that do not fit into memory: refused by their plan, or ended in one sentence.

Tests of plan/engine.py and plan/memory_demand.py.
"""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.deck.sections.machine import Machine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.host import memory as host_memory
from hpctrain.plan import engine as plan_engine
from hpctrain.plan import memory_demand
from hpctrain.plan.engine import build_within_memory
from hpctrain.plan.memory_demand import RankDemand, largest_demand, process_limits, require_memory
from tests.engines import DECK, small_deck

Launch = Callable[..., subprocess.CompletedProcess[str]]


def limit(root: Path, size: int, monkeypatch: pytest.MonkeyPatch, free: int = 10**9) -> None:
    """A system of 1 TB whose cgroup has a limit."""
    for name, text in {
        "proc/meminfo": f"MemTotal: {10**9} kB\nMemAvailable: {free} kB\n",
        "proc/self/mountinfo": "31 24 0:28 / /cgroups rw - cgroup2 cgroup2 rw\n",
        "proc/self/cgroup": "0::/job\n",
        "cgroups/job/memory.max": f"{size}\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(host_memory, "ROOT", root)


@pytest.mark.mpi(max_size=2)
def test_a_run_that_does_not_fit_is_refused_before_it_is_built(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    assemble = plan_engine.assemble
    monkeypatch.setattr(plan_engine, "assemble", lambda *all_: built.append(assemble(*all_)) or built[-1])
    limit(tmp_path, 100_000_000, monkeypatch)
    deck = small_deck()
    with pytest.raises(HpctrainError) as refused:
        build_within_memory(deck, world, make_mesh(deck, world))
    (told,) = refused.value.problems
    assert refused.value.exit_code == 2
    assert "does not fit into memory" in told
    assert "which has 100 MB for the cgroup /job" in told
    assert "--set machine.memory=SIZE overrides" in told
    assert "nodes" not in told  # the libraries alone take more than a node has
    assert "to reduce it" not in told
    assert not built
    deck = small_deck("machine.memory=50 GB")
    engine, plan = build_within_memory(deck, world, make_mesh(deck, world))
    assert built == [engine]
    assert world.planned_bytes == plan.stages[0].memory.total


@pytest.mark.mpi(max_size=1)
def test_libraries_count_with_what_a_choice_of_kernels_leaves(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def recorded(name: str) -> None:
        function = getattr(plan_engine, name)
        monkeypatch.setattr(plan_engine, name, lambda *given: calls.append(name) or function(*given))

    recorded("choose_kernels")
    recorded("library_bytes")
    deck = small_deck()
    engine, _ = build_within_memory(deck, world, make_mesh(deck, world))
    engine.close()
    assert calls == ["choose_kernels", "library_bytes"]


@pytest.mark.mpi(max_size=2)
def test_advice_names_what_helps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    plan_memory = plan_engine.plan_run_memory
    monkeypatch.setattr(
        plan_engine, "plan_run_memory", lambda *all_, **keys: planned.append(1) or plan_memory(*all_, **keys)
    )
    monkeypatch.setattr(plan_engine, "library_bytes", lambda: 10)
    deck = small_deck("machine.memory=1 kB", "model.layers=4")

    def refusal() -> str:
        planned.clear()
        with pytest.raises(HpctrainError) as refused:
            build_within_memory(deck, world, make_mesh(deck, world))
        return refused.value.problems[0]

    told = refusal()
    assert "--set memory.recompute=full" in told and " or more nodes; --set machine.memory" in told
    monkeypatch.setattr(plan_engine, "ADVICE_SECONDS", 0.0)
    assert "; to reduce it, use more nodes; --set machine.memory=SIZE overrides" in refusal()
    assert len(planned) == 1
    monkeypatch.setattr(plan_engine, "library_bytes", lambda: 10**9)
    assert "to reduce it" not in refusal()


@pytest.mark.mpi(min_size=2, max_size=2)
def test_ranks_of_a_node_count_together(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that one rank would keep, two do not."""
    needed = 10**9
    monkeypatch.setattr(memory_demand, "shared_resident_bytes", lambda: 10**8)
    limit(tmp_path, 1_900_000_000, monkeypatch)
    require_memory(world, small_deck().machine, "deck", needed, str)
    limit(tmp_path, 1_899_999_999, monkeypatch)
    with pytest.raises(HpctrainError, match=r"2 ranks need 1\.9 GB"):
        require_memory(world, small_deck().machine, "deck", needed, str)


@pytest.mark.mpi(max_size=2)
def test_memory_that_others_hold_is_warned_of(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit(tmp_path, 10**12, monkeypatch, free=10)
    monkeypatch.setattr(logging.getLogger("hpctrain"), "propagate", True)
    require_memory(world, small_deck().machine, "deck", 10**10, str)
    assert ("has only 10.2 kB of its memory free" in caplog.text) == (world.rank == 0)


@pytest.fixture
def deck(tmp_path: Path, launch: Launch) -> Path:
    (tmp_path / "text.txt").write_text("some words to train on, " * 400)
    assert launch(0, "-m", "hpctrain", "prepare", "none", "text.txt").returncode == 0
    (tmp_path / "deck.toml").write_text(DECK.replace("vocabulary = 61\n", ""))
    return tmp_path / "deck.toml"


def test_a_run_that_no_node_has_the_memory_for_leaves_with_2(deck: Path, launch: Launch) -> None:
    sets = ("model.hidden=65536", "model.layers=4")
    done = launch(
        2, "-m", "hpctrain", "run", deck, *(part for each in sets for part in ("--set", each)), timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("does not fit into memory") == 1
    assert "Traceback" not in done.stderr
    assert not (deck.parent / "runs").exists()


def test_the_plan_of_a_tiny_model_is_what_its_run_held(deck: Path, launch: Launch) -> None:
    """Neither the measurement of the peak rate nor the first checkpoint decides it."""
    done = launch(0, "-m", "hpctrain", "run", deck, "--set", "machine.peak_flops=", timeout=120, cold=True)
    assert done.returncode == 0, done.stderr
    (path,) = (deck.parent / "runs").glob("*/plan.json")
    found = json.loads(path.read_text())
    (measured,) = found["measured"]
    assert found["predicted"]["stages"][0]["total_bytes"] == pytest.approx(measured["total_bytes"], rel=0.05)


LIMITED = """
import os, re, resource
from hpctrain.cli.main import main
from hpctrain.plan import engine as plan_engine

assemble = plan_engine.assemble

def limited(deck, world, *rest):
    if world.rank == world.size - 1:
        have = int(re.search(r"VmData:\\\\s+(\\\\d+) kB", open("/proc/self/status").read())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (have + (8 << 20), resource.RLIM_INFINITY))
    return assemble(deck, world, *rest)

plan_engine.assemble = limited
main()
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [0, 2])
def test_memory_that_ends_all_the_same_is_one_sentence(deck: Path, launch: Launch, ranks: int) -> None:
    (deck.parent / "limited.py").write_text(LIMITED.replace("\\\\", "\\"))
    done = launch(ranks, "limited.py", "run", deck, "--set", "model.hidden=1024", timeout=120, cold=True)
    assert done.returncode == 70, done.stderr
    assert "Traceback" not in done.stderr
    rank, size = (1, 2) if ranks else (0, 1)
    assert done.stderr.count("ran out of memory: it used ") == 1
    assert f"rank {rank} of {size} on " in done.stderr
    assert " (planned: " in done.stderr and ", and an allocation failed (" in done.stderr


@pytest.mark.parametrize(("names", "ranks"), [("ab", 1), ("aa", 2)])
def test_gpus_are_told_apart_by_their_uuid(names: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sees one GPU, which has the number 0."""
    monkeypatch.setattr(memory_demand, "gpu_memory_bytes", lambda _: 80)
    claims = []
    for name in names:
        monkeypatch.setattr(memory_demand, "gpu_identity", lambda _, name=name: name)
        claims.append(RankDemand(0, "node", 50, 0, process_limits(Machine(), torch.device("cuda", 0), {})))
    demand = largest_demand(claims)
    assert demand is not None
    assert (demand.ranks, demand.needed, demand.limit.text) == (ranks, 50 * ranks, "on GPU 0")
