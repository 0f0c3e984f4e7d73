"""Hundreds of damaged checkpoints: each is as good as before, or refused in one sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.damage import DAMAGES, regions
from tests.launch import ROOT, clean_environment
from tests.train.test_run import DECK

FILES = 175
BATCH = 35
SECONDS = 240
"""Patience with a batch: a file takes some hundredths of one."""

KINDS = {
    "fp32, one rank": (0, []),
    "bf16, stage 3 of two ranks, in the background": (
        2,
        ["precision.compute=bf16", "layout.zero=3", "checkpoint.mode=background"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_passed_over_or_the_same(
    kind: str,
    tmp_path: Path,
    launch: Callable[..., subprocess.CompletedProcess[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run(tmp_path, launch, kind)
    rows: list[dict[str, Any]] = []
    for first in range(0, FILES, BATCH):
        rows += batch(tmp_path, first, min(FILES, first + BATCH))
    assert [row["number"] for row in rows] == list(range(FILES))
    counts: Counter[str] = Counter()
    for row in rows:
        counts[check(row)] += 1
    assert counts["skipped"] > FILES // 2
    assert counts["the same"] > 0
    assert counts.total() == FILES
    with capsys.disabled():
        print(f"\n{FILES} damaged checkpoints ({kind}): {dict(counts)}")


@pytest.mark.slow
def test_resume_says_what_it_passes_over(
    tmp_path: Path, launch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The command itself, on two ranks."""
    make_run(tmp_path, launch, "fp32, one rank")
    good = (tmp_path / "good.h5").read_bytes()
    known = regions(tmp_path / "good.h5")
    for region in ("superblock", "tensors", "texts"):
        run = tmp_path / region
        shutil.copytree(tmp_path / "run", run)
        content = bytearray(good)
        content[known[region][0].start + 12] ^= 4
        (run / "checkpoints" / "step-00000002.h5").write_bytes(content)
        strict = launch(
            2, "-m", "hpctrain", "resume", run, "--strict", "--set", "run.steps=3", timeout=SECONDS
        )
        assert strict.returncode == 3, strict.stderr
        assert strict.stderr.count("hpctrain: error: ") == 1
        assert "Traceback" not in strict.stderr
        command = ("-m", "hpctrain", "resume", run, "--set", "run.steps=3")
        done = launch(2, *command, timeout=SECONDS, cold=True)  # whose lines no terminal shows
        assert done.returncode == 0, done.stderr
        assert "skipped" in done.stdout + done.stderr
        assert "step-00000001.h5 at step 1" in done.stdout


def make_run(folder: Path, launch: Callable[..., subprocess.CompletedProcess[str]], kind: str) -> None:
    """A run of two steps with a checkpoint of each, and the newer one once more as good.h5."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    (folder / "small.toml").write_text(DECK.format(tokens="tokens.h5"))
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    ranks, keys = KINDS[kind]
    small = ["run.dir=run", "run.steps=2", "checkpoint.every=1", "model.layers=1", "model.hidden=16"]
    sets = [part for key in [*small, *keys] for part in ("--set", key)]
    done = launch(ranks, "-m", "hpctrain", "run", "small.toml", *sets)
    assert done.returncode == 0, done.stderr
    shutil.copy(folder / "run" / "checkpoints" / "step-00000002.h5", folder / "good.h5")


def batch(folder: Path, first: int, last: int) -> list[dict[str, Any]]:
    """What came of the damages of these numbers, tried in a process of their own."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.checkpoint.damage", folder, first, last]
    try:
        done = subprocess.run(
            [*map(str, command)],
            cwd=ROOT,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"hangs at {(late.stdout or b'').decode().splitlines()[-1:]}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last_word = rows[-1] if rows else {}
    assert done.returncode == 0, f"ended with {done.returncode} at {last_word}\n{done.stderr[-4000:]}"
    return [row for row in rows if "taken" in row]


def check(row: dict[str, Any]) -> str:
    """What became of one damaged file; fails where that is not what is promised."""
    assert row["damage"] in DAMAGES
    if row["taken"] == "step-00000002.h5":
        assert row["load"] == "equal", row
        assert row["strict"] == "equal", row
        assert not row["said"], row
        return "the same"
    assert row["taken"] == "step-00000001.h5", row
    assert not row["same_bytes"], row
    told = [line for line in row["said"] if line.endswith("; skipped")]
    assert told, row
    assert all("step-00000002.h5" in line or line.startswith("... and ") for line in row["said"]), row
    assert not any("\n" in line for line in row["said"]), row
    code, problems = row["strict"]
    # A file without the signature or the mark of a checkpoint counts as another one, the user's mistake.
    other = all(
        "not a checkpoint of hpctrain" in problem or "is unsupported; " in problem for problem in problems
    )
    assert code == (2 if other else 3), row
    # What is read alone may be whole; then it is what was written.
    assert row["load"] == "equal" or row["load"][0] in (2, 3), row
    return "skipped"
