"""What a run holds that learns by rewards, planned to the byte: critic, reference, the copy that writes.

Tests of plan/auxiliary_memory.py, deck/auxiliary_decks.py, engine/stages/inference_stage.py and
costs/cache_plan.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.deck.auxiliary_decks import CRITIC, MOST_CONCURRENT_TEXTS, REFERENCE, concurrent_texts
from hpctrain.deck.toml_text import deck_text
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.plan import engine as plan_engine
from hpctrain.plan.auxiliary_memory import plan_run_memory
from hpctrain.plan.deck_plan import PlanOptions, plan_deck
from hpctrain.plan.engine import build_within_memory
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.plan.plan_text import plan_text
from hpctrain.post.policy_trainer import make_trainer
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.run import run_deck
from tests.plan.policies import copying, prepare_copying, prepare_judge

EXACT = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "cache_bytes")
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "one": (),
        "16 bits": ("precision.compute=bf16", "memory.recompute=full"),
        "adapters": ('model.adapters={rank=2, alpha=4, targets=["*"]}',),
        "alone": ("objective.kind=grpo", "objective.beta=0", "policy.samples=4"),
    },
    2: {
        "data": ("layout.zero=1",),
        "tensor": ("layout.tensor=2",),
        "sequence": ("layout.tensor=2", "layout.sequence_parallel=true"),
        "zero 3": ("layout.zero=3",),
        "pipeline": ("layout.pipeline=2",),
        "gathered": ("layout.zero=3", "communication.transport=mpi", "run.steps=4"),
        "others": ('policy.critic=["layout.zero=3"]', 'policy.reference=["layout.pipeline=2"]'),
    },
}


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("name", [name for of_size in LAYOUTS.values() for name in of_size])
def test_all_that_a_run_holds_is_planned(world: World, mpi_tmp_path: Path, name: str) -> None:
    keys = LAYOUTS[world.size].get(name)
    if keys is None:
        pytest.skip("of another number of ranks")
    prepare_copying(world, mpi_tmp_path)
    world.groups.scratch._free.clear()  # what earlier tests of this world have left
    world.groups.scratch.bytes = world.groups.scratch.peak_bytes = 0
    assert run_deck(world, mpi_tmp_path / "deck.toml", keys, trainer_factory=make_trainer) == 0
    rows = json.loads((mpi_tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    for predicted, measured in zip(rows["predicted"]["stages"], rows["measured"], strict=True):
        assert {kind: predicted[kind] for kind in EXACT} == {kind: measured[kind] for kind in EXACT}
        assert predicted["activation_bytes"] == pytest.approx(measured["activation_bytes"], rel=0.01)
        messages = 0 if len(rows["measured"]) == 1 else 3 * 2 * 16 * 16 * 4
        assert predicted["buffer_bytes"] == measured["buffer_bytes"] + messages


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_reference_may_lie_on_a_disk(world: World, mpi_tmp_path: Path) -> None:
    """Where it takes no memory, and tells the same, bit for bit; its file goes at the end."""
    prepare_copying(world, mpi_tmp_path)
    found = list[tuple[int, list[tuple[float, ...]]]]()
    for home in ("", ', "memory.optimizer=disk", "memory.parameters=disk"'):
        folder = mpi_tmp_path / f"run{len(found)}"
        keys = (f'policy.reference=["layout.zero=3"{home}]', f"run.dir={folder}")
        assert run_deck(world, mpi_tmp_path / "deck.toml", keys, trainer_factory=make_trainer) == 0
        rows = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        predicted, measured = rows["predicted"]["stages"][0], rows["measured"][0]
        assert predicted["parameter_bytes"] == measured["parameter_bytes"]
        figures = [
            (row["loss"], row["kl"], row["grad_norm"]) for row in read_metrics(folder / "metrics.jsonl")
        ]
        found.append((predicted["beside_bytes"][REFERENCE], figures))
        world.everyone.barrier()
        assert not list(folder.glob("offload/*"))
    assert found[0][0] > found[1][0] == 0
    assert found[0][1] == found[1][1] and found[0][1][1][1] != 0


@pytest.mark.mpi(max_size=1)
def test_a_run_is_refused_for_all_of_it_together(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is there; but for a cache, which does with less."""
    built = []
    monkeypatch.setattr(plan_engine, "library_bytes", lambda: 1000)
    monkeypatch.setattr(plan_engine, "assemble", lambda *_: built.append(1))
    deck = copying(tmp_path, "policy.rollout=64", "policy.epochs=1", "run.steps=8")
    (stage,) = plan_run_memory(deck, 1, 257, 1000).stages
    assert stage.memory.total > stage.required_bytes > plan_memory(deck, 1, 257, 1000).largest.memory.total
    short = copying(tmp_path, *_without(deck.policy.rollout), f"machine.memory={stage.required_bytes - 1}")
    with pytest.raises(HpctrainError, match="does not fit into memory") as refused:
        build_within_memory(short, world, make_mesh(short, world))
    assert refused.value.exit_code == 2 and not built
    enough = copying(tmp_path, *_without(deck.policy.rollout), f"machine.memory={stage.required_bytes}")
    build_within_memory(enough, world, make_mesh(enough, world))
    assert built and world.planned_bytes == stage.required_bytes


