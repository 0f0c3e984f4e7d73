"""Measured times of layers, and decks whose layers and schedules follow them."""

from __future__ import annotations

import gc
from itertools import count
from pathlib import Path

import pytest
import torch

from hpctrain.bench.pipeline_prediction import gather_part_times
from hpctrain.comm.world import World
from hpctrain.costs import action_timer
from hpctrain.costs.pass_times import LayerTimes, PassTimes
from hpctrain.deck.read import read_deck
from hpctrain.engine.layout import layer_times
from hpctrain.engine.layout.layer_placement import LayerPlacement, with_split
from hpctrain.engine.layout.layer_times import measure_layers
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.model.block import FeedForward
from hpctrain.model.construction import bare_model
from hpctrain.model.part import LayerKind
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.simulate import simulate
from hpctrain.pipeline.split import split_layers
from hpctrain.sharding.bucket import Bucket
from hpctrain.train.run import resume, run_deck
from tests.data.preparing import prepare
from tests.engines import LLAMA, small_deck, trainer

KINDS = tuple(map(LayerKind, ("block", "embedding", "head")))
BLOCK, EMBEDDING, HEAD = KINDS


def times_of(*passes: PassTimes, communication: float = 0.0) -> LayerTimes:
    """Of a block, an embedding and a head."""
    return LayerTimes(dict(zip(KINDS, passes, strict=True)), communication)


def measure(world: World, *overrides: str) -> LayerTimes:
    deck = small_deck(*overrides)
    mesh = make_mesh(deck, world)
    layer_context = LayerContext(mesh.group("tensor"), mesh.group("context"), deck.layout.sequence_parallel)
    return measure_layers(deck, ModelShape.of(deck, 61), layer_context, mesh)


def test_times_of_parts_are_those_of_their_layers() -> None:
    given = times_of(PassTimes(1, 2, 3), PassTimes(10, 20, 30), PassTimes(100, 200, 300), communication=0.5)
    layers = bare_model(ModelShape.of(small_deck("model.layers=7"), 61)).layers
    times = given.of_parts(split_layers(layers, [2, 1, 4]))
    assert times.forward == [12, 1, 104]
    assert times.input_gradient == [24, 2, 208]
    assert times.weight_gradient == [36, 3, 312]
    assert times.communication == 0.5
    assert given.of_parts([[layers[0], layers[1], layers[-1]]]).forward == [111]
    assert given.of_kind[HEAD].total == 600


@pytest.fixture
def by_feed_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second with each feed-forward's forward pass alone, on any machine."""
    passes = count()
    done = [next(passes)]
    forward = FeedForward.forward

    def counted(layer: FeedForward, x: torch.Tensor) -> torch.Tensor:
        done[0] = next(passes)
        return forward(layer, x)

    monkeypatch.setattr(FeedForward, "forward", counted)
    for module in (action_timer, layer_times):
        monkeypatch.setattr(module, "now", lambda _: float(done[0]))


@pytest.mark.usefixtures("two_kinds", "by_feed_forwards")
def test_each_kind_is_measured_and_told(world: World) -> None:
    deck = ("model.layers=4", "model.hidden=256", "batch.micro_size=4")
    times = measure(world.single_rank_world(), *deck)
    assert list(map(str, times.of_kind)) == ["block", "wide block", "embedding", "head"]
    assert [each.forward for each in times.of_kind.values()] == [1, 2, 0, 0]
    assert "measured per micro-batch: block " in str(
        LayerPlacement(lambda _: generate_schedule("1f1b", 1, 1), (4,), times)
    )
    layers = bare_model(ModelShape.of(small_deck(*deck), 61)).layers
    first, second = times.of_parts(split_layers(layers, [1, 3])).forward
    block, wide, embedding, head = (each.forward for each in times.of_kind.values())
    assert (first, second) == (embedding + block, 2 * wide + block + head) == (1, 5)


