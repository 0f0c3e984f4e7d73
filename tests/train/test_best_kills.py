"""Ranks killed around evaluations and saves: `best` is always whole, and the best of those evaluated.

Tests of train/best_evaluation.py and of the link `best` in train/checkpoints.py, with real jobs that
SIGKILL ends.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hpctrain.checkpoint.names import checkpoint_step
from hpctrain.report.metric_rows import read_metrics
from tests.train.jobs import RANKS, Jobs, kill, losses, same

KILLS = 20
STAGES = ("evaluating", "writing", "written", "linked")

# Each step is evaluated, on one sequence, at a rate at which losses rise as often as they fall.
KEYS = {
    "run__evaluate_every": "1",
    "run__evaluate_sequences": "1",
    "checkpoint__keep_best": "validation",
    "checkpoint__every": "5",
    "checkpoint__keep": "1",
    "learning_rate__peak": "6e-2",
    "learning_rate__decay": "constant",
}


class KeptJobs(Jobs):
    """Jobs of a run that keeps its best checkpoint: after the first one by `hpctrain resume`."""

    def command(self, **keys: str) -> list[str]:
        """As of all jobs, but that what goes on is asked to."""
        words = super().command(**keys)
        if "run__dir" not in keys and self.checkpoints:
            begin = words.index("--set")
            return [*words[:1], "hpctrain", "resume", "run", *words[begin:]]
        return words

    @property
    def best(self) -> int:
        """The step of the checkpoint that the link leads to; 0 where there is none."""
        link = self.run / "checkpoints" / "best"
        return (checkpoint_step(link.readlink()) or 0) if link.is_symlink() else 0


def evaluated(folder: Path) -> dict[int, float]:
    """The validation losses of a run by step."""
    return {row["step"]: row["validation_loss"] for row in read_metrics(folder / "metrics.jsonl")}


def best_among(found: Mapping[int, float], steps: int) -> int:
    """The first of the steps up to that one whose loss none is below."""
    return min(range(1, steps + 1), key=lambda step: found[step], default=0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["collective", "background"])
def test_best_is_whole_and_the_best_after_every_kill(
    tmp_path: Path,
    launch: Callable[..., subprocess.CompletedProcess[str]],
    capsys: pytest.CaptureFixture[str],
    mode: str,
) -> None:
    draw = random.Random(21)
    jobs = KeptJobs(tmp_path, launch, **KEYS, checkpoint__mode=mode)
    counts: Counter[str] = Counter()
    seen: list[tuple[int, int, dict[int, Path]]] = []
    kept = tmp_path / "kept"
    kept.mkdir()
    for number in range(KILLS // 2):
        stage = STAGES[number % len(STAGES)]
        victims = draw.choice(([0], [1], list(range(RANKS))))
        with jobs.start() as job:
            begun, linked, known = jobs.steps, jobs.best, set(jobs.checkpoints)
            after = begun + draw.randrange(2, 7)
            job.wait_for(lambda: jobs.steps >= after, fine=False)  # noqa: B023
            match stage:
                case "evaluating":
                    time.sleep(draw.uniform(0.0, 0.03))
                case "writing":
                    job.wait_for(lambda: jobs.writing)
                    time.sleep(draw.choice((0.0, draw.uniform(0.0, 0.02))))
                case "written":
                    job.wait_for(lambda: set(jobs.checkpoints) - known)  # noqa: B023
                    time.sleep(draw.choice((0.0, draw.uniform(0.0, 0.005))))
                case "linked":
                    until = time.monotonic() + 20
                    job.wait_for(lambda: jobs.best != linked or time.monotonic() > until)  # noqa: B023
            there = job.ranks
            assert len(there) == RANKS, f"ended by itself before kill {number}\n{job.text}"
            for victim in victims:
                kill(there[victim], signal.SIGKILL)
            assert job.wait() != 0, job.text
            assert "Traceback" not in job.text, job.text
        counts.update(["kills", stage])
        files = {checkpoint_step(path) or 0: path for path in jobs.checkpoints}
        best = jobs.best
        if best:
            assert best in files, (best, sorted(files), job.text)
            copy = kept / f"{number}.h5"
            copy.write_bytes(files[best].read_bytes())
            files[best] = copy
        seen.append((best, max(files, default=0), files))
    last = jobs.steps + 3
    jobs.finish(last)
    assert not jobs.leftovers()
    whole = jobs.uninterrupted(last)
    right = evaluated(whole.parent)
    assert evaluated(jobs.run) == right
    assert losses(jobs.run) == losses(whole.parent)
    lowest = [step for step in range(1, last + 1) if best_among(right, step) == step]
    assert len(lowest) < last  # some evaluations found a higher loss
    for best, newest, files in seen:
        # The newest checkpoint may be whole already, and the link not yet lead to it.
        assert best in (best_among(right, newest), best_among(right, newest - 1)), (best, newest, right)
        if best:
            assert same(files[best], whole / f"step-{best:08d}.h5")
    assert jobs.best == best_among(right, last)
    assert same(jobs.run / "checkpoints" / "best", whole / f"step-{jobs.best:08d}.h5")
    names = {jobs.best, last}
    assert {checkpoint_step(path) for path in jobs.checkpoints} == names
    with capsys.disabled():
        print(f"\n{mode}: {dict(counts)}, {len(lowest)} bests in {last} steps")
