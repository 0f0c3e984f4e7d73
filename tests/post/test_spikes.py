"""A policy that goes back for a spike: what it leaves out are whole rollouts, told by their prompts.

Tests of post/policy_trainer.py, post/samples_file.py and report/bad_samples.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.post.policy_trainer import make_trainer
from hpctrain.report.inspect import InspectOptions, inspect
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.run import resume, run_deck
from hpctrain.train.step import ReadBatches, Step, TrainState
from tests.post.policies import LENGTH, policy, write_deck, write_prompts
from tests.train.poisoned import Poison

BATCH, ROLLOUT, EPOCHS, STEPS = 16, 32, 2, 24
MORE = f"""
rollout = {ROLLOUT}
epochs = {EPOCHS}
[stability]
spike = "rollback"
spike_window = 8
spike_factor = 30.0
spike_back = 4
[checkpoint]
every = 4
keep = 9
"""


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_policy_that_goes_back_leaves_out_whole_rollouts(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 14, the second of four on a rollout, is a spike."""
    write_prompts(world, mpi_tmp_path)
    deck = write_deck(world, mpi_tmp_path, "policy", policy(more=MORE), steps=STEPS, size=BATCH)
    seen: list[list[int]] = []
    read = Step.read_share

    def kept(step: Step, state: TrainState, batch: int) -> ReadBatches:
        share = read(step, state, batch)
        if state.samples == 13 * BATCH:
            seen.extend(
                row.tolist() for micro in share.micro_batches for row in micro.tokens[: micro.samples]
            )
        return share

    with monkeypatch.context() as patch:
        patch.setattr(Step, "read_share", kept)
        Poison(patch, [13 * BATCH], tokens=False, loud=True)
        assert run_deck(world, deck, [], trainer_factory=make_trainer) == 0
    run, again = mpi_tmp_path / "policy", mpi_tmp_path / "again"
    rows = read_metrics(run / "metrics.jsonl")
    told = [row["went_back"] for row in rows if "went_back" in row]
    assert [(each["step"], each["back_to"]) for each in told] == [(14, 8)]
    assert told[0]["first_sample"] == 8 * BATCH and told[0]["samples"] == 8 * BATCH

    # What was written in steps that are given up is forgotten.
    lines = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    written = [line["step"] for line in lines if line["of"] == "rollout"]
    assert written == sorted(written) and set(written) == set(range(1, STEPS, 4))
    assert all(written.count(step) == written.count(1) for step in written)

    shown: list[str] = []
    inspect(world.everyone, run, InspectOptions(bad_samples=True, as_json=True), shown.append)
    texts = world.everyone.broadcast_object("".join(shown))
    left = {row["sample"]: row["text"] for row in json.loads(texts)["spikes"][0]["left_out"]}
    prompts = sorted(left[13 * BATCH + number][: LENGTH + 1] for number in range(BATCH))
    everyone = [row for some in world.everyone.all_gather_object(seen) for row in some]
    assert prompts == sorted(bytes(row[: LENGTH + 1]).decode() for row in everyone)

    # Whoever resumes it goes the same way.
    middle = run / "checkpoints" / "step-00000008.h5"
    assert resume(world, middle, [f"run.dir={again}"], trainer_factory=make_trainer) == 0
    later = read_metrics(again / "metrics.jsonl")
    assert [row["loss"] for row in later] == [row["loss"] for row in rows[8:]]
