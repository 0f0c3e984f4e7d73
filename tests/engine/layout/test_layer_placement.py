"""Where layers go without being measured: by the FLOPs of each, told from the deck alone.

Tests of engine/layout/layer_placement.py and costs/layer_flops.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpctrain.comm.world import World
from hpctrain.costs.layer_flops import layer_flops, model_flops
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.layer_placement import place_by_flops, with_split
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.model.shape import ModelShape
from hpctrain.train.layout_difference import LayoutDifference
from hpctrain.train.layout_verification import verify_layout
from tests.engines import LLAMA, Trainer, reference, small_deck, trainer

# A block has 3 (24 h^2 + 4 s h) FLOPs, the head 6 V h; h = 32, s = 32.
HEADS = {"light": 61, "of five blocks": 2250}
BASE = ("model.layers=8", "model.tied=false")


def flops_of(*overrides: str, vocabulary: int = 61) -> list[tuple[float, ...]]:
    deck = small_deck(*overrides, f"model.vocabulary={vocabulary}")
    return [tuple(each) for each in layer_flops(deck, ModelShape.of(deck, vocabulary))]


def split_of(vocabulary: int, *overrides: str) -> tuple[int, ...]:
    deck = small_deck(*overrides, f"model.vocabulary={vocabulary}")
    return place_by_flops(deck, ModelShape.of(deck, vocabulary), 1).split


def test_flops_are_those_of_the_published_formula() -> None:
    """h = 32, s = 32: a block's matrices have 12 h^2 elements, queries, keys and values 2 s h products."""
    matrices, core = 2 * 12 * 32**2, 4 * 32 * 32
    block = (matrices + core, matrices + 2 * core, matrices)
    head = (3 * 2 * 61 * 32, 0, 0)
    assert flops_of("model.layers=3") == [(0, 0, 0), block, block, block, head]
    again = (block[0], block[1] + block[0], block[2])
    for recompute in ("full", "2", "sqrt"):
        assert flops_of("model.layers=3", f"memory.recompute={recompute}")[1] == again
    selective = flops_of("model.layers=3", "memory.recompute=selective")
    assert selective[1] == (block[0], block[1] + core, block[2]) and selective[-1] == head
    for family in ((), LLAMA, (*LLAMA, "model.experts.count=4", "model.experts.per_token=2")):
        deck = small_deck("model.layers=3", *family)
        shape = ModelShape.of(deck, 61)
        assert sum(each.total for each in layer_flops(deck, shape)) == model_flops(shape).flops_per_token


def test_what_is_frozen_computes_less() -> None:
    plain = flops_of(*BASE)
    frozen = flops_of(*BASE, 'model.frozen=["embedding.*", "blocks.[01].*", "blocks.4.*", "head.*"]')
    assert frozen[1:3] == [(plain[1][0], 0, 0)] * 2  # backward never comes to them
    assert frozen[3] == plain[3]
    assert frozen[5] == (*plain[5][:2], 0)
    assert frozen[-1][0] * 3 == plain[-1][0] * 2
    # A third of the heads' products is that of values; of a block four twelfths are attention's.
    (values,) = {each[2] for each in flops_of(*BASE, 'model.frozen=["*.value.weight"]')[1:-1]}
    assert values == plain[1][2] * 11 // 12


@pytest.mark.parametrize(
    ("layout", "light", "heavy"),
    [
        (("layout.pipeline=2",), (4, 4), (7, 1)),
        (("layout.pipeline=3",), (3, 3, 2), (4, 4, 0)),
        (("layout.pipeline=4",), (2, 2, 2, 2), (3, 3, 2, 0)),
        (("layout.pipeline=2", "layout.schedule=interleaved"), (2, 2, 2, 2), (4, 1, 3, 0)),
        (("layout.pipeline=2", "layout.schedule=zb-v"), (2, 2, 2, 2), (1, 4, 3, 0)),
        (("layout.pipeline=1",), (8,), (8,)),
        (("layout.pipeline=2", "layout.split=[0, 8]"), (0, 8), (0, 8)),
    ],
    ids=str,
)
def test_a_head_of_five_blocks_goes_alone_where_that_is_best(
    layout: Sequence[str], light: tuple[int, ...], heavy: tuple[int, ...]
) -> None:
    keys = (*BASE, *layout)
    total = [sum(each) for each in flops_of(*BASE, vocabulary=HEADS["of five blocks"])]
    assert 5 < total[-1] / total[1] < 5.1
    assert split_of(HEADS["light"], *keys) == light
    assert split_of(HEADS["of five blocks"], *keys) == heavy


def test_recomputation_makes_blocks_heavier() -> None:
    keys = (*BASE, "layout.pipeline=2")
    assert split_of(HEADS["of five blocks"], *keys, "memory.recompute=full") == (6, 2)


def test_a_split_of_an_earlier_version_goes_on() -> None:
    """A checkpoint tells the split of its run, which is gone on with to the same bits."""
    deck = small_deck(*BASE, "layout.pipeline=4")
    assert with_split(deck, [1, 2, 3, 2]).layout.split == (1, 2, 3, 2)
    assert with_split(deck, None) == deck


