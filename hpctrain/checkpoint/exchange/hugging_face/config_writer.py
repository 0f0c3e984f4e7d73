"""Conversion of a ModelShape to a config.json of Hugging Face's `transformers`."""

from __future__ import annotations

from typing import Any

from hpctrain.checkpoint.exchange.hugging_face.architectures import MTP_LAYERS, HuggingFaceArchitecture
from hpctrain.checkpoint.exchange.hugging_face.config_keys import (
    EXPERT_COUNT_KEYS,
    FULL,
    NO_CONFIG,
    SLIDING,
    Config,
    deck_value,
    integer_inverse_square,
)
from hpctrain.checkpoint.exchange.hugging_face.export_choice import architecture_for_export
from hpctrain.checkpoint.exchange.hugging_face.rope_parameters import local_rope_config, rope_config
from hpctrain.checkpoint.exchange.hugging_face.yarn_scale import latent_yarn_keys
from hpctrain.deck.activations import imported_activation
from hpctrain.deck.family import ConfigKey, MixtureFiles, WindowKeys
from hpctrain.model.shape import ModelShape


def config_of(shape: ModelShape, dtype: str, imported: Config = NO_CONFIG) -> dict[str, Any]:
    """Return the config.json of a model without ids of tokens.

    Some keys have both their newer and their older name, so that versions 4 and 5 of `transformers` read the
    same model.

    Args:
        shape: Shape of the model.
        dtype: Type of its tensors, such as "float32".
        imported: The config.json that the model was imported with; empty if it was not imported.

    Raises:
        HpctrainError: `transformers` has no such model.
    """
    architecture = architecture_for_export(shape, imported)
    files = architecture.files
    shared = {
        "initializer_range": shape.initial_std,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
    }
    sizes = {key: getattr(shape, own) for own, (key, _) in files.config_sizes.items()}
    sizes |= {key.name: _config_value(key, shape, imported) for key in files.keys}
    if files.epsilon[0]:
        sizes[files.epsilon[0]] = shape.norm_epsilon
    required = {key: value for key, (value, _) in files.required_values.items() if value is not None}
    activation = _activation_name(architecture, shape.activation, imported)
    required[files.activation[0]] = activation
    if files.activation[0] == "hidden_activation":  # as in published files; SGLang reads hidden_act
        required["hidden_act"] = activation
    own: dict[str, Any] = {**files.constants, **_training_keys(architecture, shape, imported)}
    if files.grouped:
        size = shape.head_size if shape.latent is None else shape.latent.rotary_size
        own |= {"num_key_value_heads": shape.key_value_heads, "head_dim": size}
    if architecture.rotary:
        fraction = shape.rotary_fraction if architecture.has_rotary_fraction else None
        if files.local_rope:
            own |= local_rope_config(shape.rope_base, shape.rope_scaling, shape.rope_local_base)
        else:
            yarn_keys = latent_yarn_keys(shape, imported)
            own |= rope_config(shape.rope_base, shape.rope_scaling, fraction, yarn_keys, files.rope_keys)
    if files.longrope_original is not None and shape.rope_scaling is not None:
        own["original_max_position_embeddings"] = shape.rope_scaling.original_sequence
    if shape.latent is not None:
        latent = {**dict(shape.latent), "plain_size": shape.head_size - shape.latent.rotary_size}
        own |= {key: latent[name] for name, (key, _) in files.latent.items()}
    if files.windows is not None:
        own |= _window_keys(shape, files.windows)
    if files.mixture is not None:
        own |= _mixture_keys(shape, files.mixture)
    if len(files.attention_biases) > 1 and not files.has_key_for("attention_bias"):
        own["attention_bias"] = shape.attention_bias == "all"
    if architecture.has_mtp:
        own[MTP_LAYERS] = shape.mtp_layers
    identity: dict[str, Any] = {"architectures": [architecture.name], "model_type": architecture.model_type}
    if architecture.head == "scalar":
        identity |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return identity | sizes | own | required | shared


