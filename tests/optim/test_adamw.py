"""Compare AdamW on flat buckets with torch's on separate tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpctrain.optim.adamw import AdamW
from hpctrain.optim.clip import clip_coefficient, local_square_norm
from hpctrain.optim.optimizer import ResidentOptimizer
from hpctrain.parallel.shards import Parameter, Shard
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.replication import Replications
from hpctrain.sharding.state import MASTER
from tests.engines import alone, make_buckets

SHAPES = {"a.weight": (5, 7), "a.bias": (5,), "b.weight": (3, 5), "norm.weight": (3,)}


def setup(world, dtype: torch.dtype) -> tuple[dict[str, Parameter], list[Bucket]]:
    parameters = {
        name: Parameter(Shard.replicated(name, shape), has_weight_decay=len(shape) == 2)
        for name, shape in SHAPES.items()
    }
    leaves = [
        [parameters["a.weight"], parameters["a.bias"]],
        [parameters["b.weight"]],
        [parameters["norm.weight"]],
    ]
    one = alone(world).tensor
    buckets = make_buckets([[leaf] for leaf in leaves], Replications.of_one_rank(one), dtype, 200)
    assert len(buckets) == 2
    torch.manual_seed(3)
    for parameter in parameters.values():
        parameter.data.copy_(torch.randn(parameter.shape))
    return parameters, buckets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_are_those_of_torch(world, dtype: torch.dtype) -> None:
    parameters, buckets = setup(world, dtype)
    ours = ResidentOptimizer(AdamW((0.9, 0.95), 1e-8, 0.1), buckets)
    copies: dict[str, Tensor] = {
        name: parameter.detach().float().clone().requires_grad_() for name, parameter in parameters.items()
    }
    theirs = torch.optim.AdamW(
        [
            {"params": [c for c in copies.values() if c.ndim == 2], "weight_decay": 0.1},
            {"params": [c for c in copies.values() if c.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
    )
    for step in range(5):
        for group in theirs.param_groups:
            group["lr"] = 0.01 * (step + 1)
        for name, parameter in parameters.items():
            gradient = torch.randn(parameter.shape)
            copies[name].grad = gradient.clone()
            parameter.gradient.copy_(gradient * 4.0)
        theirs.step()
        ours.step(0.01 * (step + 1), 4.0)
        for name, parameter in parameters.items():
            if dtype == torch.float32:
                torch.testing.assert_close(parameter.detach(), copies[name].detach(), rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(parameter.detach(), master(ours, parameter).to(dtype))
                torch.testing.assert_close(
                    master(ours, parameter), copies[name].detach(), rtol=1e-6, atol=1e-7
                )
    assert ours.updates == 5


@pytest.mark.parametrize("piece", [8, 1 << 20], ids=["shorter than tensors", "longer than buckets"])
def test_reduced_momentum_is_divided_by_the_former_second_moment(
    world, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Compare with the formula of 1-bit Adam in fp64, for any number of elements at a time."""
    monkeypatch.setattr("hpctrain.optim.optimizer.PIECE", piece)
    parameters, buckets = setup(world, torch.float32)
    ours = ResidentOptimizer(AdamW((0.9, 0.95), 1e-8, 0.1, momentum_after=1), buckets)
    weights = {name: parameter.detach().double() for name, parameter in parameters.items()}
    before = {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for gradient in before.values():
        gradient[0] = 0.0  # of what never had a gradient, weights only decay
    for step, given in enumerate((before, {name: 3 * gradient + 1 for name, gradient in before.items()})):
        for name, parameter in parameters.items():
            parameter.gradient.copy_(given[name] * 4.0)
            mean = given[name] if step else 0.1 * given[name]
            size = before[name].abs() + 1e-8
            moved = torch.where(before[name] == 0, 0.0, mean / (1 - 0.9 ** (step + 1)) / size)
            weights[name] = weights[name] * (1 - 0.01 * 0.1 * parameter.has_weight_decay) - 0.01 * moved
        ours.step(0.01, 4.0)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.detach().double(), weights[name], rtol=1e-5, atol=1e-6)


def master(optimizer: ResidentOptimizer, parameter: Parameter) -> Tensor:
    for bucket, moments in zip(optimizer.buckets, optimizer.states, strict=True):
        for segment in bucket.segments:
            if segment.parameter is parameter:
                return segment.view(moments[MASTER])
    raise AssertionError


def test_the_norm_counts_each_element_and_no_padding(world) -> None:
    parameters, buckets = setup(world, torch.float32)
    for parameter in parameters.values():
        parameter.gradient.copy_(torch.randn(parameter.shape))
    expected = torch.cat([p.gradient.flatten() for p in parameters.values()]).double().norm()
    assert local_square_norm(buckets).sqrt() == pytest.approx(expected.item(), rel=1e-6)


def test_clipping_is_that_of_torch() -> None:
    weight = torch.zeros(10, requires_grad=True)
    weight.grad = torch.randn(10) * 5
    before = weight.grad.clone()
    norm = float(torch.nn.utils.clip_grad_norm_([weight], 1.0))
    assert torch.allclose(before * clip_coefficient(norm, 1.0), weight.grad)
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(50.0, 0.0) == 1.0


def test_an_update_does_not_load_the_compiler_of_torch(launch) -> None:
    """The compiler would take a second and 75 MB on every rank."""
    program = """
import sys
from hpctrain.comm.world import World
from hpctrain.plan.libraries import library_bytes
from tests.engines import small_deck, trainer
trainer(World.start("cpu"), small_deck()).train(1)
library_bytes()
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    done = launch(0, "-c", program, cold=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
