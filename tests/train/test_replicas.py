"""A replica is lost, and the run goes on with the one that is left; another one joins. One command each."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from hpctrain.deck.read import parse_deck
from hpctrain.optim.schedule import LearningRate
from hpctrain.report.metric_rows import read_metrics
from tests.train.jobs import Jobs, kill
from tests.train.test_run import DECK

KEYS = {
    "layout__replicas": "2",
    "communication__outer": "diloco",
    "communication__local_steps": "4",
    "checkpoint__every": "3",
    "batch__ramp_from": "0",
    "batch__ramp_steps": "0",
}


def test_a_lost_replica_ends_the_job_and_not_the_run(
    tmp_path: Path, launch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    jobs = Jobs(tmp_path, launch, **KEYS)
    with jobs.start() as job:
        job.wait_for(lambda: jobs.checkpoints and jobs.steps >= 4)
        assert kill(job.ranks[1], signal.SIGKILL)
        assert job.wait() != 0
    saved = int(jobs.checkpoints[-1].stem.removeprefix("step-"))
    for ranks, replicas in ((0, 1), (2, 2)):
        steps = f"run.steps={saved + 3 + ranks}"
        done = launch(ranks, "-m", "hpctrain", "resume", "run", "--set", steps, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        log = (jobs.run / "log.txt").read_text()
        count = "1 rank forms 1 replica" if replicas == 1 else "2 ranks form 2 replicas"
        assert count in log, log
        assert f"replicas = {replicas}" in (jobs.run / "deck.toml").read_text()
    rows = read_metrics(jobs.run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, saved + 6))
    assert any("replica_distance" in row for row in rows)
    # The rate goes on where it was, whatever joins or leaves.
    rate = LearningRate(**parse_deck(DECK.format(tokens="tokens.h5")).learning_rate.model_dump())
    assert [row["lr"] for row in rows] == [rate.at(step, 8) for step in range(len(rows))]