def same(run: Trainer, single: Trainer, steps: int = 2) -> None:
    """Losses, norms, gradients of the last step."""
    measured, expected = run.train(steps), single.train(steps)
    for one, other in zip(measured, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    gradients = single.gradients()
    for name, gradient in run.gradients().items():
        scale = gradients[name.replace(".key.bias", ".query.bias")].abs().max()
        assert (gradient - gradients[name]).abs().max() <= 2e-5 * scale, name


SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved", "zb-v", "v-half", "dualpipe-v")


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    ("schedule", "tied"), [*((name, "true") for name in SCHEDULES), ("1f1b", "false"), ("zb-v", "false")]
)
def test_ends_alone_train_as_one_rank(world: World, schedule: str, tied: str) -> None:
    sizes = ("batch.global_size=8", f"model.tied={tied}", "model.dropout=0.1")
    one_chunk = schedule in {"1f1b", "gpipe", "zb-h1", "zb-h2"}
    splits = ["[2, 0]", "[0, 2]"] if one_chunk else ["[0, 1, 1, 0]"]
    for split in splits:
        deck = small_deck(*sizes, "layout.pipeline=2", f"layout.schedule={schedule}", f"layout.split={split}")
        run = trainer(world, deck)
        assert run.engine.placement.split == deck.layout.split
        same(run, reference(world, small_deck(*sizes)))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "keys",
    [
        ("memory.recompute=full",),
        ("memory.recompute=sqrt", "layout.schedule=zb-h1"),
        ("memory.activations=disk", "memory.recompute=selective"),
        ("memory.optimizer=disk",),
        ("optimizer.name=muon",),
        ("optimizer.name=adafactor", "layout.zero=1"),
        ("optimizer.name=adam-mini",),
        (*LLAMA, "model.experts.count=4", "model.experts.per_token=2", "layout.schedule=interleaved"),
        ('model.frozen=["embedding.*", "blocks.0.*"]',),
        ('model.frozen=["final_norm.*", "head.*", "blocks.1.*"]', "model.tied=false"),
        ("communication.bucket_bytes=1000", "stability.z_loss=1e-3"),
    ],
    ids=str,
)
def test_ends_alone_with_everything_else(world: World, mpi_tmp_path: object, keys: tuple[str, ...]) -> None:
    chunks = 2 if "layout.schedule=interleaved" in keys else 1
    split = "[0, 1, 1, 0]" if chunks == 2 else "[2, 0]"
    shared = ("batch.global_size=8", f"memory.offload_dir={mpi_tmp_path}")
    deck = small_deck(*shared, *keys, "layout.pipeline=2", f"layout.split={split}")
    plain = [key for key in keys if not key.startswith(("layout.", "memory."))]
    run = trainer(world, deck)
    same(run, reference(world, small_deck("batch.global_size=8", *plain)))
    run.engine.close()


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize(
    "layout",
    [
        ("layout.zero=1",),
        ("layout.zero=2", "memory.accumulate=sliced"),
        ("layout.zero=3", "memory.recompute=full"),
        ("layout.zero=3", "memory.optimizer=disk", "memory.parameters=disk"),
        ("layout.zero=3", "layout.schedule=zb-h1", "memory.keep_gathered=1"),
        ("layout.tensor=2", "layout.sequence_parallel=true"),
        ("layout.context=2", "model.tied=false"),
        ("layout.pipeline=4", "layout.split=[0, 1, 1, 0]"),
    ],
    ids=str,
)
def test_ends_alone_on_other_axes(world: World, layout: tuple[str, ...]) -> None:
    deck = small_deck("layout.pipeline=2", "layout.split=[2, 0]", *layout)
    assert "agree with one rank" in verify_layout(deck, world, make_mesh(deck, world))


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_checked_layout_has_its_head_alone_where_the_deck_has(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def compared(deck: Deck, *_: object) -> list[LayoutDifference]:
        seen.append(deck.layout.split)
        return [LayoutDifference("loss", 0.0, "")]

    monkeypatch.setattr("hpctrain.train.layout_verification.compare", compared)
    for keys in (
        ("model.layers=9", "layout.split=[9, 0]"),
        ("model.layers=9", "layout.split=[7, 2]"),
        ("model.layers=3", f"model.vocabulary={HEADS['of five blocks']}"),
    ):
        deck = small_deck("layout.pipeline=2", *keys)
        verify_layout(deck, world, make_mesh(deck, world))
    assert seen == [(2, 0), (1, 1), (2, 0)]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_all_ranks_place_alike_by_default(world: World) -> None:
    deck = small_deck(*BASE, "layout.pipeline=2", f"model.vocabulary={HEADS['of five blocks']}")
    engine = trainer(world, deck).engine
    assert engine.placement.split == (7, 1) and engine.placement.times is None
    assert engine.model.span.blocks == (7, 1)[world.rank]


@pytest.mark.mpi(min_size=4, max_size=4)
def test_a_stage_without_a_piece_of_a_fragment_synchronizes_the_others(world: World) -> None:
    """Of two fragments each with a block, the stage of the head has pieces of the first one alone."""
    keys = (
        "layout.pipeline=2",
        "layout.local_steps.replicas=2",
        "layout.local_steps.steps=2",
        "layout.local_steps.fragments=2",
    )
    one, other = (
        trainer(world, small_deck(*keys, f"layout.split={s}")).train(4) for s in ("[2, 0]", "[0, 2]")
    )
    assert [each.loss for each in one] == pytest.approx([each.loss for each in other], rel=1e-6)
