"""hpctrain: transformer language models trained over MPI ranks.

    import hpctrain

    loss = hpctrain.metrics("runs/quickstart")["loss"]  # a NumPy array
    with hpctrain.open_checkpoint("runs/quickstart") as checkpoint:
        first = checkpoint.model["embedding.tokens"][:8]  # reads eight rows, as a torch tensor
    model = hpctrain.load("runs/quickstart")  # model.logits(tokens), model.generate("def ")
    hpctrain.run(hpctrain.make_deck("inputs/quickstart.toml", changes={"run.steps": 100}))

`hpctrain.api` defines these names. Each is imported when it is first used, so that `import hpctrain`
is fast.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.api import DeckDefaults, check, make_deck, resume, run
    from hpctrain.checkpoint.lazy import Checkpoint, open_checkpoint
    from hpctrain.comm.world import World
    from hpctrain.errors import HpctrainError
    from hpctrain.generate.generation_model import GenerationModel, load
    from hpctrain.report.series import metrics

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "DeckDefaults",
    "GenerationModel",
    "HpctrainError",
    "World",
    "check",
    "load",
    "make_deck",
    "metrics",
    "open_checkpoint",
    "resume",
    "run",
]

_MODULES = {
    "Checkpoint": "checkpoint.lazy",
    "DeckDefaults": "api",
    "GenerationModel": "generate.generation_model",
    "HpctrainError": "errors",
    "World": "comm.world",
    "check": "api",
    "load": "generate.generation_model",
    "make_deck": "api",
    "metrics": "report.series",
    "open_checkpoint": "checkpoint.lazy",
    "resume": "api",
    "run": "api",
}
"""Module that defines each public name. Those that read files import neither torch nor MPI."""

_EARLIER_NAMES = {"Given": "DeckDefaults", "Model": "GenerationModel"}
"""Names of version 0.1.0, which still work, and their successors."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    current = _EARLIER_NAMES.get(name, name)
    if current not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if current != name:
        message = f"hpctrain.{name} is now hpctrain.{current}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(import_module(__name__), current)
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    """Return all names of the package, whether they have been imported or not."""
    return sorted({*globals(), *_MODULES})
