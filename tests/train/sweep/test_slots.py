"""Runs of a sweep that are asked to end before they heed it, again and again, or never; results of such.

Tests of train/sweep/slots.py and train/sweep/results.py, with processes that stand in for runs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.report.metric_rows import METRICS_FILE
from hpctrain.train.sweep import slots
from hpctrain.train.sweep.results import results_of
from hpctrain.train.sweep.slots import make_slots, train_all
from hpctrain.train.sweep.variants import Sweep, make_sweep
from hpctrain.watch.status import STATUS_FILE
from tests.train.sweep.test_sweep_deck import DECK

SLEEPS = "import time; print('up', flush=True); time.sleep(100)"
IGNORES = f"import signal; signal.signal(signal.SIGUSR2, signal.SIG_IGN); {SLEEPS}"


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Three runs, with the folder that their outputs go to."""
    monkeypatch.chdir(tmp_path)
    Path("deck.toml").write_text(DECK)
    sweep = make_sweep(Path("deck.toml"), ["run.seed=1,2,3"], 1, None)
    sweep.folder.mkdir(parents=True)
    return sweep


def trained(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, program: str, *numbers: signal.Signals, count: int = 1
) -> tuple[dict[str, int], list[str]]:
    """Codes and words of a sweep whose runs are this program; these signals come when the first one is up."""
    monkeypatch.setattr(slots, "command", lambda *_: [sys.executable, "-c", program])
    told: list[str] = []
    over = threading.Event()

    def ask() -> None:
        output = slots.output_of(sweep.variants[0])
        for number in numbers:
            while not (output.exists() and output.read_text().startswith("up")) and not over.wait(0.05):
                pass
            over.wait(0.5)
            os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        return train_all(
            Path("deck.toml"), sweep.variants, 1, make_slots(count, 1, 1, range(2), []), told.append
        ), told
    finally:
        over.set()
        asking.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_does_not_heed_yet_is_stopped_and_has_not_failed(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    former = signal.getsignal(number)
    codes, told = trained(sweep, monkeypatch, SLEEPS, number)
    assert codes == {"seed=1": 75}
    assert told[1:] == [
        "seed=1: stopped with a checkpoint",
        "2 runs not started; repeat the command to continue",
    ]
    assert [each.state for each in results_of(sweep, codes)] == ["waiting"] * 3
    assert signal.getsignal(number) is former


def test_nothing_is_begun_any_more_while_others_come_to_their_end(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a second slot one takes its time, when the first is free."""
    program = f"import sys\nif 'seed=2' in sys.argv[3]: {IGNORES.replace('100', '4')}\nelse: {SLEEPS}"
    codes, told = trained(sweep, monkeypatch, program, signal.SIGTERM, count=2)
    assert codes == {"seed=1": 75, "seed=2": 0}
    assert told[-1] == "1 run not started; repeat the command to continue"


def test_asked_again_it_ends_what_does_not_stop(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, told = trained(sweep, monkeypatch, IGNORES, signal.SIGTERM, signal.SIGTERM)
    assert codes == {"seed=1": -9}
    assert told[1] == f"seed=1: failed with signal 9; see {slots.output_of(sweep.variants[0])}"
    assert [each.state for each in results_of(sweep, codes)] == ["failed", "waiting", "waiting"]


def test_a_signal_that_is_ignored_stays_so(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        codes, _ = trained(sweep, monkeypatch, SLEEPS.replace("100", "1"), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)
    assert codes == dict.fromkeys(("seed=1", "seed=2", "seed=3"), 0)


def test_a_slot_is_free_again_where_a_run_fails(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own exit code or by a signal, of which only the one that was asked for counts as stopping."""
    codes, told = trained(
        sweep, monkeypatch, "import sys, os; 'seed=2' in sys.argv[3] and os.kill(os.getpid(), 12)"
    )
    assert codes == {"seed=1": 0, "seed=2": -12, "seed=3": 0}
    assert told[3].startswith("seed=2: failed with signal 12; see ") and told[-1] == "seed=3: done"
    assert "started (3 of 3)" in told[4]


@pytest.fixture
def written(sweep: Sweep) -> Callable[[int, str, int], None]:
    """`written(0, "done", 40)`: what the first run leaves behind after so many steps."""

    def write(number: int, state: str, steps: int) -> None:
        folder = sweep.variants[number].folder
        folder.mkdir()
        status = {"state": state, "step": steps, "steps": steps, "time": "2024-01-01T00:00:00Z"}
        (folder / STATUS_FILE).write_text(json.dumps(status))
        rows = [
            {"step": step, "loss": 100.0 - step, "tokens_per_s": 10.0 + step % 3}
            | ({"validation_loss": 5.0 + step} if step % 10 == 0 else {})
            for step in range(1, steps + 1)
        ]
        (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


def test_results_are_those_of_the_last_tenth(sweep: Sweep, written: Callable[[int, str, int], None]) -> None:
    written(0, "done", 40)
    written(1, "stopped", 3)
    done, stopped, waiting = results_of(sweep)
    assert (done.state, done.step, done.loss) == ("done", 40, 100 - 38.5)
    assert (done.validation, done.tokens_per_s) == (45.0, 11.0)
    assert (stopped.state, stopped.step, stopped.loss) == ("stopped", 3, 97.0)
    assert (waiting.state, waiting.step) == ("waiting", 0)


def test_a_run_is_done_by_the_steps_of_this_sweep_alone(
    sweep: Sweep, written: Callable[[int, str, int], None]
) -> None:
    written(0, "done", 3)  # of the four that there are now
    written(1, "running", 2)
    written(2, "done", 4)
    states = [each.state for each in results_of(sweep, {"seed=1": 75, "seed=2": 70, "seed=3": 70})]
    assert states == ["waiting", "failed", "done"]


def test_a_status_that_somebody_else_wrote_harms_no_table(
    sweep: Sweep, written: Callable[[int, str, int], None]
) -> None:
    written(0, "\x1b[2Jdone", 4)
    written(1, "done", 4)
    path = sweep.variants[1].folder / STATUS_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": "many"}))
    assert [each.state for each in results_of(sweep)] == ["\\u001B[2Jdone", "waiting", "waiting"]
