"""The configuration of DeepSpeed, a JSON file, as keys of a deck.

It says nothing of the model and the data: the deck wants these besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

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
    translate,
    when_on,
    whole,
)

NAME = "DeepSpeed"

DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "gradient_clipping": 0.0,
        "zero_optimization.stage": 0,
        "steps_per_print": 10,
    }
)
_OF_ADAM: Mapping[str, object] = MappingProxyType(
    {"optimizer.params.betas": [0.9, 0.999], "optimizer.params.lr": 1e-3}
)
_OF_WARMUP: Mapping[str, object] = MappingProxyType(
    {"scheduler.params.warmup_num_steps": 1000, "scheduler.params.warmup_type": "log"}
)
_AUTO = "is filled in by what starts DeepSpeed (Trainer's arguments): give the key here"
_DEPTH = 8

_TRAINER = (
    "is not part of a step: leave it to what watches a run (`hpctrain status`, `run.trace`, metrics.jsonl)"
)
_OTHER_METHOD = "is another method than any of a deck"


def translated(configuration: Mapping[str, object]) -> Translated:
    """The keys of a configuration, and what no key says."""
    given = dict(_flat(configuration))
    auto = {name for name, value in given.items() if value == "auto"}
    kind = str(given.get("scheduler.type"))
    defaults = dict(DEFAULTS)
    defaults |= _OF_ADAM if "adam" in str(given.get("optimizer.type")).lower() else {}
    one_bit = str(given.get("optimizer.type")).lower() == "onebitadam"
    defaults |= {"optimizer.params.freeze_step": 100_000} if one_bit else {}
    defaults |= {"optimizer.params.weight_decay": 0.0} if "optimizer.type" in given else {}
    if kind.startswith("Warmup"):
        defaults |= _OF_WARMUP
        defaults |= {"scheduler.params.warmup_max_lr": 0.001} if kind != "WarmupCosineLR" else {}
        defaults |= {"scheduler.params.cos_min_ratio": 0.0001} if kind == "WarmupCosineLR" else {}
    elif "optimizer.type" in given and "scheduler.type" not in given:
        defaults["scheduler.type"] = "constant"
    settled = {name: value for name, value in defaults.items() if name not in auto}
    theirs = Theirs({name: value for name, value in given.items() if name not in auto}, settled)
    found = translate(theirs, RULES, f"is no setting of {NAME} that is known here")
    for name in sorted(auto):
        found.leave(name, "auto", _AUTO)
    return found


def _flat(table: Mapping[str, object], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Values by their names with those of tables before them; a table that is off has none."""
    if depth and table.get("enabled") is False:
        return
    for name, value in table.items():
        path = f"{prefix}{name}"
        if not depth and name in _TABLES:
            if not isinstance(value, Mapping) or value.get("enabled") is not False:
                yield name, True
        elif isinstance(value, Mapping) and depth < _DEPTH:
            yield from _flat(value, f"{path}.", depth + 1)
        elif value is not None:
            yield path, value


def _accumulated(value: object, theirs: Theirs) -> Keys:
    """What follows from the batch and the ranks."""
    micro, batch = theirs.whole("train_micro_batch_size_per_gpu"), theirs.whole("train_batch_size")
    if micro and batch and whole(value) > 0 and batch % (micro * whole(value)):
        made = micro * whole(value)
        raise UntranslatedError(
            f"x the micro-batch makes {made}, of which train_batch_size = {batch} is no multiple"
        )
    if "train_batch_size" in theirs or whole(value) == 1:
        return {}
    raise UntranslatedError(
        "follows in a deck from batch.global_size: give that, as this x the micro-batch x the data ranks"
    )


def _optimizer(value: object, theirs: Theirs) -> Keys:
    names = {
        "adam": "adamw",
        "adamw": "adamw",
        "fusedadam": "adamw",
        "sgd": "sgd",
        "lion": "lion",
        "muon": "muon",
    }
    if str(value).lower() == "onebitadam":
        return {"optimizer.name": "adamw", "communication.compress": "onebit"}
    keys = choice("optimizer.name", names)(value, theirs)
    if str(value).lower() == "adam" and theirs.get("optimizer.params.adam_w_mode") is False:
        raise UntranslatedError("with adam_w_mode = false decays through the gradient; a deck's is decoupled")
    return keys


def _betas(value: object, _: Theirs) -> Keys:
    if not isinstance(value, list) or len(value) != 2:
        raise UntranslatedError("are no two numbers")
    return {"optimizer.beta1": number(value[0]), "optimizer.beta2": number(value[1])}


def _peak(value: object, theirs: Theirs) -> Keys:
    """The optimizer's rate, unless the scheduler has another one."""
    other = theirs.number("scheduler.params.warmup_max_lr")
    if other not in {None, number(value)}:
        raise UntranslatedError(f"gives way to scheduler.params.warmup_max_lr = {other}")
    return {"learning_rate.peak": number(value)}