@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_work_takes_time(world: World, family: tuple[str, ...]) -> None:
    alone = world.single_rank_world()
    small = measure(alone, *family)
    # 256 times the weights and a mlp that dwarfs attention: no machine does that in twice the time.
    large = measure(alone, *family, "model.hidden=512", "model.mlp=2048", "batch.micro_size=4")
    for times in (small, large):
        assert tuple(times.of_kind) == KINDS
        for passes in times.of_kind.values():
            assert passes.forward > 0 and passes.input_gradient > 0 and passes.weight_gradient >= 0
        assert times.communication == 0
    block = large.of_kind[BLOCK]
    assert block.total > 2 * small.of_kind[BLOCK].total
    assert block.weight_gradient > block.total / 10
    assert block.total > large.of_kind[EMBEDDING].total


def test_nothing_is_left(world: World) -> None:
    def buckets() -> int:
        gc.collect()
        return sum(type(item) is Bucket for item in gc.get_objects())

    before = buckets()
    measure(world.single_rank_world())
    assert buckets() == before


def test_neither_measured_nor_drawn_at_random_where_it_does_not_matter(world: World) -> None:
    state = torch.get_rng_state()
    engine = trainer(world.single_rank_world(), small_deck("layout.split=balanced", "model.layers=3")).engine
    assert engine.placement.split == (3,)
    assert engine.placement.times is None
    measure(world.single_rank_world())
    assert torch.equal(state, torch.get_rng_state())


def test_a_split_found_before_is_kept_only_for_balanced_decks() -> None:
    balanced, given = (
        small_deck("layout.pipeline=2", "model.layers=5", f"layout.split={split}")
        for split in ("balanced", "[2, 3]")
    )
    assert with_split(balanced, [4, 1]).layout.split == (4, 1)
    assert with_split(balanced, None).layout.split == "balanced"
    assert with_split(given, [4, 1]).layout.split == (2, 3)


def test_a_split_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(HpctrainError, match=r"layout.split=\[2, 2\]: must add up to model.layers = 5, not 4"):
        small_deck("layout.pipeline=2", "model.layers=5", "layout.split=[2, 2]")


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "layout",
    [(), ("layout.schedule=interleaved",), ("layout.schedule=v-half", "layout.split=")],
    ids=["1f1b", "interleaved", "searched"],
)
def test_all_ranks_choose_alike_and_train(world: World, layout: tuple[str, ...]) -> None:
    deck = small_deck(f"layout.pipeline={world.size}", "model.layers=9", "layout.split=balanced", *layout)
    run = trainer(world, deck)
    placement = run.engine.placement
    chosen = world.everyone.all_gather_object(
        (placement.split, repr(placement.times), str(placement.schedule_of(4)), str(run.engine.schedule))
    )
    assert placement.times is not None
    assert len(set(chosen)) == 1
    assert sum(placement.split) == 9 and min(placement.split) >= 1
    even = trainer(world, deck.model_copy(update={"layout": deck.layout.model_copy(update={"split": None})}))
    losses = [[result.loss for result in one.train(3)] for one in (run, even)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] != losses[0][1]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    ("embedding", "head", "split"),
    [(0.0, 5.0, (7, 2)), (0.0, 7.9, (8, 1)), (4.0, 1.0, (3, 6)), (0.0, 1.0, (5, 4))],
)
def test_the_slowest_stage_takes_no_longer_than_it_must(
    world: World, monkeypatch: pytest.MonkeyPatch, embedding: float, head: float, split: tuple[int, int]
) -> None:
    """Of given times: seconds of the ends, where a block takes one."""
    times = times_of(*(PassTimes(total, 0.0, 0.0) for total in (1.0, embedding, head)))
    monkeypatch.setattr("hpctrain.engine.layout.layer_placement.measure_layers", lambda *_: times)
    deck = small_deck("layout.pipeline=2", "model.layers=9", "layout.split=balanced")
    engine = trainer(world, deck).engine
    assert engine.placement.split == split
    assert engine.model.span.blocks == split[world.rank]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_stages_balance_blocks_of_two_kinds(
    world: World, monkeypatch: pytest.MonkeyPatch, two_kinds: None
) -> None:
    seconds = {"block": 1.0, "wide block": 9.0, "embedding": 0.0, "head": 3.0}
    times = LayerTimes({LayerKind(kind): PassTimes(total, 0.0, 0.0) for kind, total in seconds.items()}, 0.0)
    monkeypatch.setattr("hpctrain.engine.layout.layer_placement.measure_layers", lambda *_: times)
    run = trainer(world, small_deck("layout.pipeline=2", "model.layers=6", "layout.split=balanced"))
    # 1 9 1 9 and 1 9 3; were all blocks alike, it would be three and three.
    assert run.engine.placement.split == (4, 2)
    run.train(1)


