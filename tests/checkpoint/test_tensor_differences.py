"""Differences of two files against numpy on the whole tensors."""

from __future__ import annotations

from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint import tensor_differences
from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.tensor_differences import comparable, compare
from hpctrain.comm.world import World
from tests.checkpoint.conftest import Tensors, whole


def bits(tensor: Tensor) -> np.ndarray:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()]).numpy().reshape(-1)


@pytest.mark.mpi(min_size=1)
def test_differences_are_those_of_the_whole_tensors(
    world: World, mpi_tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_differences, "_PIECE", 1000)
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["large.weight"][700:703, 5] += 0.5  # far from each other in the file, so on several ranks
    changed["large.weight"][1499, 800] = -9.0
    changed["layers.0.cube"][6, 5, 4] *= -1
    changed["double"][0, 0] = float("nan")
    changed["half"][3] = float("inf")
    changed["counts"][1, 1] += 3
    changed["flags"][4] ^= True
    tensors["small"][:] = torch.tensor([0.0, 2.0])
    changed["small"][:] = torch.tensor([-0.0, 2.0])
    changed["int"] = changed["int"].reshape(2, 3)
    changed["matrix"] = changed["matrix"].double()
    changed["new"] = changed.pop("scalar")
    for name, held in (("one.h5", tensors), ("other.h5", changed)):
        save(mpi_tmp_path / name, world.everyone, whole(held, world.rank, world.size), {})
    one, other = (examine(mpi_tmp_path / name, world.everyone) for name in ("one.h5", "other.h5"))
    assert {name.removeprefix("/model/") for name in comparable(one, other)} == set(tensors) - {
        "int",
        "matrix",
        "scalar",
    }
    found = {
        difference.dataset.removeprefix("/model/"): difference
        for difference in compare(one, other, world.everyone)
    }
    for name, difference in found.items():
        left, right = tensors[name], changed[name]
        assert difference.elements == left.numel()
        assert difference.differing == np.count_nonzero(bits(left) != bits(right)), name
    assert found["nothing"].differing == 0
    for name in ("large.weight", "layers.0.cube", "counts", "flags"):
        left, right = (held[name].double().numpy() for held in (tensors, changed))
        absolute = np.abs(left - right).max()
        assert found[name].absolute == absolute, name
        assert found[name].relative == absolute / max(np.abs(left).max(), np.abs(right).max()), name
    assert (found["double"].absolute, found["half"].absolute) == (inf, inf)
    assert (found["small"].differing, found["small"].absolute, found["small"].relative) == (1, 0.0, 0.0)


@pytest.mark.mpi(min_size=1)
def test_nothing_differs_in_a_copy(world: World, mpi_tmp_path: Path, tensors: Tensors) -> None:
    tensors["matrix"][0, :2] = torch.tensor([float("nan"), float("inf")])
    for name in ("one.h5", "other.h5"):
        save(mpi_tmp_path / name, world.everyone, whole(tensors, world.rank, world.size), {})
    one, other = (examine(mpi_tmp_path / name, world.everyone) for name in ("one.h5", "other.h5"))
    found = compare(one, other, world.everyone)
    assert len(found) == len(tensors)
    assert {(each.differing, each.absolute, each.relative) for each in found} == {(0, 0.0, 0.0)}
