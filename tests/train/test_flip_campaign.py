"""Five hundred flips in runs: of what lasts, what is sent, and what is multiplied."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

KINDS = ("parameter", "moment", "gradient", "sum", "message", "product")


@pytest.mark.slow
def test_five_hundred_flips_are_found_located_and_healed(
    tmp_path: Path,
    launch: Callable[..., subprocess.CompletedProcess[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All but products' that are no more than rounding, of which 95% are enough, too."""
    program = "-m", "tests.train.flip_campaign", tmp_path, "--flips", "500"
    done = launch(2, *program, timeout=3000.0)
    lines = done.stdout.splitlines()
    outcome = lines[-1 - len(KINDS) :]
    assert done.returncode == 0, "\n".join(lines[-60:]) + done.stderr[-3000:]
    with capsys.disabled():
        print("", *outcome, sep="\n")
    assert [line.split()[0] for line in outcome[1:]] == list(KINDS)
    counts = {line.split()[0]: list(map(int, line.split()[1:])) for line in outcome[1:]}
    for kind, (planted, happened, above, found, of_above, located, healed) in counts.items():
        assert planted == happened == 100, kind
        assert found == located == healed, kind
        if kind != "product":
            assert of_above == above, kind
    above, of_above = counts["product"][2], counts["product"][4]
    assert above > 40 and of_above >= 0.95 * above
