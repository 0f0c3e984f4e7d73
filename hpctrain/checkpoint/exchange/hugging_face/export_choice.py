"""Choice of the architecture of `transformers` that computes the same as a model, for its export."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.checkpoint.exchange.hugging_face.architectures import (
    LANGUAGE_MODELS,
    REWARD_ARCHITECTURES,
    HuggingFaceArchitecture,
)
from hpctrain.checkpoint.exchange.hugging_face.config_keys import NO_CONFIG, Config, integer_inverse_square
from hpctrain.checkpoint.exchange.hugging_face.yarn_scale import has_default_scale, mscale_all_dim_of
from hpctrain.deck.family import MixtureFiles
from hpctrain.deck.sections.experts import ExpertsTable
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape
from hpctrain.text import either


def architecture_for_export(shape: ModelShape, imported: Config = NO_CONFIG) -> HuggingFaceArchitecture:
    """Return the architecture of `transformers` that computes the same as a model of this shape.

    Args:
        shape: Shape of the model.
        imported: The config.json that the model was imported with; empty if it was not imported. Of several
            architectures that compute the same, the result is the one that it names.

    Raises:
        HpctrainError: `transformers` has no such model.
    """
    models = sorted(LANGUAGE_MODELS, key=lambda each: each.family != shape.family)
    obstacles = {each.name: list(_obstacles(each, shape)) for each in models}
    possible = [each for each in models if not obstacles[each.name]]
    if not possible:
        of_family = [obstacles[each.name] for each in models if each.family == shape.family]
        if not of_family:
            reason = "transformers has no such model, so this model cannot be exported"
            raise HpctrainError(f'model.family = "{shape.family}": {reason}')
        closest = min(of_family, key=lambda errors: sum(_WEIGHTS.get(key, 1) for key, _ in errors))
        raise closest[0][1]
    same = [each for each in possible if each.model_type == imported.get("model_type")]
    architecture = (same or possible)[0]
    if shape.head == "vocabulary":
        return architecture
    if architecture.name not in REWARD_ARCHITECTURES:
        message = f"transformers has no {_display_name(architecture)} with a scalar head"
        raise HpctrainError(f'objective.kind = "reward": {message}, so this model cannot be exported')
    return REWARD_ARCHITECTURES[architecture.name]


def _display_name(architecture: HuggingFaceArchitecture) -> str:
    """Return the name of an architecture for messages."""
    return {"gpt2": "GPT-2", "llama": "Llama"}.get(architecture.model_type, architecture.name)


_WEIGHTS = {"latent": 200, "experts.count": 100, "experts.router": 50, "query_key_norm": 5}
"""Weights of keys in the difference between a model and an architecture. All other keys count 1."""


def _obstacles(
    architecture: HuggingFaceArchitecture, shape: ModelShape
) -> Iterator[tuple[str, HpctrainError]]:
    """Yield the keys that prevent an export as this architecture, each with its error."""
    for key, requirement in _requirements(architecture, shape):
        yield key, _export_error(shape, key, requirement, _display_name(architecture))


def _requirements(architecture: HuggingFaceArchitecture, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Yield keys of [model] with values that an architecture lacks, and what it has or requires."""
    files = architecture.files
    if (shape.latent is None) == bool(files.latent):
        yield "latent", f"has {'' if files.latent else 'no '}latent attention"
    elif shape.latent is not None and not has_default_scale(shape) and mscale_all_dim_of(shape) is None:
        supported = 'only with rope_scaling.kind = "yarn", and only a larger one'
        yield "attention_scale", f"supports a scale other than 1 / sqrt(head_size) {supported}"
    if (shape.experts is None) != (files.mixture is None):
        yield "experts.count", f"has {'no ' if files.mixture is None else ''}experts"
    for key, value in architecture.choices(shape.hidden).items():
        is_default = key == "attention_scale" and value is None and has_default_scale(shape)
        if getattr(shape, key) != value and not is_default:
            yield key, f"requires {_value_text(value)}"
    if shape.activation not in architecture.activations:
        yield "activation", f"requires {either(map(toml_value, architecture.activations))}"
    for config_key in files.keys:
        value, possible = getattr(shape, config_key.deck_key), [chosen for _, chosen in config_key.choices]
        if possible and value not in possible:
            yield config_key.deck_key, f"requires {either(map(toml_value, possible))}"
        if config_key.form == "inverse_root" and value is not None and integer_inverse_square(value) is None:
            yield config_key.deck_key, f"requires 1 / sqrt(n) with an integer n, its {config_key.name}"
    yield from _shared_key_requirements(architecture, shape)
    if files.windows is not None:
        sizes = {shape.window(layer) for layer in range(shape.layers)}
        if len(sizes - {0}) > 1:
            yield "windows", "requires windows of one size"
        elif len(sizes) > 1 and not files.windows.has_layer_types:
            yield "windows", "requires a window in all layers or in none"
        rotate_alike = (shape.rotates(layer) == (shape.window(layer) > 0) for layer in range(shape.layers))
        if files.windows.rotate and not all(rotate_alike):
            yield "rotation_pattern", "requires rotation in layers with a window alone"
    if shape.rope_local_base is not None and not files.local_rope:
        yield "rope_local_base", "requires none"
    if shape.rope_scaling is not None and files.rope_kinds:
        if shape.rope_scaling.kind not in files.rope_kinds:
            yield "rope_scaling.kind", f"requires {either(map(toml_value, files.rope_kinds))}"
        if shape.head_size * shape.heads != shape.hidden:
            yield "head_size", "requires hidden / heads if positions are scaled"
    if files.local_rope and shape.rope_scaling is not None and not shape.rope_scaling.truncate:
        yield "rope_scaling.truncate", "ignores it where layers with windows have positions of their own"
    if shape.attention_bias not in files.attention_biases:
        supported = either(map(toml_value, files.attention_biases))
        yield "attention_bias", f"requires {supported}"
    if not files.epsilon[0] and shape.norm_epsilon != files.epsilon[1]:
        yield "norm_epsilon", f"requires {files.epsilon[1]}"
    if not files.grouped and shape.key_value_heads != shape.heads:
        yield "key_value_heads", f"requires as many key-value heads as query heads ({shape.heads})"
    has_head_size = files.grouped and files.has_head_size
    if not has_head_size and shape.head_size * shape.heads != shape.hidden:
        yield "head_size", "requires hidden / heads"
    if files.heads_divide_hidden and shape.hidden % shape.heads:
        yield "heads", f"requires a number of heads that divides model.hidden = {shape.hidden}"
    if shape.experts is not None:
        yield from _mixture_requirements(architecture, shape, shape.experts)


