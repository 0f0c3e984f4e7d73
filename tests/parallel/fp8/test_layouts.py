"""Scales are the same, bit for bit, on every layout, and where a run goes on on another one.

Layouts that keep the bits of activations are compared in bf16. Tensor and context parallelism add up in
another order: these are compared in fp32, whose rounding a power of two does not show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.stages import stage
from hpctrain.model.precision import Precision
from hpctrain.train.checkpoints import Checkpoints
from tests.engines import Trainer, by_rank_0, small_deck, trainer
from tests.parallel.fp8.scales import (
    DELAYED,
    KEYS,
    Maxima,
    alike,
    delayed_products,
    maxima,
    maxima_of,
    scales_of,
)

STILL = ("learning_rate.peak=1e-12",)
"""Where weights stay, micro-batches of another size, which add up gradients differently, show nothing."""

SAME_BITS: dict[str, tuple[int, tuple[str, ...]]] = {
    "recompute": (1, ("memory.recompute=full",)),
    "recompute attention": (1, ("memory.recompute=selective",)),
    "data": (2, ()),
    "sliced": (2, ("layout.zero=2", "memory.accumulate=sliced")),
    "parameters": (2, ("layout.zero=3", "memory.recompute=full")),
    "pipeline": (2, ("layout.pipeline=2",)),
    "split backward": (2, ("layout.pipeline=2", "layout.schedule=zb-h1", "memory.recompute=full")),
    "interleaved": (
        4,
        ("layout.pipeline=2", "layout.chunks=2", "layout.schedule=interleaved", "layout.zero=1"),
    ),
    "hybrid": (4, ("layout.zero=3", "layout.zero_group=2")),
}
IN_FP32: dict[str, tuple[int, tuple[str, ...]]] = {
    "tensor": (2, ("layout.tensor=2",)),
    "sequence": (2, ("layout.tensor=2", "layout.sequence_parallel=true", "memory.recompute=full")),
    "context": (2, ("layout.context=2",)),
    "all to all": (4, ("layout.context=2", "layout.context_form=all_to_all", "layout.tensor=2")),
    "everything": (
        8,
        ("layout.tensor=2", "layout.sequence_parallel=true", "layout.pipeline=2", "layout.zero=1"),
    ),
    "all axes but one": (8, ("layout.tensor=2", "layout.context=2", "layout.zero=3")),
}


def on_layouts(layouts: dict[str, tuple[int, tuple[str, ...]]]) -> Callable[..., object]:
    """A test of each, on as many ranks as it has."""
    each = [
        pytest.param(keys, marks=pytest.mark.mpi(min_size=ranks, max_size=ranks), id=name)
        for name, (ranks, keys) in layouts.items()
    ]
    return pytest.mark.parametrize("layout", each)


@on_layouts(SAME_BITS)
def test_maxima_of_steps_are_those_of_one_rank(world: World, layout: tuple[str, ...]) -> None:
    expected = by_rank_0(world, lambda: maxima_of(world.single_rank_world()))
    found = maxima_of(world, *layout)
    assert len(expected) == 3 * 4 * 4
    assert len(found) == len(expected) // (2 if "layout.pipeline=2" in layout else 1)
    assert alike(found, expected)


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("size", [1, 4, 8])
def test_maxima_of_steps_do_not_see_micro_batches(world: World, size: int) -> None:
    assert alike(maxima_of(world, *STILL, f"batch.micro_size={size}"), maxima_of(world, *STILL))


@on_layouts({name: SAME_BITS[name] for name in ("parameters", "split backward")})
@pytest.mark.parametrize("recipe", ["row", "block"])
def test_every_scale_is_one_of_one_rank(world: World, layout: tuple[str, ...], recipe: str) -> None:
    keys = f"precision.fp8={recipe}"
    expected = by_rank_0(world, lambda: scales_of(world.single_rank_world(), keys))
    assert scales_of(world, keys, *layout) == expected


@pytest.fixture
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not in 8 bits is in fp32."""
    asked = Precision.of

    def wide(deck: Deck) -> Precision:
        return replace(asked(deck), storage=torch.float32, product=torch.float32)

    monkeypatch.setattr(stage.Precision, "of", staticmethod(wide))


@pytest.mark.usefixtures("in_fp32")
@on_layouts(IN_FP32)
def test_scales_of_steps_are_those_of_one_rank(world: World, layout: tuple[str, ...]) -> None:
    expected = by_rank_0(world, lambda: maxima_of(world.single_rank_world(), *STILL))
    assert alike(maxima_of(world, *STILL, *layout), expected, exactly=False)


@pytest.mark.usefixtures("in_fp32")
@on_layouts({name: (SAME_BITS | IN_FP32)[name] for name in ("split backward", "sequence", "context")})
def test_scales_of_padded_rows_are_those_of_one_rank(world: World, layout: tuple[str, ...]) -> None:
    keys = (*STILL, "data.pack=false")
    expected = by_rank_0(world, lambda: maxima_of(world.single_rank_world(), *keys))
    assert alike(maxima_of(world, *keys, *layout), expected, exactly=False)


