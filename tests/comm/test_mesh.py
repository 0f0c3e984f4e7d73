"""The mesh against numpy's own reshaped arange."""

from __future__ import annotations

import os
from math import prod

import numpy as np
import pytest
import torch

from hpctrain.comm.mesh import AXES, JOINED, Mesh, choose_transport
from hpctrain.comm.transports import TRANSPORTS
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError

pytestmark = pytest.mark.mpi

LAYOUTS = {
    1: [{}],
    2: [{"data": 2}, {"tensor": 2}, {"pipeline": 2}],
    3: [{"data": 3}],
    4: [{"data": 2, "tensor": 2}, {"pipeline": 2, "context": 2}, {"expert": 2, "data": 2}, {"context": 4}],
}


def test_coordinates_and_groups_are_those_of_a_reshaped_arange(world: World) -> None:
    for sizes in LAYOUTS[world.size]:
        mesh = Mesh(world, sizes)
        shape = [sizes.get(axis, 1) for axis in AXES]
        assert prod(shape) == world.size
        array = np.arange(world.size).reshape(shape)
        for rank in range(world.size):
            place = tuple(int(index[0]) for index in np.nonzero(array == rank))
            assert mesh.coordinates(rank) == dict(zip(AXES, place, strict=True))
        here = mesh.coordinates(world.rank)
        for axis in AXES:
            assert mesh.coordinate(axis) == here[axis]
            assert mesh.size(axis) == sizes.get(axis, 1)
        for axes in (*((axis,) for axis in AXES), *JOINED):
            group = mesh.group(*axes)
            index = tuple(slice(None) if axis in axes else here[axis] for axis in AXES)
            expected = array[index].reshape(-1).tolist()
            assert list(group.ranks) == expected
            assert group.size == len(expected)
            assert group.rank == expected.index(world.rank)
            assert group.axes == axes
            assert group.name == " x ".join(axes)
            mine = torch.tensor([float(world.rank)])
            assert group.all_gather(mine).tolist() == expected
            assert group.all_reduce(mine).item() == sum(expected)


def test_parts_of_an_axis(world: World) -> None:
    mesh = Mesh(world, {"tensor": world.size})
    part = mesh.part("tensor", world.size // 2 or 1)
    size = part.size
    first = world.rank // size * size
    assert part.ranks == tuple(range(first, first + size))
    assert part.all_gather(torch.tensor([world.rank])).tolist() == list(part.ranks)


def test_the_product_must_be_the_world(world: World) -> None:
    with pytest.raises(AssertionError):
        Mesh(world, {"data": world.size + 1})
    with pytest.raises(AssertionError):
        Mesh(world, {"date": world.size})
    with pytest.raises(AssertionError):
        Mesh(world, {"data": world.size}).group("tensor", "data")


@pytest.mark.skipif(os.environ.get("HPCTRAIN_TEST_DEVICE", "cpu") != "cpu", reason="the device is a GPU")
def test_nccl_is_refused_without_gpus(world: World) -> None:
    assert choose_transport(world, "auto") == "mpi"
    with pytest.raises(HpctrainError, match="not every rank has a GPU"):
        Mesh(world, {"data": world.size}, "nccl")


def test_what_the_table_holds_can_be_chosen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    other = TRANSPORTS["mpi"]
    monkeypatch.setitem(TRANSPORTS, "other", other)
    assert Mesh(world, {"data": world.size}, "other").transport == "other"
    monkeypatch.setitem(TRANSPORTS, "other", other._replace(obstacles=lambda _: ["is not here"]))
    with pytest.raises(HpctrainError, match='"other": is not here'):
        choose_transport(world, "other")


def test_nccl_is_for_ranks_with_a_gpu_each() -> None:
    suits, obstacles = TRANSPORTS["nccl"].suits, TRANSPORTS["nccl"].obstacles
    assert suits(["a", "b"])
    assert not any(map(suits, (["a"], ["a", "a"], ["a", None], [None, None])))
    assert "several ranks share a GPU" in obstacles(["a", "a"])[0]
    assert "not every rank has a GPU" in obstacles([None, None])[0]