def _shared_key_requirements(
    architecture: HuggingFaceArchitecture, shape: ModelShape
) -> Iterator[tuple[str, str]]:
    """Yield keys of [model] whose value differs from that of another one, where config.json has one key."""
    first: dict[str, tuple[str, object]] = {}
    for key in architecture.files.keys:
        own = getattr(shape, key.deck_key)
        value = next((hf_value for hf_value, native in key.choices if native == own), own)
        deck_key, expected = first.setdefault(key.name, (key.deck_key, value))
        if value != expected:
            yield (
                key.deck_key,
                f"requires the value of model.{deck_key}, since both have one key there ({key.name})",
            )


_NO_MIXTURE = MixtureFiles(sizes={})


def _mixture_requirements(
    architecture: HuggingFaceArchitecture, shape: ModelShape, table: ExpertsTable
) -> Iterator[tuple[str, str]]:
    """Yield keys of [model.experts] with values that an architecture lacks, and what it requires."""
    mixture = architecture.files.mixture or _NO_MIXTURE
    required: dict[str, object] = {
        "capacity": None,
        "router": "softmax",
        "router_scale": 1.0,
        "router_groups": 1,
        "shared": 0,
        "every": 1,
        "dense_first": 0,
        "pattern": (),
        "shared_gate": False,
        "router_bias": False,
        "router_group_best": 2,
        **architecture.constant_expert_keys,
    }
    if table.router_groups == 1:
        del required["router_group_best"]
    required = {key: value for key, value in required.items() if key not in mixture.sizes}
    if "every" in mixture.sizes:
        for key in ("dense_first", "pattern"):  # mlp_only_layers replaces them
            required.pop(key, None)
    if mixture.scale is not None:
        del required["router_scale"]
    if mixture.shared_width is not None:
        del required["shared"]
    if mixture.normalizes is None:
        required.setdefault("router_normalize", True)
    if not architecture.choice_is_biased and table.balance == "bias":
        required["balance"] = "loss"
    for key, value in required.items():
        if getattr(table, key) != value:
            yield f"experts.{key}", f"requires {_value_text(value)}"
    if shape.query_key_norm == "all" and shape.head_size * shape.heads != shape.hidden:
        yield "head_size", "requires hidden / heads"
    if mixture.shared_width is not None and not table.shared:
        yield "experts.shared", "requires 1 or more"


def _value_text(value: object) -> str:
    """Return a value as in a deck; "none" for None."""
    return "none" if value is None else toml_value(value)


def _export_error(shape: ModelShape, key: str, has: str, family: str) -> HpctrainError:
    """Return the error about a key that prevents an export; `has` says what the architecture has."""
    if key == "latent":
        has_table = "with" if shape.latent is not None else "without"
        return HpctrainError(
            f"a model {has_table} the table [model.latent]: the {family} of transformers {has}, so this "
            "model cannot be exported"
        )
    table, _, name = key.rpartition(".")
    owner = getattr(shape, table) if table else shape
    value = toml_value(0 if owner is None else getattr(owner, name))
    return HpctrainError(
        f"model.{key} = {value}: the {family} of transformers {has}, so this model cannot be exported"
    )
