"""The mesh against numpy's own reshaped arange.

Tests of comm/mesh.py and comm/transports/choose.py.
"""

from __future__ import annotations

import os
from math import prod

import numpy as np
import pytest
import torch

from hpctrain.comm.mesh import AXES, EXPERT_AXES, JOINED, Mesh, choose_transport, sizes_text
from hpctrain.comm.planned import PlannedMesh
from hpctrain.comm.transports.choose import TRANSPORTS
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError

pytestmark = pytest.mark.mpi

LAYOUTS = {
    1: [{}],
    2: [{"data": 2}, {"tensor": 2}, {"pipeline": 2}],
    3: [{"data": 3}],
    4: [{"data": 2, "tensor": 2}, {"pipeline": 2, "context": 2}, {"context": 4}],
}

EXPERT_LAYOUTS = {
    1: [{"expert": 1}],
    2: [{"data": 2, "expert": 1}, {"tensor": 2, "expert": 2}, {"pipeline": 2, "expert": 1}],
    3: [{"data": 3, "expert": 3}],
    4: [
        {"data": 2, "tensor": 2, "expert": 2},
        {"data": 4, "expert": 2, "expert_tensor": 2},
        {"pipeline": 2, "context": 2, "expert_tensor": 2, "expert": 1},
    ],
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


def test_experts_fold_the_ranks_of_a_stage_in_their_own_way(world: World) -> None:
    for sizes in EXPERT_LAYOUTS[world.size]:
        mesh = Mesh(world, sizes)
        split = sizes.get("expert", 1) * sizes.get("expert_tensor", 1)
        shape = [sizes.get("pipeline", 1), -1, sizes.get("expert", 1), sizes.get("expert_tensor", 1)]
        array = np.arange(world.size).reshape(shape)
        assert mesh.size("expert_data") * split == world.size // sizes.get("pipeline", 1)
        for rank in range(world.size):
            place = tuple(int(index[0]) for index in np.nonzero(array == rank))
            along = mesh.coordinates(rank)
            assert tuple(along[axis] for axis in EXPERT_AXES) == place
        here = mesh.coordinates(world.rank)
        for axis in EXPERT_AXES:
            assert (mesh.size(axis), mesh.coordinate(axis)) == (
                array.shape[EXPERT_AXES.index(axis)],
                here[axis],
            )
            index = tuple(slice(None) if each == axis else here[each] for each in EXPERT_AXES)
            expected = array[index].reshape(-1).tolist()
            group = mesh.group(axis)
            assert list(group.ranks) == expected
            assert group.all_gather(torch.tensor([world.rank])).tolist() == expected
            assert mesh.new_subgroup(axis, 1).ranks == (world.rank,)


def test_a_mesh_without_experts_has_no_groups_for_them(world: World) -> None:
    mesh = Mesh(world, {"data": world.size})
    assert set(mesh.coordinates(0)) == set(mesh.sizes) == set(AXES)
    assert mesh.group("expert") is mesh.group("expert_tensor")
    assert mesh.group("expert").ranks == (world.rank,)
    if world.size > 1:
        with pytest.raises(AssertionError):
            mesh.group("expert_data")


def test_groups_of_the_same_ranks_share_communicators(world: World) -> None:
    """Calls of both are counted apart, under their own names."""
    for sizes in LAYOUTS[world.size]:
        mesh = Mesh(world, sizes)
        for axes in JOINED:
            joined, split = mesh.group(*axes), [axis for axis in axes if sizes.get(axis, 1) > 1]
            alike = [mesh.group(axis) for axis in axes if mesh.group(axis).host is joined.host]
            assert len(alike) == (len(split) < 2)
            for other in alike:
                assert (other.ranks, other.objects) == (joined.ranks, joined.objects)
                assert other.accelerator is joined.accelerator
                assert other.calls is not joined.calls and other.name != joined.name
            planned = PlannedMesh(mesh.sizes, mesh.coordinate("pipeline"), world.size)
            assert (planned.group(*axes) in planned.communicating_groups) == (len(split) == 2)


def test_experts_are_named_where_they_are_split() -> None:
    sizes = {"pipeline": 2, "data": 2, "context": 1, "tensor": 2}
    assert sizes_text(sizes) == "pipeline 2 x data 2 x context 1 x tensor 2"
    assert sizes_text(sizes, 2) == "pipeline 2 x data 2 x tensor 2"
    assert sizes_text({**sizes, "expert": 1, "expert_tensor": 1}) == sizes_text(sizes)
    experts = sizes_text({**sizes, "expert": 2, "expert_tensor": 1}, 2)
    assert experts == "pipeline 2 x data 2 x tensor 2, experts expert_data 2 x expert 2"


def test_parts_of_an_axis(world: World) -> None:
    mesh = Mesh(world, {"tensor": world.size})
    part = mesh.new_subgroup("tensor", world.size // 2 or 1)
    size = part.size
    first = world.rank // size * size
    assert part.ranks == tuple(range(first, first + size))
    assert part.all_gather(torch.tensor([world.rank])).tolist() == list(part.ranks)


@pytest.mark.mpi(min_size=3, max_size=4)
def test_parts_of_an_axis_may_have_different_sizes(world: World) -> None:
    part = Mesh(world, {"tensor": world.size}).new_subgroup("tensor", [world.size - 1, 1])
    assert part.ranks == ((world.rank,) if world.rank == world.size - 1 else tuple(range(world.size - 1)))


def test_the_product_must_be_the_world(world: World) -> None:
    with pytest.raises(AssertionError):
        Mesh(world, {"data": world.size + 1})
    with pytest.raises(AssertionError):
        Mesh(world, {"date": world.size})
    with pytest.raises(AssertionError):
        Mesh(world, {"data": world.size}).group("tensor", "data")


@pytest.mark.skipif(os.environ.get("HPCTRAIN_TEST_DEVICE", "cpu") != "cpu", reason="the device is a GPU")
def test_nccl_is_refused_without_gpus(world: World) -> None:
    assert choose_transport(world, "auto") == ("shared" if world.size > 1 else "mpi")
    with pytest.raises(HpctrainError, match="no rank has a GPU"):
        Mesh(world, {"data": world.size}, "nccl")


def test_what_the_table_holds_can_be_chosen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    other = TRANSPORTS["mpi"]
    monkeypatch.setitem(TRANSPORTS, "other", other)
    assert Mesh(world, {"data": world.size}, "other").transport == "other"
    monkeypatch.setitem(TRANSPORTS, "other", other._replace(obstacles=lambda _: ["is not here"]))
    with pytest.raises(HpctrainError, match='"other": is not here'):
        choose_transport(world, "other")
