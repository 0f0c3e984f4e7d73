"""`make test`: the serial tests, then the MPI tests on each number of ranks, then what came of each.

All of them run, whatever fails before. The exit code is that of the first that failed: of pytest or of the
launcher.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.durations import record  # noqa: E402
from tests.launch import is_open_mpi, launcher  # noqa: E402
from tests.mpi_plugin import CLAIMS  # noqa: E402
from tests.selection import RANKS, SEED, seed  # noqa: E402
from tests.tally import KINDS, VARIABLE, count, durations  # noqa: E402
from tests.warm import FOREIGN, Server  # noqa: E402

SLOWEST = ("--durations=12", "--durations-min=5")
"""What each part tells of its slowest tests."""

SHARED = ("--dist", "worksteal", "-n")
"""Before the number of processes that share the tests without MPI."""
LOADED = ("pytest", "transformers", *FOREIGN)
"""What ranks need not load anew, beside what every program does."""
LOADED_ALREADY = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
"""What pytest warns of then, as far as its plug-ins use the same modules."""
MOST_SIDES = 8
"""Runs that share the tests of one rank."""
YIELD = "OMPI_MCA_mpi_yield_when_idle"
"""What has waiting ranks of Open MPI leave the processor to others."""
NO_TESTS = 5
"""pytest's exit code where nothing was to run."""
NO_END = 70
"""What stands for the exit code of a run that some of its tests have not come to an end in."""
NO_LAUNCHER = 127
"""A shell's exit code where a program cannot be started."""


SLOW_SECONDS = 3600
"""What a slow test may take; whatever it starts has a limit of its own."""


@dataclass(frozen=True)
class Part:
    """One run of pytest: on so many ranks, or without MPI where `ranks` is 0."""

    ranks: int
    slow: bool = False
    """Only what is marked so: it starts ranks of its own, and counts on no other tests beside it."""

    @property
    def title(self) -> str:
        """What its line of the summary begins with."""
        if self.slow:
            return "slow"
        return "serial" if not self.ranks else f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"

    @property
    def forked(self) -> bool:
        """Whether its ranks can be copies of a process that has loaded what they need."""
        return self.ranks == 1 or (self.ranks > 1 and is_open_mpi())

    def command(self, arguments: Sequence[str], python: Sequence[str] = (sys.executable,)) -> list[str]:
        """How it is started, by what stands for Python."""
        pytest = [
            *python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.mpi_plugin",
            "-p",
            "tests.tally",
            *SLOWEST,
            *(("-W", LOADED_ALREADY) if self.forked else ()),
        ]
        if self.slow:
            return [*pytest, "-o", f"faulthandler_timeout={SLOW_SECONDS}", "-m", "slow", *arguments]
        if not self.ranks:
            waiting = 1  # many of these tests wait for what they have started
            return [*pytest, *SHARED, str(processors() + waiting), "-m", "not mpi", *arguments]
        color = f"--color={'yes' if sys.stdout.isatty() else 'no'}"
        which = "mpi and eight" if self.ranks >= 8 else "mpi"
        files = with_eight() if self.ranks >= 8 and not any(map(is_path, arguments)) else ()
        start = launcher(self.ranks) if self.ranks > 1 else []
        return [*start, *pytest, color, "--with-mpi", "-m", which, *arguments, *files]

    @property
    def sides(self) -> int:
        """Runs that share its tests: ranks that wait for each other leave processors idle."""
        if self.ranks == 1:
            return min(processors(), MOST_SIDES)
        return 2 if 1 < self.ranks < 8 else 1


def processors() -> int:
    """How many there are for this process."""
    return len(os.sched_getaffinity(0))


def is_path(argument: str) -> bool:
    """Whether an argument of pytest says where tests are."""
    return (ROOT / argument.partition("::")[0]).exists()


