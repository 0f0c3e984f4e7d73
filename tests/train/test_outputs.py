"""What parts of a module give: all calls of its first pass, whatever their order, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpctrain.train.outputs import match_calls, outputs_of


class Twice(nn.Module):
    """A part that is called twice, and computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.part, self.part(x), use_reentrant=True)
        return result


def test_all_calls_of_the_first_pass_are_kept_and_no_others() -> None:
    module, x = Twice(), torch.randn(3, 2)
    with outputs_of({module: lambda: True}) as given:
        module(x).sum().backward()
        module(x)
    once = module.part(x)
    assert list(given) == ["part"]
    first, second = given["part"]
    assert first.equal(once)
    assert second.equal(module.part(once))


def test_calls_are_compared_in_any_order() -> None:
    some = [torch.full((2,), 1.0), torch.full((2, 1), 2.0), torch.full((2,), 3.0)]
    some[2][0] = float("nan")
    mixed = [some[2], some[0] + 0.25, some[1]]
    assert [each.tolist() for each in match_calls(some[:2], mixed[1:])] == [[1.25] * 2, [[2.0]] * 2]
    assert match_calls(some, mixed)[2] is some[2]
