"""`make test`: the serial tests, then the MPI tests on each number of ranks, then what came of each.

All of them run, whatever fails before. The exit code is that of the first that failed: of pytest or of the
launcher.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.launch import launcher  # noqa: E402
from tests.mpi_plugin import CLAIMS  # noqa: E402
from tests.tally import KINDS, VARIABLE, count  # noqa: E402

SLOWEST = ("--durations=12", "--durations-min=5")
"""What each part tells of its slowest tests."""

SHARED = ("--dist", "worksteal", "-n")
"""Before the number of processes that share the tests of one rank, or of none."""
YIELD = "OMPI_MCA_mpi_yield_when_idle"
"""What has waiting ranks of Open MPI leave the processor to others."""
NO_TESTS = 5
"""pytest's exit code where nothing was to run."""
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

    def command(self, arguments: Sequence[str]) -> list[str]:
        """How it is started."""
        processors = len(os.sched_getaffinity(0))
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.mpi_plugin",
            "-p",
            "tests.tally",
            *SLOWEST,
        ]
        if self.slow:
            return [*pytest, "-o", f"faulthandler_timeout={SLOW_SECONDS}", "-m", "slow", *arguments]
        if not self.ranks:
            waiting = 1  # many of these tests wait for what they have started
            return [*pytest, *SHARED, str(processors + waiting), "-m", "not mpi", *arguments]
        color = f"--color={'yes' if sys.stdout.isatty() else 'no'}"
        which = "mpi and eight" if self.ranks >= 8 else "mpi"
        files = with_eight() if self.ranks >= 8 and not any(map(is_path, arguments)) else ()
        start = launcher(self.ranks) if self.ranks > 1 else []
        many = (*SHARED, str(processors)) if self.ranks == 1 else ()
        return [*start, *pytest, *many, color, "--with-mpi", "-m", which, *arguments, *files]

    @property
    def sides(self) -> int:
        """Runs that share its tests: two ranks that wait for each other leave half of the processors idle."""
        return 2 if self.ranks == 2 else 1


def is_path(argument: str) -> bool:
    """Whether an argument of pytest says where tests are."""
    return (ROOT / argument.partition("::")[0]).exists()


def with_eight() -> list[str]:
    """The files with tests for eight ranks, each of which would take seconds to look at all the others."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(path) for path in files if "pytest.mark.eight" in path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Outcome:
    """Exit code of one part, how many of its tests ended how, and how long it took."""

    part: Part
    code: int
    counts: Counter[str]
    seconds: float

    def line(self) -> str:
        """Its line of the summary."""
        numbers = ", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS)
        why = "" if self.code in {0, 1} else f"; ended with code {self.code}"
        if self.code == 1 and not self.counts["failed"]:
            why = "; failed outside of any test"
        minutes, seconds = divmod(round(self.seconds), 60)
        return f"{self.part.title:<8}  {numbers}{why}  ({minutes} min {seconds:02} s)"


def run(part: Part, arguments: Sequence[str]) -> Outcome:
    """Run one part to its end."""
    print(f"== {part.title}", flush=True)
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="hpctrain-tests-") as folder:
        tally, claims = Path(folder) / "tally", Path(folder) / "claims"
        claims.mkdir()
        try:
            code = run_sides(part, part.command(arguments), claims, os.environ | {VARIABLE: str(tally)})
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{part.title}: {error}", file=sys.stderr)
            code = NO_LAUNCHER
        return Outcome(part, code if code >= 0 else 128 - code, count(tally), monotonic() - began)


def run_sides(part: Part, command: Sequence[str], claims: Path, environment: Mapping[str, str]) -> int:
    """Run a part's command as often at a time as it has sides; the exit code of the first that failed.

    Each side keeps to its half of the processors, where its ranks take turns instead of waiting on one that
    the other side needs. What the second one prints comes after the first one's.
    """
    if part.sides == 1:
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    processors = sorted(os.sched_getaffinity(0))
    half = -(-len(processors) // 2)

    def start(claims: str, on: Sequence[int], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        os.sched_setaffinity(0, on)
        own = {**environment, YIELD: "1", CLAIMS: claims}
        return subprocess.Popen(
            command, cwd=ROOT, env=own, stdout=output, stderr=output and subprocess.STDOUT
        )

    with tempfile.TemporaryFile() as output:
        first = start(str(claims), processors[:half])
        second = start(f"{claims}:backwards", processors[-half:], output)
        os.sched_setaffinity(0, processors)
        first.wait()
        second.wait()
        output.seek(0)
        print(f"== {part.title}, beside these", flush=True)
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
    return first.returncode or second.returncode


def verdict(outcomes: Sequence[Outcome], chosen: bool) -> int:
    """The exit code of all. `chosen`: by arguments, which may leave nothing for some numbers of ranks."""
    codes = [outcome.code for outcome in outcomes]
    if chosen and any(code != NO_TESTS for code in codes):
        codes = [code for code in codes if code != NO_TESTS]
    return next((code for code in codes if code), 0)


def main(words: Sequence[str]) -> int:
    """Run all parts, show the summary; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1 2 4 8", help="numbers of ranks, in one word")
    parser.add_argument("--slow", action="store_true", help="the slow tests too, as the last part")
    parser.add_argument("arguments", nargs="*", help="more arguments for pytest, after --")
    wish = parser.parse_args(words)
    parts = [Part(0), *(Part(int(number)) for number in wish.ranks.split())]
    if wish.slow:
        parts.append(Part(0, slow=True))
    outcomes = [run(part, wish.arguments) for part in parts]
    code = verdict(outcomes, bool(wish.arguments))
    print("== summary")
    for outcome in outcomes:
        print(outcome.line())
    total = sum((outcome.counts for outcome in outcomes), Counter())
    print(", ".join(f"{total[kind]} {kind}" for kind in KINDS))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
