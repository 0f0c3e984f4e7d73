"""Conversion of a DeepSpeed configuration, a JSON file, to deck keys.

Such a file describes neither the model nor the data, which the deck needs in addition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

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
    integer_above,
    number,
    sets,
    unsupported,
)

DEFAULTS: Mapping[str, object] = MappingProxyType(
    {"gradient_clipping": 0.0, "zero_optimization.stage": 0, "steps_per_print": 10}
)
"""Defaults of DeepSpeed, where a deck has others. More follow from the optimizer and the scheduler."""

_DEPTH = 8
_LARGEST_POWER = 24


def convert_configuration(configuration: Mapping[str, object]) -> Conversion:
    """Convert the content of a DeepSpeed configuration."""
    settings = dict(_flatten(configuration))
    automatic = sorted(name for name, value in settings.items() if value == "auto")
    options = SourceOptions(
        {name: value for name, value in settings.items() if name not in automatic},
        {name: value for name, value in _defaults(settings).items() if name not in automatic},
    )
    result = apply_rules("DeepSpeed", options, RULES)
    for name in automatic:
        result.report(
            name, "auto", "is filled in by the program that starts DeepSpeed (Trainer): set it in the deck"
        )
    return result


def _flatten(table: Mapping[str, object], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield all values with their dotted names. Tables that are switched off are left out."""
    if depth and table.get("enabled") is False:
        return
    for name, value in table.items():
        if not depth and name in _UNSUPPORTED_TABLES:
            if not isinstance(value, Mapping) or value.get("enabled") is not False:
                yield name, True
        elif isinstance(value, Mapping) and depth < _DEPTH:
            yield from _flatten(value, f"{prefix}{name}.", depth + 1)
        elif value is not None:
            yield f"{prefix}{name}", value


