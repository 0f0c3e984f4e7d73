"""What runs are asked by signals, files and the clock: all ranks do it, and nothing of the run is lost.

Tests of train/control.py, train/signals.py and train/time_limit.py.
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.errors import EXIT_AGAIN, EXIT_DONE, EXIT_INTERRUPTED
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train import control, signals
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.run import resume, run_deck
from hpctrain.train.signals import HANDLED, Signals
from hpctrain.train.step import Step, TrainState
from hpctrain.train.time_limit import Pace, TimeLimit
from tests.launch import clean_environment, launcher
from tests.train.test_run import DECK, contents, deck_file

__all__ = ["deck_file"]

AtStep = Callable[[int, Callable[[], None]], None]


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> AtStep:
    """`at_step(5, act)`: act within the fifth step of the run, on this rank; files are looked for always."""
    monkeypatch.setattr(control, "SECONDS_PER_CHECK", 0.0)

    def arrange(number: int, act: Callable[[], None]) -> None:
        make = Step.__call__

        def step(self: Step, state, *others):
            if state.step == number - 1:
                act()
            return make(self, state, *others)

        monkeypatch.setattr(Step, "__call__", step)

    return arrange


def stored(folder: Path) -> list[str]:
    """Names of the checkpoints in a run's folder."""
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def same_parameters(one: Path, other: Path, step: int) -> bool:
    """Whether two runs have the same bits after a step, moments and master weights included."""
    name = f"checkpoints/step-{step:08d}.h5"
    expected, found = contents(one / name), contents(other / name)
    assert expected.keys() == found.keys()
    return all(values.tobytes() == found[key].tobytes() for key, values in expected.items())


TWELVE = ["checkpoint.every=0", "run.steps=12"]


