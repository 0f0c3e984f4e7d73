"""`make gpu-test`: run the rows of rows.py one after the other, each under its own time limit.

A row runs in a process group of its own. One that hangs is ended at its limit, with all its children, and
counts as failed. At the end a table is printed, and written as `results.json` and `results.md`. The exit code
is 1 if any row failed. This program needs neither torch nor pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

TOTAL_SECONDS = 480.0
"""Time limit of all rows together."""

SECONDS_TO_END = 3.0
"""Time that a row's processes have to end after SIGTERM."""


@dataclass(frozen=True)
class Row:
    """One test.

    Attributes:
        name: Name, which is also that of its log.
        seconds: Time limit.
        needs_gpu: True if it proves nothing on a CPU.
        needs: Names of earlier rows without which it fails.
        command: Command; by default, the function of this name in rows.py.
    """

    name: str
    seconds: float
    needs_gpu: bool = False
    needs: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """Result of a row: "ok", "failed", "hung" or "not run", and the last line of its output."""

    name: str
    state: str
    seconds: float
    limit: float
    result: str

    @property
    def failed(self) -> bool:
        """True if the exit code must be 1."""
        return self.state in {"failed", "hung"}


def run_rows(rows: Sequence[Row], device: str, folder: Path, total: float = TOTAL_SECONDS) -> list[Outcome]:
    """Run rows in order, print each result, and write the table. A row without time left fails.

    Args:
        rows: The rows.
        device: "cuda" or "cpu".
        folder: Existing folder for the table, the logs, and the rows' own files.
        total: Time limit of all rows together, in seconds.
    """
    begin, outcomes = time.monotonic(), list[Outcome]()
    for row in rows:
        left = total - (time.monotonic() - begin)
        lacking = [each.name for each in outcomes if each.failed and each.name in row.needs]
        if row.needs_gpu and device == "cpu":
            outcome = Outcome(row.name, "not run", 0.0, row.seconds, "needs a GPU")
        elif lacking:
            reason = f"needs {lacking[0]}, which failed"
            outcome = Outcome(row.name, "failed", 0.0, row.seconds, reason)
        elif left <= 0:
            reason = f"the {total:.1f} s of all rows are over"
            outcome = Outcome(row.name, "failed", 0.0, row.seconds, reason)
        else:
            outcome = _run(row, min(row.seconds, left), device, folder)
        outcomes.append(outcome)
        print(f"{outcome.state:8}{outcome.seconds:5.0f} s  {row.name}: {outcome.result}", flush=True)
    seconds = time.monotonic() - begin
    results = {"device": device, "seconds": seconds, "rows": [asdict(outcome) for outcome in outcomes]}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(markdown(outcomes, device, seconds), encoding="utf-8")
    return outcomes


def _run(row: Row, limit: float, device: str, folder: Path) -> Outcome:
    """Run one row until it ends or its limit is reached, and end all its processes."""
    command = row.command or (sys.executable, "-m", "tests.gpu.rows", row.name, device)
    log, begin = folder / f"{row.name}.log", time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            state, ending = "failed" if code else "ok", f"exit code {code}"
        except subprocess.TimeoutExpired:
            state, ending = "hung", f"ended after {limit:.1f} s"
        finally:
            _end(process)
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    result = lines[-1].strip()[:300] if lines else ""
    if state in {"failed", "hung"}:
        result = f"{ending}; {result or 'no output'}"
    return Outcome(row.name, state, time.monotonic() - begin, limit, result)


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a row, in which hpctrain and this package can be imported."""
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a row's processes. Ranks are in process groups of their own, so its descendants are ended, too."""
    descendants = _descendants(process.pid) if process.poll() is None else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in descendants:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    process.wait()


def _descendants(ancestor: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    descendants = [ancestor]
    for each in descendants:
        descendants += children.get(each, [])
    return descendants[1:]


def markdown(outcomes: Sequence[Outcome], device: str, seconds: float) -> str:
    """Return the table in Markdown."""
    cells = [("row", "state", "seconds", "limit", "result"), ("---",) * 5]
    cells += [
        (each.name, each.state, f"{each.seconds:.0f}", f"{each.limit:.0f}", each.result.replace("|", "\\|"))
        for each in outcomes
    ]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join((f"GPU test on {device}, {seconds:.0f} s", "", *lines, ""))


def main(rows: Sequence[Row], arguments: Sequence[str] | None = None) -> int:
    """Run the rows that a command line selects, and return the exit code."""
    parser = argparse.ArgumentParser(description="Test hpctrain on a GPU, in at most 8 minutes.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes")
    parser.add_argument("--output", type=Path, default=Path("build/gpu-test"), help="folder of the results")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these rows, and what they need")
    options = parser.parse_args(arguments)
    names = [row.name for row in rows]
    chosen = {*(options.only or names)}
    if unknown := chosen - {*names}:
        parser.error(f"--only {min(unknown)}: must be one of {', '.join(names)}")
    chosen |= {name for row in rows if row.name in chosen for name in row.needs}
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = run_rows([row for row in rows if row.name in chosen], options.device, folder)
    print(f"\n{(folder / 'results.md').read_text(encoding='utf-8')}\nwritten to {folder}")
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    from tests.gpu.rows import ROWS

    sys.exit(main(ROWS))
