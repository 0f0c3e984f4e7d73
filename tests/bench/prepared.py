"""A deck and tokens for benchmarks that train."""

from __future__ import annotations

from pathlib import Path

from hpctrain.comm.world import World
from tests.data.preparing import prepare
from tests.engines import DECK


def prepared(world: World, folder: Path) -> tuple[Path, str]:
    """The file of the small deck, without a vocabulary, and the key that names tokens of lines of numbers.

    Collective.
    """
    if world.rank == 0:
        (folder / "text.txt").write_text("".join(f"{n * n % 97} lines\n" for n in range(3000)))
        (folder / "deck.toml").write_text(DECK.replace("vocabulary = 61\n", ""))
    world.everyone.barrier()
    prepare(world, folder / "tokens.h5", [str(folder / "text.txt")])
    return folder / "deck.toml", f"data.tokens={folder}/tokens.h5"
