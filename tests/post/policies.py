"""A task for policies, words to be copied: prompts, decks, and a model that copies some letters."""

from __future__ import annotations

import random
from pathlib import Path

from hpctrain.comm.world import World
from hpctrain.train.run import run_deck
from tests.data.chats import write_rows
from tests.data.preparing import prepare_rows

LETTERS, LENGTH = "abcdef", 3

MODEL = """
[run]
title = "{title}"
steps = {steps}
seed = 3
dir = "{folder}/{title}"
evaluate_sequences = 32
[model]
{model}
[data]
tokens = "{folder}/{tokens}.h5"
validation = 0.1
[batch]
sequence = 12
global_size = {size}
micro_size = {micro}
[learning_rate]
peak = {rate}
decay = "constant"
warmup = 4
[machine]
peak_flops = 1e10
[objective]
"""
START = 'kind = "sft"\n'
POLICY = """
kind = "{kind}"
beta = {beta}
[policy]
reward = ["{reward}"]
tokens = 4
"""
SMALL = 'family = "llama"\nlayers = 2\nhidden = 64\nheads = 4\n'


def words(count: int, seed: int) -> list[str]:
    """Of random letters."""
    draw = random.Random(seed)
    return ["".join(draw.choice(LETTERS) for _ in range(LENGTH)) for _ in range(count)]


def write_prompts(world: World, folder: Path, count: int = 200) -> None:
    """Prompts, which are words to be copied, in prompts.h5."""
    if world.rank == 0:
        rows = [{"prompt": f"{word}>", "answer": word} for word in words(count, 1)]
        source = write_rows(folder / "prompts.jsonl", rows)
        prepare_rows(
            world.single_rank_world(), folder / "prompts.h5", [source], kind="prompts", template="raw"
        )
    world.everyone.barrier()


def write_deck(world: World, folder: Path, title: str, objective: str, **keys: object) -> Path:
    """A deck of that title."""
    known = {"tokens": "prompts", "steps": 4, "size": 64, "micro": 4, "rate": "2e-3", "model": SMALL} | keys
    path = folder / f"{title}.toml"
    if world.rank == 0:
        path.write_text(MODEL.format(folder=folder, title=title, **known) + objective)
    world.everyone.barrier()
    return path


def policy(kind: str = "grpo", beta: float = 0.05, reward: str = "exact-match", more: str = "") -> str:
    """Keys of [objective] and [policy]."""
    return POLICY.format(kind=kind, beta=beta, reward=reward) + more


def half_right(world: World, folder: Path) -> Path:
    """The checkpoint of a model that has learned from copies of which most letters are wrong."""
    if world.rank == 0:
        draw, rows = random.Random(5), []
        for word in words(3000, 2):
            copied = "".join(each if draw.random() < 0.4 else draw.choice(LETTERS) for each in word)
            rows.append({"prompt": f"{word}>", "response": copied})
        source = write_rows(folder / "copies.jsonl", rows)
        prepare_rows(world.single_rank_world(), folder / "copies.h5", [source], kind="chat", template="raw")
    world.everyone.barrier()
    deck = write_deck(
        world, folder, "start", START, tokens="copies", steps=150, size=64, micro=16, rate="5e-3"
    )
    assert run_deck(world, deck, []) == 0
    return folder / "start" / "checkpoints" / "latest"
