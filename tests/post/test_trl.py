"""Ten steps of fine-tuning, and of learning from preferences, have the losses of trl's trainers.

Both read the same rows of text by the same tokenizer, from the same folder of Hugging Face's. trl runs in a
process of its own; without it these tests are left out.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hpctrain.comm.world import World
from hpctrain.data.order import SampleOrder
from hpctrain.train.run import run_deck
from tests.data.chats import write_rows
from tests.data.preparing import prepare_rows
from tests.launch import clean_environment
from tests.model.test_against_transformers import gpt2_reference, llama_reference

STEPS, ROWS, BATCH, SEED, BETA, LENGTH = 10, 14, 4, 5, 0.3, 24
BETAS, EPSILON, RATE = (0.9, 0.95), 1e-6, 2e-3
SAID = [(f"{n}+{n * n % 23}?\n", f"It is {n + n * n % 23}" + ", I say" * (n % 3)) for n in range(ROWS)]
DECK = f"""
[run]
title = "trl"
steps = {STEPS}
seed = {SEED}
[model]
from = "{{folder}}/theirs"
[data]
tokens = "{{folder}}/{{kind}}.h5"
validation = 0.0
{{more}}
[batch]
micro_size = 2
sequence = {LENGTH}
[learning_rate]
peak = {RATE}
warmup = 0
decay = "constant"
[optimizer]
clip = 0
weight_decay = 0
[optimizer.adamw]
beta1 = {BETAS[0]}
beta2 = {BETAS[1]}
epsilon = {EPSILON}
[machine]
peak_flops = 1e10
"""


def make_model(folder: Path, make: Callable[[], tuple[torch.nn.Module, object]]) -> None:
    """A small model, no two tensors of which are alike, and a tokenizer that has learned of these rows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    learner = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for row in SAID for text in row], learner)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>")
    torch.manual_seed(3)
    model, _ = make()
    model.resize_token_embeddings(len(fast))
    model.save_pretrained(folder / "theirs")
    fast.save_pretrained(folder / "theirs")


def by_trl(folder: Path, kind: str, rows: list[dict[str, str]], **config: object) -> list[float]:
    """The losses of its trainer, which takes these rows in order."""
    numbers = {"learning_rate": RATE, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_epsilon": EPSILON}
    settings = {"rows": rows, "config": {**numbers, **config, "max_length": None}}
    (folder / f"{kind}.json").write_text(json.dumps(settings))
    program = [sys.executable, str(Path(__file__).with_name("trl_steps.py")), str(folder), kind]
    environment = {**clean_environment(), "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    subprocess.run(program, check=True, env=environment, stdout=subprocess.DEVNULL)
    losses: list[float] = json.loads((folder / f"{kind}.found.json").read_text())
    assert len(losses) == STEPS
    return losses


def by_ours(world: World, folder: Path, kind: str, more: str, *keys: str) -> list[float]:
    """The losses of a run."""
    deck = folder / f"{kind}.toml"
    deck.write_text(DECK.format(folder=folder, kind=kind, more=more))
    run_deck(world, deck, [f"run.dir={folder / kind}", *keys])
    return [json.loads(line)["loss"] for line in (folder / kind / "metrics.jsonl").read_text().splitlines()]


def in_order(batch: int) -> list[int]:
    """The numbers of the rows that a run takes."""
    return SampleOrder(ROWS, SEED).at(np.arange(STEPS * batch)).tolist()


@pytest.mark.parametrize("make", [gpt2_reference, llama_reference], ids=["gpt2", "llama"])
def test_fine_tuning(
    world: World, tmp_path: Path, make: Callable[[], tuple[torch.nn.Module, object]]
) -> None:
    pytest.importorskip("trl")
    make_model(tmp_path, make)
    ours = [{"prompt": prompt, "response": answer} for prompt, answer in SAID]
    source = write_rows(tmp_path / "rows.jsonl", ours)
    tokens = tmp_path / "sft.h5"
    prepare_rows(world, tokens, [source], kind="chat", template="raw", tokenizer=str(tmp_path / "theirs"))
    found = by_ours(world, tmp_path, "sft", "pack = false", f"batch.global_size={BATCH}")
    theirs = [{"prompt": SAID[n][0], "completion": SAID[n][1]} for n in in_order(BATCH)]
    expected = by_trl(tmp_path, "sft", theirs, per_device_train_batch_size=BATCH)
    assert expected[-1] < expected[0] - 0.1
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("make", [gpt2_reference, llama_reference], ids=["gpt2", "llama"])
def test_preferences(
    world: World, tmp_path: Path, make: Callable[[], tuple[torch.nn.Module, object]]
) -> None:
    pytest.importorskip("trl")
    make_model(tmp_path, make)
    rows = [
        {"prompt": prompt, "chosen": answer, "rejected": f"{n} or so" + "!" * (n % 4)}
        for n, (prompt, answer) in enumerate(SAID)
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    tokens = tmp_path / "dpo.h5"
    prepare_rows(
        world, tokens, [source], kind="preferences", template="raw", tokenizer=str(tmp_path / "theirs")
    )
    more = f'[objective]\nkind = "dpo"\nbeta = {BETA}'
    found = by_ours(world, tmp_path, "dpo", more, f"batch.global_size={2 * BATCH}")
    theirs = [rows[n] for n in in_order(BATCH)]
    expected = by_trl(tmp_path, "dpo", theirs, per_device_train_batch_size=BATCH, beta=BETA)
    assert found[0] == pytest.approx(math.log(2), abs=1e-7)
    assert expected[-1] < expected[0] - 0.01
    assert found == pytest.approx(expected, rel=1e-5)
