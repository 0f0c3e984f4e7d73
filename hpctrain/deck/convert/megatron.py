"""Megatron-LM's arguments, as a script or a file has them, as keys of a deck.

What it takes for arguments that it is not given stands in `DEFAULTS`, where that is not what a deck takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hpctrain.deck.activations import DEFAULT_ACTIVATIONS
from hpctrain.deck.convert.rules import (
    Keys,
    Rule,
    Theirs,
    Translated,
    UntranslatedError,
    as_key,
    choice,
    needless,
    nothing,
    number,
    only,
    switch,
    text,
    translate,
    when_on,
    whole,
)
from hpctrain.deck.convert.script import arguments_of

NAME = "Megatron-LM"

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

_LAYER_LIST = re.compile(r"\(?\[0\]\*(\d+)\+\[1\]\*(\d+)\)?")

_TOKENS = "of its files no tokens are read: make a token file of the text with `hpctrain prepare`"
_TOKENIZER = "tokens are made before a run, by `hpctrain prepare --tokenizer`"
_LAUNCH = "is the launcher's matter: mpirun or srun starts the ranks"


def translated(script: str) -> Translated:
    """The keys of a script's arguments, and what no key says."""
    theirs = Theirs(arguments_of(script), DEFAULTS)
    hidden = theirs.whole("--hidden-size")
    if "--ffn-hidden-size" not in theirs and hidden:
        inner = int(4 * hidden * 2 / 3 / 64) * 64 if theirs.is_on("--swiglu") else 4 * hidden
        theirs.defaults["--ffn-hidden-size"] = inner
    found = translate(theirs, RULES, f"is no argument of {NAME} that is known here")
    _add_family(theirs, found)
    return found


_ACTIVATIONS = {"--swiglu": "swiglu", "--squared-relu": "relu2"}
_ROTARY, _SWIGLU, _RMS, _BIASES = "rotary positions", "SwiGLU", "RMSNorm", "no biases"


def _add_family(theirs: Theirs, found: Translated) -> None:
    """The family that most of a model's habits are of; the others are told."""
    rotary = theirs.is_on("--use-rotary-position-embeddings")
    habits = {
        _ROTARY: rotary or theirs.get("--position-embedding-type") == "rope",
        _SWIGLU: theirs.is_on("--swiglu"),
        _RMS: theirs.get("--normalization") == "RMSNorm",
        _BIASES: theirs.is_on("--disable-bias-linear"),
    }
    if "--num-layers" not in theirs and not any(habits.values()):
        return
    llama = sum(habits.values()) >= 2
    family = "llama" if llama else "gpt2"
    found.keys["model.family"] = family
    activation = next((ours for name, ours in _ACTIVATIONS.items() if theirs.is_on(name)), "gelu-tanh")
    if activation != DEFAULT_ACTIVATIONS[family]:
        found.keys["model.activation"] = activation
    other = [habit for habit, has in habits.items() if has != llama and habit != _SWIGLU]
    if other:
        has = "has" if llama else "has not"
        found.left["the model"] = f"has {'not all of' if llama else ''} {', '.join(other)}".replace(
            "  ", " "
        ) + (f': model.family = "{found.keys["model.family"]}" {has}, and is the nearest that there is')
    for key in ("model.rope_base", "model.query_key_norm") if not llama else ():
        found.keys.pop(key, None)


def _share(of: str) -> Rule:
    """The floor, as a share of the peak."""

    def rule(value: object, theirs: Theirs) -> Keys:
        peak = theirs.number(of)
        if not number(value):
            return {"learning_rate.floor": 0.0}
        if not peak:
            raise UntranslatedError(f"is a share of the peak in a deck, and there is no {of}")
        return {"learning_rate.floor": float(f"{number(value) / peak:.6g}")}

    return rule


