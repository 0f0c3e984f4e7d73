"""A strategy of small decks that could well be run, for one rank or a few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as some

from hpctrain.pipeline.generate import NAMES

WHOLE: dict[str, str] = {
    "run.steps": "1",
    "run.device": '"cpu"',
    "run.log_every": "1",
    "model.family": '"gpt2"',
    "model.layers": "2",
    "model.hidden": "16",
    "model.heads": "2",
    "batch.global_size": "2",
    "batch.sequence": "16",
    "machine.peak_flops": "1e10",
}

# Of each key, values among which some fit each other and some do not.
VALUES: dict[str, list[str]] = {
    "run.steps": ["1", "2"],
    "run.seed": ["0", "9223372036854775807"],
    "run.evaluate_every": ["1", "2"],
    "run.evaluate_sequences": ["1", "100"],
    "run.noise_scale_steps": ["1", "20"],
    "run.time_limit": ['"1 h"'],
    "run.time_margin": ["0", "30", "7200"],
    "run.threads": ["1", "2"],
    "run.trace": ["true"],
    "run.trace_steps": ["1", "1000000000000"],
    "model.family": ['"llama"'],
    "model.layers": ["1", "3", "4"],
    "model.hidden": ["1", "6", "12", "24", "32"],
    "model.heads": ["1", "3", "4"],
    "model.key_value_heads": ["1", "2", "3"],
    "model.head_size": ["1", "4", "6"],
    "model.query_key_norm": ['"head"', '"all"'],
    "model.mlp": ["1", "7", "40"],
    "model.vocabulary": ["2", "257", "300"],
    "model.tied": ["true", "false"],
    "model.frozen": [
        "[]",
        '["embedding.*"]',
        '["blocks.0.*"]',
        '["blocks.1.*", "final_norm.*"]',
        '["blocks.*"]',
        '["*"]',
        '["head.weight"]',
        '["*.bias"]',
        '["*.query.weight"]',
        '["blocks.0.attention.query.*"]',
        '["blocks.[0-1].attention_norm.*"]',
    ],
    "model.dropout": ["0.1", "0.99"],
    "model.rope_base": ["2.0", "1e-300", "1e300"],
    "model.norm_epsilon": ["1e-30", "1e30"],
    "model.initial_std": ["1e-30", "1e3"],
    "model.parametrization": ['"mup"'],
    "model.base_width": ["1", "8", "64"],
    "model.base_head_size": ["1", "16"],
    "data.validation": ["0", "1e-9", "0.3", "0.5", "0.999"],
    "layout.data": ["1", "2"],
    "layout.tensor": ["2"],
    "layout.context": ["2"],
    "layout.pipeline": ["2", "3"],
    "layout.schedule": [f'"{name}"' for name in (*NAMES, "nonsense")],
    "layout.chunks": ["2", "3"],
    "layout.split": ['"balanced"', "[2]", "[1, 1]", "[1, 2]", "[]"],
    "layout.zero": ["1", "2", "3"],
    "layout.zero_group": ["1", '"node"', "2"],
    "layout.replicas": ["2", "3"],
    "layout.sequence_parallel": ["true"],
    "layout.context_form": ['"all_to_all"'],
    "batch.global_size": ["1", "3", "4", "8"],
    "batch.micro_size": ["2", "3"],
    "batch.sequence": ["1", "2", "63", "64", "500", "999", "1000", "2000"],
    "batch.ramp_from": ["1", "2", "4"],
    "batch.ramp_steps": ["1", "5"],
    "memory.recompute": ["1", "2", "3", '"full"', '"selective"', '"sqrt"'],
    "memory.activations": ['"host"', '"disk"'],
    "memory.activation_format": ['"bf16"', '"int8"'],
    "memory.keep_gathered": ["1", "5"],
    "memory.accumulate": ['"sliced"'],
    "memory.optimizer": ['"host"', '"disk"'],
    "memory.parameters": ['"host"', '"disk"'],
    "memory.offload_buffer": ["4096", '"1 MB"'],
    "optimizer.name": ['"sgd"', '"lion"', '"schedule-free"'],
    "optimizer.beta1": ["0", "0.999999"],
    "optimizer.beta2": ["0", "0.999999"],
    "optimizer.epsilon": ["1e-300", "1e300"],
    "optimizer.weight_decay": ["0", "1e300"],
    "optimizer.clip": ["0", "1e-300", "1e300"],
    "optimizer.restart": ["true"],
    "learning_rate.peak": ["1e-300", "1e300"],
    "learning_rate.warmup": ["0", "1", "5"],
    "learning_rate.decay": ['"linear"', '"constant"', '"wsd"', '"inverse-sqrt"'],
    "learning_rate.decay_steps": ["1", "9223372036854775807"],
    "learning_rate.cooldown": ["0", "1", "9223372036854775807"],
    "learning_rate.floor": ["0", "1"],
    "learning_rate.reference_batch": ["1", "7"],
    "precision.compute": ['"bf16"', '"fp16"', '"fp8"'],
    "precision.fp8": ['"tensor"', '"row"', '"block"', '"mx"'],
    "precision.fp8_history": ["1", "2"],
    "precision.fp8_gradients": ['"e4m3"'],
    "precision.fp8_exclude": ['["head"]', '["blocks.0.*"]', '["blocks.*"]', '["*.query"]', '["nothing"]'],
    "precision.fp8_watch": ["1", "2"],
    "precision.gradients": ['"compute"'],
    "precision.initial_loss_scale": ["1e-30", "1e300"],
    "precision.loss_scale_window": ["1", "9223372036854775807"],
    "communication.transport": ['"mpi"', '"nccl"'],
    "communication.bucket_bytes": ["1", "100", "9223372036854775807"],
    "communication.check": ["true"],
    "communication.local_steps": ["2", "1000"],
    "communication.outer": ['"diloco"'],
    "communication.outer_learning_rate": ["1e-300", "1"],
    "communication.outer_momentum": ["0", "0.999999"],
    "communication.fragments": ["2", "3"],
    "communication.delay": ["1", "2"],
    "communication.blend": ["0.5", "1"],
    "communication.outer_format": ['"bf16"', '"int4"'],
    "communication.compress": ['"int8"', '"sign"', '"onebit"', '"topk"', '"powersgd"'],
    "communication.rank": ["1", "9223372036854775807"],
    "communication.compress_between": ['"nodes"'],
    "communication.ratio": ["0.001", "1.0"],
    "communication.warmup": ["1", "9223372036854775807"],
    "communication.error_feedback": ["false"],
    "checkpoint.every": ["1", "2"],
    "checkpoint.keep": ["1", "9223372036854775807"],
    "checkpoint.keep_every": ["1", "2"],
    "checkpoint.mode": ['"background"'],
    "checkpoint.buffer": ["1000", "65536"],
    "stability.hang_seconds": ["0", "3600"],
    "stability.check_parameters": ["false"],
    "stability.straggler_factor": ["0", "1", "1e300"],
    "stability.z_loss": ["1e-4", "1"],
    "stability.verify_layout": ["true"],
    "machine.bind": ["true"],
    "machine.ranks_per_node": ["1"],
}


@some.composite
def small_decks(draw: Callable[[Any], Any], most: int = 8) -> str:
    """A deck with other values than the usual in up to `most` keys; `data.tokens` is left to `--set`."""
    keys = dict(WHOLE)
    for key in draw(some.lists(some.sampled_from(sorted(VALUES)), max_size=most, unique=True)):
        keys[key] = draw(some.sampled_from(VALUES[key]))
    lines: dict[str, list[str]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        lines.setdefault(section, [f"[{section}]"]).append(f"{name} = {value}")
    return "\n".join(line for section in lines.values() for line in section) + "\n"