def _schedule(value: object, theirs: Theirs) -> Keys:
    if value == "constant" and "scheduler.type" not in theirs:
        return {"learning_rate.decay": "constant", "learning_rate.warmup": 0}
    decays = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    decay = decays.get(str(value))
    if decay is None:
        known = ", ".join(decays)
        raise UntranslatedError(f"is not what a deck can say ({known} it can)")
    return {"learning_rate.decay": decay} | ({"learning_rate.floor": 0.0} if decay == "linear" else {})


def _offload(key: str) -> Rule:
    return choice(key, {"cpu": "host", "nvme": "disk", "none": "device"})


def _scale_power(value: object, _: Theirs) -> Keys:
    most = 24
    if whole(value) > most:
        raise UntranslatedError(f"is more than {most}: a deck's scale begins at 2^{most} at the most")
    return {"precision.initial_loss_scale": float(2 ** whole(value))}


def _constant_scale(value: object, _: Theirs) -> Keys:
    if number(value):
        raise UntranslatedError("the loss scale is dynamic")
    return {}


def _gradients(value: object, theirs: Theirs) -> Keys:
    half = "bf16" if theirs.is_on("bf16.enabled") else "fp16"
    kinds = {"fp32": "fp32", half: "compute"}
    return choice("precision.gradients", kinds)(value, theirs)


def _checkpointing(value: object, _: Theirs) -> Keys:
    blocks = whole(value)
    return {"memory.recompute": blocks if blocks > 1 else "full"} if blocks > 0 else {}


_STEP: dict[str, Rule] = {
    "train_batch_size": as_key("batch.global_size"),
    "train_micro_batch_size_per_gpu": as_key("batch.micro_size"),
    "gradient_accumulation_steps": _accumulated,
    "gradient_clipping": as_key("optimizer.clip", number),
    "steps_per_print": as_key("run.log_every"),
    "seed": as_key("run.seed"),
    "optimizer.type": _optimizer,
    "optimizer.params.lr": _peak,
    "optimizer.params.betas": _betas,
    "optimizer.params.eps": as_key("optimizer.epsilon", number),
    "optimizer.params.weight_decay": as_key("optimizer.weight_decay", number),
    "optimizer.params.momentum": as_key("optimizer.momentum", number),
    "optimizer.params.nesterov": when_on({"optimizer.nesterov": True}),
    "optimizer.params.freeze_step": as_key("communication.warmup"),
    "optimizer.params.cuda_aware": needless,
    "optimizer.params.comm_backend_name": needless,
    "optimizer.params.adam_w_mode": needless,
    "optimizer.params.torch_adam": needless,
    "optimizer.params.bias_correction": only((True,), "the bias of moments is corrected"),
    "optimizer.params.amsgrad": nothing("there is no AMSGrad"),
    "scheduler.type": _schedule,
    "scheduler.params.warmup_max_lr": as_key("learning_rate.peak", number),
    "scheduler.params.warmup_min_lr": only((0, 0.0), "the warm-up begins at nought"),
    "scheduler.params.warmup_num_steps": as_key("learning_rate.warmup"),
    "scheduler.params.warmup_type": only(("linear",), "the warm-up is linear"),
    "scheduler.params.total_num_steps": lambda value, _: {
        "learning_rate.decay_steps": whole(value),
        "run.steps": whole(value),
    },
    "scheduler.params.cos_min_ratio": as_key("learning_rate.floor", number),
    "scheduler.params.warmup_min_ratio": only((0, 0.0), "the warm-up begins at nought"),
}

_FORMATS: dict[str, Rule] = {
    "bf16.enabled": when_on({"precision.compute": "bf16"}),
    "bfloat16.enabled": when_on({"precision.compute": "bf16"}),
    "fp16.enabled": when_on({"precision.compute": "fp16"}),
    "fp16.auto_cast": nothing("layers compute in the format of their weights"),
    "fp16.loss_scale": _constant_scale,
    "fp16.initial_scale_power": _scale_power,
    "fp16.loss_scale_window": as_key("precision.loss_scale_window"),
    "fp16.hysteresis": only((1,), "the loss scale halves at every overflow"),
    "fp16.consecutive_hysteresis": nothing("the loss scale halves at every overflow"),
    "fp16.min_loss_scale": needless,
    "fp16.fp16_master_weights_and_grads": nothing("master weights are always fp32"),
    "data_types.grad_accum_dtype": _gradients,
    "communication_data_type": nothing("sums are of gradients as they are kept: precision.gradients"),
    "prescale_gradients": needless,
    "gradient_predivide_factor": needless,
    "fp32_allreduce": needless,
    "sparse_gradients": nothing("gradients of tables are summed whole"),
}