def _samples(key: str) -> Rule:
    """Whole steps for samples."""

    def rule(value: object, theirs: Theirs) -> Keys:
        batch = theirs.whole("--global-batch-size")
        if not batch:
            raise UntranslatedError("is counted in steps in a deck, and there is no --global-batch-size")
        if "--rampup-batch-size" in theirs:
            raise UntranslatedError("is counted in steps in a deck, whose batch grows: work it out by hand")
        return {key: whole(value) // batch}

    return rule


def _warmup_fraction(value: object, theirs: Theirs) -> Keys:
    steps = theirs.whole("--lr-decay-iters") or theirs.whole("--train-iters")
    if not steps:
        raise UntranslatedError("is a number of steps in a deck, and there is no --train-iters")
    return {"learning_rate.warmup": int(number(value) * steps)}


def _decay(value: object, theirs: Theirs) -> Keys:
    names = {"linear": "linear", "cosine": "cosine", "constant": "constant", "wsd": "wsd"}
    names |= {"inverse-square-root": "inverse-sqrt"}
    return choice("learning_rate.decay", names)(value, theirs)


def _minimum(value: object, theirs: Theirs) -> Keys:
    return {} if theirs.get("--lr-decay-style") == "constant" else _share("--lr")(value, theirs)


def _warmup(value: object, theirs: Theirs) -> Keys:
    others = {"--lr-warmup-fraction", "--lr-warmup-samples"}
    if "--lr-warmup-iters" not in theirs and any(other in theirs for other in others):
        return {}
    return {"learning_rate.warmup": whole(value)}


def _chunks(value: object, theirs: Theirs) -> Keys:
    """Of layers of a virtual stage."""
    layers, stages = theirs.whole("--num-layers"), theirs.whole("--pipeline-model-parallel-size")
    if not layers or not stages or layers % (stages * whole(value)):
        raise UntranslatedError("does not divide --num-layers over --pipeline-model-parallel-size")
    return _virtual(layers // (stages * whole(value)), theirs)


def _virtual(value: object, _: Theirs) -> Keys:
    return {"layout.schedule": "interleaved", "layout.chunks": whole(value)} if whole(value) > 1 else {}


def _ramp(value: object, theirs: Theirs) -> Keys:
    """Start, increment and samples."""
    words, batch = str(value).split(), theirs.whole("--global-batch-size")
    if len(words) != 3 or not batch:
        raise UntranslatedError("is to be three numbers, beside --global-batch-size")
    start, increment, samples = map(whole, words)
    if start != increment or start >= batch or batch % start:
        raise UntranslatedError("in a deck the batch grows by as many sequences as it begins with")
    sizes = range(start, batch, increment)
    steps = sum(samples // len(sizes) // size for size in sizes)
    return {"batch.ramp_from": start, "batch.ramp_steps": steps}


def _kept(value: object, theirs: Theirs) -> Keys:
    """What of activations is kept."""
    if value == "selective":
        return {"memory.recompute": "selective"}
    if value != "full":
        raise UntranslatedError('is neither "selective" nor "full"')
    pieces = theirs.whole("--recompute-num-layers") or 1
    return {"memory.recompute": pieces if pieces > 1 else "full"}


def _sixteen(form: str) -> Rule:
    """Of bf16 and fp16, whose gradients it sums in fp32 and in 16 bits."""

    def rule(value: object, theirs: Theirs) -> Keys:
        if not switch(value):
            return {}
        summed = form == "bf16" or theirs.is_on("--accumulate-allreduce-grads-in-fp32")
        gradients = {"precision.gradients": "fp32" if summed else "compute"}
        return gradients if "--fp8-format" in theirs else gradients | {"precision.compute": form}

    return rule


def _first_scale(value: object, _: Theirs) -> Keys:
    most = 1 << 24
    if number(value) > most:
        raise UntranslatedError(f"is more than a deck's {most}, which is where it can begin")
    return {"precision.initial_loss_scale": number(value)}


def _dropout(value: object, _: Theirs) -> Keys:
    return {"model.dropout": number(value)}


def _attention_dropout(value: object, theirs: Theirs) -> Keys:
    if number(value) != theirs.number("--hidden-dropout"):
        raise UntranslatedError("is one with --hidden-dropout in a deck: model.dropout")
    return {}


def _before_softmax(value: object, theirs: Theirs) -> Keys:
    if not switch(value) or theirs.get("--moe-router-score-function") == "sigmoid":
        return {}  # probabilities by themselves are made to add up to one in any case
    return {"model.router_normalize": False}


def _of_adam(key: str) -> Rule:
    def rule(value: object, theirs: Theirs) -> Keys:
        return {key: number(value)} if theirs.get("--optimizer") in {None, "adam"} else {}

    return rule


def _momentum(value: object, theirs: Theirs) -> Keys:
    return {"optimizer.momentum": number(value)} if theirs.get("--optimizer") == "sgd" else {}


def _dropped(value: object, theirs: Theirs) -> Keys:
    if value == "position" or "--moe-expert-capacity-factor" not in theirs:
        return {}
    raise UntranslatedError("the last tokens are dropped in a deck, not those of the least probabilities")


def _cooldown_form(value: object, theirs: Theirs) -> Keys:
    if value == "linear" or str(theirs.get("--lr-decay-style")).lower() != "wsd":
        return {}
    raise UntranslatedError("the cooldown falls in a line in a deck")


def _queries(value: object, theirs: Theirs) -> Keys:
    return {"model.key_value_heads": whole(value)} if theirs.is_on("--group-query-attention") else {}


def _shared(value: object, theirs: Theirs) -> Keys:
    inner = theirs.whole("--moe-ffn-hidden-size") or theirs.whole("--ffn-hidden-size")
    if not inner or whole(value) % inner:
        raise UntranslatedError("is no multiple of an expert's width, as shared experts are in a deck")
    return {"model.shared_experts": whole(value) // inner}


def _frequency(value: object, _: Theirs) -> Keys:
    found = _LAYER_LIST.fullmatch(str(value).replace(" ", ""))
    if found:
        return {"model.dense_first": int(found[1])}
    try:
        every = whole(value)
    except UntranslatedError:
        raise UntranslatedError("is neither a number nor [0]*n+[1]*m") from None
    if every > 1:
        raise UntranslatedError(
            "begins with the first block, where a deck's model.expert_every ends with the last of so many"
        )
    return {}


def _experts(value: object, theirs: Theirs) -> Keys:
    router = {"fp32": "fp32", "fp64": "fp32"}.get(str(theirs.get("--moe-router-dtype")), "compute")
    keys = {"model.experts": whole(value), "model.router_dtype": router}
    biased = theirs.is_on("--moe-router-enable-expert-bias")
    return keys | ({"model.balance": "bias"} if biased else {})


def _balance(value: object, theirs: Theirs) -> Keys:
    if value == "none":
        return {} if theirs.is_on("--moe-router-enable-expert-bias") else {"model.balance": "none"}
    over = {"aux_loss": "micro_batch", "seq_aux_loss": "sequence"}.get(str(value))
    if over is None:
        raise UntranslatedError('is not what a deck can say ("aux_loss", "seq_aux_loss" or "none" it can)')
    return {"model.balance_over": over} if theirs.number("--moe-aux-loss-coeff") else {}


def _balance_loss(value: object, theirs: Theirs) -> Keys:
    if "--num-experts" not in theirs or theirs.get("--moe-router-load-balancing-type") == "none":
        return {}
    return {"model.balance_loss": number(value)}


def _held_out(value: object, _: Theirs) -> Keys:
    parts = [number(each) for each in str(value).replace(",", " ").split()]
    if not parts or not sum(parts):
        raise UntranslatedError("has no parts")
    shares = [*parts, 0.0, 0.0]
    return {"data.validation": float(f"{shares[1] / sum(parts):.4g}")}


def _held_out_sequences(value: object, theirs: Theirs) -> Keys:
    batch = theirs.whole("--global-batch-size")
    if not batch and "--eval-iters" not in theirs:
        return {}
    if not batch:
        raise UntranslatedError("is counted in sequences in a deck, and there is no --global-batch-size")
    return {"run.evaluate_sequences": max(1, whole(value) * batch)}


def _pieces(value: object, theirs: Theirs) -> Keys:
    """Of the sequence, which one tensor rank has none of."""
    size = "--tensor-model-parallel-size"
    alone = size not in theirs or theirs.whole(size) == 1
    return {"layout.sequence_parallel": True} if switch(value) and not alone else {}


def _of_documents(value: object, theirs: Theirs) -> Keys:
    """What data.document_mask does by itself."""
    if switch(value) and not theirs.is_on("--reset-attention-mask"):
        raise UntranslatedError("goes with data.document_mask alone, and there is no --reset-attention-mask")
    return {}


def _tensorboard(value: object, _: Theirs) -> Keys:
    """Write event files, which lie in the run's folder."""
    return {"report.tensorboard": bool(value)}


def _wandb(value: object, theirs: Theirs) -> Keys:
    """Report to W&B, whose project is that of an environment variable."""
    theirs.notes["--wandb-project"] = f"set WANDB_PROJECT={value}: a deck does not name W&B's project"
    return {"report.wandb": "online"}


def _of_names(names: Sequence[str], rule: Rule) -> dict[str, Rule]:
    return {f"--{name}": rule for name in names}


_SAME_OPTIMIZERS = ("sgd", "muon", "lion", "adafactor")
"""Optimizers with the same name in a deck."""

_OF_LAUNCHERS = (
    "nproc-per-node",
    "nnodes",
    "num-nodes",
    "num-gpus",
    "node-rank",
    "master-addr",
    "master-port",
    "rdzv-endpoint",
    "rdzv-id",
    "hostfile",
    "force-multi",
)

_MODEL: dict[str, Rule] = {
    "--num-layers": as_key("model.layers"),
    "--hidden-size": as_key("model.hidden"),
    "--num-attention-heads": as_key("model.heads"),
    "--ffn-hidden-size": as_key("model.mlp"),
    "--kv-channels": as_key("model.head_size"),
    "--group-query-attention": needless,
    "--num-query-groups": _queries,
    "--vocab-size": as_key("model.vocabulary"),
    "--make-vocab-size-divisible-by": needless,
    "--untie-embeddings-and-output-weights": lambda value, _: {"model.tied": not switch(value)},
    "--swiglu": needless,
    "--squared-relu": needless,
    "--normalization": only(("LayerNorm", "RMSNorm"), "is neither LayerNorm nor RMSNorm"),
    "--position-embedding-type": only(
        ("rope", "learned_absolute"), "are neither rotary nor learned, as a deck's models have them"
    ),
    "--use-rotary-position-embeddings": needless,
    "--disable-bias-linear": needless,
    "--add-qkv-bias": nothing("queries, keys and values of llama have no biases"),
    "--rotary-base": as_key("model.rope_base", number),
    "--rotary-percent": only((1, "1.0"), "rotary positions turn whole heads"),
    "--use-rope-scaling": nothing("rotary positions are not scaled"),
    "--rotary-interleaved": nothing("rotary positions turn halves of heads"),
    "--qk-layernorm": when_on({"model.query_key_norm": "head"}),
    "--norm-epsilon": as_key("model.norm_epsilon", number),
    "--layernorm-epsilon": as_key("model.norm_epsilon", number),
    "--init-method-std": as_key("model.initial_std", number),
    "--hidden-dropout": _dropout,
    "--attention-dropout": _attention_dropout,
    "--max-position-embeddings": needless,
    "--apply-layernorm-1p": nothing("the weights of norms are what is multiplied by"),
    "--multi-latent-attention": nothing("attention is that of heads of keys and values"),
    "--mtp-num-layers": nothing("one token ahead is predicted"),
    "--window-size": nothing("attention sees all tokens before"),
    "--num-experts": _experts,
    "--moe-router-topk": as_key("model.experts_per_token"),
    "--moe-ffn-hidden-size": as_key("model.expert_mlp"),
    "--moe-shared-expert-intermediate-size": _shared,
    "--moe-layer-freq": _frequency,
    "--moe-router-load-balancing-type": _balance,
    "--moe-aux-loss-coeff": _balance_loss,
    "--moe-z-loss-coeff": as_key("model.router_z_loss", number),
    "--moe-expert-capacity-factor": as_key("model.capacity", number),
    "--moe-token-drop-policy": _dropped,
    "--moe-router-score-function": choice("model.router", {"softmax": "softmax", "sigmoid": "sigmoid"}),
    "--moe-router-pre-softmax": _before_softmax,
    "--moe-router-enable-expert-bias": needless,
    "--moe-router-bias-update-rate": as_key("model.balance_rate", number),
    "--moe-router-num-groups": as_key("model.router_groups"),
    "--moe-router-group-topk": as_key("model.router_groups_per_token"),
    "--moe-router-topk-scaling-factor": as_key("model.router_scale", number),
    "--moe-router-dtype": needless,
}

_RUN: dict[str, Rule] = {
    "--train-iters": as_key("run.steps"),
    "--train-samples": _samples("run.steps"),
    "--seed": as_key("run.seed"),
    "--save": as_key("run.dir", text),
    "--save-interval": as_key("checkpoint.every"),
    "--load": nothing("`hpctrain resume RUN_DIR` goes on with a run; `hpctrain import` reads weights"),
    "--log-interval": as_key("run.log_every"),
    "--eval-interval": as_key("run.evaluate_every"),
    "--eval-iters": _held_out_sequences,
    "--exit-duration-in-mins": lambda value, _: {"run.time_limit": f"{whole(value)} min"},
    "--distributed-timeout-minutes": lambda value, _: {"stability.hang_seconds": f"{whole(value)} min"},
    "--async-save": when_on({"checkpoint.mode": "background"}),
    "--split": _held_out,
    "--reset-attention-mask": when_on({"data.document_mask": True}),
    "--reset-position-ids": _of_documents,
    "--eod-mask-loss": _of_documents,
    "--profile": when_on({"run.trace": True}),
    "--tensorboard-dir": _tensorboard,
    "--wandb-project": _wandb,
    "--wandb-exp-name": nothing("W&B shows a run under its run.title"),
    "--wandb-save-dir": nothing("W&B's files lie in the folder wandb of the run's folder"),
    "--wandb-entity": nothing("set the environment variable WANDB_ENTITY"),
    **_of_names(
        ("data-path", "train-data-path", "valid-data-path", "test-data-path", "mock-data"), nothing(_TOKENS)
    ),
    **_of_names(
        ("tokenizer-type", "tokenizer-model", "vocab-file", "merge-file"),
        nothing(_TOKENIZER),
    ),
}

_STEP: dict[str, Rule] = {
    "--micro-batch-size": as_key("batch.micro_size"),
    "--global-batch-size": as_key("batch.global_size"),
    "--rampup-batch-size": _ramp,
    "--seq-length": as_key("batch.sequence"),
    "--lr": as_key("learning_rate.peak", number),
    "--min-lr": _minimum,
    "--lr-decay-style": _decay,
    "--lr-decay-iters": as_key("learning_rate.decay_steps"),
    "--lr-decay-samples": _samples("learning_rate.decay_steps"),
    "--lr-warmup-iters": _warmup,
    "--lr-warmup-samples": _samples("learning_rate.warmup"),
    "--lr-warmup-fraction": _warmup_fraction,
    "--lr-wsd-decay-iters": as_key("learning_rate.cooldown"),
    "--lr-wsd-decay-samples": _samples("learning_rate.cooldown"),
    "--lr-wsd-decay-style": _cooldown_form,
    "--optimizer": choice("optimizer.name", {"adam": "adamw"} | {name: name for name in _SAME_OPTIMIZERS}),
    "--weight-decay": as_key("optimizer.weight_decay", number),
    "--start-weight-decay": nothing("the weight decay is the same in all steps"),
    "--end-weight-decay": nothing("the weight decay is the same in all steps"),
    "--clip-grad": as_key("optimizer.clip", number),
    "--adam-beta1": _of_adam("optimizer.beta1"),
    "--adam-beta2": _of_adam("optimizer.beta2"),
    "--adam-eps": _of_adam("optimizer.epsilon"),
    "--sgd-momentum": _momentum,
    "--bf16": _sixteen("bf16"),
    "--fp16": _sixteen("fp16"),
    "--fp8-format": lambda value, theirs: {
        "precision.compute": "fp8",
        **choice("precision.fp8_gradients", {"hybrid": "e5m2", "e4m3": "e4m3"})(value, theirs),
    },
    "--fp8-recipe": choice(
        "precision.fp8", {"delayed": "delayed", "tensorwise": "tensor", "mxfp8": "mx", "blockwise": "block"}
    ),
    "--fp8-amax-history-len": as_key("precision.fp8_history"),
    "--fp8-amax-compute-algo": only(("max",), "the scale follows from the largest maximum"),
    "--initial-loss-scale": _first_scale,
    "--loss-scale-window": as_key("precision.loss_scale_window", whole),
    "--loss-scale": nothing("the loss scale is dynamic"),
    "--accumulate-allreduce-grads-in-fp32": needless,
}

_LAYOUT: dict[str, Rule] = {
    "--tensor-model-parallel-size": as_key("layout.tensor"),
    "--pipeline-model-parallel-size": as_key("layout.pipeline"),
    "--num-layers-per-virtual-pipeline-stage": _chunks,
    "--num-virtual-stages-per-pipeline-rank": _virtual,
    "--context-parallel-size": as_key("layout.context"),
    "--cp-comm-type": choice("layout.context_form", {"p2p": "ring", "a2a": "all_to_all"}),
    "--expert-model-parallel-size": as_key("layout.expert"),
    "--expert-tensor-parallel-size": as_key("layout.expert_tensor"),
    "--sequence-parallel": _pieces,
    "--use-distributed-optimizer": lambda _, theirs: (
        {} if "--data-parallel-sharding-strategy" in theirs else {"layout.zero": 1}
    ),
    "--data-parallel-sharding-strategy": choice(
        "layout.zero", {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    ),
    "--use-torch-fsdp2": when_on({"layout.zero": 3}),
    "--checkpoint-activations": when_on({"memory.recompute": "full"}),
    "--cpu-optimizer": when_on({"memory.optimizer": "host"}),
    "--zero-stage": as_key("layout.zero"),
    "--deepspeed-config": nothing("give that file to --from by itself"),
    "--recompute-activations": when_on({"memory.recompute": "selective"}),
    "--recompute-granularity": _kept,
    "--recompute-method": only(("uniform",), "either all blocks are computed again, or none"),
    "--recompute-num-layers": needless,
    "--recompute-modules": only(("core_attn",), "attention alone is selected"),
    "--ddp-bucket-size": lambda value, _: {"communication.bucket_bytes": 4 * whole(value)},
    "--optimizer-cpu-offload": when_on({"memory.optimizer": "host"}),
    "--decoder-first-pipeline-num-layers": nothing("give the blocks of every part: layout.split = [...]"),
    "--decoder-last-pipeline-num-layers": nothing("give the blocks of every part: layout.split = [...]"),
    "--pipeline-model-parallel-layout": nothing("give the blocks of every part: layout.split = [...]"),
    "--account-for-embedding-in-pipeline-split": needless,
    "--account-for-loss-in-pipeline-split": needless,
    **_of_names(_OF_LAUNCHERS, nothing(_LAUNCH)),
}

_NEEDLESS = (
    "deepspeed",
    "data-impl",
    "use-mcore-models",
    "transformer-impl",
    "attention-backend",
    "use-flash-attn",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "tp-comm-overlap",
    "overlap-p2p-communication",
    "no-masked-softmax-fusion",
    "no-bias-gelu-fusion",
    "no-bias-swiglu-fusion",
    "no-bias-dropout-fusion",
    "no-rope-fusion",
    "no-gradient-accumulation-fusion",
    "cross-entropy-loss-fusion",
    "cross-entropy-fusion-impl",
    "attention-softmax-in-fp32",
    "no-async-tensor-model-parallel-allreduce",
    "distributed-backend",
    "dataloader-type",
    "num-workers",
    "no-create-attention-mask-in-dataloader",
    "ckpt-format",
    "use-dist-ckpt",
    "dist-ckpt-strategy",
    "auto-detect-ckpt-format",
    "no-save-optim",
    "no-load-optim",
    "no-load-rng",
    "finetune",
    "tensorboard-log-interval",
    "tensorboard-queue-size",
    "log-throughput",
    "log-params-norm",
    "log-num-zeros-in-grad",
    "log-timers-to-tensorboard",
    "log-memory-to-tensorboard",
    "log-validation-ppl-to-tensorboard",
    "log-progress",
    "log-straggler",
    "timing-log-level",
    "timing-log-option",
    "manual-gc",
    "manual-gc-interval",
    "empty-unused-memory-level",
    "moe-grouped-gemm",
    "moe-token-dispatcher-type",
    "moe-permute-fusion",
    "moe-shared-expert-overlap",
    "moe-per-layer-logging",
    "moe-enable-deepep",
    "override-opt-param-scheduler",
    "use-checkpoint-opt-param-scheduler",
    "data-cache-path",
    "use-precision-aware-optimizer",
    "distribute-saved-activations",
)
"""What changes no result, and is here anyway or has no counterpart."""

RULES: Mapping[str, Rule] = MappingProxyType(_MODEL | _RUN | _STEP | _LAYOUT | _of_names(_NEEDLESS, needless))