def _without(rollout: int | None) -> tuple[str, ...]:
    return (f"policy.rollout={rollout}", "policy.epochs=1", "run.steps=8")


def test_stages_of_other_pipelines_lie_where_their_ranks_do(tmp_path: Path) -> None:
    """Of a critic in two stages, the ranks of a policy in one hold that which has more; and the other way."""
    whole = copying(tmp_path, "model.layers=3", "objective.beta=0", ranks=2)
    cut = copying(
        tmp_path, "model.layers=3", "objective.beta=0", 'policy.critic=["layout.pipeline=2"]', ranks=2
    )
    (alone,), (beside,) = (plan_run_memory(deck, 2, 257).stages for deck in (whole, cut))
    pipeline = copying(tmp_path, "model.layers=3", "objective.beta=0", "layout.pipeline=2", ranks=2)
    stages = plan_memory(pipeline.with_keys(objective={"kind": "reward"}), 2, 257).stages
    held = [stage.memory.parameter + stage.memory.gradient + stage.memory.optimizer for stage in stages]
    assert beside.auxiliary_bytes[CRITIC] == max(held) < alone.auxiliary_bytes[CRITIC] and held[0] != held[1]
    own = plan_run_memory(pipeline, 2, 257).stages
    assert [stage.auxiliary_bytes[CRITIC] for stage in own] == held
    other = copying(
        tmp_path, "model.layers=3", "layout.pipeline=2", 'policy.reference=["layout.pipeline=1"]', ranks=2
    )
    references = [stage.auxiliary_bytes[REFERENCE] for stage in plan_run_memory(other, 2, 257).stages]
    assert references == [plan_memory(whole, 2, 257).largest.memory.parameter] * 2


def test_what_a_plan_says_of_what_stands_beside(tmp_path: Path) -> None:
    deck = tmp_path / "deck.toml"
    deck.write_text(deck_text(copying(tmp_path)), encoding="utf-8")
    told = " ".join(plan_text(plan_deck(deck, 1)).split())
    assert "This includes other models: " in told and " critic " in told and " reference " in told
    assert "keys and values of 8 answers" in told and "Generating and rating answers" in told
    assert " cache " in told and "Reward models" not in told
    plain = plan_deck(
        deck,
        1,
        ["objective.kind=next-token", "objective.beta=", *GIVEN],
        options=PlanOptions(with_savings=False),
    )
    assert " cache " not in plan_text(plain) and "answers" not in plan_text(plain)
    model = plan_deck(deck, 1, [f'policy.reward=["{tmp_path}"]'], options=PlanOptions(with_savings=False))
    assert "Reward models cannot be read on this machine" in " ".join(plan_text(model).split())


GIVEN = ("policy.reward=", "policy.tokens=", "policy.epochs=", "policy.samples=", "policy.rollout=")


def test_texts_of_a_rollout_share_the_cache(tmp_path: Path) -> None:
    many = copying(tmp_path, "policy.rollout=1024", "policy.samples=4", "policy.epochs=1", "run.steps=128")
    few = copying(tmp_path, "policy.rollout=24", "policy.samples=4", "policy.epochs=1", "run.steps=3")
    assert concurrent_texts(many, 2) == MOST_CONCURRENT_TEXTS
    assert [concurrent_texts(few, copies) for copies in (1, 2, 4, 8)] == [24, 12, 8, 4]


@pytest.mark.mpi(max_size=2)
def test_reward_models_are_planned(world: World, mpi_tmp_path: Path) -> None:
    """By their checkpoints, beside the policy or on ranks of their own."""
    prepare_copying(world, mpi_tmp_path)
    judges = []
    for name, layers in (("one", 1), ("two", 3)):
        deck = prepare_judge(world, mpi_tmp_path, name, layers)
        assert run_deck(world, deck, []) == 0
        judges.append(f"{mpi_tmp_path}/{name}")
    keys = [f"policy.reward={json.dumps(['exact-match', *judges])}", "run.steps=2", "run.evaluate_every=0"]
    keys += ["policy.reward_ranks=1", "batch.micro_size=4"] if world.size == 2 else []
    assert run_deck(world, mpi_tmp_path / "deck.toml", keys, trainer_factory=make_trainer) == 0
    rows = json.loads((mpi_tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    for predicted, measured in zip(rows["predicted"]["stages"], rows["measured"], strict=True):
        assert {kind: predicted[kind] for kind in EXACT} == {kind: measured[kind] for kind in EXACT}
    last = rows["predicted"]["stages"][-1]
    held = last["beside_bytes"]["reward model"]
    assert 0 < held < last["parameter_bytes"] or (world.size == 2 and held == last["parameter_bytes"])