_ZERO: dict[str, Rule] = {
    "stage": as_key("layout.zero"),
    "offload_optimizer.device": _offload("memory.optimizer"),
    "offload_param.device": _offload("memory.parameters"),
    "offload_optimizer.nvme_path": as_key("memory.offload_dir", str),
    "offload_param.nvme_path": as_key("memory.offload_dir", str),
    "offload_optimizer.ratio": only((1, 1.0), "all of the optimizer's state goes, or none"),
    "cpu_offload": when_on({"memory.optimizer": "host"}),
    "reduce_bucket_size": lambda value, _: {"communication.bucket_bytes": 4 * int(number(value))},
    "zero_hpz_partition_size": lambda value, _: (
        {"layout.zero_group": whole(value)} if whole(value) > 1 else {}
    ),
    "mics_shard_size": lambda value, _: {"layout.zero_group": whole(value)} if whole(value) > 0 else {},
    "zero_quantized_weights": nothing(
        "weights are gathered in 8 bits with precision.fp8_gather, in FP8 alone"
    ),
    "zero_quantized_gradients": nothing("sums in fewer bits are communication.compress, with zero 0 or 1"),
    "ignore_unused_parameters": needless,
    **dict.fromkeys(
        (
            "allgather_partitions",
            "allgather_bucket_size",
            "overlap_comm",
            "reduce_scatter",
            "contiguous_gradients",
            "round_robin_gradients",
            "sub_group_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_module_granularity_threshold",
            "elastic_checkpoint",
            "load_from_fp32_weights",
            "use_all_reduce_for_fetch_params",
            *(
                f"{what}.{name}"
                for what in ("offload_optimizer", "offload_param")
                for name in (
                    "pin_memory",
                    "buffer_count",
                    "buffer_size",
                    "max_in_cpu",
                    "fast_init",
                    "pipeline_read",
                    "pipeline_write",
                )
            ),
        ),
        needless,
    ),
}

_OTHERS: dict[str, Rule] = {
    "activation_checkpointing.partition_activations": needless,
    "activation_checkpointing.contiguous_memory_optimization": needless,
    "activation_checkpointing.synchronize_checkpoint_boundary": needless,
    "activation_checkpointing.profile": needless,
    "activation_checkpointing.cpu_checkpointing": when_on({"memory.activations": "host"}),
    "activation_checkpointing.number_checkpoints": nothing("give the blocks of a piece: memory.recompute"),
    "pipeline.stages": as_key("layout.pipeline"),
    "pipeline.activation_checkpoint_interval": _checkpointing,
    "tensor_parallel.autotp_size": as_key("layout.tensor"),
    "tensor_parallel.tp_size": as_key("layout.tensor"),
    "sequence_parallel_size": lambda value, _: (
        {"layout.context": whole(value), "layout.context_form": "all_to_all"} if whole(value) > 1 else {}
    ),
    "zero_allow_untested_optimizer": needless,
    "zero_force_ds_cpu_optimizer": needless,
    "wall_clock_breakdown": lambda value, _: {"run.trace": True} if switch(value) else {},
    "dump_state": needless,
    "memory_breakdown": needless,
    "disable_allgather": needless,
    "checkpoint.load_universal": needless,
    "checkpoint.use_node_local_storage": nothing("a checkpoint is one file, which all nodes see"),
    "checkpoint.tag_validation": needless,
    "checkpoint.parallel_write.pipeline_stage": needless,
}

_TABLES: Mapping[str, str] = MappingProxyType(
    {
        "tensorboard": _TRAINER,
        "wandb": _TRAINER,
        "comet": _TRAINER,
        "csv_monitor": _TRAINER,
        "flops_profiler": "is what `hpctrain plan` and `hpctrain bench train` tell",
        "comms_logger": "is kept anyway: ledger.json",
        "autotuning": 'is what layout = "auto" does, and `hpctrain plan --search`',
        "elasticity": "is not needed: `hpctrain resume` goes on with any number of ranks",
        "aio": "files are read and written as the disk takes them",
        "compression_training": _OTHER_METHOD,
        "sparse_attention": _OTHER_METHOD,
        "progressive_layer_drop": _OTHER_METHOD,
        "curriculum_learning": _OTHER_METHOD,
        "data_efficiency": _OTHER_METHOD,
        "eigenvalue": _OTHER_METHOD,
        "hybrid_engine": _OTHER_METHOD,
        "quantize_training": _OTHER_METHOD,
        "amp": "is a format of weights here: precision.compute",
    }
)
"""Tables of settings of which no key is."""


RULES: Mapping[str, Rule] = MappingProxyType(
    _STEP
    | _FORMATS
    | {f"zero_optimization.{name}": rule for name, rule in _ZERO.items()}
    | _OTHERS
    | {name: nothing(why) for name, why in _TABLES.items()}
)
