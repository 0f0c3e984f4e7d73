"""The fingerprint of a model changes with its weights: checkpoint/exchange/source_fingerprint.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hpctrain.checkpoint.exchange.source_fingerprint import source_fingerprint
from hpctrain.errors import InputOutputError


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Write a folder of safetensors and return its fingerprint."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return source_fingerprint(folder)


def test_a_folder_is_known_by_its_weights(tmp_path: Path) -> None:
    tensors = {
        "table": torch.arange(600, dtype=torch.bfloat16).reshape(100, 6),
        "bias": torch.arange(5.0),
        "scalar": torch.tensor(2.0),
    }
    before = written(tmp_path / "a", tensors)
    assert written(tmp_path / "b", dict(reversed(tensors.items()))) == before
    fingerprints = {before}
    for name, value in tensors.items():
        fingerprints.add(written(tmp_path / "c", {**tensors, name: value + 1}))
    table = tensors["table"].clone()
    table[-1, -1] = 0
    fingerprints.add(written(tmp_path / "c", {**tensors, "table": table}))
    fingerprints.add(written(tmp_path / "c", {**tensors, "bias": tensors["bias"].reshape(1, 5)}))
    assert len(fingerprints) == 6
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(InputOutputError, match="c: no such checkpoint"):
        source_fingerprint(tmp_path / "c")
