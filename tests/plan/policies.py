"""Decks of policies that tests try: a small model, and prompts that are to be copied."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from tests.data.chats import write_rows
from tests.data.preparing import prepare_rows

COPYING = """
[run]
title = "copying"
steps = 2
dir = "{folder}/run"
[model]
family = "llama"
layers = 2
hidden = 16
heads = 2
vocabulary = 257
[data]
tokens = "{folder}/prompts.h5"
[objective]
kind = "ppo"
beta = 0.05
[policy]
reward = ["exact-match"]
tokens = 4
epochs = 2
[batch]
global_size = 8
micro_size = 2
sequence = 16
[learning_rate]
peak = 1e-3
[checkpoint]
every = 0
[machine]
peak_flops = 1e10
"""


def copying(folder: Path, *overrides: str, ranks: int | None = None) -> Deck:
    """The deck, whose file and run are in a folder."""
    return parse_deck(COPYING.format(folder=folder), overrides, ranks=ranks)


def prepare_copying(world: World, folder: Path, count: int = 32) -> None:
    """Make its file, and its own deck. Collective."""
    with world.agreement():
        if world.rank == 0:
            draw, rows = random.Random(3), list[dict[str, str]]()
            for _ in range(count):
                word = "".join(draw.choices("abcd", k=3))
                rows.append({"prompt": f"{word}>", "answer": word})
            source: Sequence[Path] = [write_rows(folder / "prompts.jsonl", rows)]
            prepare_rows(
                world.single_rank_world(), folder / "prompts.h5", source, kind="prompts", template="raw"
            )
            (folder / "deck.toml").write_text(COPYING.format(folder=folder), encoding="utf-8")


JUDGE = """
[run]
title = "{name}"
steps = 1
evaluate_every = 0
dir = "{folder}/{name}"
[model]
family = "llama"
layers = {layers}
hidden = 16
heads = 2
[data]
tokens = "{folder}/pairs.h5"
validation = 0
[objective]
kind = "reward"
[batch]
global_size = 8
micro_size = 2
sequence = 16
[learning_rate]
peak = 1e-3
[machine]
peak_flops = 1e10
"""


def prepare_judge(world: World, folder: Path, name: str, layers: int) -> Path:
    """The deck of a reward model, and its file. Collective."""
    deck = folder / f"{name}.toml"
    with world.agreement():
        if world.rank == 0:
            rows = [{"prompt": "ab>", "chosen": "ab", "rejected": "b"}] * 8
            source: Sequence[Path] = [write_rows(folder / "pairs.jsonl", rows)]
            pairs = folder / "pairs.h5"
            pairs.unlink(missing_ok=True)
            prepare_rows(world.single_rank_world(), pairs, source, kind="preferences", template="raw")
            deck.write_text(JUDGE.format(folder=folder, name=name, layers=layers), encoding="utf-8")
    return deck
