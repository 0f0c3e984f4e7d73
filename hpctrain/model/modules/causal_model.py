"""Causal language models of the installed `transformers`, described by their configuration alone.

A Hugging Face folder whose architecture is not built into hpctrain becomes a user's module. Its class is
always one of `transformers` itself: code in the folder, kernels from a hub and pickles are never used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from hpctrain.deck.code import CAUSAL_MODEL
from hpctrain.errors import HpctrainError, InputOutputError, require
from hpctrain.files import JSON_BYTES, parse_json, read_text
from hpctrain.model.modules.causal_classes import TEXT_PART, causal_class, causal_classes, is_of_text
from hpctrain.model.modules.config_problems import config_problems, reads_key, transformers_errors
from hpctrain.model.modules.config_values import checked_warnings, size_problems, value_problems
from hpctrain.model.modules.tensor_parallel.transformers_plan import MODEL_PLAN

_CODE_KEYS = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)
"""Keys of config.json that choose code. They are ignored: a file must not choose code."""

_FILE_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Keys of config.json that describe the files, not the model."""

_CONFIG_KEY = "config"
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
"""Keys of the longest sequence, in the order in which they are looked for."""

_MODALITIES = ("vision", "audio", "image", "video", "speech", "vq")
"""Beginnings of the names of configurations of models that do not take text alone."""

_NOT_CAUSAL: Mapping[str, str] = {
    "cpmant": "its predictions depend on later tokens",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "its predictions depend on keys and values of another model",
    ),
}
"""Types of models that `transformers` calls causal, and why they are not."""

_ENCODER_VALUES: Mapping[str, object] = {
    "causal": False,
    "is_causal": False,
    "is_decoder": False,
    "attn_type": "bi",
}
"""Values in the configurations of encoders, by their keys."""

_DECODER_REMEDY = (
    "to train it as a decoder, write its folder with transformers: "
    "AutoModelForCausalLM.from_pretrained(DIR, is_decoder=True).save_pretrained(OUT)"
)
"""Remedy for a model that is an encoder unless its configuration has `"is_decoder": true`."""

_ALWAYS_CAUSAL = ("gpt_neox", "gpt_neox_japanese")
"""Types of models whose configuration has `is_decoder`, but whose attention does not depend on it."""


def build_causal_model(arguments: Mapping[str, Any]) -> nn.Module:
    """Build a causal language model of `transformers` in fp32, on torch's default device.

    Args:
        arguments: Arguments of the deck: `config`, the text of a config.json or the folder that contains one.

    Raises:
        HpctrainError: The configuration is not one of a causal language model.
    """
    config, where = _config_of(arguments)
    return _build(config, where)


def causal_model_keys(config: Mapping[str, Any], where: str) -> dict[str, object]:
    """Return the keys of a deck for the model that a config.json describes, such as "model.blocks".

    Args:
        config: Content of the file.
        where: Name of the file, for messages.

    Raises:
        HpctrainError: The configuration is not one of a causal language model of `transformers`.
    """
    with torch.device("meta"):
        module = _build(config, where)
    state = module.state_dict()
    text_config: Any = cast(Any, module).config.get_text_config()
    keys: dict[str, object] = {
        "model.module": CAUSAL_MODEL,
        "model.arguments": {_CONFIG_KEY: json.dumps(config_of_model(config), separators=(",", ":"))},
        "model.blocks": _block_pattern(module),
        "model.plan": MODEL_PLAN if getattr(module, "tp_plan", None) else None,
        "model.buffers": "first" if any(name in state for name, _ in module.named_buffers()) else None,
        "model.vocabulary": getattr(text_config, "vocab_size", None),
        "batch.sequence": _longest_sequence(module, where),
    }
    return {key: value for key, value in keys.items() if value is not None}


def config_of_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the keys that choose code or describe files, at all depths."""
    dropped = {*_CODE_KEYS, *_FILE_KEYS}
    return {
        key: config_of_model(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in dropped
    }


def stored_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json that the arguments of a deck contain or name; see `build_causal_model`."""
    return config_of_model(_config_of(arguments)[0])