def _defaults(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults that DeepSpeed uses with the optimizer and the scheduler of a configuration."""
    optimizer = str(settings.get("optimizer.type")).lower()
    scheduler = str(settings.get("scheduler.type"))
    defaults = dict(DEFAULTS)
    if "adam" in optimizer:
        defaults |= {"optimizer.params.betas": [0.9, 0.999], "optimizer.params.lr": 1e-3}
    if optimizer == "onebitadam":
        defaults |= {"optimizer.params.freeze_step": 100_000}
    if "optimizer.type" in settings:
        defaults |= {"optimizer.params.weight_decay": 0.0}
    if scheduler.startswith("Warmup"):
        defaults |= {"scheduler.params.warmup_num_steps": 1000, "scheduler.params.warmup_type": "log"}
        cosine = scheduler == "WarmupCosineLR"
        final, peak = {"scheduler.params.cos_min_ratio": 1e-4}, {"scheduler.params.warmup_max_lr": 1e-3}
        defaults |= final if cosine else peak
    elif "optimizer.type" in settings and "scheduler.type" not in settings:
        defaults |= {"scheduler.type": "constant"}
    return defaults


def _accumulation(value: object, options: SourceOptions) -> None:
    """Check the number of micro-batches of a step, which follows from other keys in a deck."""
    micro, batch = (
        options.read("train_micro_batch_size_per_gpu", integer),
        options.read("train_batch_size", integer),
    )
    if micro and batch and integer(value) > 0 and batch % (micro * integer(value)):
        product = micro * integer(value)
        raise UnsupportedOptionError(
            f"times the micro-batch is {product}, but train_batch_size = {batch} is not a multiple of it"
        )
    if "train_batch_size" not in options and integer(value) != 1:
        raise UnsupportedOptionError(
            "follows from batch.global_size: set that to this x the micro-batch x the number of data ranks"
        )


def _optimizer(value: object, options: SourceOptions) -> object:
    """Return the name of the optimizer, and a compression of gradients or None."""
    if str(value).lower() == "onebitadam":
        return "adamw", "onebit"
    name = choice(value, _OPTIMIZERS)
    if str(value).lower() == "adam" and options.get("optimizer.params.adam_w_mode") is False:
        raise UnsupportedOptionError(
            "adds the weight decay to the gradient with adam_w_mode = false; in a deck it is decoupled"
        )
    return name, None


def _betas(value: object, _: SourceOptions) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise UnsupportedOptionError("must be two numbers")
    return number(value[0]), number(value[1])


def _optimizer_rate(value: object, options: SourceOptions) -> float:
    """Return the learning rate of the optimizer, unless the scheduler sets another one."""
    peak = options.read("scheduler.params.warmup_max_lr", number)
    if peak not in {None, number(value)}:
        raise UnsupportedOptionError(f"is overridden by scheduler.params.warmup_max_lr = {peak}")
    return number(value)


def _schedule(value: object, options: SourceOptions) -> object:
    """Return the decay, the steps of the warm-up or None, and the floor or None."""
    if value == "constant" and "scheduler.type" not in options:
        return "constant", 0, None
    decay = _DECAYS.get(str(value))
    if decay is None:
        raise UnsupportedOptionError(f"is not supported (supported: {', '.join(_DECAYS)})")
    return decay, None, 0.0 if decay == "linear" else None


def _initial_scale(value: object, _: SourceOptions) -> float:
    if integer(value) > _LARGEST_POWER:
        raise UnsupportedOptionError(f"exceeds {_LARGEST_POWER}: a deck starts at 2^{_LARGEST_POWER} at most")
    return float(2 ** integer(value))


def _loss_scale(value: object, _: SourceOptions) -> None:
    if number(value):
        raise UnsupportedOptionError("the loss scale is always dynamic")


def _gradients(value: object, options: SourceOptions) -> object:
    compute = "bf16" if options.is_on("bf16.enabled") else "fp16"
    return choice(value, {"fp32": "fp32", compute: "compute"})


def _recomputed_blocks(value: object) -> object:
    blocks = integer(value)
    return (blocks if blocks > 1 else "full") if blocks > 0 else None


def _total_steps(value: object, _: SourceOptions) -> tuple[int, int]:
    return integer(value), integer(value)


def _context_ranks(value: object, _: SourceOptions) -> object:
    return (integer(value), "all_to_all") if integer(value) > 1 else None


_OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "adamw",
    "sgd": "sgd",
    "lion": "lion",
    "muon": "muon",
}
_BETAS = ("optimizer.{optimizer}.beta1", "optimizer.{optimizer}.beta2")
_DECAYS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OFFLOAD = "pin_memory buffer_count buffer_size max_in_cpu fast_init pipeline_read pipeline_write"
_DEVICES = {"cpu": "host", "nvme": "disk", "none": "device"}

_FROM_ZERO = "the warm-up starts at 0"
_HALVED = "the loss scale is halved at every overflow"
_OBSERVER = "is not part of a step: runs are observed with `hpctrain status`, `run.trace` and metrics.jsonl"
_OTHER_METHOD = "is a training method that hpctrain does not have"

_UNSUPPORTED_TABLES: Mapping[str, Rule] = MappingProxyType(
    {
        **each("tensorboard wandb comet csv_monitor", unsupported(_OBSERVER)),
        "flops_profiler": unsupported("is what `hpctrain plan` and `hpctrain bench train` show"),
        "comms_logger": unsupported("is always recorded, in ledger.json"),
        "autotuning": unsupported('is what layout = "auto" and `hpctrain plan --search` do'),
        "elasticity": unsupported("is not needed: `hpctrain resume` accepts any number of ranks"),
        "aio": unsupported("files are read and written as the disk allows"),
        **each(
            "compression_training sparse_attention progressive_layer_drop curriculum_learning data_efficiency"
            " eigenvalue hybrid_engine quantize_training",
            unsupported(_OTHER_METHOD),
        ),
        "amp": unsupported("is a format of parameters in a deck: precision.compute"),
    }
)
"""Rules of tables that have no counterpart as a whole. Their settings are not looked at."""

_ZERO: Mapping[str, Rule] = MappingProxyType(
    {
        "stage": sets("layout.zero"),
        "offload_optimizer.device": chooses("memory.optimizer", _DEVICES),
        "offload_param.device": chooses("memory.parameters", _DEVICES),
        **each("offload_optimizer.nvme_path offload_param.nvme_path", sets("memory.offload_dir", str)),
        "offload_optimizer.ratio": expects(1, 1.0, refusal="either all or nothing of the state is offloaded"),
        "cpu_offload": flag("memory.optimizer", "host"),
        "reduce_bucket_size": sets("communication.bucket_bytes", fp32_bytes),
        "zero_hpz_partition_size": sets("layout.zero_group", integer_above(1)),
        "mics_shard_size": sets("layout.zero_group", integer_above(0)),
        "zero_quantized_weights": unsupported(
            "weights are gathered in 8 bits only in FP8, with precision.fp8_gather"
        ),
        "zero_quantized_gradients": unsupported(
            "gradients are reduced in fewer bits with communication.compress, which needs layout.zero 0 or 1"
        ),
        **each(
            "ignore_unused_parameters allgather_partitions allgather_bucket_size overlap_comm reduce_scatter"
            " contiguous_gradients round_robin_gradients sub_group_size stage3_max_live_parameters"
            " stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold"
            " stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold"
            " elastic_checkpoint load_from_fp32_weights use_all_reduce_for_fetch_params",
            UNNEEDED,
        ),
        **each(_OFFLOAD, UNNEEDED, "offload_optimizer."),
        **each(_OFFLOAD, UNNEEDED, "offload_param."),
    }
)
"""Rules of the settings of the table `zero_optimization`."""

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "train_batch_size": sets("batch.global_size"),
        "train_micro_batch_size_per_gpu": sets("batch.micro_size"),
        "gradient_accumulation_steps": Rule((), _accumulation),
        "gradient_clipping": sets("optimizer.clip", number),
        "steps_per_print": sets("run.log_every"),
        "seed": sets("run.seed"),
        "optimizer.type": Rule(("optimizer.name", "communication.compress"), _optimizer),
        "optimizer.params.lr": Rule(("learning_rate.peak",), _optimizer_rate),
        "optimizer.params.betas": Rule(
            ("optimizer.{optimizer}.beta1", "optimizer.{optimizer}.beta2"), _betas
        ),
        "optimizer.params.eps": sets("optimizer.{optimizer}.epsilon", number),
        "optimizer.params.weight_decay": sets("optimizer.weight_decay", number),
        "optimizer.params.momentum": sets("optimizer.{optimizer}.momentum", number),
        "optimizer.params.nesterov": flag("optimizer.{optimizer}.nesterov"),
        "optimizer.params.freeze_step": sets("communication.warmup"),
        "optimizer.params.bias_correction": expects(True, refusal="Adam's moments are always bias-corrected"),
        "optimizer.params.amsgrad": unsupported("AMSGrad is not available"),
        "scheduler.type": Rule(
            ("learning_rate.decay", "learning_rate.warmup", "learning_rate.floor"), _schedule
        ),
        "scheduler.params.warmup_max_lr": sets("learning_rate.peak", number),
        "scheduler.params.warmup_num_steps": sets("learning_rate.warmup"),
        "scheduler.params.warmup_type": expects("linear", refusal="the warm-up is linear"),
        **each(
            "scheduler.params.warmup_min_lr scheduler.params.warmup_min_ratio",
            expects(0, 0.0, refusal=_FROM_ZERO),
        ),
        "scheduler.params.total_num_steps": Rule(("learning_rate.decay_steps", "run.steps"), _total_steps),
        "scheduler.params.cos_min_ratio": sets("learning_rate.floor", number),
        **each("bf16.enabled bfloat16.enabled", flag("precision.compute", "bf16")),
        "fp16.enabled": flag("precision.compute", "fp16"),
        "fp16.auto_cast": unsupported("layers compute in the format of their weights"),
        "fp16.loss_scale": Rule((), _loss_scale),
        "fp16.initial_scale_power": Rule(("precision.initial_loss_scale",), _initial_scale),
        "fp16.loss_scale_window": sets("precision.loss_scale_window"),
        "fp16.hysteresis": expects(1, refusal=_HALVED),
        "fp16.consecutive_hysteresis": unsupported(_HALVED),
        "fp16.fp16_master_weights_and_grads": unsupported("master weights are always fp32"),
        "data_types.grad_accum_dtype": Rule(("precision.gradients",), _gradients),
        "communication_data_type": unsupported("gradients are reduced as they are: precision.gradients"),
        "sparse_gradients": unsupported("gradients of embeddings are reduced as dense tensors"),
        "activation_checkpointing.cpu_checkpointing": flag("memory.activations", "host"),
        "activation_checkpointing.number_checkpoints": unsupported(
            "set the number of blocks that are recomputed together: memory.recompute"
        ),
        "pipeline.stages": sets("layout.pipeline"),
        "pipeline.activation_checkpoint_interval": sets("memory.recompute", _recomputed_blocks),
        **each("tensor_parallel.autotp_size tensor_parallel.tp_size", sets("layout.tensor")),
        "sequence_parallel_size": Rule(("layout.context", "layout.context_form"), _context_ranks),
        "wall_clock_breakdown": flag("run.trace"),
        "checkpoint.use_node_local_storage": unsupported(
            "a checkpoint is one file that all nodes can access"
        ),
        **each(
            "optimizer.params.cuda_aware optimizer.params.comm_backend_name optimizer.params.adam_w_mode"
            " optimizer.params.torch_adam fp16.min_loss_scale prescale_gradients gradient_predivide_factor"
            " fp32_allreduce activation_checkpointing.partition_activations"
            " activation_checkpointing.contiguous_memory_optimization"
            " activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile"
            " zero_allow_untested_optimizer zero_force_ds_cpu_optimizer dump_state memory_breakdown"
            " disable_allgather checkpoint.load_universal checkpoint.tag_validation"
            " checkpoint.parallel_write.pipeline_stage",
            UNNEEDED,
        ),
        **{f"zero_optimization.{name}": rule for name, rule in _ZERO.items()},
        **_UNSUPPORTED_TABLES,
    }
)
"""Rule of each setting by its dotted name."""