def _training_keys(
    architecture: HuggingFaceArchitecture, shape: ModelShape, imported: Config
) -> dict[str, Any]:
    """Return the keys of config.json for dropout and noise in training, which hpctrain does not read.

    An imported config.json keeps its values, and the defaults of missing keys. Otherwise dropout is that of
    the model, and noise is 0.
    """
    files = architecture.files
    values: dict[str, Any] = {
        **dict.fromkeys(files.dropouts, shape.dropout),
        **dict.fromkeys(files.training_noise, 0.0),
    }
    if imported.get("model_type") == files.model_type:
        values = {**files.dropouts, **files.training_noise}
    return {key: imported.get(key, value) for key, value in values.items()}


def _activation_name(architecture: HuggingFaceArchitecture, activation: str, imported: Config) -> str:
    """Return the name of an activation in config.json; that of the imported one if both mean the same."""
    files = architecture.files
    name: Any = imported.get(files.activation[0])
    is_same = imported_activation(name, architecture.gated) == activation
    return name if is_same and name not in files.activation_aliases else architecture.activations[activation]


def _config_value(key: ConfigKey, shape: ModelShape, imported: Config) -> Any:
    """Return the value of a key in config.json; that of the imported config.json if both mean the same."""
    value, imported_value = getattr(shape, key.deck_key), imported.get(key.name)
    if key.choices:
        return next((hf_value for hf_value, native in key.choices if native == value), key.default)
    if key.form == "layers":
        return [int(shape.rotates(layer)) for layer in range(shape.layers)]
    if isinstance(value, bool):
        return value
    if key.form == "cap" and not value:
        return None
    if key.deck_key == "attention_scale" and value is None:
        value = shape.head_size**-0.5
    is_number = isinstance(imported_value, int | float) and imported_value > 0
    if imported_value is not None and is_number and deck_value(key, imported_value) == value:
        return imported_value
    match key.form:
        case "reciprocal":
            return 1 / value
        case "inverse_root":
            return integer_inverse_square(value)
        case _:
            return value


def _window_keys(shape: ModelShape, keys: WindowKeys) -> dict[str, Any]:
    """Return the keys of config.json for windows."""
    windows = [shape.window(layer) for layer in range(shape.layers)]
    # If layer_types alone names the layers with a window, transformers needs a size even if there are none.
    needs_size = keys.has_layer_types and keys.first_full is None and not keys.has_use_flag
    values: dict[str, Any] = {"sliding_window": max(windows) or (keys.size if needs_size else None)}
    if keys.has_use_flag:
        values["use_sliding_window"] = any(windows)
    if keys.has_layer_types and (any(windows) or needs_size):
        values["layer_types"] = [SLIDING if window else FULL for window in windows]
    if keys.first_full is not None:
        first = (layer for layer, window in enumerate(windows) if window)
        values["max_window_layers"] = next(first, shape.layers)
    return values


def _mixture_keys(shape: ModelShape, mixture: MixtureFiles) -> dict[str, Any]:
    """Return the keys of config.json for mixtures of experts."""
    table = shape.experts
    assert table is not None
    keys: dict[str, Any] = {key: getattr(table, own) for own, (key, _) in mixture.sizes.items()}
    if keys.keys() & set(EXPERT_COUNT_KEYS):
        keys |= dict.fromkeys(EXPERT_COUNT_KEYS, table.count)
    if "mlp" not in mixture.sizes:
        keys["intermediate_size"] = table.mlp
    if mixture.shared_width is not None:
        keys[mixture.shared_width[0]] = table.shared * table.mlp
    if mixture.normalizes is not None:
        keys["norm_topk_prob"] = table.router_normalize
    if (method := mixture.group_method) is not None:
        key, alone, grouped = method
        keys[key] = grouped if table.router_groups > 1 else alone
    if mixture.scale is not None:
        keys["routed_scaling_factor"] = table.router_scale
    if "every" in mixture.sizes:
        sparse = range(table.every - 1, shape.layers, table.every)
        keys["mlp_only_layers"] = (
            [layer for layer in sparse if not shape.is_mixture(layer)]
            if table.pattern
            else list(range(table.dense_first))
        )
    return keys
