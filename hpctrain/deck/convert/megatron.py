"""Conversion of Megatron-LM's command-line arguments, in a script or a file, to deck keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from hpctrain.deck.activations import DEFAULT_ACTIVATIONS
from hpctrain.deck.convert.rules import (
    UNNEEDED,
    Conversion,
    Rule,
    SourceOptions,
    UnsupportedOptionError,
    apply_rules,
    choice,
    chooses,
    each,
    expects,
    flag,
    fp32_bytes,
    integer,
    number,
    sets,
    switch,
    text,
    unsupported,
)
from hpctrain.deck.convert.script import parse_arguments

DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "--adam-beta2": 0.999,
        "--weight-decay": 0.01,
        "--hidden-dropout": 0.1,
        "--attention-dropout": 0.1,
        "--num-query-groups": 1,
        "--sgd-momentum": 0.9,
        "--lr-wsd-decay-style": "exponential",
        "--moe-token-drop-policy": "probs",
        "--split": "969, 30, 1",
        "--eval-interval": 1000,
        "--eval-iters": 100,
        "--lr-decay-style": "linear",
        "--min-lr": 0.0,
        "--lr-warmup-iters": 0,
        "--log-interval": 100,
        "--untie-embeddings-and-output-weights": False,
        "--moe-aux-loss-coeff": 0.0,
    }
)
"""Defaults of Megatron-LM, where those of a deck are others."""

_LAYER_LIST = re.compile(r"\(?\[0\]\*(\d+)\+\[1\]\*(\d+)\)?")
_LARGEST_SCALE = 1 << 24


def convert_script(script: str) -> Conversion:
    """Convert the arguments that a script or a file contains."""
    options = SourceOptions(parse_arguments(script), DEFAULTS)
    hidden = options.read("--hidden-size", integer)
    if "--ffn-hidden-size" not in options and hidden:
        inner = int(4 * hidden * 2 / 3 / 64) * 64 if options.is_on("--swiglu") else 4 * hidden
        options.defaults["--ffn-hidden-size"] = inner
    result = apply_rules("Megatron-LM", options, RULES)
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
    if activation != DEFAULT_ACTIVATIONS[family]:
        result.keys["model.activation"] = activation
    different = [name for name, present in properties.items() if present != llama]
    if different:
        differs = f"{'has' if llama else 'does not have'} {', '.join(different)}"
        result.unsupported["the model"] = (
            f'model.family = "{family}" is nearest to it; unlike the model of the script it {differs}'
        )
    if not llama:
        for key in _LLAMA_ONLY:
            result.keys.pop(key, None)


# Conversions that depend on several options. Those that return a tuple set several keys.


def _floor(value: object, options: SourceOptions) -> float:
    peak = options.read("--lr", number)
    if not number(value):
        return 0.0
    if not peak:
        raise UnsupportedOptionError("becomes a fraction of the peak, and --lr is missing")
    return float(f"{number(value) / peak:.6g}")


def _steps_of_samples(value: object, options: SourceOptions) -> int:
    batch = options.read("--global-batch-size", integer)
    if not batch:
        raise UnsupportedOptionError("becomes a number of steps, and --global-batch-size is missing")
    if "--rampup-batch-size" in options:
        raise UnsupportedOptionError("becomes a number of steps, but the batch grows: calculate it by hand")
    return integer(value) // batch


def _warmup_of_fraction(value: object, options: SourceOptions) -> int:
    steps = options.read("--lr-decay-iters", integer) or options.read("--train-iters", integer)
    if not steps:
        raise UnsupportedOptionError("becomes a number of steps, and --train-iters is missing")
    return int(number(value) * steps)


def _cooldown_form(value: object, _: SourceOptions) -> None:
    if value != "linear":
        raise UnsupportedOptionError("the cooldown of a deck is linear")


def _stage_layers(value: object, options: SourceOptions) -> object:
    """Return the schedule and the chunks of each rank, from the layers of a virtual stage."""
    layers = options.read("--num-layers", integer)
    stages = options.read("--pipeline-model-parallel-size", integer)
    if not layers or not stages or not integer(value) or layers % (stages * integer(value)):
        raise UnsupportedOptionError("does not divide --num-layers over --pipeline-model-parallel-size")
    return _virtual_stages(layers // (stages * integer(value)), options)


def _virtual_stages(value: object, _: SourceOptions) -> object:
    return ("interleaved", integer(value)) if integer(value) > 1 else None


def _ramp(value: object, options: SourceOptions) -> tuple[int, int]:
    """Return the first batch and the steps in which it grows, from "START INCREMENT SAMPLES"."""
    words, batch = str(value).split(), options.read("--global-batch-size", integer)
    if len(words) != 3 or not batch:
        raise UnsupportedOptionError("must be three numbers, together with --global-batch-size")
    start, increment, samples = map(integer, words)
    if start != increment or start >= batch or batch % start:
        raise UnsupportedOptionError("the batch grows by its first size, which divides --global-batch-size")
    sizes = range(start, batch, increment)
    return start, sum(samples // len(sizes) // size for size in sizes)


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


def _initial_scale(value: object, _: SourceOptions) -> float:
    if number(value) > _LARGEST_SCALE:
        raise UnsupportedOptionError(f"exceeds {_LARGEST_SCALE}, the largest initial loss scale of a deck")
    return number(value)


def _attention_dropout(value: object, options: SourceOptions) -> None:
    if number(value) != options.read("--hidden-dropout", number):
        raise UnsupportedOptionError("must equal --hidden-dropout: a deck has one probability, model.dropout")


def _router_normalize(value: object, options: SourceOptions) -> object:
    sigmoid = options.get("--moe-router-score-function") == "sigmoid"  # whose weights are always normalized
    return False if switch(value) and not sigmoid else None


def _dropped_tokens(value: object, _: SourceOptions) -> None:
    if value != "position":
        raise UnsupportedOptionError("experts of a deck drop the last tokens, not the least probable ones")


def _shared_experts(value: object, options: SourceOptions) -> int:
    inner = options.read("--moe-ffn-hidden-size", integer) or options.read("--ffn-hidden-size", integer)
    if not inner or integer(value) % inner:
        raise UnsupportedOptionError("must be a multiple of the width of an expert")
    return integer(value) // inner


def _dense_first(value: object, _: SourceOptions) -> int | None:
    if pattern := _LAYER_LIST.fullmatch(str(value).replace(" ", "")):
        return int(pattern[1])
    try:
        every = integer(value)
    except UnsupportedOptionError:
        raise UnsupportedOptionError("must be a number or [0]*n+[1]*m") from None
    if every > 1:
        raise UnsupportedOptionError(
            "gives experts to the first of so many blocks; model.expert_every gives them to the last"
        )
    return None


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


def _validation(value: object) -> float:
    parts = [number(part) for part in str(value).replace(",", " ").split()]
    if not parts or not sum(parts):
        raise UnsupportedOptionError("must have a part above 0")
    return float(f"{[*parts, 0.0, 0.0][1] / sum(parts):.4g}")


def _evaluated_sequences(value: object, options: SourceOptions) -> int | None:
    batch = options.read("--global-batch-size", integer)
    if batch:
        return max(1, integer(value) * batch)
    if "--eval-iters" not in options:
        return None
    raise UnsupportedOptionError("becomes a number of sequences, and --global-batch-size is missing")


def _sequence_parallel(value: object, options: SourceOptions) -> object:
    size = "--tensor-model-parallel-size"
    one_rank = size not in options or options.read(size, integer) == 1
    return True if switch(value) and not one_rank else None


def _document_mask(value: object, options: SourceOptions) -> None:
    if switch(value) and not options.is_on("--reset-attention-mask"):
        raise UnsupportedOptionError(
            "belongs to data.document_mask, which masks attention, but --reset-attention-mask is missing"
        )


def _minutes(value: object) -> str:
    return f"{integer(value)} min"


# Conditions under which Megatron-LM uses an option.


def _is_adam(options: SourceOptions) -> bool:
    return options.get("--optimizer") in {None, "adam"}


def _is_sgd(options: SourceOptions) -> bool:
    return options.get("--optimizer") == "sgd"


def _is_wsd(options: SourceOptions) -> bool:
    return str(options.get("--lr-decay-style")).lower() == "wsd"


def _decays(options: SourceOptions) -> bool:
    return options.get("--lr-decay-style") != "constant"


def _warms_up_by_steps(options: SourceOptions) -> bool:
    others = {"--lr-warmup-fraction", "--lr-warmup-samples"}
    return "--lr-warmup-iters" in options or not any(name in options for name in others)


def _has_query_groups(options: SourceOptions) -> bool:
    return options.is_on("--group-query-attention")


def _has_capacity(options: SourceOptions) -> bool:
    return "--moe-expert-capacity-factor" in options


def _has_balance_loss(options: SourceOptions) -> bool:
    return "--num-experts" in options and options.get("--moe-router-load-balancing-type") != "none"


def _has_no_strategy(options: SourceOptions) -> bool:
    return "--data-parallel-sharding-strategy" not in options


_LLAMA_ONLY = ("model.rope_base", "model.query_key_norm")
_BALANCE_OVER = {"aux_loss": "micro_batch", "seq_aux_loss": "sequence"}
_DECAYS = {name: name for name in ("linear", "cosine", "constant", "wsd")} | {
    "inverse-square-root": "inverse-sqrt"
}
_OPTIMIZERS = {"adam": "adamw"} | {name: name for name in ("sgd", "muon", "lion", "adafactor")}
_FP8_RECIPES = {"delayed": "delayed", "tensorwise": "tensor", "mxfp8": "mx", "blockwise": "block"}
_ZERO_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}

_MODEL: Mapping[str, Rule] = {
    "--num-layers": sets("model.layers"),
    "--hidden-size": sets("model.hidden"),
    "--num-attention-heads": sets("model.heads"),
    "--ffn-hidden-size": sets("model.mlp"),
    "--kv-channels": sets("model.head_size"),
    "--num-query-groups": sets("model.key_value_heads", condition=_has_query_groups),
    "--vocab-size": sets("model.vocabulary"),
    "--untie-embeddings-and-output-weights": sets("model.tied", lambda value: not switch(value)),
    "--normalization": expects("LayerNorm", "RMSNorm", refusal="must be LayerNorm or RMSNorm"),
    "--position-embedding-type": expects(
        "rope", "learned_absolute", refusal="is not supported (supported: rope or learned_absolute)"
    ),
    "--add-qkv-bias": unsupported("queries, keys and values of llama have no biases"),
    "--rotary-base": sets("model.rope_base", number),
    "--rotary-percent": expects(1, "1.0", refusal="rotary positions rotate whole heads"),
    "--use-rope-scaling": unsupported("rotary positions are not scaled"),
    "--rotary-interleaved": unsupported("rotary positions pair the two halves of a head"),
    "--qk-layernorm": flag("model.query_key_norm", "head"),
    **each("--norm-epsilon --layernorm-epsilon", sets("model.norm_epsilon", number)),
    "--init-method-std": sets("model.initial_std", number),
    "--hidden-dropout": sets("model.dropout", number),
    "--attention-dropout": Rule((), _attention_dropout),
    "--apply-layernorm-1p": unsupported("norms multiply by their weights, not by 1 + weight"),
    "--multi-latent-attention": unsupported("latent attention is not available"),
    "--mtp-num-layers": unsupported("only the next token is predicted"),
    "--window-size": unsupported("attention sees all earlier tokens"),
    "--num-experts": Rule(("model.experts", "model.router_dtype", "model.balance"), _experts),
    "--moe-router-topk": sets("model.experts_per_token"),
    "--moe-ffn-hidden-size": sets("model.expert_mlp"),
    "--moe-shared-expert-intermediate-size": Rule(("model.shared_experts",), _shared_experts),
    "--moe-layer-freq": Rule(("model.dense_first",), _dense_first),
    "--moe-router-load-balancing-type": Rule(("model.balance", "model.balance_over"), _balance),
    "--moe-aux-loss-coeff": sets("model.balance_loss", number, _has_balance_loss),
    "--moe-z-loss-coeff": sets("model.router_z_loss", number),
    "--moe-expert-capacity-factor": sets("model.capacity", number),
    "--moe-token-drop-policy": Rule((), _dropped_tokens, _has_capacity),
    "--moe-router-score-function": chooses("model.router", {"softmax": "softmax", "sigmoid": "sigmoid"}),
    "--moe-router-pre-softmax": Rule(("model.router_normalize",), _router_normalize),
    "--moe-router-bias-update-rate": sets("model.balance_rate", number),
    "--moe-router-num-groups": sets("model.router_groups"),
    "--moe-router-group-topk": sets("model.router_groups_per_token"),
    "--moe-router-topk-scaling-factor": sets("model.router_scale", number),
}

_RUN: Mapping[str, Rule] = {
    "--train-iters": sets("run.steps"),
    "--train-samples": Rule(("run.steps",), _steps_of_samples),
    "--seed": sets("run.seed"),
    "--save": sets("run.dir", text),
    "--save-interval": sets("checkpoint.every"),
    "--load": unsupported("`hpctrain resume RUN_DIR` continues a run, and `hpctrain import` reads weights"),
    "--log-interval": sets("run.log_every"),
    "--eval-interval": sets("run.evaluate_every"),
    "--eval-iters": Rule(("run.evaluate_sequences",), _evaluated_sequences),
    "--exit-duration-in-mins": sets("run.time_limit", _minutes),
    "--distributed-timeout-minutes": sets("stability.hang_seconds", _minutes),
    "--async-save": flag("checkpoint.mode", "background"),
    "--split": sets("data.validation", _validation),
    "--reset-attention-mask": flag("data.document_mask"),
    **each("--reset-position-ids --eod-mask-loss", Rule((), _document_mask)),
    "--profile": flag("run.trace"),
    "--tensorboard-dir": sets("report.tensorboard", bool),
    "--wandb-project": sets(
        "report.wandb",
        lambda _: "online",
        note="set WANDB_PROJECT={value}: a deck has no key for it",
    ),
    "--wandb-exp-name": unsupported("W&B shows a run under its run.title"),
    "--wandb-save-dir": unsupported("files of W&B are written to the folder wandb of the run folder"),
    "--wandb-entity": unsupported("set the environment variable WANDB_ENTITY"),
    **each(
        "--data-path --train-data-path --valid-data-path --test-data-path --mock-data",
        unsupported("is not read: make a token file of the text with `hpctrain prepare`"),
    ),
    **each(
        "--tokenizer-type --tokenizer-model --vocab-file --merge-file",
        unsupported("text is tokenized before a run, by `hpctrain prepare --tokenizer`"),
    ),
}

_STEP: Mapping[str, Rule] = {
    "--micro-batch-size": sets("batch.micro_size"),
    "--global-batch-size": sets("batch.global_size"),
    "--rampup-batch-size": Rule(("batch.ramp_from", "batch.ramp_steps"), _ramp),
    "--seq-length": sets("batch.sequence"),
    "--lr": sets("learning_rate.peak", number),
    "--min-lr": Rule(("learning_rate.floor",), _floor, _decays),
    "--lr-decay-style": chooses("learning_rate.decay", _DECAYS),
    "--lr-decay-iters": sets("learning_rate.decay_steps"),
    "--lr-decay-samples": Rule(("learning_rate.decay_steps",), _steps_of_samples),
    "--lr-warmup-iters": sets("learning_rate.warmup", condition=_warms_up_by_steps),
    "--lr-warmup-samples": Rule(("learning_rate.warmup",), _steps_of_samples),
    "--lr-warmup-fraction": Rule(("learning_rate.warmup",), _warmup_of_fraction),
    "--lr-wsd-decay-iters": sets("learning_rate.cooldown"),
    "--lr-wsd-decay-samples": Rule(("learning_rate.cooldown",), _steps_of_samples),
    "--lr-wsd-decay-style": Rule((), _cooldown_form, _is_wsd),
    "--optimizer": chooses("optimizer.name", _OPTIMIZERS),
    "--weight-decay": sets("optimizer.weight_decay", number),
    **each("--start-weight-decay --end-weight-decay", unsupported("the weight decay is constant")),
    "--clip-grad": sets("optimizer.clip", number),
    "--adam-beta1": sets("optimizer.adamw.beta1", number, _is_adam),
    "--adam-beta2": sets("optimizer.adamw.beta2", number, _is_adam),
    "--adam-eps": sets("optimizer.adamw.epsilon", number, _is_adam),
    "--sgd-momentum": sets("optimizer.sgd.momentum", number, _is_sgd),
    "--bf16": Rule(("precision.gradients", "precision.compute"), _bf16),
    "--fp16": Rule(("precision.gradients", "precision.compute"), _fp16),
    "--fp8-format": Rule(
        ("precision.compute", "precision.fp8_gradients"),
        lambda value, _: ("fp8", choice(value, {"hybrid": "e5m2", "e4m3": "e4m3"})),
    ),
    "--fp8-recipe": chooses("precision.fp8", _FP8_RECIPES),
    "--fp8-amax-history-len": sets("precision.fp8_history"),
    "--fp8-amax-compute-algo": expects("max", refusal="the scale follows from the maximum of the history"),
    "--initial-loss-scale": Rule(("precision.initial_loss_scale",), _initial_scale),
    "--loss-scale-window": sets("precision.loss_scale_window"),
    "--loss-scale": unsupported("the loss scale is always dynamic"),
}

_LAYOUT: Mapping[str, Rule] = {
    "--tensor-model-parallel-size": sets("layout.tensor"),
    "--pipeline-model-parallel-size": sets("layout.pipeline"),
    "--num-layers-per-virtual-pipeline-stage": Rule(("layout.schedule", "layout.chunks"), _stage_layers),
    "--num-virtual-stages-per-pipeline-rank": Rule(("layout.schedule", "layout.chunks"), _virtual_stages),
    "--context-parallel-size": sets("layout.context"),
    "--cp-comm-type": chooses("layout.context_form", {"p2p": "ring", "a2a": "all_to_all"}),
    "--expert-model-parallel-size": sets("layout.expert"),
    "--expert-tensor-parallel-size": sets("layout.expert_tensor"),
    "--sequence-parallel": Rule(("layout.sequence_parallel",), _sequence_parallel),
    "--use-distributed-optimizer": sets("layout.zero", lambda _: 1, _has_no_strategy),
    "--data-parallel-sharding-strategy": chooses("layout.zero", _ZERO_STAGES),
    "--use-torch-fsdp2": flag("layout.zero", 3),
    "--zero-stage": sets("layout.zero"),
    "--deepspeed-config": unsupported("is converted by itself, by another --from"),
    **each("--cpu-optimizer --optimizer-cpu-offload", flag("memory.optimizer", "host")),
    "--checkpoint-activations": flag("memory.recompute", "full"),
    "--recompute-activations": flag("memory.recompute", "selective"),
    "--recompute-granularity": Rule(("memory.recompute",), _recompute),
    "--recompute-method": expects("uniform", refusal="either all blocks are recomputed or none"),
    "--recompute-modules": expects("core_attn", refusal="only attention can be recomputed selectively"),
    "--ddp-bucket-size": sets("communication.bucket_bytes", fp32_bytes),
    **each(
        "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers"
        " --pipeline-model-parallel-layout",
        unsupported("set the number of blocks of each part: layout.split = [...]"),
    ),
    **each(
        "--nproc-per-node --nnodes --num-nodes --num-gpus --node-rank --master-addr --master-port"
        " --rdzv-endpoint --rdzv-id --hostfile --force-multi",
        unsupported("belongs to the launcher: mpirun or srun starts the ranks"),
    ),
}

_UNNEEDED = """
    --group-query-attention --make-vocab-size-divisible-by --swiglu --squared-relu
    --use-rotary-position-embeddings --disable-bias-linear --max-position-embeddings
    --moe-router-enable-expert-bias --moe-router-dtype --accumulate-allreduce-grads-in-fp32
    --recompute-num-layers --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    --deepspeed --data-impl --use-mcore-models --transformer-impl --attention-backend --use-flash-attn
    --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap --overlap-p2p-communication
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-rope-fusion --no-gradient-accumulation-fusion --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl --attention-softmax-in-fp32 --no-async-tensor-model-parallel-allreduce
    --distributed-backend --dataloader-type --num-workers --no-create-attention-mask-in-dataloader
    --ckpt-format --use-dist-ckpt --dist-ckpt-strategy --auto-detect-ckpt-format --no-save-optim
    --no-load-optim --no-load-rng --finetune --tensorboard-log-interval --tensorboard-queue-size
    --log-throughput --log-params-norm --log-num-zeros-in-grad --log-timers-to-tensorboard
    --log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --log-progress --log-straggler
    --timing-log-level --timing-log-option --manual-gc --manual-gc-interval --empty-unused-memory-level
    --moe-grouped-gemm --moe-token-dispatcher-type --moe-permute-fusion --moe-shared-expert-overlap
    --moe-per-layer-logging --moe-enable-deepep --override-opt-param-scheduler
    --use-checkpoint-opt-param-scheduler --data-cache-path --use-precision-aware-optimizer
    --distribute-saved-activations
"""
"""Arguments that other rules read, that change no result, or that have no counterpart and need none."""

RULES: Mapping[str, Rule] = MappingProxyType(
    {**_MODEL, **_RUN, **_STEP, **_LAYOUT, **each(_UNNEEDED, UNNEEDED)}
)
"""Rule of each argument."""
