"""A hundred signals to ranks, whatever they do: each is heeded, and the run loses no bit."""

from __future__ import annotations

import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, Signals

import pytest

from hpctrain.errors import EXIT_AGAIN
from tests.train.jobs import Jobs, kill, losses, same

SIGNALS = 100


@dataclass(frozen=True)
class Effect:
    """What a signal does to a run."""

    number: Signals
    stops: bool
    to_launcher: bool
    """Whether it may be sent to mpirun, which hands it on to its ranks."""
    codes: tuple[int, ...] = (EXIT_AGAIN,)
    """What the job may end with."""


EFFECTS = (
    Effect(SIGUSR1, stops=False, to_launcher=True),
    Effect(SIGUSR2, stops=True, to_launcher=True),
    Effect(SIGTERM, stops=True, to_launcher=False),
    Effect(SIGINT, stops=True, to_launcher=False),
    Effect(SIGHUP, stops=True, to_launcher=False),
)


@pytest.mark.slow
def test_a_run_that_gets_signals_all_the_time_ends_as_one_that_does_not(
    tmp_path: Path,
    launch: Callable[..., subprocess.CompletedProcess[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw = random.Random(7)
    jobs = Jobs(tmp_path, launch, checkpoint__every="1000000")
    counts: Counter[str] = Counter()
    number = 0
    while counts.total() < SIGNALS:
        jobs.keys["checkpoint.mode"] = draw.choice(("collective", "background"))
        number += 1
        with jobs.start() as job:
            job.wait_for(job.heeds, fine=False)
            begun, stop = jobs.steps, None
            last = draw.randrange(3, 7)
            for turn in range(last + 1):
                stops = turn == last
                choice = [effect for effect in EFFECTS if effect.stops == stops]
                effect = choice[number % len(choice)]
                pause(job, jobs, draw, begun, first=turn == 0)
                targets = job.ranks
                assert targets, job.text
                match draw.randrange(3 if effect.to_launcher else 2):
                    case 0:
                        chosen, named = [draw.choice(targets)], "one rank"
                    case 1:
                        chosen, named = targets, "all ranks"
                    case _:
                        chosen, named = [job.process.pid], "the launcher"
                reached = [kill(pid, effect.number) for pid in chosen]
                assert all(reached), job.text
                counts[f"{effect.number.name} to {named}"] += 1
                stop = effect
            code = job.wait()
            assert stop is not None
            assert code in stop.codes, f"{stop.number.name}: {code}\n{job.text}"
            assert "Traceback" not in job.text
        step = int(jobs.checkpoints[-1].stem.removeprefix("step-"))
        assert step == jobs.steps, "it stopped without a checkpoint of its last step"
        assert not jobs.leftovers()
    last = jobs.steps + 2
    jobs.finish(last)
    whole = jobs.uninterrupted(last)
    final = f"step-{last:08d}.h5"
    assert same(jobs.run / "checkpoints" / final, whole / final)
    assert losses(jobs.run) == losses(whole.parent)
    with capsys.disabled():
        print(f"\n{counts.total()} signals to {number} jobs: {dict(counts)}; {last} steps equal")


def pause(job, jobs: Jobs, draw: random.Random, begun: int, first: bool) -> None:
    """Let a random time pass: of the first signals some come while libraries load."""
    if first and draw.random() < 0.3:
        time.sleep(draw.uniform(0.0, 1.0))
        return
    if first:
        job.wait_for(lambda: jobs.steps > begun)
    time.sleep(draw.uniform(0.0, 0.1))
