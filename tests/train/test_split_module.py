"""Runs of modules that users bring on tensor ranks, by the command: resumed on other layouts, inspected, and
refused where a plan cannot be.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.train.test_module import Launch, hpctrain, losses, tokens

__all__ = ["tokens"]

DECK = """
[run]
title = "mine"
steps = 9
[model]
module = "transformers:GPT2LMHeadModel"
blocks = "transformer.h.*"
[model.arguments]
vocab_size = 257
n_embd = 32
n_layer = 2
n_head = 4
n_positions = 32
resid_pdrop = 0.0
embd_pdrop = 0.0
attn_pdrop = 0.0
initializer_range = 0.1
bos_token_id = 1
eos_token_id = 2
[model.plan]
"transformer.wte" = "vocabulary"
"lm_head" = "vocabulary"
"transformer.h.0" = "cut"
"transformer.h.*.attn" = "gather"
"transformer.h.*.attn.c_attn" = {split = "column", parts = 3, unit = 8}
"transformer.h.*.attn.c_proj" = "row"
"transformer.h.*.attn.split_size" = "divided"
"transformer.h.*.mlp.c_fc" = "column"
"transformer.h.*.mlp.c_proj" = "row"
"transformer.h.*.ln_?" = "sequence"
"transformer.ln_f" = "join"
[data]
tokens = "tokens.h5"
[batch]
global_size = 8
micro_size = 2
sequence = 32
[layout]
tensor = 2
[optimizer]
epsilon = 1e-3  # above the gradients of biases of keys, which are rounding alone
[learning_rate]
peak = 1e-2
warmup = 2
[checkpoint]
every = 3
keep = 9
[machine]
peak_flops = 1e10
"""


@pytest.fixture
def folder(tmp_path: Path, tokens: Path) -> Path:
    shutil.copy(tokens, tmp_path)
    (tmp_path / "deck.toml").write_text(DECK)
    return tmp_path


def sets(*keys: str) -> list[str]:
    return [each for key in keys for each in ("--set", key)]


def model(path: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    with h5py.File(path) as file:

        def take(name: str, item: object) -> None:
            if isinstance(item, h5py.Dataset) and name.startswith(("model", "optimizer")):
                found[name] = item[()]

        file.visititems(take)
    return found


@pytest.mark.sampled(1)
def test_a_run_goes_on_with_tensor_ranks_and_without(folder: Path, launch: Launch) -> None:
    alone = sets("layout.tensor=1", "layout.zero=3", "run.dir=runs/whole")
    hpctrain(launch, 2, "run", "deck.toml", *alone)
    hpctrain(launch, 2, "run", "deck.toml", *sets("run.steps=3", "learning_rate.decay_steps=9"))
    data = sets("layout.tensor=1", "layout.zero=3", "run.steps=6")
    hpctrain(launch, 2, "resume", "runs/mine", "--trust-code", *data)
    pieces = sets("layout.tensor=2", "layout.zero=0", "layout.sequence_parallel=true", "run.steps=9")
    hpctrain(launch, 2, "resume", "runs/mine", "--trust-code", *pieces)
    np.testing.assert_allclose(losses(folder / "runs/mine"), losses(folder / "runs/whole"), rtol=1e-5)
    last = folder / "runs/mine/checkpoints/step-00000009.h5"
    expected = model(folder / "runs/whole/checkpoints/step-00000009.h5")
    found = model(last)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert abs(values - expected[name]).max() <= 2e-5 * abs(expected[name]).max(), name
    assert expected["model/transformer.h.0.attn.c_attn.weight"].shape == (32, 96)
    told = hpctrain(launch, 0, "inspect", "--tensors", str(last))
    assert "transformer.h.0.attn.c_attn.weight" in told


def test_a_plan_that_cannot_be_is_told_in_sentences(folder: Path, launch: Launch) -> None:
    wrong = 'model.plan={"transformer.h.*.attn.c_atn" = "column", "transformer.drop" = "row"}'
    told = hpctrain(launch, 0, "plan", "deck.toml", "--ranks", "2", *sets(wrong), code=2)
    assert "matches no submodule or parameter (did you mean transformer.h.*.attn.c_attn?)" in told
    assert "transformer.drop has the class Dropout, which does not support" in told
    assert "Traceback" not in told
    none = hpctrain(launch, 0, "plan", "deck.toml", "--ranks", "2", *sets("model.plan="), code=2)
    assert "requires model.plan for a module" in none
