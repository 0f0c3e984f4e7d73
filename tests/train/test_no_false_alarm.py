"""Twenty thousand steps of which nothing is wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.clean_steps import FORMATS, LAYOUTS


@pytest.mark.slow
def test_twenty_thousand_clean_steps_give_no_alarm_and_have_the_bits_of_unguarded_ones(
    tmp_path: Path,
    launch: Callable[..., subprocess.CompletedProcess[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = "-m", "tests.train.clean_steps", tmp_path, "--steps", "20000"
    done = launch(2, *program, timeout=3500.0)
    looked = [line for line in done.stdout.splitlines() if " faults, " in line]
    assert done.returncode == 0, "\n".join(done.stdout.splitlines()[-60:]) + done.stderr[-3000:]
    with capsys.disabled():
        print("", *looked, sep="\n")
    full = [line for line in looked if "-full: 1000 steps, 0 faults" in line]
    assert len(full) == len(LAYOUTS) * len(FORMATS)
