"""Runs that start from the weights of another model, on layouts and in precisions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpctrain.checkpoint.exchange.convert import import_model
from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import master_entries
from hpctrain.comm.world import World
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.deck.read import parse_deck
from hpctrain.deck.toml_text import deck_text
from hpctrain.engine.build import build_engine
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.plan.deck_plan import PlanOptions, plan_deck
from hpctrain.sharding.state import MASTER
from hpctrain.train.run import resume, run_deck
from hpctrain.train.start import start_from_source
from tests.checkpoint.exchange.test_prediction_modules import save_with_modules
from tests.data.preparing import prepare
from tests.model.test_against_transformers import gpt2_reference, llama_reference
from tests.train.test_run import contents, write_deck

DECK = """
[run]
title = "tuned"
steps = 2
dir = "{folder}/run"
[model]
from = "{source}"
[data]
tokens = "{folder}/tokens.h5"
[batch]
global_size = 4
sequence = {sequence}
[communication]
bucket_bytes = 20000
[machine]
peak_flops = 1e10
"""

REFERENCES = {"gpt2": gpt2_reference, "llama": llama_reference}
# Name: family, kind of source, length of sequences, ranks, layout and what else differs.
STARTS: dict[str, tuple[str, str, int, int, tuple[str, ...]]] = {
    "one": ("gpt2", "checkpoint", 16, 1, ("model.vocabulary=98",)),
    "disk": ("llama", "folder", 48, 1, ("memory.optimizer=disk", "precision.compute=fp16")),
    "tensor": ("gpt2", "folder", 16, 2, ("layout.tensor=2", "model.vocabulary=131")),
    "pipeline": ("gpt2", "checkpoint", 24, 2, ("layout.pipeline=2", "model.vocabulary=99")),
    "zero-1": ("llama", "folder", 24, 2, ("layout.zero=1", "precision.compute=bf16", "model.vocabulary=128")),
    "zero-3": ("llama", "checkpoint", 48, 2, ("layout.zero=3", "layout.context=2", "model.vocabulary=101")),
}


def make_source(world: World, folder: Path, family: str, kind: str) -> tuple[Path, dict[str, np.ndarray]]:
    """A Hugging Face folder or a checkpoint of random weights, and these under our names."""
    torch.manual_seed(3)
    model, weights = REFERENCES[family]()
    if world.rank == 0:
        model.save_pretrained(folder / "theirs")
    world.everyone.barrier()
    source = folder / "theirs"
    if kind == "checkpoint":
        import_model(world, folder / "theirs", folder / "model.h5")
        source = folder / "model.h5"
    return source, {name: tensor.detach().numpy() for name, tensor in weights.items()}


def stored(engine: Engine, path: Path) -> dict[str, np.ndarray]:
    """The fp32 weights of all ranks, whole, through a checkpoint."""
    entries = master_entries(engine.state())
    save(path, engine.world.everyone, entries, {})
    found: dict[str, np.ndarray] = {}
    with h5py.File(path) as file:
        file["model"].visititems(
            lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
        )
    return found


def started(world: World, text: str, overrides: Sequence[str]) -> tuple[Engine, Engine, str]:
    """The engine of a deck before and after it takes the weights, and what it tells."""
    deck = parse_deck(text, overrides, read_source=read_source_keys)
    before, after = (build_engine(deck, world, make_mesh(deck, world)) for _ in range(2))
    return before, after, start_from_source(deck, after)


@pytest.mark.sampled(3)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("name", STARTS)
def test_every_rank_takes_its_pieces(name: str, world: World, mpi_tmp_path: Path) -> None:
    family, kind, sequence, ranks, overrides = STARTS[name]
    if world.size != ranks:
        pytest.skip(f"for {ranks} ranks")
    source, weights = make_source(world, mpi_tmp_path, family, kind)
    text = DECK.format(folder=mpi_tmp_path, source=source, sequence=sequence)
    before, after, told = started(world, text, overrides)
    initial, found = stored(before, mpi_tmp_path / "before.h5"), stored(after, mpi_tmp_path / "after.h5")
    assert found.keys() == weights.keys()
    for name, expected in weights.items():
        rows = min(len(expected), len(found[name]))
        assert found[name].shape == (initial[name].shape)
        assert np.array_equal(found[name][:rows], expected[:rows]), name
        assert np.array_equal(found[name][rows:], initial[name][rows:]), name
        assert not np.array_equal(found[name], initial[name]), name
    for bucket, moments in zip(after.stage.buckets, after.stage.optimizer.states, strict=True):
        # What computes is what was read, rounded; padding stays zero, as the optimizer expects.
        for (segment, values, _), (_, masters, _) in zip(
            bucket.owned_segments(bucket.owned_values), bucket.owned_segments(moments[MASTER]), strict=True
        ):
            whole = masters if isinstance(masters, torch.Tensor) else masters.load()
            assert torch.equal(values, whole.to(values.dtype)), segment.parameter.shard.name
    vocabulary = after.shape.vocabulary
    assert f"initialized from the weights of {source}" in told
    assert (f"{vocabulary - 97} tokens added to its 97" in told) == (vocabulary > 97)
    assert ("the first 16 of its 24 positions" in told) == (family == "gpt2" and sequence == 16)
    for engine in (before, after):
        engine.close()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_starts_from_a_model_and_is_resumed_without_it(world: World, mpi_tmp_path: Path) -> None:
    if world.size > 2:
        pytest.skip("one or two ranks")
    source, weights = make_source(world, mpi_tmp_path, "llama", "folder")
    if world.rank == 0:
        (mpi_tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 99)
        tokenizer = Tokenizer.train(["the quick brown fox"], 270)
        (source / "tokenizer.json").write_text(tokenizer.text)
        text = DECK.format(folder=mpi_tmp_path, source=source, sequence=24)
        (mpi_tmp_path / "deck.toml").write_text(text)
    world.everyone.barrier()
    prepare(world, mpi_tmp_path / "tokens.h5", [str(mpi_tmp_path / "text.txt")], tokenizer=str(source))
    path, run = mpi_tmp_path / "deck.toml", mpi_tmp_path / "run"
    with pytest.raises(
        HpctrainError, match=r"vocabulary = 97 \(from model.from\): is smaller than the .* 270"
    ):
        run_deck(world, path, [])
    plan = plan_deck(path, world.size, ["model.vocabulary=270"], options=PlanOptions(with_savings=False))
    assert plan.deck.model.layers == 3 and plan.memory.largest.memory.total > 0

    # A rate of almost nothing, so that what is stored is what was read.
    slow = ["model.vocabulary=270", "learning_rate.peak=1e-30"]
    assert run_deck(world, path, [*slow, "run.steps=1", "learning_rate.decay_steps=4"]) == 0
    deck = parse_deck((run / "deck.toml").read_text())
    assert (deck.model.source, deck.model.mlp, deck.model.vocabulary) == (str(source), 80, 270)
    with h5py.File(run / "checkpoints/step-00000001.h5") as file:
        for name, expected in weights.items():
            assert np.array_equal(file[f"model/{name}"][: len(expected)], expected), name
        assert int(json.loads(file["state"][()])["updates"]) == 1
        assert deck_text(deck) == file["deck"][()].decode()
    if world.rank == 0:
        assert f"initialized from the weights of {source}, 173 tokens added" in (run / "log.txt").read_text()
        shutil.rmtree(source)
    world.everyone.barrier()
    with pytest.raises(
        HpctrainError, match=r"--set model.from=x: conflicts with resuming, which uses the weights of the"
    ):
        resume(world, run, ["model.from=x"])
    with pytest.raises(
        HpctrainError,
        match=r"--set model.experts.count=4: .* was trained without it, .* can start .*from",
    ) as no:
        resume(world, run, ["model.experts.count=4", "run.steps=2"])
    assert no.value.exit_code == 2 and len(no.value.problems) == 1
    assert resume(world, run, ["run.steps=2"]) == 0
    assert (run / "checkpoints/step-00000002.h5").exists()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_model_alone_is_no_run_to_resume(world: World, mpi_tmp_path: Path) -> None:
    source, _ = make_source(world, mpi_tmp_path, "gpt2", "checkpoint")
    with pytest.raises(HpctrainError) as caught:
        resume(world, source, [])
    assert caught.value.problems == (
        f"{source}: holds only a model, no training state to resume; start a run from it with "
        f'[model] from = "{source}" in a deck',
    )


@pytest.mark.mpi(min_size=1, max_size=2)
def test_damaged_models_are_refused_on_all_ranks(world: World, mpi_tmp_path: Path) -> None:
    source, _ = make_source(world, mpi_tmp_path, "gpt2", "checkpoint")
    text = DECK.format(folder=mpi_tmp_path, source=source, sequence=24)
    deck = parse_deck(text, read_source=read_source_keys)
    world.everyone.barrier()
    if world.rank == 0:
        with h5py.File(source) as file:
            offset = file["model/blocks.2.feed_forward.up.bias"].id.get_offset()
        content = bytearray(source.read_bytes())
        content[offset] ^= 1
        source.write_bytes(content)
    world.everyone.barrier()
    engine = build_engine(deck, world, make_mesh(deck, world))
    with pytest.raises(InputOutputError, match=r"/model/blocks.2.feed_forward.up.bias is damaged"):
        start_from_source(deck, engine)

    folder = mpi_tmp_path / "theirs"
    if world.rank == 0:
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[:-4])
    world.everyone.barrier()
    deck = parse_deck(text, [f"model.from={folder}"], read_source=read_source_keys)
    with pytest.raises(InputOutputError, match=r"model.safetensors: damaged or truncated safetensors"):
        start_from_source(deck, engine)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_mixture_goes_on_as_a_mixture_however_it_is_asked(world: World, mpi_tmp_path: Path) -> None:
    path, run = mpi_tmp_path / "deck.toml", mpi_tmp_path / "run"
    sizes = 'family = "llama"\nlayers = 2\nhidden = 32\nheads = 4\nmlp = 48'
    if world.rank == 0:
        text = DECK.format(folder=mpi_tmp_path, source="", sequence=16)
        path.write_text(text.replace('from = ""', sizes))
        (mpi_tmp_path / "text.txt").write_text("one two three " * 200)
    world.everyone.barrier()
    prepare(world, mpi_tmp_path / "tokens.h5", [str(mpi_tmp_path / "text.txt")])
    mixture = ["model.experts.count=4", "model.experts.balance=bias", "model.experts.balance_rate=0.02"]
    assert run_deck(world, path, [*mixture, "run.steps=1", "learning_rate.decay_steps=2"]) == 0
    refused = "was trained with 4, and another value changes"
    with pytest.raises(HpctrainError, match=rf"deck.toml: model.experts.count \(default\): .* {refused}"):
        run_deck(world, path, [], resumes=True)
    with pytest.raises(HpctrainError, match=rf"model.experts.count.*: .* {refused}"):
        resume(world, run, ["model.experts=none", "run.steps=2"])
    # What the stored deck says of biases has no effect any more, and cannot be left out.
    assert resume(world, run, ["model.experts.balance=loss", "run.steps=2"]) == 0


ANEW, LION = "optimizer.restart=true", "optimizer.name=lion"


@pytest.mark.mpi(min_size=1, max_size=2)
def test_another_optimizer_begins_anew_where_it_is_asked_to(world: World, mpi_tmp_path: Path) -> None:
    """Lion's first mean has the signs of its first steps, as it has not if it goes on from AdamW's."""
    path, run = write_deck(world, mpi_tmp_path), mpi_tmp_path / "run"
    assert run_deck(world, path, [f"run.dir={run}", "run.steps=3", "learning_rate.decay=constant"]) == 0
    lion = [LION, "optimizer.weight_decay=0", "layout.zero=1", "run.steps=4"]
    with pytest.raises(HpctrainError, match=r"optimizer.name=lion: .*00000003.h5 holds .*restart") as no:
        resume(world, run, lion)
    assert no.value.exit_code == 2 and len(no.value.problems) == 1
    assert resume(world, run, [*lion, ANEW]) == 0
    old, new = (contents(run / f"checkpoints/step-0000000{step}.h5") for step in (3, 4))
    assert not [name for name in new if "exp_avg_sq" in name]
    for name, before in old.items():
        if name.startswith("model/"):
            mean = new[name.replace("model/", "optimizer/exp_avg/")]
            assert np.array_equal(np.sign(before - new[name]), np.sign(mean)) and mean.any(), name
    with pytest.raises(
        HpctrainError, match=r"optimizer.name = .adamw. .*the state of .lion. \(optimizer.restart"
    ):
        run_deck(world, path, [f"run.dir={run}", "run.steps=6"], resumes=True)
    assert resume(world, run, ["run.steps=6", 'model.frozen=["blocks.0.*"]']) == 0
    with h5py.File(run / "checkpoints/step-00000006.h5") as file:
        state = json.loads(file["state"][()])
    assert (state["step"], state["updates"]) == (6, 3)
    assert resume(world, run, ["run.steps=7"]) == 0
    assert resume(world, run, ["run.steps=8", "model.frozen=[]"]) == 0
    if world.rank == 0:
        said = (run / "log.txt").read_text()
        path, places = (
            run / "checkpoints/step-0000000",
            " parameters (blocks.0.attention_norm.weight, blocks.0.",
        )
        frozen = f'--set model.frozen=["blocks.0.*"]: {path}4.h5 was trained with []; 16{places}'
        free = f'--set model.frozen=[]: {path}7.h5 was trained with ["blocks.0.*"]; 16{places}'
        assert said.count(frozen) == said.count(free) == 1 and said.count("was trained with") == 2
        assert "not trained from now on, and their optimizer state is dropped ([] would continue" in said
        assert 'are trained from now on, with new optimizer state (["blocks.0.*"] would keep' in said
        assert said.count('00000003.h5: holds the state of "adamw"; lion starts with new state') == 1
        assert "does not fit this run" not in said


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        (0, ", without 1 module of multi-token prediction (model.mtp_layers = 1 trains it)"),
        (1, ""),
        (3, ", with 2 new modules of multi-token prediction"),
    ],
)
def test_a_start_says_which_modules_of_the_source_are_left_out(
    world: World, tmp_path: Path, modules: int, told: str
) -> None:
    save_with_modules(tmp_path / "theirs")
    text = DECK.format(folder=tmp_path, source=tmp_path / "theirs", sequence=24)
    before, after, sentence = started(world, text, [f"model.mtp_layers={modules}"])
    assert sentence == f"initialized from the weights of {tmp_path / 'theirs'}{told}"
    for engine in (before, after):
        engine.close()
