"""Keys of a deck with a model of `transformers` that hpctrain does not implement itself."""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoint.checkpoint_index import CheckpointIndex
from hpctrain.checkpoint.exchange.hugging_face.architectures import native_architecture
from hpctrain.checkpoint.exchange.safetensors_folder import CONFIG, read_json
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.deck.code import CAUSAL_MODEL
from hpctrain.deck.schema import Deck
from hpctrain.model.modules.causal_model import causal_model_keys

_KEYS = ("module", "arguments", "blocks", "plan", "buffers", "vocabulary")


def folder_module_keys(path: Path) -> dict[str, object]:
    """Return the keys of a deck with the model of a folder, by full name; see `causal_model_keys`.

    They are empty if hpctrain implements its architecture itself, or if the folder has no config.json.

    Raises:
        HpctrainError: As in `native_architecture` and `causal_model_keys`.
    """
    file = path / CONFIG
    if not file.is_file():
        return {}
    config = read_json(file)
    is_native = native_architecture(config, str(file)) is not None
    return {} if is_native else causal_model_keys(config, str(file))


def stored_module_deck(structure: CheckpointIndex) -> Deck | None:
    """Return the deck of a checkpoint whose model is one of `transformers`; None for other models."""
    deck = stored_deck(structure.state, structure.path)
    return deck if deck.model.module == CAUSAL_MODEL else None


def stored_module_keys(structure: CheckpointIndex) -> dict[str, object]:
    """Return the keys of a deck with the model of a checkpoint; empty if it is not one of `transformers`."""
    deck = stored_module_deck(structure)
    if deck is None:
        return {}
    keys = {f"model.{name}": getattr(deck.model, name) for name in _KEYS}
    values: dict[str, object] = {key: value for key, value in keys.items() if value is not None}
    return values | {"batch.sequence": deck.batch.sequence}
