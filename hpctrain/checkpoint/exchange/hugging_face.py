"""config.json of Hugging Face's `transformers`: conversion to a ModelShape, and from one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from hpctrain.checkpoint.exchange.architectures import (
    ARCHITECTURES,
    MTP_LAYERS,
    SCORED,
    HuggingFaceArchitecture,
)
from hpctrain.checkpoint.exchange.quantization import quantization_problems
from hpctrain.checkpoint.exchange.rope_parameters import (
    RopeParametersReader,
    local_rope_config,
    of_layer_type,
    rope_config,
)
from hpctrain.checkpoint.exchange.yarn_scale import has_default_scale, mscale_of, yarn_attention_scale
from hpctrain.deck.activations import imported_activation
from hpctrain.deck.families import FAMILIES
from hpctrain.deck.family import AttentionBias, ConfigKey
from hpctrain.deck.schema import fields
from hpctrain.deck.sections.experts import has_experts
from hpctrain.deck.sections.latent import LatentTable
from hpctrain.deck.sections.rope_scaling import rotated_features
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import EXPERT_KEYS, ModelShape
from hpctrain.text import either

Config = Mapping[str, Any]
_Value = TypeVar("_Value")

_NONE: Config = MappingProxyType({})
_LARGEST = 10_000_000
_SLIDING, _FULL = _LAYER_TYPES = ("sliding_attention", "full_attention")
_EXPERTS = ("num_experts", "num_local_experts")
"""Keys of the number of experts, of which each version of `transformers` writes one."""


def shape_of(config: Config, where: str) -> ModelShape:
    """Return the shape that a config.json describes.

    Args:
        config: Content of the config.json.
        where: Its name in messages.

    Raises:
        HpctrainError: The architecture or a value in the config.json is not supported.
    """
    return _Reading(config, where).shape()


class _Reading:
    """Reader of a config.json, which collects the problems that it finds.

    The default replaces the value of a key with a problem. What depends on this key is not checked, since
    further messages would be about a value that the file does not have.
    """

    def __init__(self, config: Config, where: str) -> None:
        self.architecture = architecture_of(config, where)
        experts = next((config[key] for key in _EXPERTS if config.get(key) is not None), None)
        self.config = config if experts is None else {**dict.fromkeys(_EXPERTS, experts), **config}
        self.where = where
        self.problems: list[str] = []
        self.invalid_keys: set[str] = set()

    def shape(self) -> ModelShape:
        """Return the shape of the model that the configuration describes."""
        architecture, config = self.architecture, self.config
        for required in architecture.required_values:
            value = config.get(required.key, required.default)
            if value not in required.accepted:
                message = f"unsupported; expected {required.accepted[0]!r} for {architecture.model_type}"
                self.problem(required.key, value, message)
        for problem in quantization_problems(config, architecture.quantization):
            self.problem(*problem)
        activation = self.activation()
        sizes: dict[str, Any] = {
            own: self.size(key, default) for own, (key, default) in architecture.sizes.items()
        }
        # null stands for a value that follows from other sizes.
        sizes["mlp"] = sizes["mlp"] or 4 * sizes["hidden"]
        sizes["key_value_heads"] = sizes["heads"]
        if architecture.latent:
            sizes |= self.latent_attention(sizes["heads"])
        elif architecture.grouped:
            has_key = "num_key_value_heads" in config
            shared = sizes["heads"] if has_key else architecture.key_value_heads or sizes["heads"]
            sizes["key_value_heads"] = self.size("num_key_value_heads", shared)
            size = config.get("head_dim", architecture.head_size)
            if size is not None:
                sizes["head_size"] = self.size("head_dim", size)
        if architecture.rotary:
            sizes["windows"] = self.windows(sizes["layers"]) if self.has_valid_sizes("layers") else ()
            head_keys = {"head_dim", *(key for key, _ in architecture.latent.values())}
            if self.has_valid_sizes("hidden", "heads", "sequence") and self.invalid_keys.isdisjoint(
                head_keys
            ):
                sizes |= self.rotary_positions(sizes)
                sizes["rope_local_base"] = self.local_base(sizes)
            if architecture.windows is not None and architecture.windows.rotate:
                rotated = tuple(window > 0 for window in sizes["windows"]) or (False,)
                sizes["rotation_pattern"] = () if all(rotated) else rotated
        if architecture.mixture:
            sizes |= self.mixture(sizes)
        if "attention_bias" not in {key.deck_key for key in architecture.keys}:
            sizes["attention_bias"] = self.attention_bias()
        sizes |= {key.deck_key: self.deck_value(key, sizes["layers"]) for key in architecture.keys}
        sizes["norm_epsilon"] = self.number(*architecture.epsilon)
        sizes["tied"] = self.flag("tie_word_embeddings", architecture.tied) and architecture.head != "scalar"
        if architecture.head == "scalar":
            self.check_labels()
        if not self.problems:
            self.check(sizes)
        if self.problems:
            raise HpctrainError(self.problems)
        sizes["activation"] = activation
        return ModelShape(
            family=architecture.family, head=architecture.head, **architecture.constant_fields, **sizes
        )

    def activation(self) -> str:
        """Return the name here of the activation in config.json; report an unsupported one."""
        key, default = self.architecture.hidden_act
        value = self.config.get(key, default)
        name = imported_activation(value, self.architecture.gated)
        by_name = {hf_name: own for own, hf_name in self.architecture.activations.items()}
        if name not in self.architecture.activations:
            name = by_name.get(value) if isinstance(value, str) else None
        if name is None:
            names = sorted({repr(each) for each in self.architecture.activations.values()})
            message = f"unsupported; expected {either(names)} for {self.architecture.model_type}"
            self.problem(key, value, message)
        return name or ""

    def attention_bias(self) -> AttentionBias:
        """Return the value of model.attention_bias."""
        supported = self.architecture.attention_biases
        if len(supported) == 1:
            return supported[0]
        return "all" if self.flag("attention_bias", False) else "none"

    def problem(self, key: str, value: object, message: str) -> None:
        self.problems.append(f"{self.where}: {key} = {value!r}: {message}")
        self.invalid_keys.add(key)

    def has_valid_sizes(self, *names: str) -> bool:
        """Return True if the keys of some sizes have no problem. The names are fields of a ModelShape."""
        return self.invalid_keys.isdisjoint(self.architecture.sizes[name][0] for name in names)

    def size(self, key: str, default: int, least: int = 1) -> int:
        value = self.config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
            self.problem(key, value, f"must be a whole number from {least} to {_LARGEST}")
            return default
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default) if key else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.problem(key, value, "must be a number above 0")
            return default
        return float(value)

    def deck_value(self, key: ConfigKey, layers: int) -> Any:
        """Return the value of the key of [model] that a key of config.json gives."""
        if key.choices:
            values = dict(key.choices)
            value = self.config.get(key.name, key.default)
            if not isinstance(value, str | bool) or value not in values:
                self.problem(key.name, value, f"must be {either(map(repr, values))}")
                return values[key.default]
            return values[value]
        if key.form == "layers":
            return self.pattern(key, layers) if self.has_valid_sizes("layers") else ()
        if isinstance(key.default, bool):
            return self.flag(key.name, key.default)
        if key.form == "cap" and self.config.get(key.name, key.default) is None:
            return 0.0
        return deck_value(key, self.number(key.name, key.default))

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            self.problem(key, value, "must be true or false")
            return default
        return value

    def latent_attention(self, heads: int) -> dict[str, Any]:
        """Return the fields of latent attention, in which each head has its own keys and values."""
        shared = self.size("num_key_value_heads", heads)
        if shared != heads and self.has_valid_sizes("heads"):
            self.problem("num_key_value_heads", shared, f"must be num_attention_heads = {heads}")
        fields_read: dict[str, Any] = {}
        for own, (key, default) in self.architecture.latent.items():
            is_missing = own == "query_rank" and self.config.get(key, default) is None
            fields_read[own] = (
                None if is_missing else self.size(key, default, 2 if own == "rotary_size" else 1)
            )
        plain = fields_read.pop("plain_size")
        names = self.architecture.latent
        for own, size in {"plain_size": plain, **fields_read}.items():
            if size is not None and size % 2 and own in {"plain_size", "rotary_size", "key_value_rank"}:
                self.problem(names[own][0], size, "must be even")
        are_valid = self.invalid_keys.isdisjoint(key for key, _ in names.values())
        if are_valid and fields_read["value_size"] > plain + fields_read["rotary_size"]:
            message = f"must be at most {names['plain_size'][0]} + {names['rotary_size'][0]}"
            self.problem(names["value_size"][0], fields_read["value_size"], message)
        return {"head_size": plain + fields_read["rotary_size"], "latent": LatentTable(**fields_read)}

    def rotary_positions(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of rotary positions: base, scaling, and share of rotated features."""
        architecture = self.architecture
        fraction = FAMILIES[architecture.family].defaults.rotary_fraction if architecture.partial else None
        config = of_layer_type(self.config, _FULL) if architecture.local_rope else self.config
        flat = self.config.get("rope_parameters")
        if architecture.local_rope and flat and config is self.config:
            # transformers fills in the defaults of both types of layers and ignores these keys.
            message = f"must have an object for each of {_FULL!r} and {_SLIDING!r}"
            self.problem("rope_parameters", flat, message)
        tables = ("rope_parameters", "rope_scaling")
        if architecture.rope_parameters and all(config.get(key) is None for key in tables):
            config = {**config, "rope_parameters": architecture.rope_parameters}
        reader = RopeParametersReader(config, architecture.rope_base, fraction)
        head_size = sizes.get("head_size", sizes["hidden"] // sizes["heads"])
        latent: LatentTable | None = sizes.get("latent")
        base, scaling = reader.read(sizes["sequence"], latent.rotary_size if latent else head_size)
        for problem in reader.problems:
            self.problem(*problem)
        rotated = rotated_features(head_size, reader.fraction)
        if reader.fraction < 1 and (rotated % 2 or not rotated):
            self.problem("partial_rotary_factor", reader.fraction, "must give an even number of features")
        fields_read = {"rope_base": base, "rope_scaling": scaling, "rotary_fraction": reader.fraction}
        if latent is not None and scaling is not None and reader.mscale_all_dim is not None:
            fields_read["attention_scale"] = yarn_attention_scale(
                head_size, scaling.factor, reader.mscale_all_dim
            )
        return fields_read

    def local_base(self, sizes: Mapping[str, Any]) -> float | None:
        """Return the base of the rotary positions of layers with windows; None for those of other layers."""
        architecture, base, scaling = self.architecture, sizes["rope_base"], sizes["rope_scaling"]
        if not architecture.local_rope or not sizes["windows"]:
            return None
        config, others = of_layer_type(self.config, _SLIDING), ["rope_theta", "rope_scaling"]
        if architecture.rope_local_base is not None:
            usual = self.number("rope_local_base_freq", architecture.rope_local_base)
        else:
            usual = architecture.rope_base
            self.refuse_base_of_all_layers(config)
        if config is self.config:  # older files scale the positions of other layers alone
            others.append("rope_parameters")
        reader = RopeParametersReader({**config, **dict.fromkeys(others)}, usual)
        head_size = sizes.get("head_size", sizes["hidden"] // sizes["heads"])
        local, of_local = reader.read(sizes["sequence"], head_size)
        for problem in reader.problems:
            self.problem(*problem)
        if (local, of_local) == (base, scaling):
            return None
        if of_local is not None:
            message = (
                "unsupported: positions of layers with a window are scaled only like those of other layers"
            )
            table = self.config["rope_parameters"][_SLIDING]
            self.problem(f"rope_parameters: {_SLIDING}", table, message)
        return local

    def refuse_base_of_all_layers(self, sliding: Config) -> None:
        """Report a base that is not that of layers with a window in each version of `transformers`."""
        table = None if sliding is self.config else sliding.get("rope_parameters")
        if isinstance(table, Mapping) and table.get("rope_theta") is not None:
            return
        for key in ("rope_theta", "rope_local_base_freq"):
            value = self.config.get(key)
            if value is not None and value != self.architecture.rope_base:
                message = (
                    f"ambiguous; set rope_theta in rope_parameters for each of {_FULL!r} and {_SLIDING!r}"
                )
                self.problem(key, value, message)

    def pattern(self, key: ConfigKey, layers: int) -> tuple[bool, ...]:
        """Return the shortest pattern of flags that gives the list of all layers."""
        value = self.config.get(key.name)
        if value is None:
            interval = self.size(*key.default)
            value = [int((layer + 1) % interval != 0) for layer in range(layers)]
        if not isinstance(value, list) or len(value) != layers or not all(each in (0, 1) for each in value):
            self.problem(key.name, value, f"must have 0 or 1 for each of {layers} layers")
            return ()
        return () if all(value) else shortest_pattern([bool(each) for each in value])

    def check_labels(self) -> None:
        """Report a reward model without exactly one label. A config.json without labels means two."""
        labels = self.config.get("id2label")
        if not isinstance(labels, dict) or len(labels) != 1:
            self.problem("id2label", labels, "reward models must have exactly one label")

    def windows(self, layers: int) -> tuple[int, ...]:
        """Return the shortest pattern of windows that gives those of all layers; () if none has a window."""
        keys, config = self.architecture.windows, self.config
        if keys is None:
            self.refuse_windows()
            return ()
        used = not keys.has_use_flag or self.flag("use_sliding_window", False)
        used &= config.get("sliding_window", keys.size) is not None
        size = self.size("sliding_window", keys.size or 0) if used else None
        kinds = config.get("layer_types") if keys.has_layer_types else None
        if kinds is None and size is not None and keys.requires_layer_types:
            self.problem("sliding_window", size, "requires layer_types, a list of the kinds of all layers")
            return ()
        if kinds is None:
            every = self.size(keys.pattern_key, keys.full_every) if keys.pattern_key else keys.full_every
            full = 0 if keys.first_full is None else self.size("max_window_layers", keys.first_full, 0)
            slides = [layer >= full and not (every and (layer + 1) % every == 0) for layer in range(layers)]
        elif (
            not isinstance(kinds, list)
            or len(kinds) != layers
            or any(kind not in _LAYER_TYPES for kind in kinds)
        ):
            message = f"must have {either(map(repr, _LAYER_TYPES))} for each of {layers} layers"
            self.problem("layer_types", kinds, message)
            return ()
        else:
            slides = [kind == _SLIDING for kind in kinds]
        if size is None and kinds is not None and any(slides):
            if keys.has_use_flag and self.config.get("use_sliding_window") is not True:
                switch = self.config.get("use_sliding_window", False)
                self.problem(
                    "use_sliding_window", switch, f"must be true, since layer_types has {_SLIDING!r}"
                )
            else:
                self.problem("layer_types", kinds, "requires sliding_window")
        windows = [size if slide and size else 0 for slide in slides]
        return shortest_pattern(windows) if any(windows) else ()

    def refuse_windows(self) -> None:
        """Report windows of an architecture that has none."""
        kinds = self.config.get("layer_types")
        if kinds is not None and (not isinstance(kinds, list) or any(kind != _FULL for kind in kinds)):
            self.problem("layer_types", kinds, "unsupported; this architecture has no windows")
        window = self.config.get("sliding_window")
        known = any(each.key == "sliding_window" for each in self.architecture.required_values)
        if window is not None and self.config.get("use_sliding_window") is not False and not known:
            self.problem("sliding_window", window, "unsupported; this architecture has no windows")

    def mixture(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the mixtures of experts."""
        architecture = self.architecture
        fields_read: dict[str, Any] = {}
        for own, (key, default) in architecture.mixture.items():
            fields_read[own] = self.size(key, default, 0 if own in {"shared_experts", "dense_first"} else 1)
        if "expert_mlp" not in fields_read:
            fields_read["expert_mlp"] = sizes["mlp"]
        if architecture.normalizes is not None:
            fields_read["router_normalize"] = self.flag("norm_topk_prob", architecture.normalizes)
        if (method := architecture.group_method) is not None:
            key, alone, grouped = method
            value = self.config.get(key, alone)
            if value not in (alone, grouped):
                self.problem(key, value, f"must be {either((repr(alone), repr(grouped)))}")
            if value == alone:
                fields_read |= {"router_groups": 1, "router_groups_per_token": 1}
        if architecture.scale is not None:
            fields_read["router_scale"] = self.number("routed_scaling_factor", architecture.scale)
        if architecture.shared_width is not None:
            key, default = architecture.shared_width
            width, of_expert = self.size(key, default), fields_read["expert_mlp"]
            fields_read["shared_experts"] = width // of_expert
            name = architecture.mixture["expert_mlp"][0]
            if width % of_expert and self.invalid_keys.isdisjoint({key, name}):
                self.problem(key, width, f"must be a multiple of {name} = {of_expert}")
        dense = self.config.get("mlp_only_layers")
        if dense not in (None, []) and "expert_every" in fields_read:
            every = architecture.mixture["expert_every"][0]
            if self.has_valid_sizes("layers") and every not in self.invalid_keys:
                fields_read |= self._blocks_with_experts(dense, sizes["layers"], fields_read["expert_every"])
        return fields_read

    def _blocks_with_experts(self, dense: object, layers: int, every: int) -> dict[str, Any]:
        """Return the fields that say which blocks have experts, if `mlp_only_layers` lists dense blocks."""
        numbers = range(layers)
        if not isinstance(dense, list) or not all(type(each) is int and each in numbers for each in dense):
            expected = f"must be a list of numbers of layers from 0 to {layers - 1}"
            self.problem("mlp_only_layers", dense, expected)
            return {}
        mixtures = [(layer + 1) % every == 0 and layer not in dense for layer in range(layers)]
        if not any(mixtures):
            self.problem("mlp_only_layers", dense, "leaves no layer with experts")
            return {}
        first = mixtures.index(True)
        if mixtures == [has_experts(layer, every, first, ()) for layer in range(layers)]:
            return {"dense_first": first}
        return {"expert_every": 1, "expert_pattern": shortest_pattern(mixtures)}

    def check(self, sizes: Mapping[str, Any]) -> None:
        """Report sizes that contradict each other or are not supported."""
        names = {
            own: key for own, (key, _) in {**self.architecture.sizes, **self.architecture.mixture}.items()
        }
        hidden, heads, shared = sizes["hidden"], sizes["heads"], sizes["key_value_heads"]
        size = sizes.get("head_size")
        if size is None and hidden % heads:
            self.problem(names["heads"], heads, f"must divide {names['hidden']} = {hidden}")
        elif heads % shared:
            self.problem("num_key_value_heads", shared, f"must divide {names['heads']} = {heads}")
        elif self.architecture.rotary and size is not None and size % 2:
            self.problem("head_dim", size, "must be even")
        elif self.architecture.rotary and size is None and hidden // heads % 2:
            self.problem(names["heads"], heads, "must result in an even head size")
        if "experts" not in sizes:
            return
        experts, chosen = sizes["experts"], sizes["experts_per_token"]
        groups, of_groups = sizes.get("router_groups", 1), sizes.get("router_groups_per_token", 1)
        if chosen > experts:
            self.problem(
                names["experts_per_token"], chosen, f"must be at most {names['experts']} = {experts}"
            )
        elif experts % groups:
            self.problem(names["router_groups"], groups, f"must divide {names['experts']} = {experts}")
        elif of_groups > groups or of_groups * (experts // groups) < chosen:
            message = (
                f"must be at most {names['router_groups']} = {groups} and select at least {chosen} experts"
            )
            self.problem(names["router_groups_per_token"], of_groups, message)


def shortest_pattern(values: Sequence[_Value]) -> tuple[_Value, ...]:
    """Return the shortest pattern whose repetition gives the values of all layers."""
    lengths = range(1, len(values) + 1)
    period = next(n for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))
    return tuple(values[:period])


def config_of(shape: ModelShape, dtype: str, imported: Config = _NONE) -> dict[str, Any]:
    """Return the config.json of a model without ids of tokens.

    Both the newer and the older names of some keys are there, so that versions 4 and 5 of `transformers`
    read the same.

    Args:
        shape: Shape of the model.
        dtype: Type of its tensors, such as "float32".
        imported: The config.json that the model was imported with; empty if it was not imported.

    Raises:
        HpctrainError: `transformers` has no such model.
    """
    architecture = exported_as(shape, imported)
    shared = {
        "initializer_range": shape.initial_std,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
    }
    sizes = {key: getattr(shape, own) for own, (key, _) in architecture.sizes.items()}
    sizes |= {key.name: _config_value(key, shape, imported) for key in architecture.keys}
    if architecture.epsilon[0]:
        sizes[architecture.epsilon[0]] = shape.norm_epsilon
    required = {
        each.key: each.accepted[0] for each in architecture.required_values if each.accepted[0] is not None
    }
    required[architecture.hidden_act[0]] = architecture.activations[shape.activation]
    own: dict[str, Any] = {**architecture.constants, **dict.fromkeys(architecture.dropouts, shape.dropout)}
    if architecture.grouped:
        size = shape.head_size if shape.latent is None else shape.latent.rotary_size
        own |= {"num_key_value_heads": shape.key_value_heads, "head_dim": size}
    if architecture.rotary:
        fraction = shape.rotary_fraction if architecture.partial else None
        if architecture.local_rope:
            own |= local_rope_config(shape.rope_base, shape.rope_scaling, shape.rope_local_base)
        else:
            own |= rope_config(shape.rope_base, shape.rope_scaling, fraction, mscale_of(shape, imported))
    if shape.latent is not None:
        latent = {**dict(shape.latent), "plain_size": shape.head_size - shape.latent.rotary_size}
        own |= {key: latent[name] for name, (key, _) in architecture.latent.items()}
    own |= _window_keys(shape, architecture)
    own |= _mixture_keys(shape, architecture)
    if len(architecture.attention_biases) > 1 and "attention_bias" not in [
        k.deck_key for k in architecture.keys
    ]:
        own["attention_bias"] = shape.attention_bias == "all"
    if architecture.has_mtp:
        own[MTP_LAYERS] = shape.mtp_layers
    identity: dict[str, Any] = {"architectures": [architecture.name], "model_type": architecture.model_type}
    if architecture.head == "scalar":
        identity |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return identity | sizes | own | required | shared


def deck_value(key: ConfigKey, value: float) -> float:
    """Return the value of the key of [model] for a number in config.json."""
    match key.form:
        case "reciprocal":
            return 1 / value
        case "inverse_root":
            return float(value**-0.5)
        case _:
            return value


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
            exact = value**-2
            return round(exact) if abs(exact - round(exact)) < 1e-6 * exact else exact
        case _:
            return value


def _window_keys(shape: ModelShape, architecture: HuggingFaceArchitecture) -> dict[str, Any]:
    """Return the keys of config.json for windows."""
    keys = architecture.windows
    if keys is None:
        return {}
    windows = [shape.window(layer) for layer in range(shape.layers)]
    # If layer_types alone names the layers with a window, transformers needs a size even if there are none.
    needs_size = keys.has_layer_types and keys.first_full is None and not keys.has_use_flag
    values: dict[str, Any] = {"sliding_window": max(windows) or (keys.size if needs_size else None)}
    if keys.has_use_flag:
        values["use_sliding_window"] = any(windows)
    if keys.has_layer_types and (any(windows) or needs_size):
        values["layer_types"] = [_SLIDING if window else _FULL for window in windows]
    if keys.first_full is not None:
        first = (layer for layer, window in enumerate(windows) if window)
        values["max_window_layers"] = next(first, shape.layers)
    return values


def _mixture_keys(shape: ModelShape, architecture: HuggingFaceArchitecture) -> dict[str, Any]:
    """Return the keys of config.json for mixtures of experts."""
    if not architecture.mixture:
        return {}
    keys: dict[str, Any] = {key: getattr(shape, own) for own, (key, _) in architecture.mixture.items()}
    if keys.keys() & set(_EXPERTS):
        keys |= dict.fromkeys(_EXPERTS, shape.experts)
    if "expert_mlp" not in architecture.mixture:
        keys["intermediate_size"] = shape.expert_mlp
    if architecture.shared_width is not None:
        keys[architecture.shared_width[0]] = shape.shared_experts * shape.expert_mlp
    if architecture.normalizes is not None:
        keys["norm_topk_prob"] = shape.router_normalize
    if (method := architecture.group_method) is not None:
        key, alone, grouped = method
        keys[key] = grouped if shape.router_groups > 1 else alone
    if architecture.scale is not None:
        keys["routed_scaling_factor"] = shape.router_scale
    if "expert_every" in architecture.mixture:
        sparse = range(shape.expert_every - 1, shape.layers, shape.expert_every)
        keys["mlp_only_layers"] = (
            [layer for layer in sparse if not shape.is_mixture(layer)]
            if shape.expert_pattern
            else list(range(shape.dense_first))
        )
    return keys


def exported_as(shape: ModelShape, imported: Config = _NONE) -> HuggingFaceArchitecture:
    """Return the architecture that computes what a model of this shape does.

    Args:
        shape: Shape of the model.
        imported: The config.json that the model was imported with; empty if it was not imported. Of several
            architectures that compute the same, the result is the one that it names.

    Raises:
        HpctrainError: `transformers` has no such model.
    """
    models = sorted(_EXPORTED, key=lambda each: each.family != shape.family)
    obstacles = {each.name: list(_obstacles(each, shape)) for each in models}
    possible = [each for each in models if not obstacles[each.name]]
    if not possible:
        own = [obstacles[each.name] for each in models if each.family == shape.family]
        if not own:
            reason = "transformers has no such model, so this model cannot be exported"
            raise HpctrainError(f'model.family = "{shape.family}": {reason}')
        closest = min(own, key=lambda errors: sum(_WEIGHTS.get(key, 1) for key, _ in errors))
        raise closest[0][1]
    same = [each for each in possible if each.model_type == imported.get("model_type")]
    architecture = (same or possible)[0]
    if shape.head == "vocabulary":
        return architecture
    if architecture.name not in SCORED:
        message = f"transformers has no {_display_name(architecture)} with a scalar head"
        raise HpctrainError(f'objective.kind = "reward": {message}, so this model cannot be exported')
    return SCORED[architecture.name]


def _display_name(architecture: HuggingFaceArchitecture) -> str:
    """Return the name of an architecture for messages."""
    return {"gpt2": "GPT-2", "llama": "Llama"}.get(architecture.model_type, architecture.name)


_WEIGHTS = {"latent": 200, "experts": 100, "router": 50, "query_key_norm": 5}
"""Weights of keys in the difference between a model and an architecture. All other keys count 1."""


def _obstacles(
    architecture: HuggingFaceArchitecture, shape: ModelShape
) -> Iterator[tuple[str, HpctrainError]]:
    """Yield the keys that prevent an export as this architecture, each with its error."""
    for key, requirement in _requirements(architecture, shape):
        yield key, _export_error(shape, key, requirement, _display_name(architecture))


def _requirements(architecture: HuggingFaceArchitecture, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Yield keys of [model] with values that an architecture lacks, and what it has or requires."""
    if (shape.latent is None) == bool(architecture.latent):
        yield "latent", f"has {'' if architecture.latent else 'no '}latent attention"
    elif shape.latent is not None and not has_default_scale(shape) and mscale_of(shape) is None:
        supported = 'only with rope_scaling.kind = "yarn", and only a larger one'
        yield "attention_scale", f"supports a scale other than 1 / sqrt(head_size) {supported}"
    if bool(shape.experts) != bool(architecture.mixture):
        yield "experts", f"has {'' if architecture.mixture else 'no '}experts"
    for key, value in architecture.choices(shape.hidden).items():
        is_default = key == "attention_scale" and value is None and has_default_scale(shape)
        if getattr(shape, key) != value and not is_default:
            yield key, f"requires {_value_text(value)}"
    if shape.activation not in architecture.activations:
        yield "activation", f"requires {either(map(toml_value, architecture.activations))}"
    for config_key in architecture.keys:
        if (
            config_key.choices
            and getattr(shape, config_key.deck_key) not in dict(config_key.choices).values()
        ):
            possible = either(toml_value(chosen) for _, chosen in config_key.choices)
            yield config_key.deck_key, f"requires {possible}"
    if architecture.windows is not None:
        sizes = {shape.window(layer) for layer in range(shape.layers)}
        if len(sizes - {0}) > 1:
            yield "windows", "requires windows of one size"
        elif len(sizes) > 1 and not architecture.windows.has_layer_types:
            yield "windows", "requires a window in all layers or in none"
        if architecture.windows.rotate and any(
            shape.rotates(layer) != (shape.window(layer) > 0) for layer in range(shape.layers)
        ):
            yield "rotation_pattern", "requires rotation in layers with a window alone"
    if shape.rope_local_base is not None and not architecture.local_rope:
        yield "rope_local_base", "requires none"
    if shape.attention_bias not in architecture.attention_biases:
        supported = either(map(toml_value, architecture.attention_biases))
        yield "attention_bias", f"requires {supported}"
    if not architecture.epsilon[0] and shape.norm_epsilon != architecture.epsilon[1]:
        yield "norm_epsilon", f"requires {architecture.epsilon[1]}"
    if not architecture.grouped and shape.key_value_heads != shape.heads:
        yield "key_value_heads", f"requires as many key-value heads as query heads ({shape.heads})"
    if not architecture.grouped and shape.head_size * shape.heads != shape.hidden:
        yield "head_size", "requires hidden / heads"
    if shape.experts:
        required: dict[str, object] = {
            "capacity": None,
            "router": "softmax",
            "router_scale": 1.0,
            "router_groups": 1,
            "shared_experts": 0,
            "expert_every": 1,
            "dense_first": 0,
            "expert_pattern": (),
            "shared_gate": False,
            "router_bias": False,
            "router_group_best": 2,
            **architecture.constant_fields,
        }
        if shape.router_groups == 1:
            del required["router_group_best"]
        required = {key: value for key, value in required.items() if key not in architecture.mixture}
        if "expert_every" in architecture.mixture:
            for key in ("dense_first", "expert_pattern"):  # mlp_only_layers replaces them
                required.pop(key, None)
        if architecture.scale is not None:
            del required["router_scale"]
        if architecture.shared_width is not None:
            del required["shared_experts"]
        if architecture.normalizes is None:
            required.setdefault("router_normalize", True)
        if not architecture.choice_is_biased and shape.balance == "bias":
            required["balance"] = "loss"
        for key, value in required.items():
            if getattr(shape, key) != value:
                yield key, f"requires {_value_text(value)}"
        if shape.query_key_norm == "all" and shape.head_size * shape.heads != shape.hidden:
            yield "head_size", "requires hidden / heads"
        if architecture.shared_width is not None and not shape.shared_experts:
            yield "shared_experts", "requires 1 or more"


_LANGUAGE_MODELS = [each for each in ARCHITECTURES.values() if each.head == "vocabulary"]
_EXPORTED = [each for each in _LANGUAGE_MODELS if each.exported]


def _value_text(value: object) -> str:
    return "none" if value is None else toml_value(value)


def _export_error(shape: ModelShape, key: str, has: str, family: str) -> HpctrainError:
    if key == "latent":
        has_table = "with" if shape.latent is not None else "without"
        return HpctrainError(
            f"a model {has_table} the table [model.latent]: the {family} of transformers {has}, so this "
            "model cannot be exported"
        )
    value = toml_value(getattr(shape, key))
    is_of_experts = key in EXPERT_KEYS or (key in fields("model.experts") and key != "mlp")
    name = f"model.experts.{EXPERT_KEYS.get(key, key)}" if is_of_experts else f"model.{key}"
    return HpctrainError(
        f"{name} = {value}: the {family} of transformers {has}, so this model cannot be exported"
    )


def architecture_of(config: Config, where: str) -> HuggingFaceArchitecture:
    """Return the architecture that a config.json names.

    Args:
        config: Content of the config.json.
        where: Its name in messages.

    Raises:
        HpctrainError: The architecture is not supported.
    """
    names = config.get("architectures")
    if names is None:
        # Older files have only the model type.
        names = [each.name for each in _LANGUAGE_MODELS if config.get("model_type") == each.model_type]
    known = [each for name, each in ARCHITECTURES.items() if names == [name]]
    if "layer_types" in config and known and known[0].model_type == "mistral":
        # transformers reads such files as those of Ministral.
        known = [ARCHITECTURES[known[0].name.replace("Mistral", "Ministral")]]
    if not known:
        value = f"architectures = {config.get('architectures')!r}, model_type = {config.get('model_type')!r}"
        raise HpctrainError(f"{where}: {value}: unsupported architecture; expected {either(ARCHITECTURES)}")
    return known[0]