@pytest.mark.usefixtures("in_fp32")
@on_layouts({name: layout for name, layout in IN_FP32.items() if name != "all axes but one"})
def test_a_tensor_has_one_scale_on_all_its_ranks(world: World, layout: tuple[str, ...]) -> None:
    keys = ("precision.fp8=tensor", *STILL)
    expected = by_rank_0(world, lambda: scales_of(world.single_rank_world(), *keys))
    assert scales_of(world, *keys, *layout) == expected


def saved(run: Trainer) -> Path:
    """A checkpoint of it as it is now."""
    checkpoints = Checkpoints(run.deck, run.engine, {})
    checkpoints.save(run.state)
    assert checkpoints.newest is not None
    return checkpoints.newest


@on_layouts({name: SAME_BITS[name] for name in ("recompute", "parameters", "split backward", "interleaved")})
def test_a_run_goes_on_by_the_same_scales_on_another_layout(
    world: World, layout: tuple[str, ...], mpi_tmp_path: Path
) -> None:
    def whole() -> tuple[Maxima, Maxima, Path]:
        deck = small_deck(*KEYS, *DELAYED, f"run.dir={mpi_tmp_path}")
        run = trainer(world.single_rank_world(), deck)
        before = maxima(run, 2)
        path = saved(run)
        return before, maxima(run, 2), path

    before, after, path = by_rank_0(world, whole)
    deck = small_deck(*KEYS, *DELAYED, *layout)
    run = trainer(world, deck)
    checkpoints = Checkpoints(deck, run.engine, {})
    run.state = checkpoints.restore(path)
    assert not checkpoints.notes
    products = list(delayed_products(run))
    assert products and all(product.has_all_scales for product in products)
    for product in products:
        for kind, shard, values in product.state():
            assert torch.equal(values, before[f"{kind}/{shard.name}"][-1])
    assert alike(maxima(run, 2), after)


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("stored", [("precision.compute=bf16",), ("precision.fp8=row",)])
def test_a_file_without_these_maxima_goes_on_and_notes_them_anew(
    world: World, stored: tuple[str, ...], tmp_path: Path
) -> None:
    deck = small_deck(*KEYS, *stored, f"run.dir={tmp_path}")
    run = trainer(world, deck)
    run.train(2)
    path = saved(run)
    other = small_deck(*KEYS, "precision.fp8_history=3", f"run.dir={tmp_path}")
    further = trainer(world, other)
    checkpoints = Checkpoints(other, further.engine, {})
    further.state = checkpoints.restore(path)
    assert len(checkpoints.notes) == 3
    assert not any(product.has_all_scales for product in delayed_products(further))
    further.train(1)
    for product in delayed_products(further):
        assert product.has_all_scales and all(
            int((maxima > 0).sum()) == 1 for _, _, maxima in product.state()
        )
    # And back: what has no use for them leaves them.
    path = saved(further)
    back = trainer(world, deck)
    checkpoints = Checkpoints(deck, back.engine, {})
    back.state = checkpoints.restore(path)
    assert not checkpoints.notes
    back.train(1)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_as_many_maxima_go_on_as_there_is_room_for(world: World, steps: int, mpi_tmp_path: Path) -> None:
    keys = ("layout.zero=1",) if world.size == 2 else ()
    kept = "precision.fp8_history=3"
    run = trainer(world, small_deck(*KEYS, kept, *keys, f"run.dir={mpi_tmp_path}"))
    before, path = maxima(run, 4), saved(run)
    deck = small_deck(*KEYS, *keys, f"precision.fp8_history={steps}")
    further = trainer(world, deck)
    checkpoints = Checkpoints(deck, further.engine, {})
    further.state = checkpoints.restore(path)
    assert not checkpoints.notes
    for product in delayed_products(further):
        assert product.has_all_scales
        for kind, shard, values in product.state():
            newest = before[f"{kind}/{shard.name}"][-1][:steps]
            assert values.tolist() == [*newest.tolist(), *[0.0] * (steps - 3)]


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_goes_on_with_more_layers_left_out_and_then_with_fewer(
    world: World, mpi_tmp_path: Path
) -> None:
    """As after an instability: layers that are in bf16 leave what the file has of theirs."""
    deck = small_deck(*KEYS, *DELAYED, f"run.dir={mpi_tmp_path}")
    run = trainer(world, deck)
    run.train(2)
    path = saved(run)
    fewer = deck.with_keys(precision={"fp8_exclude": ("blocks.0.*",)})
    further = trainer(world, fewer)
    checkpoints = Checkpoints(fewer, further.engine, {})
    further.state = checkpoints.restore(path)
    assert not checkpoints.notes
    products = list(delayed_products(further))
    assert len(products) == len(list(delayed_products(run))) * 3 // 4
    assert all(product.has_all_scales for product in products)
    further.train(1)
    path = saved(further)
    back = trainer(world, deck)
    checkpoints = Checkpoints(deck, back.engine, {})
    back.state = checkpoints.restore(path)
    assert len(checkpoints.notes) == 3
    products = list(delayed_products(back))
    assert [product.has_all_scales for product in products].count(False) == len(products) // 4
    back.train(1)
    assert all(product.has_all_scales for product in products)
