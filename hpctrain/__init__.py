"""hpctrain: transformer language models trained over MPI ranks.

    import hpctrain

    loss = hpctrain.metrics("runs/quickstart")["loss"]  # an array of numpy's
    with hpctrain.open_checkpoint("runs/quickstart") as checkpoint:
        first = checkpoint.model["embedding.tokens"][:8]  # eight rows are read, as a tensor of torch's
    model = hpctrain.load("runs/quickstart")  # model.logits(tokens), model.generate("def ")
    hpctrain.run(hpctrain.make_deck("inputs/quickstart.toml", changes={"run.steps": 100}))

These are the names of `hpctrain.api`, each loaded when it is first used: nothing heavy comes with the import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.api import DeckDefaults, check, make_deck, resume, run
    from hpctrain.checkpoint.lazy import Checkpoint, open_checkpoint
    from hpctrain.comm.world import World
    from hpctrain.errors import HpctrainError
    from hpctrain.generate.loaded import GenerationModel, load
    from hpctrain.report.series import metrics

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "Given",
    "HpctrainError",
    "Model",
    "World",
    "check",
    "load",
    "make_deck",
    "metrics",
    "open_checkpoint",
    "resume",
    "run",
]

_HOMES = {
    "Checkpoint": "checkpoint.lazy",
    "Given": "api",
    "HpctrainError": "errors",
    "Model": "generate.loaded",
    "World": "comm.world",
    "check": "api",
    "load": "generate.loaded",
    "make_deck": "api",
    "metrics": "report.series",
    "open_checkpoint": "checkpoint.lazy",
    "resume": "api",
    "run": "api",
}
"""Where each name is from: what reads a file needs neither torch nor MPI."""


def __getattr__(name: str) -> object:
    """A name of the interface, when it is first asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return found


def __dir__() -> list[str]:
    """What there is, loaded or not."""
    return sorted({*globals(), *_HOMES})