def _config_of(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the config.json of a deck's arguments, and its name for messages."""
    text = arguments.get(_CONFIG_KEY)
    if set(arguments) != {_CONFIG_KEY} or not isinstance(text, str):
        raise HpctrainError(
            f"{CAUSAL_MODEL}: [model.arguments] must have one entry, {_CONFIG_KEY}, the text of a "
            "config.json or a folder that contains one"
        )
    if text.lstrip().startswith("{"):
        return _parse_config(text, _CONFIG_KEY), "the model's config.json"
    path = Path(text) / "config.json"
    try:
        return _parse_config(read_text(path, JSON_BYTES), str(path)), str(path)
    except OSError as error:
        raise InputOutputError(f"{path}: cannot be read: {error.strerror or error}") from None


def sequence_note(config: Mapping[str, Any], sequence: int) -> str:
    """Return a note for messages if sequences are longer than those of a config.json, else ""."""
    lengths = ((key, config.get(key)) for key in _LENGTHS)
    key, length = next((each for each in lengths if _is_size(each[1])), ("", sequence))
    return f" (more than {key} = {length})" if sequence > cast(int, length) else ""


def model_title(arguments: Mapping[str, Any]) -> str:
    """Return the name of the model that the arguments of a deck describe: its class or its type."""
    config = _config_of(arguments)[0]
    named = config.get("architectures") or [config.get("model_type", CAUSAL_MODEL)]
    return str(named[0])


def module_notes(module: nn.Module) -> tuple[str, ...]:
    """Return notes for the start of a run: how the model is computed, and what is unsupported."""
    import transformers

    kind, version = type(module).__name__, transformers.__version__
    return (
        f"{kind} is not built in: it runs as a module of transformers {version} with eager attention",
        f"{kind}: unsupported for modules are context parallelism, layout.expert, fp8, packed documents, "
        "adapters, DPO, GRPO and the cache of generation (hpctrain guide own-module)",
    )


def _parse_config(text: str, where: str) -> dict[str, Any]:
    try:
        config = parse_json(text)
    except ValueError:
        raise InputOutputError(f"{where}: damaged or truncated: it is not JSON") from None
    if not isinstance(config, dict):
        raise InputOutputError(f"{where}: damaged: it is not a JSON object")
    return config


def _build(config: Mapping[str, Any], where: str) -> nn.Module:
    """Build the model of a config.json; see `build_causal_model`."""
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # kernels from a hub are code that nobody has reviewed
    require("transformers", "a model that hpctrain does not have itself")

    with checked_warnings() as problems:
        model_config = _text_model_config(config, where)
        with transformers_errors(f"{where}: transformers cannot build the model", config):
            model_config.use_cache = False
            model_class = causal_class(str(config["model_type"]), config.get("architectures"))
            model: Any = model_class._from_config(
                model_config, attn_implementation="eager", dtype=torch.float32
            )
    if problems:
        raise HpctrainError(f"{where}: {problems[0]}")
    depends = config["model_type"] not in _ALWAYS_CAUSAL and reads_key([type(model)], "is_decoder")
    ignored = () if depends else ("is_decoder",)
    for name, value in _ENCODER_VALUES.items():
        if getattr(model.config, name, None) == value and name not in ignored:
            remedy = f"; {_DECODER_REMEDY}" if name == "is_decoder" else ""
            raise HpctrainError(
                f"{where}: {name} = {value!r}: this {type(model).__name__} is an encoder, whose predictions "
                f"depend on later tokens{remedy}"
            )
    used = [getattr(each, "config", None) for each in model.modules()]
    for key in _modalities(type(model.config)):
        if any(each is not None and each is getattr(model.config, key, None) for each in used):
            raise HpctrainError(f"{where}: {_modality_problem(key, config, type(model.config))}")
    module: nn.Module = model
    return module


def _modalities(config_class: Any) -> list[str]:
    """Return the keys of the configurations of a model's parts for images, audio or video."""
    return [name for name in config_class.sub_configs if name.startswith(_MODALITIES)]


def _modality_problem(key: str, config: Mapping[str, Any], config_class: Any) -> str:
    """Return the reason why a model of images, audio or video is refused, given the key of such a part."""
    import transformers

    text_config = config.get(TEXT_PART)
    kind = text_config.get("model_type") if isinstance(text_config, dict) else None
    kind = kind or getattr(config_class.sub_configs.get(TEXT_PART), "model_type", "")
    classes = causal_classes(str(kind)) if kind in transformers.CONFIG_MAPPING else ()
    remedy = f"; use a folder of its language model alone ({' or '.join(classes)})" if classes else ""
    return (
        f"{key}: model_type = {config['model_type']!r} is a model of images, audio or video, not of "
        f"text{remedy}"
    )


def _text_model_config(config: Mapping[str, Any], where: str) -> Any:
    """Return the configuration of `transformers` for the content of a config.json.

    Raises:
        HpctrainError: It is not the configuration of a causal model of text.
    """
    import transformers

    kind = config.get("model_type")
    version = f"transformers {transformers.__version__}"
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        code = ", and code in the folder (auto_map) is not used" if "auto_map" in config else ""
        raise HpctrainError(f"{where}: model_type = {kind!r}: unknown to {version}{code}")
    if kind in _NOT_CAUSAL:
        raise HpctrainError(f"{where}: model_type = {kind!r}: {_NOT_CAUSAL[kind]}")
    known = causal_classes(kind)
    config_class: Any = transformers.CONFIG_MAPPING[kind]
    modalities = _modalities(config_class)
    if modalities and not any(is_of_text(name, config_class) for name in known):
        raise HpctrainError(f"{where}: {_modality_problem(modalities[0], config, config_class)}")
    if problem := next(_class_problems(config, known, version), None):
        raise HpctrainError(f"{where}: {problem}")
    if problems := list(dict.fromkeys(value_problems(_decode_floats(config)))):
        raise HpctrainError([f"{where}: {problem}" for problem in problems])
    classes = [config_class, *(getattr(transformers, name) for name in known if hasattr(transformers, name))]
    if problems := list(dict.fromkeys(config_problems(config, classes))):
        raise HpctrainError([f"{where}: {problem}" for problem in problems])
    with transformers_errors(f"{where}: transformers cannot use this configuration", config):
        model_config = config_class.from_dict(_decode_floats(config_of_model(config)))
    if getattr(model_config, "add_cross_attention", False) and not config_class().add_cross_attention:
        remedy = "let transformers load it with add_cross_attention=False, and save it again"
        raise HpctrainError(
            f"{where}: add_cross_attention = True: attention to an encoder is unsupported; {remedy}"
        )
    if problems := [f"{where}: {problem}" for problem in size_problems(model_config)]:
        raise HpctrainError(problems)
    return model_config


def _decode_floats(value: Any) -> Any:
    """Return a part of a config.json with the numbers that JSON does not have, such as infinity."""
    if isinstance(value, list):
        return [_decode_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    return {key: _decode_floats(each) for key, each in value.items()}


def _class_problems(config: Mapping[str, Any], known: tuple[str, ...], version: str) -> Iterator[str]:
    """Yield what is wrong with the class that a config.json names, given the names of causal classes."""
    named, kind = config.get("architectures"), config.get("model_type")
    named_text = f"architectures = {named!r}, model_type = {kind!r}"
    if not known:
        yield f"{named_text}: {version} has no causal language model of this type"
    elif named is not None and (not isinstance(named, list) or not set(named) & set(known)):
        import transformers

        classes = [getattr(transformers, name) for name in known if hasattr(transformers, name)]
        depends = kind not in _ALWAYS_CAUSAL and config.get("is_decoder") is not True
        remedy = f"; {_DECODER_REMEDY}" if depends and reads_key(classes, "is_decoder") else ""
        yield (
            f"{named_text}: unsupported architecture; expected {' or '.join(known)}, the causal language "
            f"model of this type in {version}{remedy}"
        )
    tables = [config, *(value for value in config.values() if isinstance(value, dict))]
    if any(table.get("quantization_config") for table in tables):
        yield "quantization_config: quantized weights are unsupported (use the folder in bf16 or fp32)"


def _longest_sequence(module: nn.Module, where: str) -> int | None:
    """Return the number of tokens of the longest sequence of a model; None if it has no limit.

    Positions that follow a padding index, as those of RoBERTa, cannot use the embeddings up to this index.

    Raises:
        HpctrainError: They leave no position. -1 stands for the last one.
    """
    config: Any = cast(Any, module).config.get_text_config()
    lengths = (getattr(config, key, None) for key in _LENGTHS)
    length: int | None = next((each for each in lengths if _is_size(each)), None)
    if length is None:
        return None
    tokens = cast(Any, module).get_input_embeddings()
    embeddings = (each for each in module.modules() if isinstance(each, nn.Embedding) and each is not tokens)
    positions = (each for each in embeddings if each.num_embeddings == length)
    unused = max((each.padding_idx + 1 for each in positions if each.padding_idx is not None), default=0)
    if unused >= length:
        raise HpctrainError(
            f"{where}: pad_token_id = {config.pad_token_id}: positions of this model begin after this index, "
            f"so none of its {length} positions is left"
        )
    return length - unused


def _block_pattern(module: nn.Module) -> str | None:
    """Return the pattern of the names of a model's blocks; None if it has no list of modules.

    They are those that its pipeline plan names, or else those of the list with most parameters.
    """
    named = dict(module.named_modules())
    lists = {name: each for name, each in named.items() if isinstance(each, nn.ModuleList) and len(each)}
    outer = {name: each for name, each in lists.items() if not any(name.startswith(f"{n}.") for n in lists)}
    plan = getattr(module, "_pp_plan", None) or {}
    planned = [name for name in outer if name in plan]
    largest = sorted(outer, key=lambda name: -sum(each.numel() for each in outer[name].parameters()))
    return f"{(planned or largest)[0]}.*" if outer else None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
