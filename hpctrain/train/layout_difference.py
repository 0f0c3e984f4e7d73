"""Difference between a tensor on a layout and on one rank, and its likely cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.parallel.shards import Shard

TOLERANCE = 1e-5  # largest difference of a tensor over its largest element, in fp32

_SUMS = (("tensor",), ("context",), ("data",), ("data", "context"), ("context", "tensor"))
"""Axes over which a sum may be missing or doubled, the likeliest first."""

_SUMS_OF_EXPERTS = (("expert_data",), ("expert",), ("expert_tensor",))
"""The same for tensors of experts, for which they come first; for other tensors they come last."""


@dataclass(frozen=True)
class LayoutDifference:
    """Difference between one tensor, or a number such as the loss, and its reference.

    Attributes:
        name: Name of the tensor.
        error: Largest difference, relative to the largest element.
        hint: Likely cause, for messages.
        explained: True if one missing or doubled sum, or one factor, explains the difference.
        reference: What the tensor is compared with.
    """

    name: str
    error: float
    hint: str
    explained: bool = True
    reference: str = "the one-rank run"

    @property
    def fails(self) -> bool:
        """True if the difference is larger than rounding."""
        return not self.error <= TOLERANCE

    def __str__(self) -> str:
        return (
            f"{self.name} differs from {self.reference} by {self.error:.1e} of its largest element "
            f"(allowed: {TOLERANCE:.0e}); {self.hint}"
        )


@dataclass(frozen=True)
class ComparedTensor:
    """Local piece of a tensor, or a number, with its expected values.

    Attributes:
        name: Name of the tensor.
        local: This rank's piece; empty if it has none.
        expected: The same elements on one rank.
        scale: Value that errors are relative to.
        shard: Shard of the piece; None for a number.
        sums: The axes over which all ranks have pieces of one shape, so that a missing or doubled sum can be
            recognized: all of them, the tensor axis, or none.
    """

    name: str
    local: Tensor
    expected: Tensor
    scale: float
    shard: Shard | None
    sums: Literal["all", "tensor", "none"]


def difference_of(tensor: ComparedTensor, world: World, mesh: Mesh) -> LayoutDifference:
    """Compare a tensor, or a number, with its expected values. Collective."""
    name, shard = tensor.name, tensor.shard
    local, expected = tensor.local.detach().double().cpu(), tensor.expected.double()
    largest = max(tensor.scale, 1e-30)

    def worst(values: Tensor) -> float:
        error = (values - expected).abs().max() if values.numel() else torch.zeros(())
        both = torch.stack((error.double(), (~error.isfinite()).double())).nan_to_num(nan=0.0)
        world.everyone.all_reduce(both, "max")
        return float("inf") if both[1] else float(both[0]) / largest

    error = worst(local)
    if error <= TOLERANCE:
        return LayoutDifference(name, error, "")
    splits = world.everyone.all_gather_object(None if shard is None else sorted(shard.split))
    split = next((each for each in splits if each is not None), None)
    what = "" if split is None else f"split over {', '.join(split) or 'no axis'}; "
    explained = min(10 * TOLERANCE, error / 10)
    of_experts = _SUMS_OF_EXPERTS if "expert" in mesh.sizes else ()
    likely = (*of_experts, *_SUMS) if split and "expert" in split else (*_SUMS, *of_experts)
    for axes in {"all": likely, "tensor": _SUMS[:1], "none": ()}[tensor.sums]:
        group = mesh.group(*axes)
        if group.size == 1:
            continue
        over = f"the {group.name} axis ({group.size} ranks)"
        sentence = ""
        if worst(group.all_reduce(local.clone())) <= explained:
            sentence = f"a sum over {over} is likely missing, since it gives the expected value"
        elif worst(local / group.size) <= explained:
            factor = f"{group.size} times the expected value"
            sentence = f"it is {factor}: a reduction over {over} is likely duplicated"
        elif worst(local * group.size) <= explained:
            factor = f"{1 / group.size:.4g} times the expected value"
            sentence = f"it is {factor}, such as after a mean over {over}"
        if sentence:
            return LayoutDifference(name, error, f"{what}{sentence}")
    # A single number always differs by a factor.
    several = bool(world.everyone.all_reduce(torch.tensor(expected.numel()), "max") > 1)
    ratio = _factor(local, expected, world)
    if several and worst(local / ratio) <= explained:
        return LayoutDifference(name, error, f"{what}it is {ratio:.4g} times the expected value")
    none = f"{what}no single missing or duplicate reduction explains it"
    return LayoutDifference(name, error, none, explained=False)


def _factor(local: Tensor, expected: Tensor, world: World) -> float:
    """Return the factor by which a tensor differs from its expected values, by least squares. Collective."""
    sums = torch.stack(((local * expected).sum(), expected.square().sum()))
    products, squares = world.everyone.all_reduce(sums.nan_to_num()).tolist()
    return products / squares if products and squares else 1.0
