"""What names the checkpoint of a reward model. Tests of engine/companions.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.engine.companions import is_checkpoint


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("runs/reward/checkpoints/step-00000100.h5", True),
        ("runs/reward/checkpoints/latest", True),
        ("{folder}", True),
        ("{folder}/none", False),
        ("exact-match", False),
        ("own.py:polite", False),
        ("regular-expression:/checkpoints/", False),
        ("regular-expression:x.h5", False),
    ],
)
def test_checkpoints(tmp_path: Path, name: str, wanted: bool) -> None:
    assert is_checkpoint(name.format(folder=tmp_path)) == wanted
