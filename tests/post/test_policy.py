"""Whole runs of policies: what they learn, going on, layouts, rewards that fail, what they write for people.

Tests of post/policy_trainer.py, post/rollout_builder.py, post/rollout.py, post/writer.py,
post/policy_reference.py, post/reward_model.py and post/samples_file.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import hpctrain
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.post.policy_trainer import make_trainer
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.run import resume, run_deck
from tests.data.chats import write_rows
from tests.data.preparing import prepare_rows
from tests.post.policies import half_right, policy, write_deck, write_prompts

UNLIKE = ("seconds", "tokens_per_s", "mfu", "peak_rss_bytes", "payload_bytes")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Its metrics, without what another run of the same cannot have alike."""
    return [
        {key: value for key, value in row.items() if key not in UNLIKE}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_policies_learn(world: World, mpi_tmp_path: Path) -> None:
    """From under 20% of words that are copied to over 90%, of prompts that were held out."""
    write_prompts(world, mpi_tmp_path, 2000)
    start = half_right(world, mpi_tmp_path)
    keys = [f"model.from={start}", "run.evaluate_every=40", "run.evaluate_sequences=200"]
    for kind, more, sizes in (
        ("grpo", "samples = 8\n", {"steps": 50, "micro": 16}),
        ("ppo", 'epochs = 2\ncritic = ["learning_rate.peak=4e-3"]\n', {"steps": 90, "micro": 16}),
    ):
        objective = policy(kind, 0.01, more=more)
        deck = write_deck(world, mpi_tmp_path, kind, objective, model="", **sizes)
        assert run_deck(world, deck, keys, trainer_factory=make_trainer) == 0
        rows = rows_of(mpi_tmp_path / kind)
        assert rows[0]["reward"] < 0.2
        assert rows[-1]["validation_reward"] >= 0.9
        assert rows[-1]["validation_loss"] == -rows[-1]["validation_reward"]
        assert rows[0]["moved"] == rows[0]["clip_share"] == rows[0]["kl"] == 0
        if kind == "ppo":
            assert rows[-1]["critic_loss"] < rows[0]["critic_loss"] / 2
            assert rows[1]["moved"] > 0
    world.everyone.barrier()


LAYOUTS = {
    1: [["batch.micro_size=8"]],
    2: [
        [],
        ["layout.tensor=2"],
        ["layout.tensor=2", "layout.sequence_parallel=true"],
        ["layout.context=2"],
        ["layout.pipeline=2"],
        ["layout.zero=3", "memory.recompute=full"],
    ],
}


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize(("kind", "adapters"), [("grpo", False), ("ppo", False), ("ppo", True)])
def test_every_layout_writes_and_learns_the_same(
    world: World, mpi_tmp_path: Path, kind: str, adapters: bool
) -> None:
    write_prompts(world, mpi_tmp_path)
    more = "epochs = 2\nrollout = 32\n" + ("samples = 4\n" if kind == "grpo" else "")
    more += '[model.adapters]\nrank = 4\nalpha = 8\ntargets = ["*"]\n' if adapters else ""
    deck = write_deck(world, mpi_tmp_path, "all", policy(kind, more=more), steps=8, size=16)
    # Adam moves what has next to no gradient by the sign of rounding.
    keys = ["run.evaluate_every=8", "optimizer.name=sgd", "learning_rate.peak=0.1"]
    alone = world.single_rank_world()
    if world.rank == 0:
        run_deck(alone, deck, [*keys, f"run.dir={mpi_tmp_path}/one"], trainer_factory=make_trainer)
    world.everyone.barrier()
    wanted, written = rows_of(mpi_tmp_path / "one"), (mpi_tmp_path / "one/samples.jsonl").read_text()
    assert len(written.splitlines()) == 4 * 2 + 4
    for number, layout in enumerate(LAYOUTS[world.size]):
        folder = mpi_tmp_path / f"layout{number}"
        assert run_deck(world, deck, [*keys, *layout, f"run.dir={folder}"], trainer_factory=make_trainer) == 0
        assert (folder / "samples.jsonl").read_text() == written, layout
        for row, other in zip(rows_of(folder), wanted, strict=True):
            assert row.keys() == other.keys()
            for name, value in other.items():
                near = pytest.approx(value, rel=2e-4, abs=2e-6)
                assert row[name] == near, (layout, row["step"], name)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("mode", ["collective", "background"])
def test_a_run_that_goes_on_has_the_same_bits(world: World, mpi_tmp_path: Path, mode: str) -> None:
    """Of actor and critic, in the middle; on another layout the same to rounding."""
    write_prompts(world, mpi_tmp_path)
    more = 'epochs = 2\nrollout = 32\ncritic = ["optimizer.beta2=0.9", "layout.zero=1"]\n'
    deck = write_deck(world, mpi_tmp_path, "whole", policy("ppo", more=more), steps=12, size=16)
    keys = ["checkpoint.every=4", "checkpoint.keep=9", "run.evaluate_every=4", f"checkpoint.mode={mode}"]
    assert run_deck(world, deck, keys, trainer_factory=make_trainer) == 0
    wanted = rows_of(mpi_tmp_path / "whole")
    middle = mpi_tmp_path / "whole/checkpoints/step-00000004.h5"
    for name, layout, exact in (("again", [], True), ("else", ["layout.tensor=2"], False)):
        folder = mpi_tmp_path / name
        assert resume(world, middle, [f"run.dir={folder}", *layout], trainer_factory=make_trainer) == 0
        rows = rows_of(folder)
        assert [row["step"] for row in rows] == list(range(5, 13))
        # What it needs to go on once more has come with it.
        assert (folder / "reference.h5").read_bytes() == (mpi_tmp_path / "whole/reference.h5").read_bytes()
        if exact:
            assert rows == wanted[4:]
            continue
        # Later steps are apart by what Adam makes of rounding.
        for key in ("reward", "kl", "entropy", "grad_norm", "critic_loss", "critic_grad_norm"):
            assert rows[0][key] == pytest.approx(wanted[4][key], rel=1e-4, abs=1e-6), key


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("adapters", ["", '[model.adapters]\nrank = 2\nalpha = 4\ntargets = ["*"]\n'])
def test_the_reference_of_another_run_is_known(world: World, mpi_tmp_path: Path, adapters: str) -> None:
    """Of as large a model: a run that goes on is told. With its own again, `hpctrain.resume` goes on."""
    write_prompts(world, mpi_tmp_path)
    for name, seed in (("one", 3), ("other", 4)):
        more = f"samples = 4\n{adapters}"
        deck = write_deck(world, mpi_tmp_path, name, policy("grpo", more=more), size=16, steps=2)
        keys = [f"run.seed={seed}", "checkpoint.every=1"]
        assert run_deck(world, deck, keys, trainer_factory=make_trainer) == 0
    folder, foreign = mpi_tmp_path / "one", mpi_tmp_path / "other/reference.h5"
    own, first = (folder / "reference.h5").read_bytes(), folder / "checkpoints/step-00000001.h5"
    world.everyone.barrier()
    if world.rank == 0:
        (folder / "reference.h5").write_bytes(foreign.read_bytes())
    world.everyone.barrier()
    with pytest.raises(InputOutputError) as raised:
        resume(world, first, [], trainer_factory=make_trainer)
    (sentence,) = raised.value.problems
    assert sentence.startswith(
        f"{folder}/reference.h5: belongs to another run than {first}, whose reference is "
    )
    world.everyone.barrier()
    if world.rank == 0:
        (folder / "reference.h5").write_bytes(own)
    world.everyone.barrier()
    hpctrain.resume(first, world=world)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_critic_steps_by_its_own_keys(world: World, mpi_tmp_path: Path) -> None:
    """By its own clip, with which it goes nowhere, and its own micro-batches, which change nothing."""
    write_prompts(world, mpi_tmp_path)
    more = 'epochs = 4\ncritic = ["optimizer.name=sgd", "optimizer.weight_decay=0", {}]\n'
    found = {}
    for name, keys in (
        ("usual", '"optimizer.clip=1"'),
        ("still", '"optimizer.clip=1e-9"'),
        ("small", '"batch.micro_size=1"'),
    ):
        deck = write_deck(
            world, mpi_tmp_path, name, policy("ppo", more=more.format(keys)), size=16, rate="0.1"
        )
        assert run_deck(world, deck, [], trainer_factory=make_trainer) == 0
        found[name] = [row["critic_loss"] for row in rows_of(mpi_tmp_path / name)]
    assert found["still"][-1] == pytest.approx(found["still"][0], rel=1e-6)
    assert found["usual"][-1] != pytest.approx(found["usual"][0], rel=1e-3)
    assert found["small"] == pytest.approx(found["usual"], rel=1e-4)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("more", [["layout.zero=3"], ["layout.pipeline=2"], ["precision.compute=bf16"]])
def test_a_policy_with_adapters_is_its_own_reference(
    world: World, mpi_tmp_path: Path, more: list[str]
) -> None:
    """To the bit as if that were a model of its own, from adapters on that have been trained before."""
    write_prompts(world, mpi_tmp_path)
    adapters = '[model.adapters]\nrank = 4\nalpha = 8\ntargets = ["*"]\n'
    first = write_deck(world, mpi_tmp_path, "first", policy("grpo", more=f"samples = 4\n{adapters}"), size=16)
    assert run_deck(world, first, more, trainer_factory=make_trainer) == 0
    source = mpi_tmp_path / "first/checkpoints/latest"
    deck = write_deck(world, mpi_tmp_path, "shared", policy("ppo", more=adapters), model="", size=16)
    keys = [*more, f"model.from={source}"]
    assert run_deck(world, deck, keys, trainer_factory=make_trainer) == 0
    wanted = rows_of(mpi_tmp_path / "shared")
    assert (wanted[0]["kl"], wanted[-1]["kl"] != 0) == (0, True)
    apart = [f"run.dir={mpi_tmp_path}/apart", 'policy.reference=["batch.micro_size=4"]']
    assert run_deck(world, deck, [*keys, *apart], trainer_factory=make_trainer) == 0
    assert rows_of(mpi_tmp_path / "apart") == wanted


REWARDS = {
    "raises": ("def reward(completions, **others):\n    return [1 / 0]", "ZeroDivisionError"),
    "hangs": ("import time\ndef reward(completions, **others):\n    time.sleep(60)", "1 s"),
    "nan": ("def reward(completions, **others):\n    return [float('nan') for _ in completions]", "NaN"),
}


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_that_fails_ends_in_a_sentence(world: World, mpi_tmp_path: Path, name: str) -> None:
    write_prompts(world, mpi_tmp_path)
    code, told = REWARDS[name]
    if world.rank == 0:
        (mpi_tmp_path / "judge.py").write_text(code + "\n")
    deck = write_deck(world, mpi_tmp_path, "bad", policy(reward="judge.py:reward", more="seconds = 1\n"))
    with pytest.raises(HpctrainError) as caught:
        run_deck(world, deck, [], trainer_factory=make_trainer)
    (sentence,) = caught.value.problems
    assert told in sentence
    assert "prompt" in sentence
    assert "completion" in sentence


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_reward_model_judges(world: World, mpi_tmp_path: Path) -> None:
    """By scores of answers' last tokens; a model that is none is refused."""
    write_prompts(world, mpi_tmp_path)
    language = write_deck(
        world, mpi_tmp_path, "policy", policy("grpo", 0.0, more="samples = 4\n"), steps=1, size=16
    )
    if world.rank == 0:
        rows = [
            {"prompt": f"{word}>", "chosen": word, "rejected": word[::-1]} for word in ("abc", "bca", "fde")
        ] * 8
        source = write_rows(mpi_tmp_path / "pairs.jsonl", rows)
        prepare_rows(
            world.single_rank_world(), mpi_tmp_path / "pairs.h5", [source], kind="preferences", template="raw"
        )
    world.everyone.barrier()
    pairs = write_deck(world, mpi_tmp_path, "judge", 'kind = "reward"\n', tokens="pairs", steps=2, size=8)
    assert run_deck(world, pairs, ["data.validation=0"]) == 0
    judge = f'policy.reward=["{mpi_tmp_path}/judge"]'
    assert run_deck(world, language, [judge], trainer_factory=make_trainer) == 0
    (row,) = rows_of(mpi_tmp_path / "policy")
    assert math.isfinite(row["reward"])
    assert row["reward_deviation"] > 0
    samples = [json.loads(line) for line in (mpi_tmp_path / "policy/samples.jsonl").read_text().splitlines()]
    assert len({each["rewards"]["model"] for each in samples}) > 1
    with pytest.raises(HpctrainError, match="is not a reward model"):
        run_deck(
            world,
            language,
            [f'policy.reward=["{mpi_tmp_path}/policy"]', "run.dir=none"],
            trainer_factory=make_trainer,
        )
