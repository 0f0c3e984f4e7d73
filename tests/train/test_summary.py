"""What a run says of itself at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.data.corpus import open_corpus
from hpctrain.train.step import TrainState
from hpctrain.train.summary import decay_ended, epochs_text, introduction
from tests.data.preparing import prepare
from tests.engines import small_deck, trainer


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize(
    ("steps", "epochs", "small"),
    [(1, "0.16 epochs in 1 step", 0), (5, "0.8 epochs in 5 steps", 0), (794, "127", 127)],
)
def test_epochs_are_said(world: World, tmp_path: Path, steps: int, epochs: str, small: int) -> None:
    (tmp_path / "a.txt").write_text("a" * 3200)  # a hundred sequences of 32 tokens
    prepare(world, tmp_path / "tokens.h5", [str(tmp_path / "a.txt")])
    keys = (
        f"run.steps={steps}",
        f"data.tokens={tmp_path}/tokens.h5",
        "model.vocabulary=257",
        "batch.global_size=16",
    )
    deck = small_deck(*keys, "data.validation=0")
    lines = introduction(deck, trainer(world, deck).engine, open_corpus(deck, world), 1e9, TrainState())
    assert f"tokens; 512 per step, {epochs if not small else '127 epochs in 794 steps'}; " in lines[1]
    told = (
        f"{tmp_path}/tokens.h5 is small for this run: each of its 100 sequences of 32 tokens is trained on "
        "127 times, and the model memorizes it; use more text or fewer steps"
    )
    assert (told in lines) == bool(small)


@pytest.mark.mpi(min_size=1, max_size=1)
def test_the_device_and_how_it_multiplies_are_said(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("a" * 3200)
    prepare(world, tmp_path / "tokens.h5", [str(tmp_path / "a.txt")])
    keys = (f"data.tokens={tmp_path}/tokens.h5", "model.vocabulary=257")

    def said(*more: str) -> list[str]:
        deck = small_deck(*keys, *more)
        lines = introduction(deck, trainer(world, deck).engine, open_corpus(deck, world), 1e9, TrainState())
        return [line for line in lines if "emulated" in line]

    def device() -> str:
        engine = trainer(world, deck := small_deck(*keys)).engine
        return introduction(deck, engine, open_corpus(deck, world), 1e9, TrainState())[1]

    assert "matrix products run at 1.0 GFLOP/s per rank on the CPU (100% MFU)" in device()
    monkeypatch.setattr("hpctrain.train.summary.gpu_name", lambda _: "Card A")
    assert "GFLOP/s per rank on Card A (100% MFU)" in device()
    told = 'precision.fp8 = "row" is emulated on this device: same results, but slower than bf16'
    fp8 = ("precision.compute=fp8", "precision.fp8=row")
    assert said(*fp8) == [told] and said("precision.compute=bf16") == []
    monkeypatch.setattr("hpctrain.train.summary.native_products", lambda *_: "stored")
    assert said(*fp8) == []


@pytest.mark.mpi(min_size=2, max_size=2)
def test_one_node_that_compresses_nothing_is_said(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.rank == 0:
        (mpi_tmp_path / "a.txt").write_text("a" * 3200)
    prepare(world, mpi_tmp_path / "tokens.h5", [str(mpi_tmp_path / "a.txt")])
    keys = ("communication.compress=powersgd", "communication.powersgd.between=nodes")
    deck = small_deck(f"data.tokens={mpi_tmp_path}/tokens.h5", "model.vocabulary=257", *keys)

    def said() -> bool:
        lines = introduction(deck, trainer(world, deck).engine, open_corpus(deck, world), 1e9, TrainState())
        return any(line.startswith("communication.powersgd.between") for line in lines)

    assert said()
    monkeypatch.setattr(Mesh, "nodes", lambda _, group: list(group.ranks))
    assert not said()


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    ("steps", "left"), [(8, ""), (10, "; the last 2 steps of 10 are not synchronized, ")]
)
def test_steps_after_the_last_meeting_are_said(
    world: World, mpi_tmp_path: Path, steps: int, left: str
) -> None:
    if world.rank == 0:
        (mpi_tmp_path / "a.txt").write_text("a" * 3200)
    prepare(world, mpi_tmp_path / "tokens.h5", [str(mpi_tmp_path / "a.txt")])
    keys = ("layout.local_steps.replicas=2", "layout.local_steps.steps=4", f"run.steps={steps}")
    deck = small_deck(f"data.tokens={mpi_tmp_path}/tokens.h5", "model.vocabulary=257", *keys)
    lines = introduction(deck, trainer(world, deck).engine, open_corpus(deck, world), 1e9, TrainState())
    told = [
        line for line in lines if line.startswith("2 replicas of 1 rank synchronize every 4 steps (average)")
    ]
    assert len(told) == 1
    assert told[0].endswith(")") if not left else left in told[0]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_how_gradients_are_summed_is_said(world: World, mpi_tmp_path: Path) -> None:
    if world.rank == 0:
        (mpi_tmp_path / "a.txt").write_text("a" * 3200)
    prepare(world, mpi_tmp_path / "tokens.h5", [str(mpi_tmp_path / "a.txt")])
    tokens = (f"data.tokens={mpi_tmp_path}/tokens.h5", "model.vocabulary=257", "run.steps=8")

    def said(*keys: str) -> list[str]:
        deck = small_deck(*tokens, *keys)
        lines = introduction(deck, trainer(world, deck).engine, open_corpus(deck, world), 1e9, TrainState())
        return [line for line in lines if line.startswith(("communication", "gradients"))]

    onebit = ("communication.compress=onebit", "communication.warmup=1")
    assert said() == []
    assert said(*onebit) == ["gradients are reduced over 2 ranks with onebit, after 1 exact step"]
    assert said(*onebit[:1], "communication.warmup=8") == [
        'communication.compress = "onebit" has no effect: with communication.warmup = 8 all 8 steps are exact'
    ]
    assert said("communication.compress=int8", "layout.tensor=2") == [
        'communication.compress = "int8" has no effect with one data rank'
    ]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_weights_that_are_there_already_are_said(world: World, mpi_tmp_path: Path) -> None:
    if world.rank == 0:
        (mpi_tmp_path / "a.txt").write_text("a" * 3200)
    prepare(world, mpi_tmp_path / "tokens.h5", [str(mpi_tmp_path / "a.txt")])
    keys = (f"data.tokens={mpi_tmp_path}/tokens.h5", "model.vocabulary=257", "layout.zero=3")

    def said(*more: str) -> bool:
        deck = small_deck(*keys, "precision.compute=fp8", *more)
        lines = introduction(deck, trainer(world, deck).engine, open_corpus(deck, world), 1e9, TrainState())
        return any(line.startswith("precision.fp8_gather = true does not reduce traffic") for line in lines)

    assert said("precision.fp8_gather=true")
    assert not said()
    assert not said("precision.fp8_gather=true", "communication.transport=mpi")


def test_only_a_decay_that_ends_is_said_to_have_ended() -> None:
    def ended(decay: str) -> str:
        deck = small_deck(f"learning_rate.decay={decay}", "run.steps=40")
        return decay_ended(deck.with_keys(learning_rate={"decay_steps": 20}), 20)

    assert "steps 21 to 40 train at its floor" in ended("wsd")
    assert ended("constant") == ended("inverse-sqrt") == ""


def test_one_epoch_is_singular() -> None:
    assert [epochs_text(number) for number in (0.16, 1.001, 127.4)] == [
        "0.16 epochs",
        "1 epoch",
        "127 epochs",
    ]
