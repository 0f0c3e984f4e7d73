"""Our GPT-2 and Llama as modules that users bring: the same weights give the same losses on both paths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

Launch = Callable[..., "CompletedProcess[str]"]

COMMON = """
[run]
title = "{title}"
steps = 6
[data]
tokens = "tokens.h5"
[batch]
global_size = 8
micro_size = 2
sequence = 32
[optimizer]
weight_decay = 0.0
epsilon = 1e-5
[learning_rate]
peak = 3e-3
warmup = 2
[checkpoint]
every = 6
"""
FAMILY = """
[model]
family = "{family}"
layers = 2
hidden = 32
heads = 4
initial_std = 0.1
"""
TAKEN = """
[model]
from = "start"
"""
MODULE = """
[model]
module = "transformers:{module}"
from = "start"
blocks = "{blocks}"
[model.arguments]
config = "start"
{more}
"""
MODULES = {
    "gpt2": ("GPT2LMHeadModel", "transformer.h.*", "resid_pdrop = 0.0\nembd_pdrop = 0.0\nattn_pdrop = 0.0"),
    "llama": ("LlamaForCausalLM", "model.layers.*", ""),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", MODULES)
def test_both_paths_give_the_same_losses(tmp_path: Path, launch: Launch, family: str) -> None:
    def hpctrain(ranks: int, *arguments: str) -> None:
        done = launch(ranks, "-m", "hpctrain", *arguments)
        assert done.returncode == 0, done.stderr

    (tmp_path / "text.txt").write_text("".join(chr(32 + 7 * n * n % 61) for n in range(4000)))
    hpctrain(0, "prepare", "tokens.h5", "text.txt")
    module, blocks, more = MODULES[family]
    decks = {
        "begun": FAMILY.format(family=family),
        "own": TAKEN,
        "module": MODULE.format(module=module, blocks=blocks, more=more),
    }
    for title, model in decks.items():
        (tmp_path / f"{title}.toml").write_text(COMMON.format(title=title) + model)
    hpctrain(1, "run", "begun.toml", "--set", "run.steps=2")
    hpctrain(0, "export", "runs/begun", "start")
    losses = {}
    for title, layout in (("own", "layout.tensor=2"), ("module", "layout.zero=3")):
        hpctrain(2, "run", f"{title}.toml", "--set", layout)
        rows = (tmp_path / f"runs/{title}/metrics.jsonl").read_text().splitlines()
        losses[title] = [[json.loads(row)[name] for name in ("loss", "grad_norm")] for row in rows]
    np.testing.assert_allclose(losses["module"], losses["own"], rtol=2e-5)
    assert losses["own"][0][0] - losses["own"][-1][0] > 0.1
