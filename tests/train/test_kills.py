"""Ranks that are killed again and again: whatever they were doing, the run goes on and loses no bit."""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.jobs import PATIENCE, RANKS, STAGES, Jobs, kill, losses, same

KILLS = 25
MIRRORED_KILLS = 6
AFTER_A_SAVE = 15


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(
    tmp_path: Path,
    launch: Callable[..., subprocess.CompletedProcess[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw = random.Random(12)
    jobs = Jobs(tmp_path, launch, checkpoint__every="2")
    kept = tmp_path / "kept"
    kept.mkdir()
    counts: Counter[str] = Counter()
    torn = 0
    while counts["kills"] < KILLS:
        number = counts["kills"]
        stage = STAGES[number % len(STAGES)]
        # Both ways of writing take turns: a run may change it whenever it goes on.
        jobs.keys["checkpoint.mode"] = ("collective", "background")[number % 2]
        victims = draw.choice(([0], [1], list(range(RANKS))))
        with jobs.start() as job:
            job.reach(stage, draw)
            there = job.ranks
            assert len(there) == RANKS, f"ended by itself before kill {number}\n{job.text}"
            saved = bool(jobs.checkpoints)
            for victim in victims:
                kill(there[victim], signal.SIGKILL)
            code = job.wait()
            assert code != 0, job.text
            assert "Traceback" not in job.text, job.text
        torn += bool(jobs.writing)
        counts.update(["kills", stage, f"{len(victims)} of {RANKS} ranks"] + ["after a save"] * saved)
        for path in jobs.checkpoints:
            shutil.copy(path, kept / path.name)
    assert counts["after a save"] >= AFTER_A_SAVE, counts
    last = max(jobs.steps, 2) + 2
    jobs.finish(last)
    assert not jobs.leftovers()
    whole = jobs.uninterrupted(last)
    names = sorted(path.name for path in kept.iterdir())
    assert all(same(kept / name, whole / name) for name in names)
    final = f"step-{last:08d}.h5"
    assert same(jobs.run / "checkpoints" / final, whole / final)
    assert losses(jobs.run) == losses(whole.parent)
    with capsys.disabled():
        print(f"\n{dict(counts)}, {torn} with a checkpoint half written; {len(names)} checkpoints equal")


@pytest.mark.slow
def test_a_mirrored_run_that_is_killed_again_and_again_loses_few_steps_and_no_bit(
    tmp_path: Path,
    launch: Callable[..., subprocess.CompletedProcess[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is on the disk but what comes from memory; a mirror is renewed every three steps."""
    draw = random.Random(5)
    mirrored = {"checkpoint__mirror": "true", "checkpoint__mirror_every": "3"}
    jobs = Jobs(tmp_path, launch, checkpoint__every="0", communication__ranks_per_node="1", **mirrored)
    lost: list[int] = []
    for number in range(MIRRORED_KILLS):
        with jobs.start() as job:
            before = jobs.steps
            deadline = time.monotonic() + PATIENCE
            while jobs.steps < before + 8:
                assert time.monotonic() < deadline, job.text
                time.sleep(0.01)
            time.sleep(draw.random() / 5)
            there = job.ranks
            assert len(there) == RANKS, f"ended by itself before kill {number}\n{job.text}"
            for victim in draw.choice(([0], [1], list(range(RANKS)))):
                kill(there[victim], signal.SIGKILL)
            assert job.wait() != 0, job.text
            assert "Traceback" not in job.text, job.text
        came = jobs.steps
        taken = re.findall(r"restored step (\d+) from the memory of node", (jobs.run / "log.txt").read_text())
        assert len(taken) == number
        lost += [before - int(step) for step in taken[-1:]]
        assert came > before
    last = jobs.steps + 2
    jobs.finish(last)
    assert max(lost) <= 8, lost
    whole = jobs.uninterrupted(last)
    final = f"step-{last:08d}.h5"
    assert same(jobs.run / "checkpoints" / final, whole / final)
    assert losses(jobs.run) == losses(whole.parent)
    with capsys.disabled():
        print(f"\n{MIRRORED_KILLS} kills of a mirrored run, which lost {lost} steps")
