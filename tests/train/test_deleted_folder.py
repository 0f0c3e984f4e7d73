"""Tests of a run whose folder is deleted or replaced during training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.errors import InputOutputError
from hpctrain.train import control
from hpctrain.train.control import Control
from hpctrain.train.signals import Signals


@pytest.mark.parametrize("replaced", [False, True])
def test_deleted_folder_ends_the_run(
    replaced: bool, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "SECONDS_PER_CHECK", 0.0)
    folder = tmp_path / "run"
    folder.mkdir()
    run_control = Control(world.single_rank_world(), folder, Signals(), str)
    assert not run_control.agree().stop
    folder.rename(tmp_path / "away")
    if replaced:
        folder.mkdir()
    assert not run_control.agree().stop
    with pytest.raises(InputOutputError, match="run: was deleted or replaced during training") as error:
        run_control.agree()
    assert error.value.exit_code == 3


def test_folder_may_be_invisible_for_a_moment(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "SECONDS_PER_CHECK", 0.0)
    folder = tmp_path / "run"
    folder.mkdir()
    run_control = Control(world.single_rank_world(), folder, Signals(), str)
    for _ in range(3):
        shutil.move(folder, tmp_path / "away")
        assert not run_control.agree().stop
        shutil.move(tmp_path / "away", folder)
        assert not run_control.agree().stop
