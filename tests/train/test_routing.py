"""Choices of a run's routers: the same file on every layout, followed where it is given, refused where it
does not fit.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train import routing_file
from hpctrain.train.routing import ROUTING_FILE
from hpctrain.train.routing_file import RoutingFile
from hpctrain.train.run import resume, run_deck
from tests.train.test_run import DECK, write_deck

SAMPLES = 7
"""Recorded ones: the four of the first step, and of the five of the second all but the last two."""

KEYS = (
    "model.family=llama",
    "model.key_value_heads=2",
    "model.mlp=48",
    "model.experts.count=4",
    "model.experts.mlp=16",
    "model.initial_std=0.3",
    "model.dropout=0",
    f"model.experts.record_routing={SAMPLES}",
    "run.steps=3",
    "run.evaluate_every=0",
    "checkpoint.every=1",
)

LAYOUTS = {
    "data": (),
    "expert": ("layout.expert=2",),
    "tensor": ("layout.tensor=2",),
    "sequence": ("layout.tensor=2", "layout.sequence_parallel=true", "layout.expert_tensor=2"),
    "context": ("layout.context=2", "layout.expert=2"),
    "pipeline": ("layout.pipeline=2", "memory.recompute=full"),
}

GIVEN = [2, 5, 10]
"""Samples for which a file names other experts than the routers chose."""

MORE = (f"model.experts.record_routing={SAMPLES + 5}",)

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def deck_file(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The deck of test_run.py, once for all tests."""
    return write_deck(world, world.communicator.bcast(tmp_path_factory.mktemp("routing")))


@pytest.fixture
def train(world: World, mpi_tmp_path: Path, deck_file: Path) -> Train:
    """`train(name, *keys, routing_path=None)`: a run of three steps, and its folder."""

    def run(name: str, *keys: str, routing_path: Path | None = None) -> Path:
        folder = mpi_tmp_path / name
        assert run_deck(world, deck_file, [*KEYS, *keys, f"run.dir={folder}"], routing_path=routing_path) == 0
        world.everyone.barrier()
        return folder

    return run


@pytest.fixture(scope="module")
def alone(world: World, deck_file: Path) -> Path:
    """A folder with what one rank makes: a run "free", the file "others.h5" that names other experts for some
    of its samples, one of them of the third step, and the run "followed" that follows it.
    """
    folder = deck_file.parent
    if world.rank == 0:
        assert run_deck(world.single_rank_world(), deck_file, [*KEYS, f"run.dir={folder}/free"]) == 0
        found = RoutingFile.read(folder / "free" / ROUTING_FILE)
        choices = ((found.choices[:, :3] + 1) % 4).astype(np.int32)
        RoutingFile(4, found.blocks, np.array(GIVEN), choices).write(folder / "others.h5")
        keys = [*KEYS, *MORE, f"run.dir={folder}/followed"]
        assert run_deck(world.single_rank_world(), deck_file, keys, routing_path=folder / "others.h5") == 0
    world.everyone.barrier()
    return folder


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def test_choices_are_those_that_the_figures_tell_of(train: Train) -> None:
    folder = train(
        "run", "model.experts.every=2", "model.layers=4", "model.experts.record_routing=4", "run.steps=1"
    )
    found = RoutingFile.read(folder / ROUTING_FILE)
    assert (found.experts, found.blocks.tolist(), found.samples.tolist()) == (4, [1, 3], [0, 1, 2, 3])
    assert found.choices.shape == (2, 4, 32, 2)
    counts = np.stack([np.bincount(of_block.flatten(), minlength=4) for of_block in found.choices])
    (row,) = read_metrics(folder / "metrics.jsonl")
    assert row["experts"]["load"] == (counts.max(1) / counts.mean(1)).tolist()
    assert (found.choices[..., 0] != found.choices[..., 1]).all()


def test_fewer_samples_than_asked_for_are_written_at_the_end(train: Train) -> None:
    folder = train("run", "model.experts.record_routing=1000", "run.steps=1")
    assert RoutingFile.read(folder / ROUTING_FILE).samples.tolist() == [0, 1, 2, 3]
    assert not (train("none", "model.experts.record_routing=0", "run.steps=1") / ROUTING_FILE).exists()


