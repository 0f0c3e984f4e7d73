"""Conversion of a config.json of Hugging Face's `transformers` to a ModelShape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hpctrain.checkpoint.exchange.hugging_face.architectures import architecture_of
from hpctrain.checkpoint.exchange.hugging_face.config_keys import (
    EXPERT_COUNT_KEYS,
    FULL,
    LAYER_TYPES,
    SLIDING,
    Config,
    deck_value,
    size_text,
    written_key,
)
from hpctrain.checkpoint.exchange.hugging_face.rope_parameters import RopeParametersReader, of_layer_type
from hpctrain.checkpoint.exchange.hugging_face.yarn_scale import yarn_attention_scale
from hpctrain.checkpoint.exchange.quantization import quantization_problems
from hpctrain.deck.activations import imported_activation
from hpctrain.deck.families import FAMILIES
from hpctrain.deck.families.computation_keys import computation_keys, ignored_key_problem
from hpctrain.deck.family import USUAL_SIZE_KEYS, AttentionBias, ConfigKey, MixtureFiles
from hpctrain.deck.sections.experts import ExpertsTable, has_experts
from hpctrain.deck.sections.latent import LatentTable
from hpctrain.deck.sections.rope_scaling import RopeScaling, rotated_features
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape
from hpctrain.text import either

_Value = TypeVar("_Value")

_LARGEST = 10_000_000

_BALANCE_LOSS = 0.01
"""Weight of the balance loss, which config.json does not have."""


def shape_of(config: Config, where: str) -> ModelShape:
    """Return the shape that a config.json describes.

    Args:
        config: Content of the config.json.
        where: Its name in messages.

    Raises:
        HpctrainError: The architecture or a value in the config.json is not supported.
    """
    return _ConfigReader(config, where).shape()


class _ConfigReader:
    """Reader of a config.json, which collects the problems that it finds.

    The default replaces the value of a key with a problem. What depends on this key is not checked, since
    further messages would be about a value that the file does not have.
    """

    def __init__(self, config: Config, where: str) -> None:
        self.architecture = architecture_of(config, where)
        self.files = self.architecture.files
        experts = next((config[key] for key in EXPERT_COUNT_KEYS if config.get(key) is not None), None)
        self.config = config if experts is None else {**dict.fromkeys(EXPERT_COUNT_KEYS, experts), **config}
        self.written, self.where = config, where
        self.problems: list[str] = []
        self.invalid_keys: set[str] = set()

    def shape(self) -> ModelShape:
        """Return the shape of the model that the configuration describes."""
        architecture, files = self.architecture, self.files
        self.check_required_values()
        activation = self.activation()
        sizes: dict[str, Any] = {
            field: self.size(key, default) for field, (key, default) in files.config_sizes.items()
        }
        # null stands for a value that follows from other sizes.
        sizes["mlp"] = sizes["mlp"] or 4 * sizes["hidden"]
        sizes |= self.head_sizes(sizes["heads"])
        if architecture.rotary:
            sizes |= self.windows_and_rotation(sizes)
        scaling: RopeScaling | None = sizes.get("rope_scaling")
        if scaling is not None and scaling.kind == "dynamic":  # max_position_embeddings is without scaling
            sizes["sequence"] = int(scaling.factor * sizes["sequence"])
        expert_keys = {} if files.mixture is None else self.expert_keys(files.mixture, sizes)
        if not files.has_key_for("attention_bias"):
            sizes["attention_bias"] = self.attention_bias()
        sizes |= {key.deck_key: self.deck_value(key, sizes["layers"]) for key in files.keys}
        sizes["norm_epsilon"] = self.number(*files.epsilon)
        sizes["tied"] = self.flag("tie_word_embeddings", files.tied) and architecture.head != "scalar"
        if architecture.head == "scalar":
            self.check_labels()
        if not self.problems:
            self.check(sizes, expert_keys)
        if self.problems:
            raise HpctrainError(self.problems)
        sizes["activation"] = activation
        if expert_keys:
            keys = {**architecture.constant_expert_keys, **expert_keys}
            # It is not validated: a file may have more experts than a deck may have.
            sizes["experts"] = ExpertsTable.model_construct(balance_loss=_BALANCE_LOSS, **keys)
        return ModelShape(
            family=architecture.family, head=architecture.head, **architecture.constant_fields, **sizes
        )

    def check_required_values(self) -> None:
        """Report keys whose values change what a model computes and are not supported."""
        files, config = self.files, self.config
        for key, (supported, default) in files.required_values.items():
            if (value := config.get(key, default)) != supported:
                self.problem(key, value, f"unsupported; expected {supported!r} for {files.model_type}")
        self.refuse_other_sizes()
        if not config.get("is_causal", True):
            message = "unsupported: predictions would depend on later tokens"
            self.problem("is_causal", config["is_causal"], message)
        older, newer = config.get("torch_dtype"), config.get("dtype")
        if None not in (older, newer) and older != newer:
            self.problem("torch_dtype", older, f"contradicts dtype = {newer!r}")
        for key, value in computation_keys(config):
            if key not in self.architecture.computation_keys:
                self.problem(key, value, ignored_key_problem(files.model_type))
        for problem in quantization_problems(config, files.quantization):
            self.problem(*problem)

    def refuse_other_sizes(self) -> None:
        """Report usual names of sizes that `transformers` reads in place of this architecture's own names."""
        for field in ("sequence", "hidden", "layers", "heads"):  # transformers has no second name for others
            usual, (key, default) = USUAL_SIZE_KEYS[field], self.files.config_sizes[field]
            value, used = self.config.get(usual), self.config.get(key, default)
            if value not in (None, used):
                message = f"transformers computes with it in place of {key} = {used}; write it as {key}"
                self.problem(usual, value, message)

    def head_sizes(self, heads: int) -> dict[str, Any]:
        """Return the fields of key-value heads and of the width of heads."""
        files, config = self.files, self.config
        if files.latent:
            return {"key_value_heads": heads, **self.latent_attention(heads)}
        if not files.grouped:
            return {"key_value_heads": heads}
        has_key = "num_key_value_heads" in config
        shared = heads if has_key else files.key_value_heads or heads
        sizes = {"key_value_heads": self.size("num_key_value_heads", shared)}
        size = config.get("head_dim", files.head_size)
        return sizes if size is None else {**sizes, "head_size": self.size("head_dim", size)}

    def windows_and_rotation(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of windows and of rotary positions."""
        windows = self.windows(sizes["layers"]) if self.has_valid_sizes("layers") else ()
        fields_read: dict[str, Any] = {"windows": windows}
        head_keys = {"head_dim", *(key for key, _ in self.files.latent.values())}
        if self.has_valid_sizes("hidden", "heads", "sequence") and not self.invalid_keys & head_keys:
            fields_read |= self.rotary_positions(sizes)
            fields_read["rope_local_base"] = self.local_base({**sizes, **fields_read})
        if self.files.windows is not None and self.files.windows.rotate:
            rotated = tuple(window > 0 for window in windows) or (False,)
            fields_read["rotation_pattern"] = () if all(rotated) else rotated
        return fields_read

    def activation(self) -> str:
        """Return the name here of the activation in config.json; report an unsupported one."""
        key, default = self.files.activation
        value = self.config.get(key, default)
        if isinstance(value, str):
            value = self.files.activation_aliases.get(value, value)
        name = imported_activation(value, self.architecture.gated)
        by_name = {hf_name: name for name, hf_name in self.architecture.activations.items()}
        if name not in self.architecture.activations:
            name = by_name.get(value) if isinstance(value, str) else None
        if name is None:
            names = sorted({repr(each) for each in self.architecture.activations.values()})
            message = f"unsupported; expected {either(names)} for {self.architecture.model_type}"
            self.problem(key, value, message)
        return name or ""

    def attention_bias(self) -> AttentionBias:
        """Return the value of model.attention_bias."""
        supported = self.files.attention_biases
        if len(supported) == 1:
            return supported[0]
        return "all" if self.flag("attention_bias", False) else "none"

    def problem(self, key: str, value: object, message: str) -> None:
        """Add a problem of a key, so that values that depend on it are not checked."""
        self.problems.append(f"{self.where}: {written_key(key, self.written)} = {value!r}: {message}")
        self.invalid_keys.add(key)

    def sizes_text(self, sizes: Mapping[str, Any], *names: str) -> str:
        """Return the keys of some sizes and their values in words. The names are fields of a ModelShape."""
        keys = (self.files.config_sizes[name][0] for name in names)
        texts = (size_text(key, sizes[name], self.written) for key, name in zip(keys, names, strict=True))
        return " and ".join(texts)

    def has_valid_sizes(self, *names: str) -> bool:
        """Return True if the keys of some sizes have no problem. The names are fields of a ModelShape."""
        return self.invalid_keys.isdisjoint(self.files.config_sizes[name][0] for name in names)

    def size(self, key: str, default: int, least: int = 1) -> int:
        """Return the whole number of a key; its default if the key is missing, null or wrong."""
        value = self.config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
            self.problem(key, value, f"must be a whole number from {least} to {_LARGEST}")
            return default
        return value

    def number(self, key: str, default: float) -> float:
        """Return the number above 0 of a key; its default if the key is missing or wrong."""
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
        """Return the true or false of a key; its default if the key is missing or wrong."""
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
        for field, (key, default) in self.files.latent.items():
            is_missing = field == "query_rank" and self.config.get(key, default) is None
            fields_read[field] = (
                None if is_missing else self.size(key, default, 2 if field == "rotary_size" else 1)
            )
        plain = fields_read.pop("plain_size")
        names = self.files.latent
        for field, size in {"plain_size": plain, **fields_read}.items():
            if size is not None and size % 2 and field in {"plain_size", "rotary_size"}:
                self.problem(names[field][0], size, "must be even")
        are_valid = self.invalid_keys.isdisjoint(key for key, _ in names.values())
        if are_valid and fields_read["value_size"] > plain + fields_read["rotary_size"]:
            message = f"must be at most {names['plain_size'][0]} + {names['rotary_size'][0]}"
            self.problem(names["value_size"][0], fields_read["value_size"], message)
        head, rotary_size = self.config.get("head_dim"), fields_read["rotary_size"]
        if are_valid and head not in (None, rotary_size):  # transformers rotates so many features
            self.problem("head_dim", head, f"must be {names['rotary_size'][0]} = {rotary_size}")
        return {"head_size": plain + fields_read["rotary_size"], "latent": LatentTable(**fields_read)}

    def rotary_positions(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of rotary positions: base, scaling, and share of rotated features."""
        files, defaults = self.files, FAMILIES[self.architecture.family].defaults
        usual = defaults.rotary_fraction if self.architecture.has_rotary_fraction else None
        config = of_layer_type(self.config, FULL) if files.local_rope else self.config
        flat = self.config.get("rope_parameters")
        if files.local_rope and flat and config is self.config:
            # transformers fills in the defaults of both types of layers and ignores these keys.
            message = f"must have an object for each of {FULL!r} and {SLIDING!r}"
            self.problem("rope_parameters", flat, message)
        if files.local_rope:
            self.refuse_type_without_rope_type()
        tables = ("rope_parameters", "rope_scaling")
        if files.rope_parameters and all(config.get(key) is None for key in tables):
            config = {**config, "rope_parameters": files.rope_parameters}
        reader = RopeParametersReader(
            config, files.rope_base, usual, files.rope_keys, files.longrope_original
        )
        head_size = sizes.get("head_size", sizes["hidden"] // sizes["heads"])
        latent: LatentTable | None = sizes.get("latent")
        positions = reader.read(sizes["sequence"], latent.rotary_size if latent else head_size)
        scaling, fraction = positions.scaling, positions.fraction
        head = self.sizes_text(sizes, "hidden", "heads")
        if "head_size" in sizes and latent is None:
            head = size_text("head_dim", head_size, self.written)
        for key, value, message in reader.problems:
            given = f", where {head}" if key.endswith(("short_factor", "long_factor")) else ""
            self.problem(key, value, message + given)
        if files.local_rope:
            self.refuse_truncate_false(scaling)
        if scaling is not None and files.rope_kinds and scaling.kind not in files.rope_kinds:
            key = next(key for key in tables if config.get(key))
            message = f"unsupported; expected {either(map(repr, files.rope_kinds))} for {files.model_type}"
            self.problem(f"{key}: rope_type", scaling.kind, message)
        rotated = rotated_features(head_size, fraction)
        if fraction < 1 and (rotated % 2 or not rotated):
            self.problem(files.rope_keys[1], fraction, f"must give an even number of features, where {head}")
        fields_read = {"rope_base": positions.base, "rope_scaling": scaling, "rotary_fraction": fraction}
        if latent is not None and scaling is not None and positions.mscale_all_dim is not None:
            fields_read["attention_scale"] = yarn_attention_scale(
                head_size, scaling.factor, positions.mscale_all_dim
            )
        return fields_read

    def refuse_type_without_rope_type(self) -> None:
        """Report a `rope_scaling` that has the key `type`, the older name of `rope_type`.

        `transformers` ignores `type` there if layers with windows have rotary positions of their own: it
        merges `rope_scaling` into a table that has a `rope_type` of "default" already.
        """
        table = self.config.get("rope_scaling")
        if self.config.get("rope_parameters") or not isinstance(table, Mapping) or "rope_type" in table:
            return
        if (kind := table.get("type", "default")) != "default":
            message = f"ignored by transformers for {self.files.model_type}; use its newer name rope_type"
            self.problem("rope_scaling: type", kind, message)

    def refuse_truncate_false(self, scaling: RopeScaling | None) -> None:
        """Report `truncate` = false, which `transformers` does not support with tables for types of layers.

        `transformers` ignores it inside these tables, and reads it only beside them.
        """
        tables = self.config.get("rope_parameters")
        beside = tables.get("truncate", True) if isinstance(tables, Mapping) else True
        if not beside or (scaling is not None and not scaling.truncate):
            self.problem("truncate", False, f"unsupported; expected True for {self.files.model_type}")

    def local_base(self, sizes: Mapping[str, Any]) -> float | None:
        """Return the base of the rotary positions of layers with windows; None for those of other layers."""
        files, base, scaling = self.files, sizes["rope_base"], sizes["rope_scaling"]
        if not files.local_rope or not sizes["windows"]:
            return None
        config, others = of_layer_type(self.config, SLIDING), ["rope_theta", "rope_scaling"]
        if files.rope_local_base is not None:
            usual = self.number("rope_local_base_freq", files.rope_local_base)
        else:
            usual = files.rope_base
            self.refuse_base_of_all_layers(config)
        if config is self.config:  # older files scale the positions of other layers alone
            others.append("rope_parameters")
        reader = RopeParametersReader({**config, **dict.fromkeys(others)}, usual)
        head_size = sizes.get("head_size", sizes["hidden"] // sizes["heads"])
        local = reader.read(sizes["sequence"], head_size)
        for problem in reader.problems:
            self.problem(*problem)
        if (local.base, local.scaling) == (base, scaling):
            return None
        if local.scaling is not None:
            message = (
                "unsupported: positions of layers with a window are scaled only like those of other layers"
            )
            table = self.config["rope_parameters"][SLIDING]
            self.problem(f"rope_parameters: {SLIDING}", table, message)
        return local.base

    def refuse_base_of_all_layers(self, sliding: Config) -> None:
        """Report a base that is not that of layers with a window in each version of `transformers`."""
        table = None if sliding is self.config else sliding.get("rope_parameters")
        if isinstance(table, Mapping) and table.get("rope_theta") is not None:
            return
        for key in ("rope_theta", "rope_local_base_freq"):
            value = self.config.get(key)
            if value is not None and value != self.files.rope_base:
                message = f"ambiguous; set rope_theta in rope_parameters for each of {FULL!r} and {SLIDING!r}"
                self.problem(key, value, message)

    def pattern(self, key: ConfigKey, layers: int) -> tuple[bool, ...]:
        """Return the shortest pattern of flags that gives the list of all layers."""
        value = self.config.get(key.name)
        if value is None:
            interval = self.size(*key.default)
            value = [int((layer + 1) % interval != 0) for layer in range(layers)]
        if not isinstance(value, list) or len(value) != layers or not all(each in (0, 1) for each in value):
            count = self.sizes_text({"layers": layers}, "layers")
            self.problem(key.name, value, f"must have 0 or 1 for each layer, where {count}")
            return ()
        return () if all(value) else shortest_pattern([bool(each) for each in value])

    def check_labels(self) -> None:
        """Report a reward model without exactly one label. A config.json without labels means two."""
        labels = self.config.get("id2label")
        if not isinstance(labels, dict) or len(labels) != 1:
            self.problem("id2label", labels, "reward models must have exactly one label")

    def windows(self, layers: int) -> tuple[int, ...]:
        """Return the shortest pattern of windows that gives those of all layers; () if none has a window."""
        keys, config = self.files.windows, self.config
        if keys is None:
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
            or any(kind not in LAYER_TYPES for kind in kinds)
        ):
            count = self.sizes_text({"layers": layers}, "layers")
            message = f"must have {either(map(repr, LAYER_TYPES))} for each layer, where {count}"
            self.problem("layer_types", kinds, message)
            return ()
        else:
            slides = [kind == SLIDING for kind in kinds]
        if size is None and kinds is not None and any(slides):
            if keys.has_use_flag and self.config.get("use_sliding_window") is not True:
                switch = self.config.get("use_sliding_window", False)
                self.problem("use_sliding_window", switch, f"must be true, since layer_types has {SLIDING!r}")
            else:
                self.problem("layer_types", kinds, "requires sliding_window")
        windows = [size if slide and size else 0 for slide in slides]
        return shortest_pattern(windows) if any(windows) else ()

    def expert_keys(self, mixture: MixtureFiles, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of [model.experts]."""
        fields_read: dict[str, Any] = {}
        for field, (key, default) in mixture.sizes.items():
            fields_read[field] = self.size(key, default, 0 if field in {"shared", "dense_first"} else 1)
        key, default = mixture.sizes["per_token"]
        if self.config.get(key, default or None) is None:
            self.problem(key, None, "must be the number of experts that compute each token")
        fields_read.setdefault("mlp", sizes["mlp"])
        if mixture.normalizes is not None:
            fields_read["router_normalize"] = self.flag("norm_topk_prob", mixture.normalizes)
        if (method := mixture.group_method) is not None:
            key, alone, grouped = method
            value = self.config.get(key, alone)
            if value not in (alone, grouped):
                self.problem(key, value, f"must be {either((repr(alone), repr(grouped)))}")
            if value == alone:
                fields_read |= {"router_groups": 1, "router_groups_per_token": 1}
        if mixture.scale is not None:
            fields_read["router_scale"] = self.number("routed_scaling_factor", mixture.scale)
        if mixture.shared_width is not None:
            key, default = mixture.shared_width
            width, of_expert = self.size(key, default), fields_read["mlp"]
            fields_read["shared"] = width // of_expert
            name = mixture.sizes["mlp"][0]
            if width % of_expert and self.invalid_keys.isdisjoint({key, name}):
                self.problem(key, width, f"must be a multiple of {name} = {of_expert}")
        dense = self.config.get("mlp_only_layers")
        if dense not in (None, []) and "every" in fields_read:
            every = mixture.sizes["every"][0]
            if self.has_valid_sizes("layers") and every not in self.invalid_keys:
                fields_read |= self._blocks_with_experts(dense, sizes["layers"], fields_read["every"])
        return fields_read

    def _blocks_with_experts(self, dense: object, layers: int, every: int) -> dict[str, Any]:
        """Return the keys that say which blocks have experts, if `mlp_only_layers` lists dense blocks."""
        numbers = range(layers)
        if not isinstance(dense, list) or not all(type(each) is int and each in numbers for each in dense):
            count = self.sizes_text({"layers": layers}, "layers")
            expected = f"must be a list of numbers of layers from 0 to {layers - 1}, where {count}"
            self.problem("mlp_only_layers", dense, expected)
            return {}
        mixtures = [(layer + 1) % every == 0 and layer not in dense for layer in range(layers)]
        if not any(mixtures):
            self.problem("mlp_only_layers", dense, "leaves no layer with experts")
            return {}
        first = mixtures.index(True)
        if mixtures == [has_experts(layer, every, first, ()) for layer in range(layers)]:
            return {"dense_first": first}
        return {"every": 1, "pattern": shortest_pattern(mixtures)}

    def check(self, sizes: Mapping[str, Any], expert_keys: Mapping[str, Any]) -> None:
        """Report sizes that contradict each other or are not supported."""
        names = {field: key for field, (key, _) in self.files.config_sizes.items()}
        hidden, heads, shared = sizes["hidden"], sizes["heads"], sizes["key_value_heads"]
        size = sizes.get("head_size")
        has_norms_of_all = self.architecture.constant_fields.get("query_key_norm") == "all"
        is_fixed = has_norms_of_all or not self.files.has_head_size
        if size is None and hidden % heads:
            self.problem(names["heads"], heads, f"must divide {names['hidden']} = {hidden}")
        elif heads % shared:
            self.problem("num_key_value_heads", shared, f"must divide {names['heads']} = {heads}")
        elif is_fixed and size not in (None, hidden / heads):
            self.problem("head_dim", size, f"must be {names['hidden']} / {names['heads']}")
        elif self.architecture.rotary and size is not None and size % 2:
            self.problem("head_dim", size, "must be even")
        elif self.architecture.rotary and size is None and hidden // heads % 2:
            self.problem(
                names["heads"],
                heads,
                f"must result in an even head size, where {self.sizes_text(sizes, 'hidden')}",
            )
        if self.files.mixture is None:
            return
        names = {field: key for field, (key, _) in self.files.mixture.sizes.items()}
        experts, chosen = expert_keys["count"], expert_keys["per_token"]
        groups, of_groups = expert_keys.get("router_groups", 1), expert_keys.get("router_groups_per_token", 1)
        if chosen > experts:
            self.problem(names["per_token"], chosen, f"must be at most {names['count']} = {experts}")
        elif experts % groups:
            self.problem(names["router_groups"], groups, f"must divide {names['count']} = {experts}")
        elif of_groups > groups or of_groups * (experts // groups) < chosen:
            message = (
                f"must be at most {names['router_groups']} = {groups} and select at least "
                f"{names['per_token']} = {chosen} of {names['count']} = {experts} experts"
            )
            self.problem(names["router_groups_per_token"], of_groups, message)
        every, dense_first = expert_keys.get("every", 1), expert_keys.get("dense_first", 0)
        if not any(has_experts(layer, every, dense_first, ()) for layer in range(sizes["layers"])):
            field = "dense_first" if "dense_first" in names else "every"
            count = self.sizes_text(sizes, "layers")
            self.problem(names[field], expert_keys[field], f"leaves no layer with experts, where {count}")


def shortest_pattern(values: Sequence[_Value]) -> tuple[_Value, ...]:
    """Return the shortest pattern whose repetition gives the values of all layers."""
    lengths = range(1, len(values) + 1)
    period = next(n for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))
    return tuple(values[:period])
