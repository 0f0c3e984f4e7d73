"""Terms that layers add to the losses: in the gradient and the figures once, on every layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.model import transformer
from hpctrain.model.block import PassContext, TransformerBlock
from hpctrain.model.count import count
from hpctrain.model.inputs import AuxiliaryLosses
from tests.engines import LLAMA, small_deck, trainer

WEIGHT = 0.03
LARGE = ("learning_rate.peak=1e-3", "optimizer.clip=0")


class TermBlock(TransformerBlock):
    """A block that wants its output small, and more so the later it comes."""

    auxiliary_loss_names = ("size",)

    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        x = super().forward(x, context)
        value = WEIGHT * self.site * x.float().square().mean(-1).sum()
        counted = self.feed_forward.up.layer_context.tensor.rank == 0  # on the same tokens as its neighbours
        return context.inputs.auxiliary_losses.add(
            x, "size", self.feed_forward_norm.weight.shard.name, value, counted
        )


@pytest.fixture(autouse=True)
def blocks_with_terms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(transformer, "TransformerBlock", TermBlock)
    count.cache_clear()
    yield
    count.cache_clear()


def test_a_term_is_in_the_figures_once_and_its_scale_in_the_gradient() -> None:
    terms, scale = AuxiliaryLosses(torch.tensor(0.25)), torch.tensor([2.0], requires_grad=True)
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):  # as if computed again
        y = terms.add(x, "size", "a", 3 * scale.sum())
    y = terms.add(y, "size", "b", 5 * scale.sum())
    sums = torch.zeros(2, dtype=torch.float64)
    terms.add_to(sums, ("other", "size"))
    assert sums.tolist() == [0.0, 16.0]
    y.sum().backward()
    assert scale.grad is not None and x.grad is not None
    assert scale.grad.item() == 0.25 * 8 and x.grad.tolist() == [1.0] * 3


def layouts(ranks: int) -> list[tuple[str, ...]]:
    if ranks == 1:
        return [(f"memory.recompute={each}",) for each in ("full", "selective", "sqrt")] + [LLAMA]
    return [
        ("layout.zero=3", "memory.recompute=full"),
        ("layout.tensor=2",),
        ("layout.context=2", "memory.recompute=selective"),
        ("layout.pipeline=2",),
        ("layout.pipeline=2", "layout.schedule=zb-h1", "memory.recompute=full"),
        ("layout.pipeline=2", "layout.schedule=interleaved", "layout.chunks=2"),
        ("layout.pipeline=2", "layout.schedule=zb-v", "layout.chunks=2", "layout.zero=2"),
    ]


@pytest.mark.mpi(min_size=1, max_size=2)
def test_terms_reach_figures_and_gradients_on_every_layout(world: World) -> None:
    """One rank against differences of what it lessens, the layouts against one rank."""
    sizes = ("model.layers=4", "batch.global_size=8", "data.tokens=none", *LARGE)
    alone = trainer(world.single_rank_world(), small_deck(*sizes))
    expected = alone.train(1)[0]
    gradients = {name: values.double() for name, values in alone.gradients().items()}
    assert expected.metrics["size"] > 0.02 * expected.loss
    slopes = []
    for way in (1e-3, -1e-3):
        moved = trainer(world.single_rank_world(), small_deck(*sizes))
        for name, values in moved.parameters().items():
            values.add_(gradients[name].float(), alpha=way)
        figures = moved.train(1)[0].metrics
        slopes.append(figures["loss"] + figures["size"])
    square = sum(float(values.square().sum()) for values in gradients.values())
    assert (slopes[0] - slopes[1]) / 2e-3 == pytest.approx(square, rel=1e-2)
    assert expected.grad_norm == pytest.approx(square**0.5, rel=1e-5)
    for layout in layouts(world.size):
        deck = small_deck(*sizes, *layout)
        if "model.family=llama" in layout:
            assert trainer(world, deck).train(1)[0].metrics["size"] > 0
            continue
        training = trainer(world, deck)
        result = training.train(1)[0]
        for name, figure in expected.metrics.items():
            assert result.metrics[name] == pytest.approx(figure, rel=2e-6), (layout, name)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=2e-6), layout
        evaluated = training.step.evaluate(training.step.batches, 8)
        single = alone.step.evaluate(alone.step.batches, 8)
        assert evaluated["size"] == pytest.approx(single["size"], rel=1e-4), layout
