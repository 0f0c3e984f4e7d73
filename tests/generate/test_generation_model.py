"""A model in a script: its logits are those of the run's own, its text that of the command.

Tests of `single_world` in comm/verb.py, too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpctrain
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.generate import generation_model
from hpctrain.generate.generation_model import SamplingOptions
from hpctrain.generate.sampling import Sampling
from hpctrain.model.part import logits_of
from tests.engines import LLAMA
from tests.generate.test_text_model import END, MIXTURE, VOCABULARY, make_checkpoint, texts

LAYOUTS = {
    "data": ("layout.zero=3",),
    "tensor": ("layout.tensor=2",),
    "pipeline": ("layout.pipeline=2",),
    "context": ("layout.context=2",),
    "mixture": (*MIXTURE, "layout.expert=2", "batch.micro_size=1"),
    "llama": (*LLAMA, "layout.tensor=2", "precision.compute=bf16"),
}


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_loads_on_one_rank(layout: str, world: World, mpi_tmp_path: Path) -> None:
    """Every rank loads all of it, by itself; what it computes is what one rank trains from the same start."""
    path = mpi_tmp_path / "a.h5"
    make_checkpoint(world, path, *LAYOUTS[layout])
    one = [each for each in LAYOUTS[layout] if not each.startswith("layout.")]
    trained = make_checkpoint(world.single_rank_world(), mpi_tmp_path / f"{world.rank}.h5", *one)
    model = hpctrain.load(path, device="cpu")
    tokens = torch.randint(0, 257, (3, 20), generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.logits(tokens), logits_of(trained, tokens).float())
    world.everyone.barrier()


def test_logits_of_rows_and_of_batches(world: World, tmp_path: Path) -> None:
    trained = make_checkpoint(world.single_rank_world(), tmp_path / "a.h5", step=5)
    model = hpctrain.load(tmp_path / "a.h5", device="cpu")
    assert (model.step, model.window, model.vocabulary) == (5, 32, VOCABULARY)
    assert model.deck.model.hidden == 32 and model.tokenizer.vocabulary == 257
    rows = [[1, 2, 3], [4, 5, END]]
    expected = logits_of(trained, torch.tensor(rows))
    assert torch.equal(model.logits(rows), expected) and expected.shape == (2, 3, VOCABULARY)
    assert torch.equal(model.logits(np.array(rows, np.uint16)), expected)
    assert torch.allclose(model.logits(rows[0]), expected[0], atol=1e-5)
    assert not model.logits(rows).requires_grad and "step 5, " in repr(model)


def test_text_is_that_of_the_command(world: World, tmp_path: Path) -> None:
    alone, path = world.single_rank_world(), tmp_path / "a.h5"
    make_checkpoint(alone, path)
    threads = torch.get_num_threads()
    model = hpctrain.load(path, device="cpu")
    assert torch.get_num_threads() == threads
    for seed, prompt in ((1, "def "), (2, "")):
        drawn = Sampling(tokens=30, seed=seed, top_k=20, top_p=0.9)
        shown = texts(alone, path, prompt, drawn)
        assert [model.generate(prompt, tokens=30, seed=seed, top_k=20, top_p=0.9) + "\n"] == shown


def test_every_option_is_that_of_the_command(world: World, tmp_path: Path) -> None:
    """Several prompts, too, of which each begins with the seed, as its own command would."""
    alone, path = world.single_rank_world(), tmp_path / "a.h5"
    make_checkpoint(alone, path)
    model = hpctrain.load(path, device="cpu")
    options: list[SamplingOptions] = [
        {"tokens": 30, "seed": 3, "min_p": 0.05},
        {"tokens": 30, "temperature": 0.0, "repetition_penalty": 1.3},
        {"tokens": 40, "seed": 4, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1},
        {"tokens": 40, "seed": 5, "temperature": 1.5},
    ]
    prompts = ("def ", "", "class A:\n")
    plain = []
    for each in options:
        shown = [texts(alone, path, prompt, Sampling(**each)) for prompt in prompts]  # type: ignore[arg-type]
        found = model.generate(prompts, **each)
        assert [[text + "\n"] for text in found] == shown
        assert model.generate(prompts[2], **each) == found[2]
        plain.append(found)
    assert len({tuple(each) for each in plain}) == len(options)
    for whole, prompt in zip(plain[-1], prompts, strict=True):
        rest = whole[len(prompt) :]
        stop = rest[3:5]
        found = model.generate([prompt], tokens=40, seed=5, temperature=1.5, stop=["nowhere" * 9, stop])
        assert found == [prompt + rest[: rest.index(stop)]]
        assert model.generate(prompt, tokens=40, seed=5, temperature=1.5, stop=stop) == found[0]
    assert model.generate([]) == []


OPTIONS: dict[str, dict[str, Any]] = {
    "stop: must not be empty": {"stop": ""},
    "prompt: is not UTF-8 text": {"prompt": "a\ud800"},
    "stop: expected texts, but got an int": {"stop": ["a", 3]},
    "stop: expected a text or a list of texts, but got an int": {"stop": 3},
    "prompt: expected a text or a list of texts, but got None": {"prompt": None},
    "prompt: expected texts, but got None": {"prompt": ["a", None]},
    "repetition_penalty = 0: must be above 0": {"repetition_penalty": 0},
    "min_p = 2: must be from 0": {"min_p": 2},
    "min_p: expected a number, but got a str": {"min_p": "a"},
    "top_k: expected a whole number, but got a float": {"top_k": 1.5},
    "temperature: expected a number, but got None": {"temperature": None},
    r"stops: unknown \(did you mean stop\?\)": {"stops": "a"},
    r"beams: unknown \(expected tokens, temperature, ": {"beams": 3},
}


@pytest.fixture(scope="module")
def bare(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    path = tmp_path_factory.mktemp("bare") / "a.h5"
    make_checkpoint(world.single_rank_world(), path)
    return path


@pytest.mark.parametrize("told", OPTIONS)
def test_an_option_that_will_not_do_is_told(told: str, bare: Path) -> None:
    with pytest.raises(HpctrainError, match=f"^{told}"):
        hpctrain.load(bare, device="cpu").generate(**OPTIONS[told])


TOKENS: dict[str, Any] = {
    r"a row has 33, but the window of the model \(batch.sequence\) has 32": [0] * 33,
    r"token id 320 is out of range \[0, 320\)": [[3, 320]],
    r"token id -1 is out of range \[0, 320\)": np.array([-1]),
    "whole numbers, but got float32": [0.5],
    "rows of the same length, but got a list": [[1], [1, 2]],
    "rows of the same length, but got a str": "abc",
    r"shape \[s\] or \[b, s\], but got \[1, 1, 1\]": [[[1]]],
    "^tokens: must not be empty": torch.zeros(0, dtype=torch.int64),
    "tokens: must not be empty": [],
}


def test_what_will_not_do_is_told(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(world.single_rank_world(), tmp_path / "a.h5", tokenizer=None)
    model = hpctrain.load(tmp_path / "a.h5", device="cpu")
    for told, tokens in TOKENS.items():
        with pytest.raises(HpctrainError, match=told):
            model.logits(tokens)
    with pytest.raises(HpctrainError, match=r"^tokens = 0: must be at least 1\ntop_p = 2: must be above 0"):
        model.generate(tokens=0, top_p=2)
    with pytest.raises(HpctrainError, match="contains no tokenizer"):
        model.generate("a")
    with pytest.raises(InputOutputError, match="no such run folder or checkpoint"):
        hpctrain.load(tmp_path / "b.h5")
    with pytest.raises(HpctrainError, match=r"path: must be the path of a checkpoint .*, not None"):
        hpctrain.load(None)  # type: ignore[arg-type]
    monkeypatch.setattr(generation_model, "_SMALL_BYTES", 0)
    monkeypatch.setattr(generation_model, "obtainable_bytes", lambda _: 5000)
    with pytest.raises(
        HpctrainError, match=r"the logits of \[2, 8\] need 20.5 kB, but 5 kB of memory are free"
    ):
        model.logits([[0] * 8] * 2)


def test_a_model_without_room_is_told(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(world.single_rank_world(), tmp_path / "a.h5")
    monkeypatch.setattr("hpctrain.generate.model_loading.resident_bytes", lambda: 1 << 60)
    with pytest.raises(HpctrainError, match=r"a\.h5: does not fit into memory: 1 rank needs"):
        hpctrain.load(tmp_path / "a.h5", device="cpu")


def test_a_process_begins_and_ends_mpi_itself(world: World, tmp_path: Path) -> None:
    """As a script without mpirun; after a run that ended MPI there is a sentence."""
    make_checkpoint(world.single_rank_world(), tmp_path / "a.h5")
    program = f"""
import hpctrain
model = hpctrain.load({str(tmp_path / "a.h5")!r}, device="cpu")
print(len(model.generate("x", tokens=3)) >= 1)
from hpctrain.host.mpi_library import MPI
MPI.Finalize()
for each in (
    lambda: model.logits([1]), lambda: hpctrain.load({str(tmp_path / "a.h5")!r}), hpctrain.World.start
):
    try:
        each()
    except hpctrain.HpctrainError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.startswith("True\n")
        and done.stdout.count("MPI is already finalized in this process") == 3
    )
