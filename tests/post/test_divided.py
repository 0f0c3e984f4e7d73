"""Runs whose models have ranks of their own: the same run, which goes on divided otherwise.

Tests of engine/layout/model_placement.py, plan/partitioned_engine.py and deck/sections/rank_partition.py by
whole runs; `tests/post/test_plain_policy.py` compares what such ranks compute with plain torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.evaluation_deck import evaluation_deck
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.post.policy_trainer import make_trainer
from hpctrain.train.run import resume, run_deck
from tests.data.chats import write_rows
from tests.data.preparing import prepare_rows
from tests.post.policies import policy, write_deck, write_prompts
from tests.post.test_policy import rows_of

KEYS = [
    "checkpoint.every=2",
    "checkpoint.keep=9",
    "run.evaluate_every=2",
    "machine.products=library",
    "batch.micro_size=8",
]
APART = ["policy.critic_ranks=1", "policy.reference_ranks=1", "policy.reward_ranks=1"]
TOGETHER = ["policy.critic_ranks=policy", "policy.reference_ranks=policy", "policy.reward_ranks=policy"]


def by_rank_0(world: World, verb: Callable[[World], int]) -> None:
    """What rank 0 does alone; the others wait."""
    with world.agreement():
        assert world.rank or verb(world.single_rank_world()) == 0


def judge(world: World, folder: Path) -> Path:
    """The run of a reward model that has seen a few pairs."""
    if world.rank == 0:
        rows = [{"prompt": f"{word}>", "chosen": word, "rejected": word[::-1]} for word in ("abc", "fde")] * 8
        source = write_rows(folder / "pairs.jsonl", rows)
        prepare_rows(
            world.single_rank_world(), folder / "pairs.h5", [source], kind="preferences", template="raw"
        )
    world.everyone.barrier()
    deck = write_deck(world, folder, "judge", 'kind = "reward"\n', tokens="pairs", steps=2, size=8)
    by_rank_0(world, lambda alone: run_deck(alone, deck, ["data.validation=0"]))
    return folder / "judge"


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("mode", ["collective", "background"])
def test_a_divided_run_is_the_same_run(world: World, mpi_tmp_path: Path, mode: str) -> None:
    """To the bit where the policy has one rank, whoever has the other models, also when it goes on."""
    write_prompts(world, mpi_tmp_path)
    reward = f'policy.reward=["exact-match", "{judge(world, mpi_tmp_path)}"]'
    more = 'epochs = 2\ncritic = ["optimizer.beta2=0.9"]\n'
    keys = [*KEYS, f"checkpoint.mode={mode}", reward]
    decks = [
        write_deck(world, mpi_tmp_path, name, policy("ppo", more=more), steps=6, size=16)
        for name in ("alone", "divided")
    ]
    by_rank_0(world, lambda alone: run_deck(alone, decks[0], keys, trainer_factory=make_trainer))
    assert run_deck(world, decks[1], [*keys, *APART], trainer_factory=make_trainer) == 0
    folders = [mpi_tmp_path / name for name in ("alone", "divided")]
    wanted = rows_of(folders[0])
    assert rows_of(folders[1]) == wanted
    assert len({row["critic_loss"] for row in wanted}) == len(wanted) == 6
    samples = [(folder / "samples.jsonl").read_text() for folder in folders]
    assert samples[0] == samples[1]
    middles = [folder / "checkpoints/step-00000002.h5" for folder in folders]
    structures = [examine(path, world.everyone) for path in middles]
    assert structures[0].datasets.keys() == structures[1].datasets.keys()
    assert structures[0].state["companions"] == structures[1].state["companions"]

    def goes_on(at: World, middle: Path, name: str, division: list[str]) -> int:
        return resume(at, middle, [f"run.dir={mpi_tmp_path / name}", *division], trainer_factory=make_trainer)

    assert goes_on(world, middles[1], "again", []) == 0
    assert goes_on(world, middles[0], "cut", APART[:2]) == 0
    by_rank_0(world, lambda alone: goes_on(alone, middles[1], "joined", TOGETHER))
    for name in ("again", "cut", "joined"):
        assert rows_of(mpi_tmp_path / name) == wanted[2:], name
    with pytest.raises(HpctrainError, match=r"critic_ranks=2-3: contains rank 3, but the run has 2 ranks"):
        goes_on(world, middles[1], "none", ["policy.critic_ranks=2-3"])
    # Whoever only reads the model needs no such ranks.
    assert evaluation_deck(structures[1].state, middles[1], [], 1).policy.critic_ranks == "1"


@pytest.mark.mpi(min_size=2, max_size=2)
def test_what_is_held_is_planned_by_who_holds_it(world: World, mpi_tmp_path: Path) -> None:
    write_prompts(world, mpi_tmp_path)
    deck = write_deck(world, mpi_tmp_path, "divided", policy("ppo"), steps=2, size=16)
    assert run_deck(world, deck, [*KEYS, *APART[:2]], trainer_factory=make_trainer) == 0
    plan = json.loads((mpi_tmp_path / "divided/plan.json").read_text())
    predicted, measured = plan["predicted"], plan["measured"]
    assert predicted["roles"] == {"policy": 1, "critic and reference": 1}
    assert len(predicted["stages"]) == len(measured) == 2
    for planned, found in zip(predicted["stages"], measured, strict=True):
        for kind in ("parameter", "gradient", "optimizer", "activation", "cache"):
            assert planned[f"{kind}_bytes"] == found[f"{kind}_bytes"], (planned["stage"], kind)
    policy_, others = measured
    assert policy_["cache_bytes"] > others["cache_bytes"] == 0
    # Critic and reference are two models, of which one is trained.
    assert others["parameter_bytes"] > 1.9 * others["gradient_bytes"] > 0


@pytest.mark.mpi(min_size=2, max_size=2)
def test_what_fails_on_some_ranks_ends_the_run_on_all(world: World, mpi_tmp_path: Path) -> None:
    """In one sentence, the same everywhere."""
    write_prompts(world, mpi_tmp_path)
    deck = write_deck(world, mpi_tmp_path, "divided", policy("ppo"), steps=2, size=16)
    text = 'policy.critic=["model.from=nothing.h5"]'
    with pytest.raises(HpctrainError, match=r"nothing.h5: no such checkpoint") as found:
        run_deck(world, deck, [*KEYS, *APART[:1], text], trainer_factory=make_trainer)
    assert world.is_agreed(found.value)
    fits = [*KEYS, *APART[:1], "layout.tensor=1", 'policy.critic=["layout.tensor=2"]']
    with pytest.raises(HpctrainError, match=r"policy.critic: layout.tensor=2: .*the number of ranks, 1"):
        run_deck(world, deck, fits, trainer_factory=make_trainer)
    with pytest.raises(HpctrainError, match="the number of ranks of the policy, 1"):
        run_deck(world, deck, [*KEYS, *APART[:1], "layout.tensor=2"], trainer_factory=make_trainer)
