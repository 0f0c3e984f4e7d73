"""Note about keys of a config.json for dropout and random noise in training.

`transformers` trains with these keys, and hpctrain ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.checkpoint.exchange.hugging_face.architectures import native_architecture
from hpctrain.checkpoint.exchange.hugging_face.config_keys import Config


def ignored_training_keys_note(config: Config, where: str, dropout: float = 0.0) -> str:
    """Return a note that names the keys that training ignores, and what to set instead.

    Args:
        config: Content of the config.json.
        where: Name of the config.json, with which the note begins.
        dropout: Value of model.dropout. If it is not 0, the note leaves out the keys that mean the same.

    Returns:
        The note; "" if the config.json has no such key with a value other than 0, or if the architecture is
        not built in.

    Raises:
        HpctrainError: As in `native_architecture`.
    """
    architecture = native_architecture(config, where)
    if architecture is None:
        return ""
    dropouts = "" if dropout else _describe_nonzero(config, architecture.files.dropouts)
    others = _describe_nonzero(config, architecture.files.training_noise)
    parts = [f"{dropouts} (set model.dropout instead)"] if dropouts else []
    parts += [f"{others} (hpctrain has no equivalent)"] if others else []
    return f"{where}: training ignores {' and '.join(parts)}" if parts else ""


def _describe_nonzero(config: Config, defaults: Mapping[str, float]) -> str:
    """Return the keys whose value is not 0, such as "resid_pdrop = 0.1". Missing keys have their defaults."""
    values = {key: config.get(key, default) for key, default in defaults.items()}
    return ", ".join(f"{key} = {value!r}" for key, value in values.items() if value)
