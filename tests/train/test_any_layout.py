"""Checkpoints from any layout to any layout: what is loaded and saved again is the same, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.memory.scratch import fill_pieces, read_pieces
from hpctrain.train.checkpoints import Checkpoints
from tests.engines import LLAMA, Trainer, small_deck, trainer
from tests.selection import ALL_CASES

# Micro-batches of one sequence, so that one, two, three, four and eight data ranks divide a batch.
SIZES = ("model.layers=4", "batch.global_size=24", "batch.micro_size=1", "batch.sequence=16", "run.steps=3")
# GPT-2 is tied, in half precision; 61 tokens need padding where the tensor axis cuts the vocabulary.
MODELS = {"tied": ("model.tied=true", "precision.compute=bf16"), "untied": LLAMA}
# Ranks and layout.
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "data": (2, ("layout.zero=1",)),
    "sequence": (2, ("layout.tensor=2", "layout.sequence_parallel=true")),
    "interleaved": (2, ("layout.pipeline=2", "layout.schedule=interleaved", "layout.chunks=2")),
    "context": (2, ("layout.context=2", "layout.zero=3")),
    "three": (3, ("layout.zero=3", "memory.optimizer=disk")),
    "tensor": (4, ("layout.tensor=4",)),
    "tensor-data": (4, ("layout.tensor=2", "layout.zero=2")),
    "v-schedule": (4, ("layout.pipeline=2", "layout.schedule=zb-v", "layout.zero=1")),
    "hybrid": (8, ("layout.zero=3", "layout.zero_group=4")),
    "everything": (8, ("layout.pipeline=2", "layout.tensor=2", "layout.zero=3")),
    "all-to-all": (
        8,
        ("layout.pipeline=2", "layout.tensor=2", "layout.context=2", "layout.context_form=all_to_all"),
    ),
}


@dataclass
class Ranks:
    """The first ranks of the world, on one layout; None on the others."""

    deck: Deck
    training: Trainer | None
    checkpoints: Checkpoints | None

    def load_and_save(self, source: Path) -> None:
        """Read a checkpoint over what cannot be mistaken for it, and write it again."""
        if self.training is None or self.checkpoints is None:
            return
        engine = self.training.engine
        flats = [
            values
            for bucket, moments in zip(engine.stage.buckets, engine.stage.optimizer.states, strict=True)
            for flat in (bucket.owned_values, *moments.values())
            for _, values, _ in bucket.owned_segments(flat)
        ]
        for flat in flats:
            for _, piece in fill_pieces(flat):
                piece.fill_(float("nan"))
        self.training.state = self.checkpoints.restore(source)
        for flat in flats:
            assert not any(bool(piece.isnan().any()) for _, piece in read_pieces(flat))
        self.checkpoints.save(self.training.state)
        self.checkpoints.finish()


def ranks_of(world: World, folder: Path, model: Sequence[str], name: str, mode: str) -> Ranks:
    """A layout on as many ranks as it needs; collective over the whole world."""
    ranks, layout = LAYOUTS[name]
    here = world.rank < ranks
    part = World(world.communicator.Split(0 if here else 1, world.rank))
    keys = (f"run.dir={folder / name}", f"checkpoint.mode={mode}", "checkpoint.buffer=20000")
    deck = small_deck(*SIZES, *model, *layout, *keys)
    if not here:
        return Ranks(deck, None, None)
    training = trainer(part, deck)
    return Ranks(deck, training, Checkpoints(deck, training.engine, {}))


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Every dataset but the texts, the checksums included."""
    found: dict[str, np.ndarray] = {}
    with h5py.File(path, "r") as file:
        file.visititems(
            lambda name, item: (
                found.update({name: item[()]})
                if isinstance(item, h5py.Dataset) and name not in ("state", "deck")
                else None
            )
        )
    return found


def sources(model: str, target: int) -> list[str]:
    """The layouts whose files a layout reads: all with the variable above set, else one a model."""
    names = list(LAYOUTS)
    others = [name for name in names if name != names[target]]
    if os.environ.get(ALL_CASES):
        return others
    return [others[((5 * target + 3) if model == "tied" else (7 * target + 1)) % 11]]


@pytest.mark.eight
@pytest.mark.mpi(min_size=8)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_reads_every_other(world: World, mpi_tmp_path: Path, model: str) -> None:
    everyone = world.everyone
    modes = ("collective", "background")
    layouts = {}
    for number, name in enumerate(LAYOUTS):
        part = ranks_of(world, mpi_tmp_path, MODELS[model], name, modes[number % 2])
        if part.training is not None and part.checkpoints is not None:
            part.training.train(1)
            part.checkpoints.save(part.training.state)
            part.checkpoints.finish()
        layouts[name] = part
        everyone.barrier()
    file = "checkpoints/step-00000001.h5"
    written = {name: mpi_tmp_path / f"{name}.h5" for name in LAYOUTS}
    if world.rank == 0:
        for name, path in written.items():
            (mpi_tmp_path / name / file).rename(path)
    everyone.barrier()
    differences = []
    for number, (name, part) in enumerate(layouts.items()):
        for source in sources(model, number):
            part.load_and_save(written[source])
            everyone.barrier()
            if world.rank == 0:
                expected, found = tensors(written[source]), tensors(mpi_tmp_path / name / file)
                assert expected.keys() == found.keys()
                differences += [
                    f"{source} -> {name}: {key}"
                    for key, values in expected.items()
                    if values.tobytes() != found[key].tobytes()
                ]
            everyone.barrier()
        if part.training is not None:
            part.training.engine.close()
    assert not differences
