"""What Products note of a step is on every layout what one rank notes, however the passes are made."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.engine.registry import RecordedStatistics
from hpctrain.parallel.fp8 import matmul_choice
from hpctrain.parallel.matmul import Matmul
from tests.engines import LLAMA, Trainer, record_statistics, small_deck, trainer

STEPS = 2
KEYS = (*LLAMA, "model.layers=4", "model.tied=false", "batch.global_size=8", "layout.schedule=1f1b")


class Watching(Matmul):
    """Notes its largest inputs and gradients, and how many rows it multiplies."""

    seen: tuple[dict[str, Tensor], ...] = ()

    @property
    def name(self) -> str:
        return self.weights[0].shard.name

    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        self.note("inputs", inputs)
        self.count(inputs)
        return super().forward(inputs, bias)

    def logits(self, inputs: Tensor) -> Tensor:
        self.note("inputs", inputs)
        self.count(inputs)
        return super().logits(inputs)

    def input_gradient(self, output_gradient: Tensor, out: Tensor | None = None) -> Tensor:
        self.note("gradients", output_gradient)
        return super().input_gradient(output_gradient, out)

    def count(self, values: Tensor) -> None:
        rows = torch.tensor([values.numel() // values.shape[-1], 1])
        self.layer_context.statistics.record_sum(f"{self.name} rows", rows)

    def note(self, what: str, values: Tensor) -> None:
        self.layer_context.statistics.record_max(f"{self.name} {what}", values.abs().amax().reshape(1))

    def after_update(self, statistics: Mapping[str, Tensor]) -> None:
        self.seen += (
            {name: values for name, values in statistics.items() if name.startswith(f"{self.name} ")},
        )


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products watch; the head's are of a few tokens at a time."""
    monkeypatch.setattr("hpctrain.parallel.vocabulary.chunk_rows", lambda *_: 24)
    monkeypatch.setattr(matmul_choice, "Matmul", Watching)
    monkeypatch.setattr(RecordedStatistics, "attach", record_statistics)


def seen(training: Trainer) -> list[dict[str, Tensor]]:
    """What this rank's products have been told of each step."""
    products = [
        each for each in training.engine.stage.module_state.statistics_users if isinstance(each, Watching)
    ]
    assert all(len(product.seen) == training.state.step - training.state.skipped for product in products)
    return [
        {name: values for product in products for name, values in product.seen[step].items()}
        for step in range(len(products[0].seen))
    ]


def trained(world: World, *keys: str) -> list[dict[str, Tensor]]:
    """That of a few steps, with an evaluation of more sequences between them."""
    training = trainer(world, small_deck(*KEYS, *keys))
    for _ in range(STEPS):
        training.train_step()
        training.step.evaluate(training.step.batches, 16)
    return seen(training)


LAYOUTS = {
    "data": (),
    "zero 3, recomputed": ("layout.zero=3", "memory.recompute=full"),
    "tensor": ("layout.tensor=2", "layout.sequence_parallel=true", "memory.recompute=selective"),
    "context": ("layout.context=2",),
    "pipeline": ("layout.pipeline=2", "layout.schedule=zb-h1", "memory.recompute=full"),
}


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.usefixtures("watching")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_agree_on_what_one_rank_would_note(world: World, layout: str) -> None:
    expected = trained(world.single_rank_world())
    assert len(expected) == STEPS and len(expected[0]) == 4 * 4 * 3 + 3
    ranks = world.everyone.all_gather_object(trained(world, *LAYOUTS[layout]))
    shared = ranks[0][0].keys() & ranks[1][0].keys()
    assert not shared if layout == "pipeline" else shared == expected[0].keys()
    assert all(torch.equal(*(rank[step][name] for rank in ranks)) for name in shared for step in range(STEPS))
    computed = [{**one, **other} for one, other in zip(*ranks, strict=True)]
    times = 2 if layout == "tensor" else 1  # both see all rows
    for step, values in enumerate(computed):
        assert values.keys() == expected[step].keys()
        for name, value in values.items():
            if name.endswith("rows"):
                assert value[0] == times * expected[step][name][0] == times * 8 * 32, name
            else:
                torch.testing.assert_close(value, expected[step][name], rtol=2e-5, atol=0, msg=name)


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.usefixtures("watching")
def test_what_is_computed_again_is_noted_once(world: World) -> None:
    plain, *others = (
        trained(world, *keys) for keys in ((), ("memory.recompute=full",), ("memory.recompute=sqrt",))
    )
    assert all(
        torch.equal(values, other[step][name])
        for other in others
        for step, named in enumerate(plain)
        for name, values in named.items()
    )


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.usefixtures("watching")
def test_of_a_step_that_is_skipped_nobody_learns(world: World) -> None:
    training = trainer(world, small_deck(*KEYS))
    training.train_step()
    values = training.engine.stage.buckets[0].owned_values
    assert isinstance(values, Tensor)
    before = values.clone()
    values.fill_(float("nan"))
    assert training.train_step().skipped
    values.copy_(before)
    training.train_step()
    assert len(seen(training)) == 2 and all(v.isfinite().all() for v in seen(training)[1].values())
