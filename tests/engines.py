"""Engines for tests: small models on any layout, their data and their gradients as global tensors."""

from __future__ import annotations

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.parallel.groups import LayerGroups


def alone(world: World) -> LayerGroups:
    """The groups of a layout of one rank."""
    mesh = Mesh(world.alone(), {})
    return LayerGroups(tensor=mesh.group("tensor"), context=mesh.group("context"))
