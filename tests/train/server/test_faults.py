"""Workers that go astray: what hangs is found, and what raises ends the job, though servers wait for anybody.

Tests of train/server/worker_loop.py and comm/mailbox.py under mpirun.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from tests.train.server.test_run import deck_file

PROGRAM = """
import time
from hpctrain.cli.main import main
from hpctrain.train.server.worker_loop import Worker

usual = Worker._compute

def go_astray(worker, state, share):
    if share.step == 2:
        {act}
    usual(worker, state, share)

Worker._compute = go_astray
main()
"""


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("time.sleep(1000)", "is in wait for messages of server (ranks 0-1) for"),
        ("raise RuntimeError('astray')", "RuntimeError: astray"),
    ],
)
def test_a_worker_that_goes_astray_ends_the_job(
    launch: Callable[..., subprocess.CompletedProcess[str]], world: World, tmp_path: Path, act: str, said: str
) -> None:
    deck_file(world, tmp_path, "async")
    (tmp_path / "program.py").write_text(PROGRAM.format(act=act))
    keys = ("--set", "stability.hang_seconds=2", "--set", f"run.dir={tmp_path}/run")
    done = launch(2, "program.py", "run", "deck.toml", *keys)
    assert done.returncode == 70, (done.stdout, done.stderr)
    assert said in done.stderr, done.stderr
