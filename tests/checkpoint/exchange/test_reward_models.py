"""Reward models as those of `transformers`: exported, imported, and begun from language models and others.

Tests of what checkpoint/exchange/convert.py, source.py and hugging_face/ there make of a
head of scores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from hpctrain.checkpoint.exchange.convert import export_model, import_model
from hpctrain.checkpoint.exchange.source import read_source_keys, source_shape
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import master_entries
from hpctrain.checkpoint.stored_deck import deck_state
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import build_engine
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.train.layout_verification import NOISE_STD
from hpctrain.train.start import start_from_source
from hpctrain.train.token_scores import values_of
from hpctrain.train.trainer import Trainer
from tests.engines import DECK, LLAMA, small_deck

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors.torch")

PIECE = 1 << 20
REWARD = ("objective.kind=reward", "data.validation=0")
FAMILIES: dict[str, tuple[str, ...]] = {
    "gpt2": (),
    "llama": LLAMA,
    "qwen3": (*LLAMA, "model.query_key_norm=head"),
    "mup": (*LLAMA, "model.parametrization=mup", "model.base_width=16", "model.base_head_size=4"),
    "mixtral": (*LLAMA, "model.experts.count=4", "model.experts.per_token=2"),
}


def engine_of(world: World, *keys: str) -> tuple[Deck, Engine]:
    deck = small_deck(*keys)
    return deck, build_engine(deck, world, make_mesh(deck, world), noise_std=NOISE_STD)


def written(world: World, path: Path, *keys: str) -> Engine:
    """A checkpoint of an engine of these keys, which is returned."""
    deck, engine = engine_of(world, *keys)
    save(path, world.everyone, master_entries(engine.state()), {"step": 1, **deck_state(deck)}, PIECE)
    return engine


def values(path: Path) -> dict[str, torch.Tensor]:
    found = {}
    with h5py.File(path) as file:
        file["model"].visititems(
            lambda name, item: (
                found.update({name: torch.from_numpy(item[()])}) if isinstance(item, h5py.Dataset) else None
            )
        )
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_has_the_same_scores(world: World, tmp_path: Path, family: str) -> None:
    deck, engine = engine_of(world, *FAMILIES[family], *REWARD)
    save(tmp_path / "a.h5", world.everyone, master_entries(engine.state()), deck_state(deck), PIECE)
    told = export_model(world, tmp_path / "a.h5", tmp_path / "theirs", None, 1 << 30)
    assert "theirs: " in told
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification") and len(config["id2label"]) == 1
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "theirs", attn_implementation="eager"
    ).eval()
    source = SyntheticSource(32, 61, 4)
    trainer = Trainer(deck, engine, Batches(source, 1))
    (ours,) = values_of(trainer.step, trainer.step.batches)
    with torch.no_grad():
        for row in range(4):
            tokens, _ = source.sequence(row)
            for end in (7, 32):
                theirs = float(model(tokens[None, :end]).logits)
                assert theirs == pytest.approx(float(ours[row, end - 1]), rel=1e-4, abs=1e-5)
    if family == "mup":
        return  # whose factors are in the weights now
    told = import_model(world, tmp_path / "theirs", tmp_path / "b.h5")
    assert source_shape(tmp_path / "b.h5").head == "scalar"
    before, after = values(tmp_path / "a.h5"), values(tmp_path / "b.h5")
    assert before.keys() == after.keys() and "score.weight" in after
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_not_taken(world: World, tmp_path: Path) -> None:
    written(world, tmp_path / "a.h5", *REWARD)
    export_model(world, tmp_path / "a.h5", tmp_path / "theirs", None, 1 << 30)
    path = tmp_path / "theirs" / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    for labels in (None, {"0": "no", "1": "yes"}):
        path.write_text(json.dumps({**config, "id2label": labels}))
        with pytest.raises(HpctrainError, match=r"id2label = .*: reward models must have exactly one label"):
            import_model(world, tmp_path / "theirs", tmp_path / "b.h5")
    olmoe = ("model.query_key_norm=all", "model.experts.router_normalize=false", *FAMILIES["mixtral"])
    written(world, tmp_path / "c.h5", *olmoe, *REWARD)
    with pytest.raises(HpctrainError, match=r"transformers has no .* with a scalar head"):
        export_model(world, tmp_path / "c.h5", tmp_path / "none", None, 1 << 30)


LAYOUTS: dict[int, list[tuple[str, ...]]] = {
    1: [(), ("precision.compute=bf16",)],
    2: [("layout.tensor=2",), ("layout.pipeline=2",), ("layout.zero=3", "precision.compute=bf16")],
}


def begun(world: World, source: Path, *keys: str) -> tuple[Engine, str]:
    deck = parse_deck(
        DECK.replace("[model]", f'[model]\nfrom = "{source}"'),
        ["run.seed=9", *keys],
        read_source=read_source_keys,
    )
    engine = build_engine(deck, world, make_mesh(deck, world))
    return engine, start_from_source(deck, engine)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("tied", [True, False])
def test_all_but_the_head_is_a_language_model_s(world: World, mpi_tmp_path: Path, tied: bool) -> None:
    """A tied one has none of its own; that of another is left. A reward model's is taken."""
    folder = mpi_tmp_path
    written(world, folder / "language.h5", f"model.tied={str(tied).lower()}")
    theirs = values(folder / "language.h5")
    assert ("head.weight" in theirs) != tied
    fresh = None
    for number, layout in enumerate(LAYOUTS[world.size]):
        engine, told = begun(world, folder / "language.h5", *REWARD, *layout)
        assert told.endswith("language.h5, with a new head for scores")
        path = folder / f"reward{number}.h5"
        save(path, world.everyone, master_entries(engine.state()), {**deck_state(small_deck(*REWARD))}, PIECE)
        ours = values(path)
        assert ours.keys() == (theirs.keys() - {"head.weight"}) | {"score.weight"}
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs if name != "head.weight")
        head = ours["score.weight"]
        assert head.shape == (1, 32) and 0.05 < float(head.std()) < 0.2
        fresh = head if fresh is None else fresh
        assert torch.equal(head, fresh)

        again, told = begun(world, path, *REWARD, *layout)
        assert told.endswith(f"reward{number}.h5")
        second = folder / f"again{number}.h5"
        save(second, world.everyone, master_entries(again.state()), {}, PIECE)
        assert all(torch.equal(each, ours[name]) for name, each in values(second).items())
    with pytest.raises(HpctrainError, match=r"reward0.h5: is a reward model, whose head computes"):
        begun(world, folder / "reward0.h5", "model.tied=false")