def with_eight() -> list[str]:
    """The files with tests for eight ranks, each of which would take seconds to look at all the others."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(path) for path in files if "pytest.mark.eight" in path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Outcome:
    """Exit code of one part, how many of its tests ended how, how long it and each of its cases took."""

    part: Part
    code: int
    counts: Counter[str]
    seconds: float
    cases: Sequence[tuple[str, float]] = ()

    def line(self) -> str:
        """Its line of the summary."""
        numbers = ", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS)
        why = "" if self.code in {0, 1, NO_TESTS} else f"; ended with code {self.code}"
        if self.code == 1 and not self.counts["failed"]:
            why = "; failed outside of any test"
        if self.counts[""]:
            why += f"; {self.counts['']} came to no end"
        minutes, seconds = divmod(round(self.seconds), 60)
        return f"{self.part.title:<8}  {numbers}{why}  ({minutes} min {seconds:02} s)"


def run(part: Part, arguments: Sequence[str], server: Server) -> Outcome:
    """Run one part to its end."""
    print(f"== {part.title}", flush=True)
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="hpctrain-tests-") as folder:
        tally, claims = Path(folder) / "tally", Path(folder) / "claims"
        claims.mkdir()
        try:
            python = server.command(dict(os.environ)) if part.forked else [sys.executable]
            command = part.command(arguments, python)
            code = run_sides(part, command, claims, os.environ | {VARIABLE: str(tally)})
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{part.title}: {error}", file=sys.stderr)
            code = NO_LAUNCHER
        counts = count(tally)
        if counts[""] and not code:  # a test has ended its process
            code = NO_END
        cases = list(durations(tally))
        return Outcome(part, code if code >= 0 else 128 - code, counts, monotonic() - began, cases)


def run_sides(part: Part, command: Sequence[str], claims: Path, environment: Mapping[str, str]) -> int:
    """Run a part's command as often at a time as it has sides; the exit code of the first that failed.

    Each side keeps to its share of the processors, where its ranks take turns instead of waiting on one that
    another side needs. What the others print comes after what the first one does.
    """
    if part.sides == 1:
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    every = sorted(os.sched_getaffinity(0))
    share = -(-len(every) // part.sides)
    with ExitStack() as opened:
        outputs = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(1, part.sides)]
        sides = []
        try:
            for side, output in enumerate([None, *outputs]):
                os.sched_setaffinity(0, every[side * share :][:share] or every)
                own = {**environment, YIELD: "1", CLAIMS: f"{claims}:{side}/{part.sides}"}
                stream = {"stdout": output, "stderr": subprocess.STDOUT} if output else {}
                sides.append(subprocess.Popen(command, cwd=ROOT, env=own, **stream))
            codes = [side.wait() for side in sides]
        finally:
            os.sched_setaffinity(0, every)
            for side in sides:
                side.terminate()
        for output in outputs:
            output.seek(0)
            print(f"== {part.title}, beside these", flush=True)
            sys.stdout.buffer.write(output.read())
            sys.stdout.flush()
    return next((code for code in codes if code), 0)


def verdict(outcomes: Sequence[Outcome]) -> int:
    """Return the exit code of all parts. The selection may leave some parts, but not all, without a test."""
    codes = [outcome.code for outcome in outcomes]
    if any(code != NO_TESTS for code in codes):
        codes = [code for code in codes if code != NO_TESTS]
    return next((code for code in codes if code), 0)


def main(words: Sequence[str]) -> int:
    """Run all parts, show the summary; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1 2 4 8", help="numbers of ranks, in one word")
    parser.add_argument("--slow", action="store_true", help="the slow tests too, as the last part")
    parser.add_argument(
        "--record", action="store_true", help="write the seconds of slow tests into tests/durations.txt"
    )
    parser.add_argument("arguments", nargs="*", help="more arguments for pytest, after --")
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end what was started first
    os.environ |= {SEED: seed(), RANKS: options.ranks}
    print(f"selection of cases: {SEED}={seed()}", flush=True)
    parts = [Part(0), *(Part(int(number)) for number in options.ranks.split())]
    if options.slow:
        parts.append(Part(0, slow=True))
    with closing(Server(*LOADED)) as server:
        outcomes = [run(part, options.arguments, server) for part in parts]
    code = verdict(outcomes)
    print("== summary")
    for outcome in outcomes:
        print(outcome.line())
    total = sum((outcome.counts for outcome in outcomes), Counter())
    print(", ".join(f"{total[kind]} {kind}" for kind in KINDS))
    if options.record:
        record(chain.from_iterable(outcome.cases for outcome in outcomes))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