@pytest.fixture(scope="module")
def twelve(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """`twelve(deck_file)`: the folder of that run of twelve steps, undisturbed, run once for all tests."""
    done: list[Path] = []

    def folder(deck_file: Path) -> Path:
        if not done:
            done.append(world.communicator.bcast(tmp_path_factory.mktemp("twelve")))
            assert run_deck(world, deck_file, [f"run.dir={done[0]}", *TWELVE]) == EXIT_DONE
        return done[0]

    return folder


ONE_RANK = pytest.mark.mpi(max_size=1)


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGUSR2,
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=ONE_RANK),
        pytest.param(signal.SIGHUP, marks=ONE_RANK),
    ],
    ids=lambda number: number.name,
)
def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on(
    world: World,
    deck_file: Path,
    mpi_tmp_path: Path,
    at_step: AtStep,
    twelve: Callable[[Path], Path],
    number: signal.Signals,
) -> None:
    whole, parts, keys = twelve(deck_file), mpi_tmp_path / "parts", TWELVE
    last = world.size - 1
    at_step(7, lambda: os.kill(os.getpid(), number) if world.rank == last else None)
    assert run_deck(world, deck_file, [f"run.dir={parts}", *keys]) == EXIT_AGAIN
    assert stored(parts) == ["step-00000007.h5"]
    if world.rank == 0:
        told = f"stopped after step 7 of 12: {number.name} was received by rank {last}; resume with `"
        assert told in (parts / "log.txt").read_text()
    world.everyone.barrier()
    assert resume(world, parts, []) == EXIT_DONE
    assert same_parameters(whole, parts, 12)
    if world.rank == 0:
        losses = [[row["loss"] for row in read_metrics(run / "metrics.jsonl")] for run in (whole, parts)]
        assert losses[0] == losses[1]


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("mode", ["collective", "background"])
def test_one_checkpoint_is_written_for_a_signal_to_all_ranks(
    world: World,
    deck_file: Path,
    mpi_tmp_path: Path,
    at_step: AtStep,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """It may reach a rank only while the others have begun to write."""
    save = Checkpoints.save

    def late(self: Checkpoints, state: TrainState) -> None:
        if world.rank == world.size - 1 and state.step == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        save(self, state)

    monkeypatch.setattr(Checkpoints, "save", late)
    folder = mpi_tmp_path / "run"
    at_step(5, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    keys = [f"run.dir={folder}", f"checkpoint.mode={mode}", "checkpoint.every=0", "checkpoint.keep=9"]
    assert run_deck(world, deck_file, [*keys, "run.steps=9"]) == EXIT_DONE
    assert stored(folder) == ["step-00000005.h5", "step-00000009.h5"]
    if world.rank == 0:
        assert "checkpoint requested: SIGUSR1 was received by rank 0\n" in (folder / "log.txt").read_text()


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("mode", ["collective", "background"])
def test_a_step_that_was_saved_is_not_saved_again(
    world: World,
    deck_file: Path,
    mpi_tmp_path: Path,
    at_step: AtStep,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    saved: list[int] = []
    save = Checkpoints.save
    monkeypatch.setattr(
        Checkpoints, "save", lambda self, state: (saved.append(state.step), save(self, state))
    )
    at_step(6, lambda: os.kill(os.getpid(), signal.SIGUSR2))
    keys = [f"run.dir={mpi_tmp_path / 'run'}", f"checkpoint.mode={mode}", "checkpoint.every=3"]
    assert run_deck(world, deck_file, keys) == EXIT_AGAIN
    assert saved == [3, 6]
    assert stored(mpi_tmp_path / "run") == ["step-00000003.h5", "step-00000006.h5"]


@pytest.mark.mpi(min_size=1, max_size=2)
def test_files_ask_as_signals_do(world: World, deck_file: Path, mpi_tmp_path: Path, at_step: AtStep) -> None:
    folder = mpi_tmp_path / "run"

    def touch(name: str) -> Callable[[], None]:
        return lambda: (folder / name).touch() if world.rank == 0 else None

    at_step(4, touch("checkpoint"))
    at_step(8, touch("stop"))
    keys = [f"run.dir={folder}", "checkpoint.every=0", "checkpoint.keep=9", "run.steps=10"]
    assert run_deck(world, deck_file, keys) == EXIT_AGAIN
    assert stored(folder) == ["step-00000004.h5", "step-00000008.h5"]
    assert not (folder / "stop").exists()
    assert not (folder / "checkpoint").exists()
    # What is asked in the last step is done anyway, and must not stop the next job.
    at_step(10, touch("stop"))
    assert resume(world, folder, []) == EXIT_DONE
    world.everyone.barrier()
    assert not (folder / "stop").exists()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_file_that_cannot_be_removed_asks_once_and_what_touch_does_not_make_never(
    world: World, deck_file: Path, mpi_tmp_path: Path, at_step: AtStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mpi_tmp_path / "run"
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path == folder / "checkpoint":
            raise PermissionError("no")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    at_step(4, lambda: (folder / "checkpoint").touch() if world.rank == 0 else None)
    at_step(5, lambda: (folder / "stop").write_text("precious") if world.rank == 0 else None)
    keys = [f"run.dir={folder}", "checkpoint.every=0", "checkpoint.keep=9", "run.steps=8"]
    assert run_deck(world, deck_file, keys) == EXIT_DONE
    assert stored(folder) == ["step-00000004.h5", "step-00000008.h5"]
    if world.rank == 0:
        assert (folder / "log.txt").read_text().count("cannot be removed and is ignored from now on") == 1
        assert (folder / "stop").read_text() == "precious"


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_stops_before_its_time_limit_and_goes_on(
    world: World, deck_file: Path, mpi_tmp_path: Path
) -> None:
    whole, parts = mpi_tmp_path / "whole", mpi_tmp_path / "parts"
    keys = ["checkpoint.every=0", "run.evaluate_every=0"]
    limit = ["run.time_limit=1500 ms", "run.time_margin=0", "run.steps=100000"]
    assert run_deck(world, deck_file, [f"run.dir={parts}", *keys, *limit]) == EXIT_AGAIN
    (name,) = stored(parts)
    step = int(name.removeprefix("step-").removesuffix(".h5"))
    assert step >= 1
    if world.rank == 0:
        assert " are left of run.time_limit, too little for " in (parts / "log.txt").read_text()
    steps = f"run.steps={step + 2}"
    assert resume(world, parts, [steps, "run.time_limit=", "run.time_margin="]) == EXIT_DONE
    assert run_deck(world, deck_file, [f"run.dir={whole}", *keys, steps]) == EXIT_DONE
    assert same_parameters(whole, parts, step + 2)


@pytest.mark.mpi(min_size=1)
def test_a_slurm_job_that_is_over_still_makes_one_step(
    world: World, deck_file: Path, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.rank == 0:  # the other ranks may not be told
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) - 5))
    assert run_deck(world, deck_file, [f"run.dir={mpi_tmp_path / 'run'}"]) == EXIT_AGAIN
    assert stored(mpi_tmp_path / "run") == ["step-00000001.h5"]


def test_the_earlier_limit_counts() -> None:
    def find(slurm: float | None, *keys: str) -> TimeLimit | None:
        deck = parse_deck(DECK.format(tokens="x"), keys)
        now = time.time()
        environment = {} if slurm is None else {"SLURM_JOB_END_TIME": str(int(now + slurm))}
        return TimeLimit.find(deck, environment, time.monotonic())

    assert find(None) is None
    own = find(9000, "run.time_limit=50 min")
    assert own is not None
    assert (own.name, own.margin) == ("run.time_limit", 60.0)
    assert own.end - time.monotonic() == pytest.approx(3000, abs=5)
    job = find(300, "run.time_limit=50 min")
    assert job is not None
    assert job.name == "the Slurm job's time limit"
    assert job.end - time.monotonic() == pytest.approx(300, abs=5)
    assert job.margin == pytest.approx(30, abs=1)
    given = find(300, "run.time_margin=2 min")
    assert given is not None
    assert given.margin == 120


def test_what_must_fit_before_the_limit() -> None:
    limit = TimeLimit("run.time_limit", 1000.0, 50.0)
    pace = Pace(checkpoint=100.0)
    assert not pace.reason_to_stop(limit, 999.0)  # no step yet
    pace.steps.extend([30.0, 10.0])
    pace.evaluation = 7.0
    needed = 30 + 100 + 50
    assert not pace.reason_to_stop(limit, 1000.0 - needed)
    assert not pace.reason_to_stop(None, 1e9)
    told = pace.reason_to_stop(limit, 1001.0 - needed)
    assert told == (
        "2 min 59 s are left of run.time_limit, too little for a step (30 s), a checkpoint (1 min 40 s) and "
        "a margin of 50 s"
    )
    assert pace.reason_to_stop(limit, 1000.0 - needed, evaluates=True)
    assert not pace.reason_to_stop(limit, 1000.0 - needed - 7, evaluates=True)
    assert pace.reason_to_stop(limit, 1000.0 - needed - 99, writing=True)
    assert not pace.reason_to_stop(limit, 1000.0 - needed - 100, writing=True)
    pace.steps.extend([10.0] * 20)  # the slow step is long ago
    assert not pace.reason_to_stop(limit, 1020.0 - needed)


def test_handlers_are_those_of_before_again() -> None:
    before = {number: signal.getsignal(number) for number in HANDLED}
    with Signals() as entered:
        for number in HANDLED:
            os.kill(os.getpid(), number)
        assert entered.received == set(HANDLED)
    assert {number: signal.getsignal(number) for number in HANDLED} == before


def test_a_second_interrupt_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """But two within a moment are one, which came by two ways; and loading the libraries counts."""
    now = 100.0
    monkeypatch.setattr(signals, "monotonic", lambda: now)
    with Signals():
        os.kill(os.getpid(), signal.SIGINT)
        with Signals() as inner:
            now += signals.SECONDS_BETWEEN_INTERRUPTS / 2
            os.kill(os.getpid(), signal.SIGINT)
            assert inner.received == {signal.SIGINT}
            now += signals.SECONDS_BETWEEN_INTERRUPTS
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_what_was_to_be_ignored_is_ignored(number: signal.Signals) -> None:
    """As `nohup` and a script's `&` ask for."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Signals() as entered:
            os.kill(os.getpid(), number)
            assert entered.received == set()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_mpiruns_warning_saves_and_the_run_goes_on(
    world: World, deck_file: Path, mpi_tmp_path: Path, at_step: AtStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(world.size))
    folder = mpi_tmp_path / "run"
    at_step(4, lambda: os.kill(os.getpid(), signal.SIGCONT))
    keys = [f"run.dir={folder}", "checkpoint.every=0", "checkpoint.keep=9", "run.steps=6"]
    assert run_deck(world, deck_file, keys) == EXIT_DONE
    assert stored(folder) == ["step-00000004.h5", "step-00000006.h5"]


# A run whose third step does not end. Python runs its handlers between two of its own instructions: a signal
# that came just before one long sleep would be remembered after it.
LONG_STEP = """
import time
from hpctrain.cli.main import main
from hpctrain.train.step import Step
make = Step.__call__
def step(self, state, *others):
    if state.step == 2:
        print("a long step", flush=True)
        while True:
            time.sleep(0.01)
    return make(self, state, *others)
Step.__call__ = step
main()
"""


def on_a_terminal(folder: Path, *program: str, do: Callable[[int], bytes]) -> tuple[int, bytes]:
    """Start a run of `small.toml` on a terminal of its own, `do` something with that, and close it.

    The run's exit code, and what `do` returned.
    """
    command = [sys.executable, *program, "run", "small.toml", "--set", "run.steps=1000000"]
    command += ["--set", "run.dir=run", "--set", "checkpoint.every=0"]
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execve(sys.executable, command, clean_environment() | {"TERM": "xterm"})
    try:
        done = do(terminal)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(terminal)
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), done


def read_until(terminal: int, wanted: bytes | None) -> bytes:
    """What a terminal shows up to and with `wanted`; None: until nobody writes to it any more."""
    shown, until = b"", time.monotonic() + 120
    while wanted is None or wanted not in shown:
        assert time.monotonic() < until, shown
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                new = os.read(terminal, 1 << 16)
            except OSError:  # so Linux says the end
                new = b""
            if not new:
                break
            shown += new
    assert wanted is None or wanted in shown, shown
    return shown


@pytest.fixture
def small(tmp_path: Path, launch: Callable[..., subprocess.CompletedProcess[str]]) -> Path:
    """A folder with `small.toml` and its tokens."""
    (tmp_path / "text.txt").write_text("hello world, " * 300)
    (tmp_path / "small.toml").write_text(DECK.format(tokens="tokens.h5"))
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    return tmp_path


@pytest.mark.sampled(1)
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_on_a_terminal(small: Path, presses: int) -> None:
    """With a live bar; the terminal is left as it was found."""

    def press(terminal: int) -> bytes:
        nonlocal after
        before = termios.tcgetattr(terminal)
        shown = read_until(terminal, b"loss" if presses == 1 else b"a long step")
        os.write(terminal, b"\x03")
        shown += read_until(terminal, b"Ctrl-C again ends it at once")
        if presses == 2:
            time.sleep(2 * signals.SECONDS_BETWEEN_INTERRUPTS)
            os.write(terminal, b"\x03")
        shown += read_until(terminal, None)
        after = [before, termios.tcgetattr(terminal)]
        return shown

    after: list[object] = []
    code, shown = on_a_terminal(small, *(("-m", "hpctrain") if presses == 1 else ("-c", LONG_STEP)), do=press)
    text = shown.decode(errors="replace")
    assert code == (EXIT_AGAIN if presses == 1 else EXIT_INTERRUPTED), text
    assert "Traceback" not in text
    assert after[0] == after[1]
    assert "\x1b[?25l" not in text  # the cursor was never hidden
    assert text.endswith("\n")
    assert len(stored(small / "run")) == (1 if presses == 1 else 0)


def test_a_terminal_that_goes_away_stops_a_run_in_good_order(small: Path) -> None:
    code, _ = on_a_terminal(small, "-m", "hpctrain", do=lambda terminal: read_until(terminal, b"loss"))
    assert code == EXIT_AGAIN
    assert len(stored(small / "run")) == 1
    assert "SIGHUP was received by rank 0" in (small / "run" / "log.txt").read_text()


def test_a_real_job_writes_a_checkpoint_goes_on_and_stops_with_75(
    tmp_path: Path, launch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "text.txt").write_text("hello world, " * 300)
    (tmp_path / "small.toml").write_text(DECK.format(tokens="tokens.h5"))
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    keys = ["--set", "run.steps=1000000", "--set", "run.dir=run", "--set", "checkpoint.every=0"]
    with subprocess.Popen(
        [*launcher(2), sys.executable, "-m", "hpctrain", "run", "small.toml", *keys],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            wait_for(lambda: state(tmp_path / "run") == "running", job)
            # mpirun hands both on to its ranks.
            job.send_signal(signal.SIGUSR1)
            wait_for(lambda: stored(tmp_path / "run"), job)
            wait_for(lambda: state(tmp_path / "run") == "running", job)
            job.send_signal(signal.SIGUSR2)
            output, _ = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == EXIT_AGAIN, output
    assert "SIGUSR2 was received by rank 0; resume with `hpctrain resume run`" in output
    assert "Traceback" not in output
    assert len(stored(tmp_path / "run")) == 2


def test_a_signal_while_libraries_load_is_not_lost(
    tmp_path: Path, launch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "text.txt").write_text("hello world, " * 300)
    (tmp_path / "small.toml").write_text(DECK.format(tokens="tokens.h5"))
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    program = """
import os, signal, sys
from hpctrain.cli import run
from hpctrain.cli.main import main
heed = run.record_signals
run.record_signals = lambda: (heed(), os.kill(os.getpid(), signal.SIGUSR2))
assert "torch" not in sys.modules
sys.argv = ["hpctrain", "run", "small.toml"]
main()
"""
    done = launch(0, "-c", program, cold=True)
    assert done.returncode == EXIT_AGAIN, done.stderr
    assert "SIGUSR2 was received by rank 0" in done.stdout


def state(folder: Path) -> str:
    """What a run says that it does; "" before it says anything."""
    path = folder / "status.json"
    return json.loads(path.read_text())["state"] if path.exists() else ""


def wait_for(what: Callable[[], object], job: subprocess.Popen[str]) -> None:
    """Return when it has come true; fail if the job ends before, or a minute has passed."""
    until = time.monotonic() + 60
    while not what():
        assert job.poll() is None, job.stdout and job.stdout.read()
        assert time.monotonic() < until
        time.sleep(0.05)
