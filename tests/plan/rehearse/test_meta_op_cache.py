"""Operations that were run of alike tensors: what they make is known, and made anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.comm.planned import META
from hpctrain.plan.rehearse.meta_op_cache import CachedMetaOps, MetaOpCache


class Counted(TorchDispatchMode):
    """Counts what is run, and not recalled."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run."""
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def a(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def run(*operations: Any) -> tuple[list[Any], list[str]]:
    """What operations give, and the names of those that were run for it."""
    given = [operation[1:] for operation in operations]
    with Counted() as counted, CachedMetaOps(MetaOpCache()):
        found = [each[0](*args) for each, args in zip(operations, given, strict=True)]
    return found, counted.names


def test_an_operation_of_alike_tensors_is_run_once() -> None:
    (one, other, third), names = run(
        (torch.mm, a(2, 3), a(3, 4)), (torch.mm, a(2, 3), a(3, 4)), (torch.mm, a(2, 3), a(3, 5))
    )
    assert names.count("mm") == 2
    assert (one.shape, third.shape) == ((2, 4), (2, 5))
    assert (other.shape, other.stride(), other.dtype, other.is_meta) == ((2, 4), (4, 1), one.dtype, True)
    assert one is not other


@pytest.mark.parametrize(
    "others",
    [
        (a(2, 3), a(2, 3, dtype=torch.float64)),
        (a(2, 3), a(3, 2).t()),
        (a(2, 3).t(), a(3, 2)),
        (a(2, 3), 2.0),
    ],
    ids=["type", "strides", "both", "number"],
)
def test_operations_of_others_are_run(others: tuple[Any, Any]) -> None:
    (_, found), _ = run((torch.add, a(2, 3), a(2, 3)), (torch.add, *others))
    expected = torch.add(*others)
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_what_is_made_has_the_strides_of_what_is_given() -> None:
    found, names = run((torch.neg, a(3, 3)), (torch.neg, a(3, 3).t()), (torch.neg, a(3, 3).t()))
    assert [each.stride() for each in found] == [(3, 1), (1, 3), (1, 3)]
    assert names.count("neg") == 2


def test_a_number_is_not_one_of_another_type() -> None:
    """1 == 1.0 == True."""
    whole = a(2, dtype=torch.int64)
    found, _ = run((torch.mul, whole, 1), (torch.mul, whole, 1.0), (torch.mul, whole, True))
    assert [each.dtype for each in found] == [torch.int64, torch.float32, torch.int64]


def test_what_is_written_into_is_given_back() -> None:
    one, other, product = a(2, 2), a(2, 2), a(2, 2)
    found, names = run((one.add_, other), (other.add_, one))
    assert found[0] is one
    assert found[1] is other
    assert names.count("add_") == 1
    with Counted() as counted, CachedMetaOps(MetaOpCache()):
        for _ in range(2):
            assert torch.mm(one, other, out=product) is product
    assert counted.names == ["mm"]


def test_views_are_views() -> None:
    one = a(2, 3)
    found, names = run((one.view, 6), (one.view, 6))
    assert names == ["view", "view"]
    assert all(each._base is one for each in found)


def test_several_results_and_gradients_are_those_of_operations() -> None:
    with CachedMetaOps(MetaOpCache()):
        for _ in range(2):
            values, places = a(4, 5).topk(2)
            assert (values.shape, places.dtype) == ((4, 2), torch.int64)
            weight = a(3, 4).requires_grad_()
            (weight.t() @ a(3, 2)).relu().sum().backward()
            assert weight.grad is not None
            assert weight.grad.shape == (3, 4)


def test_tensors_with_values_are_computed() -> None:
    found, _ = run((torch.add, torch.ones(2), torch.ones(2)), (torch.add, torch.zeros(2), torch.ones(2)))
    assert [each.tolist() for each in found] == [[2.0, 2.0], [1.0, 1.0]]
