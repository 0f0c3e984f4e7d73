"""Conversion of Megatron-LM's command-line arguments, in a script or a file, to deck keys."""

from __future__ import annotations

import re
from contextlib import suppress
from math import log

from hpctrain.deck.convert.layer_lists import MOST_LAYERS, layer_flags
from hpctrain.deck.convert.option_values import UnsupportedOptionError, integer, number, switch
from hpctrain.deck.convert.rule_table import Conversion, RuleTable, SourceOptions, apply_rules, load_table
from hpctrain.deck.convert.shell_script import parse_arguments
from hpctrain.deck.families import FAMILIES

_WINDOW = re.compile(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?")
_OF_ROTATION = ("model.rope_", "model.rotary_fraction", "model.rotation_pattern")
"""Beginnings of keys that have no effect without rotary positions."""

_ORIGINAL_LENGTH = 4096
"""Default of --original-max-position-embeddings."""

_LATENT_EPSILON = 1e-6
"""Number that the norms of latents add to the variance here, whatever model.norm_epsilon is."""

_BALANCE_OVER = {"aux_loss": "micro_batch", "seq_aux_loss": "sequence"}


def megatron_table() -> RuleTable:
    """Return the rules for the arguments of Megatron-LM, which are in `megatron.toml`."""
    return load_table("megatron.toml", "Megatron-LM", globals())


def convert_script(script: str) -> Conversion:
    """Convert the arguments of Megatron-LM that a text contains to deck keys. Local; nothing is executed.

    Arguments that no deck key expresses raise no error. The Conversion lists them as unsupported with a
    reason.

    Args:
        script: Text of a shell script or of a file of arguments, not its path.

    Raises:
        ValueError: Too many expressions are nested, as for `parse_arguments`.
    """
    table = megatron_table()
    explicit = parse_arguments(script)
    options = SourceOptions(explicit, table.applicable_defaults(explicit))
    hidden = options.read("--hidden-size", integer)
    if "--ffn-hidden-size" not in options and hidden:
        inner = int(4 * hidden * 2 / 3 / 64) * 64 if options.is_on("--swiglu") else 4 * hidden
        options.defaults["--ffn-hidden-size"] = inner
    result = apply_rules(options, table)
    _add_family(options, result)
    return result


def _add_family(options: SourceOptions, result: Conversion) -> None:
    """Add the family that shares most properties with the model, and keys for the properties that differ."""
    named = options.get("--position-embedding-type")
    rotary = options.is_on("--use-rotary-position-embeddings") or named == "rope"
    positions = "rotary" if rotary else "none" if named == "none" else "learned"
    norm = "rms" if options.get("--normalization") == "RMSNorm" else "layer"
    biases, swiglu = not options.is_on("--disable-bias-linear"), options.is_on("--swiglu")
    count = (positions == "rotary") + (norm == "rms") + (not biases) + swiglu
    if "--num-layers" not in options and not count:
        return
    family = "llama" if count >= 2 else "gpt2"
    relu2 = "relu2" if options.is_on("--squared-relu") else "gelu-tanh"
    properties: dict[str, object] = {
        "positions": positions,
        "norm": norm,
        "norm_bias": norm == "layer",
        "attention_bias": _attention_bias(options, biases),
        "mlp_bias": biases,
        "activation": "swiglu" if swiglu else relu2,
    }
    defaults = FAMILIES[family].defaults
    different = {
        f"model.{name}": value for name, value in properties.items() if value != getattr(defaults, name)
    }
    result.keys = {"model.family": family, **different, **result.keys}
    if positions != "rotary":
        for key in [key for key in result.keys if key.startswith(_OF_ROTATION)]:
            del result.keys[key]


def _attention_bias(options: SourceOptions, biases: bool) -> str:
    """Return the value of model.attention_bias. Latent attention has no biases."""
    if options.is_on("--multi-latent-attention"):
        return "none"
    without_all = "query_key_value" if options.is_on("--add-qkv-bias") else "none"
    return "all" if biases else without_all


# Conversions that rows of megatron.toml name. Those that return a tuple set several keys.


def _floor(value: object, options: SourceOptions) -> float:
    peak = options.read("--lr", number)
    if not number(value):
        return 0.0
    if not peak:
        raise UnsupportedOptionError("requires --lr, since a deck has it as a fraction of the peak")
    return float(f"{number(value) / peak:.6g}")


def _steps_of_samples(value: object, options: SourceOptions) -> int:
    batch = options.read("--global-batch-size", integer)
    if not batch:
        raise UnsupportedOptionError("requires --global-batch-size, since a deck has it in steps")
    if "--rampup-batch-size" in options:
        raise UnsupportedOptionError("must be converted to steps by hand, since the batch grows")
    return integer(value) // batch


def _warmup_of_fraction(value: object, options: SourceOptions) -> int:
    steps = options.read("--lr-decay-iters", integer) or options.read("--train-iters", integer)
    if not steps:
        raise UnsupportedOptionError("requires --train-iters, since a deck has it in steps")
    return int(number(value) * steps)


def _stage_layers(value: object, options: SourceOptions) -> object:
    """Return the schedule and the chunks of each rank, from the layers of a virtual stage."""
    layers = options.read("--num-layers", integer)
    stages = options.read("--pipeline-model-parallel-size", integer)
    if not layers or not stages or not integer(value) or layers % (stages * integer(value)):
        raise UnsupportedOptionError("must divide --num-layers / --pipeline-model-parallel-size")
    return _virtual_stages(layers // (stages * integer(value)), options)


def _virtual_stages(value: object, _: SourceOptions) -> object:
    return ("interleaved", integer(value)) if integer(value) > 1 else None


def _ramp(value: object, options: SourceOptions) -> tuple[int, int]:
    """Return the first batch and the steps in which it grows, from "START INCREMENT SAMPLES"."""
    words, batch = str(value).split(), options.read("--global-batch-size", integer)
    if len(words) != 3 or not batch:
        raise UnsupportedOptionError("must be three numbers, and requires --global-batch-size")
    start, increment, samples = map(integer, words)
    if start != increment or start >= batch or batch % start:
        raise UnsupportedOptionError(
            "must have an increment equal to the first batch size, which must divide --global-batch-size"
        )
    sizes = range(start, batch, increment)
    return start, sum(samples // len(sizes) // size for size in sizes)


def _rope_scaling(value: object, options: SourceOptions) -> object:
    """Return kind, factor and original length of the scaling of Llama 3, or None if it is switched off."""
    if not switch(value):
        return None
    return "llama3", options.read("--rope-scaling-factor", number) or 8.0, 8192


def _recompute(value: object, options: SourceOptions) -> object:
    if value == "selective":
        return "selective"
    if value != "full":
        raise UnsupportedOptionError('must be "selective" or "full"')
    blocks = options.read("--recompute-num-layers", integer) or 1
    return blocks if blocks > 1 else "full"


def _bf16(value: object, options: SourceOptions) -> object:
    return _half_precision(value, options, "bf16", fp32_gradients=True)


def _fp16(value: object, options: SourceOptions) -> object:
    return _half_precision(value, options, "fp16", options.is_on("--accumulate-allreduce-grads-in-fp32"))


def _half_precision(value: object, options: SourceOptions, dtype: str, fp32_gradients: bool) -> object:
    if not switch(value):
        return None
    return "fp32" if fp32_gradients else "compute", None if "--fp8-format" in options else dtype


def _attention_dropout(value: object, options: SourceOptions) -> None:
    if number(value) != options.read("--hidden-dropout", number):
        raise UnsupportedOptionError(
            "must equal --hidden-dropout, since a deck has one probability, model.dropout"
        )


def _prediction_modules(value: object, options: SourceOptions) -> int | None:
    """Return the number of modules of multi-token prediction; None without them."""
    if integer(value) < 0:
        raise UnsupportedOptionError("must not be below 0")
    if integer(value) and options.read("--hidden-dropout", number) != 0:
        raise UnsupportedOptionError(
            "requires --hidden-dropout 0 and --attention-dropout 0, which are 0.1 by default, since modules "
            "of multi-token prediction have no dropout here"
        )
    return integer(value) or None


def _prediction_weight(value: object, options: SourceOptions) -> float | None:
    """Return the weight of the loss of modules of multi-token prediction; None if there are none."""
    with suppress(UnsupportedOptionError):
        if _prediction_modules(options.get("--mtp-num-layers"), options):
            return number(value)
    return None


def _shared_experts(value: object, options: SourceOptions) -> int:
    inner = options.read("--moe-ffn-hidden-size", integer) or options.read("--ffn-hidden-size", integer)
    if not inner or integer(value) % inner:
        raise UnsupportedOptionError("must be a multiple of the width of an expert")
    return integer(value) // inner


def _flags_of_layers(value: object, options: SourceOptions, last_differs: bool) -> list[bool]:
    """Return a flag for each layer, or those of a pattern that is repeated.

    A pattern has at most as many layers as the model, which Megatron-LM does not require.

    Args:
        value: List of flags in Python's notation, or the number of layers of a pattern.
        options: All options.
        last_differs: True if the last layer of a pattern has the flag False, the others True. Otherwise the
            first one has True and the others False.
    """
    try:
        every = integer(value)
    except UnsupportedOptionError:
        return layer_flags(str(value))
    if every < 1:
        raise UnsupportedOptionError("must be above 0")
    different = every - 1 if last_differs else 0
    layers = min(every, options.read("--num-layers", integer) or MOST_LAYERS)
    return [(layer == different) != last_differs for layer in range(layers)]


def _blocks_with_experts(value: object, options: SourceOptions) -> object:
    """Return the number of dense blocks at the start and the pattern of blocks; None for defaults."""
    flags = _flags_of_layers(value, options, last_differs=False)
    if not any(flags):
        raise UnsupportedOptionError("has no layer with experts")
    first = flags.index(True)
    if all(flags[first:]):
        return (first, None) if first else None
    return None, flags


def _windows(value: object, options: SourceOptions) -> object:
    """Return the window of each layer of a pattern, in tokens with the present one; None for no window."""
    sides = _WINDOW.fullmatch(str(value))
    if sides is None or int(sides[2]) != 0 or int(sides[1]) < -1:
        raise UnsupportedOptionError("must be N,0: the N tokens before each token, and none after it")
    window = int(sides[1]) + 1  # -1 is all tokens
    skipped = options.get("--window-attn-skip-freq")
    try:
        flags = [True] if skipped is None else _flags_of_layers(skipped, options, last_differs=True)
    except UnsupportedOptionError as error:
        raise UnsupportedOptionError(f"--window-attn-skip-freq {skipped} {error}") from None
    # The list is the value of one key.
    return ([window if flag else 0 for flag in ([True] if all(flags) else flags)],) if window else None


def _rotating_blocks(value: object, options: SourceOptions) -> object:
    """Return the flags of layers that rotate; None if all do. A list has 1 for those that do not."""
    flags = _flags_of_layers(value, options, last_differs=True)
    if not str(value).strip().isdecimal():
        flags = [not flag for flag in flags]
    return None if all(flags) else (flags,)


def _linear_scaling(value: object, _: SourceOptions) -> object:
    return ("linear", number(value)) if number(value) > 1 else None


def _query_key_norm(value: object, options: SourceOptions) -> str | None:
    if switch(value) and options.get("--normalization") != "RMSNorm":
        raise UnsupportedOptionError("is supported with --normalization RMSNorm only")
    return "head" if switch(value) else None


def _norm_weight(value: object, options: SourceOptions) -> str | None:
    if switch(value) and options.get("--normalization") != "RMSNorm":
        raise UnsupportedOptionError("is supported with --normalization RMSNorm only")
    return "one_plus" if switch(value) else None


def _quick_geglu(value: object, options: SourceOptions) -> str | None:
    if not switch(value):
        return None
    settings = [
        options.read(name, number) for name in ("--glu-linear-offset", "--activation-func-clamp-value")
    ]
    if settings != [1.0, 7.0]:
        needed = "--glu-linear-offset 1 and --activation-func-clamp-value 7"
        raise UnsupportedOptionError(f"requires {needed}, the activation of gpt-oss")
    return "swiglu-clamped"


def _latent_attention(value: object, options: SourceOptions) -> None:
    """Require what latent attention always has here: normalized latents, and no biases."""
    epsilon = options.read("--norm-epsilon", number) or options.read("--layernorm-epsilon", number)
    present = {
        "--disable-bias-linear": options.is_on("--disable-bias-linear"),
        "--qk-layernorm": options.is_on("--qk-layernorm"),
        "--normalization RMSNorm": options.get("--normalization") == "RMSNorm",
        f"--norm-epsilon {_LATENT_EPSILON:g}": epsilon == _LATENT_EPSILON,
    }
    missing = [name for name, has in present.items() if not has]
    if switch(value) and missing:
        raise UnsupportedOptionError(f"becomes [model.latent], which computes as with {', '.join(missing)}")


def _latent_head_size(value: object, options: SourceOptions) -> int:
    return integer(value) + integer(options.get("--qk-pos-emb-head-dim"))


def _latent_scaling(value: object, options: SourceOptions) -> object:
    """Return kind, factor, original length and attention factor of YaRN, and the attention scale."""
    factor, all_dims = number(value), options.read("--mscale-all-dim", number) or 0.0
    if factor <= 1:
        return None
    mscale = options.read("--mscale", number)
    of_queries = 0.1 * (1.0 if mscale is None else mscale) * log(factor) + 1
    of_scores = 0.1 * all_dims * log(factor) + 1
    head_size = _latent_head_size(options.get("--qk-head-dim"), options)
    scale = of_scores**2 / head_size**0.5 if all_dims else None
    if options.get("--rope-type") == "rope":
        return None, None, None, None, scale
    original = options.read("--original-max-position-embeddings", integer) or _ORIGINAL_LENGTH
    return "yarn", factor, original, of_queries / of_scores, scale


def _chosen_groups(value: object, options: SourceOptions) -> tuple[int, int | None]:
    """Return the number of groups that are chosen, and of the best experts whose scores rank a group."""
    best = (options.read("--moe-router-topk", integer) or 2) // max(1, integer(value))
    return integer(value), best or None


def _experts(value: object, options: SourceOptions) -> object:
    """Return the number of experts, the format of the router, and its kind of balance or None."""
    fp32 = options.get("--moe-router-dtype") in {"fp32", "fp64"}
    bias = options.is_on("--moe-router-enable-expert-bias")
    return integer(value), "fp32" if fp32 else "compute", "bias" if bias else None


def _balance(value: object, options: SourceOptions) -> object:
    """Return the kind of balance or None, and the tokens over which its loss is computed or None."""
    if value == "none":
        return None if options.is_on("--moe-router-enable-expert-bias") else ("none", None)
    if value not in _BALANCE_OVER:
        raise UnsupportedOptionError('is not supported (supported: "aux_loss", "seq_aux_loss" or "none")')
    return (None, _BALANCE_OVER[str(value)]) if options.read("--moe-aux-loss-coeff", number) else None


def _validation(value: object, _: SourceOptions) -> float:
    parts = [number(part) for part in str(value).replace(",", " ").split()]
    if not parts or not sum(parts):
        raise UnsupportedOptionError("must have a number above 0")
    return float(f"{[*parts, 0.0, 0.0][1] / sum(parts):.4g}")


def _evaluated_sequences(value: object, options: SourceOptions) -> int | None:
    batch = options.read("--global-batch-size", integer)
    if batch:
        return max(1, integer(value) * batch)
    if "--eval-iters" not in options:
        return None
    raise UnsupportedOptionError("becomes a number of sequences, and --global-batch-size is missing")
