"""Runs of a module that users bring, compared by the command: on other stages, and with another rate.

Of train/fingerprints.py, too.
"""

from __future__ import annotations

from pathlib import Path

from tests.train.test_module import Launch, folder, hpctrain, tokens
from tests.train.test_module_stages import FEWER, STAGED, changes, staged

__all__ = ["folder", "staged", "tokens"]

KEYS = (*STAGED, *FEWER, "run.steps=3")


def test_what_blocks_of_a_module_give_is_compared(staged: Path, launch: Launch) -> None:
    layout = ("layout.pipeline=2", "layout.schedule=zb-v")
    made = {"one": (1, ()), "stages": (2, layout), "faster": (1, ("learning_rate.peak=1.01e-2",))}
    for name, (ranks, keys) in made.items():
        own = changes(*KEYS, *keys, f"run.dir=runs/{name}")
        hpctrain(launch, ranks, "run", "code/deck.toml", *own)
    told = hpctrain(launch, 2, "compare", "runs/one", "runs/stages", "--steps", "2")
    assert "No difference: the 2 steps after their beginning" in told, told
    told = hpctrain(launch, 1, "compare", "runs/one", "runs/faster", code=1)
    assert "first differ in step 1, in the update: learning rate" in told, told
    (row,) = (line.split() for line in told.splitlines() if line.startswith("forward "))
    assert row[1:] == ["5", "0", "0"]  # four blocks and the loss
