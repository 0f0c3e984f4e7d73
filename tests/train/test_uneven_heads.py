"""Training with heads that tensor ranks do not divide evenly: equal to one rank.

Tests of `Partition.of_heads` of parallel/shards.py in whole runs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.layout_verification import compare
from hpctrain.train.scaled_down_deck import scale_down_family
from tests.engines import LLAMA, by_rank_0, reference, small_deck, trainer
from tests.generate.test_text_model import GREEDY, make_checkpoint, texts
from tests.plan.test_memory_plan import expect_activations
from tests.train.test_any_layout import tensors

TENSOR = ("layout.tensor=2",)
SEQUENCE = (*TENSOR, "layout.sequence_parallel=true")
FOUR = ("layout.tensor=4",)


def heads(queries: int, key_values: int, *keys: str) -> tuple[str, ...]:
    """Return the keys of a llama with these heads, of 8 features."""
    sizes = f"model.heads={queries}", f"model.key_value_heads={key_values}", f"model.hidden={8 * queries}"
    return (*LLAMA, *sizes, *keys)


ON_TWO: dict[str, tuple[str, ...]] = {
    "groups": (*heads(9, 3), *SEQUENCE),
    "norms": (*heads(9, 3, "model.query_key_norm=all"), *SEQUENCE),
    "plain": (*heads(7, 7), *TENSOR),
    "shared": (*heads(5, 1), *SEQUENCE),
    "gpt2": ("model.heads=5", "model.hidden=40", "model.mlp=48", *TENSOR),
}
ON_FOUR: dict[str, tuple[str, ...]] = {
    "unequal-shares": (*heads(6, 3), *FOUR, "layout.sequence_parallel=true"),
    "split-queries": (*heads(14, 2), *FOUR),
}


def check_steps(world: World, keys: tuple[str, ...]) -> None:
    """Compare one step of a miniature, and five steps, with those of one rank. Collective."""
    deck = small_deck(*keys)
    for difference in compare(scale_down_family(deck), world, make_mesh(deck, world)):
        bound = 0.0 if re.fullmatch(r"parameter \S+", difference.name) else 1e-5
        assert difference.error <= bound, difference
    expected = by_rank_0(world, lambda: [(s.loss, s.grad_norm) for s in reference(world, deck).train(5)])
    measured = [(step.loss, step.grad_norm) for step in trainer(world, deck).train(5)]
    for here, there in zip(measured, expected, strict=True):
        assert here == pytest.approx(there, rel=1e-4)
    assert expected[-1][0] != expected[0][0]


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("case", ON_TWO)
def test_two_ranks_train_like_one(world: World, case: str) -> None:
    check_steps(world, ON_TWO[case])


@pytest.mark.sampled(1)
@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("case", ON_FOUR)
def test_four_ranks_train_like_one(world: World, case: str) -> None:
    check_steps(world, ON_FOUR[case])


@pytest.mark.mpi(min_size=2, max_size=2)
def test_checkpoints_fit_two_ranks_and_one(world: World, mpi_tmp_path: Path) -> None:
    """A file of two ranks is that of one rank that resumes it, bit for bit, and the other way round."""
    alone = world.single_rank_world()
    keys = (*heads(9, 3, "model.query_key_norm=all"), f"run.dir={mpi_tmp_path}", "run.steps=3")
    file = mpi_tmp_path / "checkpoints/step-00000001.h5"

    def write(here: World, name: str, source: str | None, *layout: str) -> None:
        deck = small_deck(*keys, *layout)
        training = trainer(here, deck)
        checkpoints = Checkpoints(deck, training.engine, {})
        if source is None:
            training.train(1)
        else:
            training.state = checkpoints.restore(mpi_tmp_path / source)
        checkpoints.save(training.state)
        checkpoints.finish()
        training.engine.close()
        here.everyone.barrier()
        if here.rank == 0:
            file.rename(mpi_tmp_path / name)
        here.everyone.barrier()

    write(world, "two.h5", None, *SEQUENCE, "layout.zero=1")
    if world.rank == 0:
        write(alone, "one.h5", "two.h5")
    world.everyone.barrier()
    write(world, "again.h5", "one.h5", *TENSOR)
    expected = tensors(mpi_tmp_path / "two.h5")
    for name in ("one.h5", "again.h5"):
        written = tensors(mpi_tmp_path / name)
        assert {key: values.tobytes() for key, values in written.items()} == {
            key: values.tobytes() for key, values in expected.items()
        }


@pytest.mark.mpi(min_size=2, max_size=2)
def test_two_ranks_generate_the_text_of_one(world: World, mpi_tmp_path: Path) -> None:
    path = mpi_tmp_path / "a.h5"
    make_checkpoint(world, path, *heads(9, 3), *TENSOR)
    found = texts(world, path, "abc", GREEDY)
    expected = by_rank_0(world, lambda: texts(world.single_rank_world(), path, "abc", GREEDY))
    if world.rank == 0:
        assert found == expected


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("case", ["groups", "shared"])
def test_the_plan_has_the_memory_of_all_ranks(world: World, case: str) -> None:
    for recompute in ("none", "selective"):
        expect_activations(world, small_deck(*ON_TWO[case], f"memory.recompute={recompute}"))


PADDED: dict[str, tuple[int, tuple[str, ...]]] = {
    "bf16": (2, ("precision.compute=bf16",)),
    "fp8": (2, ("precision.compute=fp8", "precision.fp8=row")),
    "muon": (2, ("optimizer.name=muon", "model.tied=false")),
    "norms": (2, ("model.query_key_norm=all",)),
    "adapters": (2, ("model.adapters.rank=2",)),
    **{
        name: (4, (f"communication.compress={name}", "batch.global_size=16"))
        for name in ("int8", "topk", "powersgd")
    },
}


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("case", PADDED)
def test_heads_that_fill_up_a_rank_stay_zero(world: World, case: str) -> None:
    ranks, keys = PADDED[case]
    if world.size != ranks:
        return
    training = trainer(world, small_deck(*ON_TWO["shared"], *keys))
    training.train(3)
    padded = 0
    for bucket in training.engine.stage.buckets:
        for segment in bucket.segments:
            values = segment.view(bucket.gather_owned(bucket.owned_values))
            unpadded = values.clone()
            segment.parameter.shard.clear_padding(unpadded)
            assert torch.equal(values, unpadded), segment.parameter.shard.name
            padded += segment.parameter.shard.extent != segment.parameter.shard.local
    assert sum(world.everyone.all_gather_object(padded)) > 0
