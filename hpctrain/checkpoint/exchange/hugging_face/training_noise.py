"""Keys of a config.json for dropout and noise in training of `transformers`, which hpctrain does not use."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.checkpoint.exchange.hugging_face.architectures import native_architecture
from hpctrain.checkpoint.exchange.hugging_face.config_keys import Config


def ignored_training_keys(config: Config, where: str, dropout: float = 0.0) -> str:
    """Return a note that names the keys that training ignores and what to set instead; "" without such keys.

    Args:
        config: Content of the config.json.
        where: Its name in the note.
        dropout: Value of model.dropout. If it is not 0, it replaces the keys that mean the same.

    Raises:
        HpctrainError: As in `native_architecture`.
    """
    architecture = native_architecture(config, where)
    if architecture is None:
        return ""
    replaced = "" if dropout else _nonzero(config, architecture.files.dropouts)
    others = _nonzero(config, architecture.files.training_noise)
    parts = [f"{replaced} (set model.dropout instead)"] if replaced else []
    parts += [f"{others} (hpctrain has nothing like it)"] if others else []
    return f"{where}: training ignores {' and '.join(parts)}" if parts else ""


def _nonzero(config: Config, defaults: Mapping[str, float]) -> str:
    """Return the keys whose value, or else default, is not 0, with this value."""
    values = {key: config.get(key, default) for key, default in defaults.items()}
    return ", ".join(f"{key} = {value!r}" for key, value in values.items() if value)
