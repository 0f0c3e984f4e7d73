"""A module that users bring starts from values of its own names: safetensors, or a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.train.start import start_from_source
from tests.engines import trainer
from tests.model.modules import models
from tests.model.modules.module_decks import whole_parameters
from tests.model.modules.test_module_part import deck_of


def stored(world: World, folder: Path, kind: str, change: dict[str, torch.Tensor] | None = None) -> dict:
    """The values of another module of that kind, in a folder of safetensors."""
    torch.manual_seed(7)
    module = {"gpt": models.gpt, "odd": models.odd}[kind]()
    with torch.no_grad():
        for each in (*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())):
            each.copy_(torch.rand(each.shape) + 0.5)
        for name, each in module.named_buffers():
            if name.endswith("num_batches_tracked"):
                each.fill_(41)
    # As transformers writes them: of tied parameters one.
    known = {id(value): name for name, value in module.state_dict(keep_vars=True).items()}
    values = {name: module.state_dict()[name].clone() for name in known.values()} | (change or {})
    if world.rank == 0:
        save_file(values, folder / "model.safetensors")
    world.everyone.barrier()
    return module.state_dict()


def with_source(kind: str, folder: Path, *overrides: str) -> Deck:
    return deck_of(kind, *overrides).with_keys(model={"source": str(folder)})


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("kind", ["gpt", "odd"])
def test_a_folder_of_safetensors_gives_all_values(
    world: World, mpi_tmp_path: Path, kind: str, zero: int
) -> None:
    expected = stored(world, mpi_tmp_path, kind)
    deck = with_source(kind, mpi_tmp_path, f"layout.zero={zero * (world.size > 1)}")
    training = trainer(world, deck)
    assert start_from_source(deck, training.engine) == f"initialized from the weights of {mpi_tmp_path}"
    for name, value in whole_parameters(training).items():
        assert torch.equal(value, expected[name]), name
    module = training.engine.stage.models[0].module
    for name, value in module.named_buffers():
        if name in expected:
            assert torch.equal(value, expected[name]), name
    before = whole_parameters(training)
    training.train(1)
    assert any(not torch.equal(value, before[name]) for name, value in whole_parameters(training).items())


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_does_not_fit_is_told_by_name(world: World, mpi_tmp_path: Path) -> None:
    other = {"norm.weight": torch.ones(3), "layers.0.norm1.wieght": torch.ones(2)}
    stored(world, mpi_tmp_path, "gpt", other)
    deck = with_source("gpt", mpi_tmp_path)
    training = trainer(world, deck)
    with pytest.raises(HpctrainError, match=r"norm\.weight has shape \[3\], but the module requires \[32\]"):
        start_from_source(deck, training.engine)
    stored(world, mpi_tmp_path, "gpt", {"more": torch.ones(3)})
    assert "1 tensor without a counterpart ignored (more)" in start_from_source(deck, training.engine)
    if world.rank == 0:
        save_file({"embed.weight": torch.ones(2)}, mpi_tmp_path / "model.safetensors")
    world.everyone.barrier()
    with pytest.raises(HpctrainError, match=r"has no positions, which the module requires"):
        start_from_source(deck, training.engine)
