"""Runs of one small deck on a text, whose losses are compared."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.comm.world import World
from hpctrain.train.run import run_deck
from tests.train.test_run import write_deck


class TextRuns:
    """Runs in subfolders of a folder that all ranks share. Collective."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.deck = write_deck(world, folder)

    def run(self, name: str, *keys: str) -> None:
        """Run the deck with overrides, in the subfolder `name`."""
        assert run_deck(self.world, self.deck, [f"run.dir={self.folder / name}", *keys]) == 0

    def losses(self, name: str) -> list[float]:
        """Return the losses of all steps of a run."""
        rows = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(row)["loss"] for row in rows]
