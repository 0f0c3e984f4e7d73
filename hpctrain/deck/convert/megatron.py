"""Conversion of Megatron-LM's command-line arguments, in a script or a file, to deck keys."""

from __future__ import annotations

import re

from hpctrain.deck.convert.option_values import UnsupportedOptionError, integer, number, switch
from hpctrain.deck.convert.rule_table import Conversion, RuleTable, SourceOptions, apply_rules, load_table
from hpctrain.deck.convert.shell_script import parse_arguments
from hpctrain.deck.families import FAMILIES

_LAYER_LIST = re.compile(r"\(?\[0\]\*(\d+)\+\[1\]\*(\d+)\)?")
_LLAMA_ONLY = (
    "model.rope_base",
    "model.query_key_norm",
    "model.attention_bias",
    "model.rope_scaling.kind",
    "model.rope_scaling.factor",
    "model.rope_scaling.original_sequence",
)
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
    """Add the family that shares most properties with the model, and report those that differ."""
    rotary = options.is_on("--use-rotary-position-embeddings")
    properties = {
        "rotary positions": rotary or options.get("--position-embedding-type") == "rope",
        "RMSNorm": options.get("--normalization") == "RMSNorm",
        "layers without biases": options.is_on("--disable-bias-linear"),
    }
    swiglu = options.is_on("--swiglu")
    count = sum(properties.values()) + swiglu
    if "--num-layers" not in options and not count:
        return
    llama = count >= 2
    family = "llama" if llama else "gpt2"
    result.keys["model.family"] = family
    relu2 = "relu2" if options.is_on("--squared-relu") else "gelu-tanh"
    activation = "swiglu" if swiglu else relu2
    if activation != FAMILIES[family].defaults.activation:
        result.keys["model.activation"] = activation
    different = [name for name, present in properties.items() if present != llama]
    if different:
        differs = f"{'has' if llama else 'does not have'} {', '.join(different)}"
        result.unsupported["the model"] = (
            f'model.family = "{family}" is the most similar family; unlike the model of the script it '
            f"{differs}"
        )
    if not llama:
        for key in _LLAMA_ONLY:
            result.keys.pop(key, None)


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


def _shared_experts(value: object, options: SourceOptions) -> int:
    inner = options.read("--moe-ffn-hidden-size", integer) or options.read("--ffn-hidden-size", integer)
    if not inner or integer(value) % inner:
        raise UnsupportedOptionError("must be a multiple of the width of an expert")
    return integer(value) // inner


def _blocks_with_experts(value: object, options: SourceOptions) -> object:
    """Return the number of dense blocks at the start and the pattern of blocks; None for what is usual.

    A pattern is at most as long as the model, which Megatron-LM does not require.
    """
    if pattern := _LAYER_LIST.fullmatch(str(value).replace(" ", "")):
        return int(pattern[1]), None
    try:
        every = integer(value)
    except UnsupportedOptionError:
        raise UnsupportedOptionError("must be a number or [0]*n+[1]*m") from None
    length = min(every, options.read("--num-layers", integer) or every)
    return (None, [block == 0 for block in range(length)]) if every > 1 else None


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