def test_recording_changes_no_bit(train: Train) -> None:
    assert losses(train("with")) == losses(train("without", "model.experts.record_routing=0"))


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_writes_the_same_file_and_follows_it(alone: Path, train: Train, layout: str) -> None:
    folder = train("free", *LAYOUTS[layout])
    written = (folder / ROUTING_FILE).read_bytes()
    assert written == (alone / "free" / ROUTING_FILE).read_bytes()
    assert not list(folder.glob(".routing*"))
    followed = train("followed", *LAYOUTS[layout], *MORE, routing_path=alone / "others.h5")
    free, made = RoutingFile.read(folder / ROUTING_FILE), RoutingFile.read(followed / ROUTING_FILE)
    assert made.samples.tolist() == list(range(SAMPLES + 5))
    assert np.array_equal(made.choices[:, GIVEN], (free.choices[:, :3] + 1) % 4)
    assert np.array_equal(made.choices[0, :2], free.choices[0, :2])
    expected = losses(alone / "followed")
    assert losses(followed) == pytest.approx(expected, rel=1e-5)
    assert losses(folder) != pytest.approx(expected, rel=1e-5)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_that_goes_on_adds_to_its_file(world: World, train: Train) -> None:
    whole = train("whole")
    folder = train("parts", "run.steps=1")
    assert RoutingFile.read(folder / ROUTING_FILE).samples.tolist() == list(range(4))
    assert resume(world, folder, ["run.steps=3"]) == 0
    world.everyone.barrier()
    assert (folder / ROUTING_FILE).read_bytes() == (whole / ROUTING_FILE).read_bytes()
    # What is no file of this run's is not added to.
    again = train("again", "run.steps=1")
    if world.rank == 0:
        (again / ROUTING_FILE).write_text("nothing")
    assert resume(world, again, ["run.steps=3"]) == 0
    world.everyone.barrier()
    assert RoutingFile.read(again / ROUTING_FILE).samples.tolist() == [4, 5, 6]


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_resumed_run_follows_a_file(world: World, train: Train, mpi_tmp_path: Path) -> None:
    first = train("first", "run.steps=1")
    found = RoutingFile.read(train("whole") / ROUTING_FILE)
    given = mpi_tmp_path / "others.h5"
    if world.rank == 0:
        replace(found, choices=((found.choices + 1) % 4).astype(np.int32)).write(given)
    world.everyone.barrier()
    assert resume(world, first, ["run.steps=3"], routing_path=given) == 0
    world.everyone.barrier()
    made = RoutingFile.read(first / ROUTING_FILE)
    assert np.array_equal(made.choices[:, :4], found.choices[:, :4])
    assert np.array_equal(made.choices[:, 4:], (found.choices[:, 4:] + 1) % 4)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_file_that_does_not_fit_is_refused(world: World, train: Train, mpi_tmp_path: Path) -> None:
    given = train("good", "run.steps=1") / ROUTING_FILE
    for key, sentence in {
        "model.experts.count=8": "model.experts.count = 4, but 8 in this run",
        "model.experts.per_token=3": "model.experts.per_token = 2, but 3 in this run",
        "model.experts.every=2": r"choices of the blocks = \[0, 1\], but \[1\] in this run",
        "batch.sequence=16": "batch.sequence = 32, but 16 in this run",
    }.items():
        with pytest.raises(HpctrainError, match=sentence) as raised:
            train("other", key, routing_path=given)
        assert raised.value.exit_code == 2
        assert not (mpi_tmp_path / "other").exists()
    dense = ("model.experts=none",)
    with pytest.raises(HpctrainError, match="requires a model with experts"):
        train("other", *dense, routing_path=given)
    with pytest.raises(InputOutputError, match=r"absent.h5: cannot be read: No such file"):
        train("other", routing_path=mpi_tmp_path / "absent.h5")


@pytest.mark.mpi(min_size=1, max_size=2)
def test_where_the_disk_is_full_the_run_ends(
    train: Train, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(routing_file, "flush_to_disk", refuse)
    with pytest.raises(InputOutputError, match=r"routing.h5: cannot be written: No space left on device$"):
        train("run")
    assert not list((mpi_tmp_path / "run").glob("*routing*"))


def test_the_file_that_a_run_follows_is_not_deleted_by_it(
    train: Train, world: World, deck_file: Path
) -> None:
    folder, deck = train("run", "run.steps=1"), deck_file
    keys = [*KEYS, f"run.dir={folder}"]
    with pytest.raises(HpctrainError, match=r"routing.h5, which this run reads"):
        run_deck(world, deck, keys, fresh=True, routing_path=folder / ROUTING_FILE)
    assert (folder / ROUTING_FILE).exists()
    assert run_deck(world, deck, [*keys, "model.experts.record_routing=0"], fresh=True) == 0
    assert not (folder / ROUTING_FILE).exists()


def test_a_dense_model_has_nothing_to_record() -> None:
    with pytest.raises(HpctrainError, match=r"model.experts.count is missing"):
        parse_deck(DECK.format(tokens="none"), ["model.experts.record_routing=1"])