@pytest.mark.mpi(min_size=2)
def test_with_tensor_ranks(world: World) -> None:
    times = measure(world, f"layout.tensor={world.size}", "layout.sequence_parallel=true")
    assert len(set(world.everyone.all_gather_object(repr(times)))) == 1
    assert times.of_kind[BLOCK].total > 0


@pytest.mark.mpi(min_size=2)
def test_parts_are_told_by_the_stages_that_have_them(world: World) -> None:
    deck = small_deck(f"layout.pipeline={world.size}", "model.layers=8")
    mesh = make_mesh(deck, world)
    schedule = generate_schedule("dualpipe-v", world.size, 2 * world.size)
    stage = mesh.coordinate("pipeline")
    mine = {
        (kind, chunk): 1.0 + schedule.part(stage, chunk) + number
        for chunk in range(2)
        for number, kind in enumerate("FBIW")
    }
    times = gather_part_times(mine, schedule, mesh, torch.zeros(4, 1, 2))  # type: ignore[arg-type]
    assert times.forward == [1.0 + part for part in range(schedule.parts)]
    assert times.input_gradient == [3.0 + part for part in range(schedule.parts)]
    assert times.weight_gradient == [4.0 + part for part in range(schedule.parts)]
    assert isinstance(times.communication, float) and times.communication > 0
    assert simulate(schedule, times).cost > 0


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_balanced_run_keeps_its_split_until_its_layout_changes(world: World, mpi_tmp_path: Path) -> None:
    path, folder = mpi_tmp_path / "deck.toml", mpi_tmp_path / "run"
    if world.rank == 0:
        (mpi_tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 300)
        path.write_text(
            f'[run]\nsteps = 2\ndir = "{folder}"\n[model]\nfamily = "gpt2"\nlayers = 5\nhidden = 32\n'
            f'heads = 4\n[data]\ntokens = "{mpi_tmp_path / "tokens.h5"}"\n[layout]\npipeline = {world.size}\n'
            'split = "balanced"\n[batch]\nglobal_size = 8\nsequence = 32\n[machine]\npeak_flops = 1e10\n'
        )
    world.everyone.barrier()
    prepare(world, mpi_tmp_path / "tokens.h5", [str(mpi_tmp_path / "text.txt")])
    run_deck(world, path, [])
    assert read_deck(folder / "deck.toml").layout.split == "balanced"

    def told() -> list[str]:
        lines = (folder / "log.txt").read_text().splitlines() if world.rank == 0 else []
        found: list[str] = world.everyone.broadcast_object([x for x in lines if "layers of each part: " in x])
        return [line.split("each part: ")[1] for line in found]

    first = told()[-1]
    assert "measured per micro-batch: block " in first
    resume(world, folder, ["run.steps=3"])
    assert told()[-1] == first.split(";")[0]  # not measured again
    resume(world, folder, ["run.steps=4", "layout.pipeline=1"])
    resume(world, folder, ["run.steps=5", f"layout.pipeline={world.size}"])
    assert "measured" in told()[-1]
