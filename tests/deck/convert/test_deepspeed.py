"""Tests of deck/convert/deepspeed.py: conversion of each setting, and reports of unsupported ones."""

from __future__ import annotations

import pytest

from hpctrain.deck.convert import deepspeed
from hpctrain.deck.convert.deepspeed import convert_configuration, deepspeed_table
from hpctrain.deck.convert.option_values import CONVERSIONS
from hpctrain.deck.schema import field_of

Table = dict[str, object]


def keys(configuration: Table) -> dict[str, object]:
    result = convert_configuration(configuration)
    return {key: value for key, value in result.keys.items() if key not in result.defaults}


@pytest.mark.parametrize(
    ("configuration", "expected"),
    [
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            {"batch.global_size": 64, "batch.micro_size": 4},
        ),
        ({"gradient_clipping": 1.0, "steps_per_print": 50}, {"optimizer.clip": 1.0, "run.log_every": 50}),
        (
            {
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": 1e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 3e-7},
                }
            },
            {
                "optimizer.name": "adamw",
                "learning_rate.peak": 1e-4,
                "optimizer.adamw.beta1": 0.8,
                "optimizer.adamw.beta2": 0.99,
                "optimizer.adamw.epsilon": 1e-7,
                "optimizer.weight_decay": 3e-7,
            },
        ),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, {"precision.compute": "bf16"}),
        (
            {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 500}},
            {
                "precision.compute": "fp16",
                "precision.initial_loss_scale": 65536.0,
                "precision.loss_scale_window": 500,
            },
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/local"},
                    "offload_param": {"device": "cpu"},
                    "reduce_bucket_size": 5e8,
                    "zero_hpz_partition_size": 8,
                }
            },
            {
                "layout.zero": 3,
                "memory.optimizer": "disk",
                "memory.offload_dir": "/local",
                "memory.parameters": "host",
                "communication.bucket_bytes": 2_000_000_000,
                "layout.zero_group": 8,
            },
        ),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}}},
            {"zero": 0, "device": 1},
        ),
        ({"sequence_parallel_size": 4}, {"layout.context": 4, "layout.context_form": "all_to_all"}),
        ({"tensor_parallel": {"autotp_size": 4}}, {"layout.tensor": 4}),
        (
            {
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {
                        "warmup_max_lr": 2e-4,
                        "warmup_num_steps": 20,
                        "warmup_type": "linear",
                        "total_num_steps": 300,
                    },
                }
            },
            {
                "learning_rate.peak": 2e-4,
                "learning_rate.warmup": 20,
                "learning_rate.decay": "linear",
                "learning_rate.floor": 0.0,
                "learning_rate.decay_steps": 300,
                "run.steps": 300,
            },
        ),
        ({"wall_clock_breakdown": True}, {"run.trace": True}),
    ],
)
def test_settings(configuration: Table, expected: dict[str, object]) -> None:
    if "device" in expected:
        expected = {"layout.zero": 0, "memory.optimizer": "device"}
    assert keys(configuration) == expected
    assert not convert_configuration(configuration).unsupported


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        (
            {"zero_optimisation": {"stage": 3}},
            "zero_optimisation.stage = 3: is an unknown option of DeepSpeed",
        ),
        ({"zero_optimization": True}, "zero_optimization: is an unknown option of DeepSpeed"),
        (
            {"train_batch_size": "auto"},
            "train_batch_size = auto: is set by the program that starts DeepSpeed",
        ),
        ({"gradient_accumulation_steps": 4}, "requires a change of batch.global_size"),
        (
            {"optimizer": {"type": "OneBitLamb"}},
            'optimizer.type = OneBitLamb: is not supported (supported: "adam"',
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "optimizer.type = Adam: with adam_w_mode = false",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupLR"}},
            "scheduler.params.warmup_type = log: the warm-up is linear (this is the default)",
        ),
        (
            {
                "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}},
            },
            "optimizer.params.lr = 0.01: is overridden by scheduler.params.warmup_max_lr = 0.001",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.95]}}},
            'optimizer.params.betas = [0.9, 0.95]: has no counterpart with optimizer.name = "sgd"',
        ),
        ({"scheduler": {"type": ["WarmupLR"]}}, "scheduler.type = ['WarmupLR']: is not supported"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type = OneCycle: is not supported"),
        ({"fp16": {"enabled": True, "initial_scale_power": 32}}, "must be at most 24"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "the loss scale is always dynamic"),
        ({"flops_profiler": {"enabled": True, "profile_step": 1}}, "flops_profiler: is what `hpctrain plan`"),
        (
            {"compression_training": {"weight_quantization": {}}},
            "compression_training: is a training method that hpctrain does not have",
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "data_types.grad_accum_dtype = bf16: is not supported",
        ),
        ({"optimizer": {"type": "adam", "params": {"betas": [0.9]}}}, "must be two numbers"),
        ({"zero_optimization": {"stage": [3]}}, "zero_optimization.stage = [3]: is not a number"),
    ],
)
def test_unsupported_settings_are_reported(configuration: Table, message: str) -> None:
    assert message in "; ".join(
        f"{name}: {reason}" for name, reason in convert_configuration(configuration).unsupported.items()
    )


def test_tables_that_are_off_are_not_reported() -> None:
    off: Table = {"tensorboard": {"enabled": False, "output_path": "x"}, "amp": {"enabled": False}}
    assert not convert_configuration(off).unsupported


def test_defaults_of_deepspeed_are_marked() -> None:
    result = convert_configuration({"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}})
    assert {key: result.keys[key] for key in result.defaults} == {
        "optimizer.clip": 0.0,
        "layout.zero": 0,
        "run.log_every": 10,
        "optimizer.adamw.beta1": 0.9,
        "optimizer.adamw.beta2": 0.999,
        "optimizer.weight_decay": 0.0,
        "learning_rate.decay": "constant",
        "learning_rate.warmup": 0,
    }


def test_defaults_depend_on_the_optimizer() -> None:
    for kind in ("SGD", "Lion"):
        result = convert_configuration({"optimizer": {"type": kind, "params": {"lr": 0.1}}})
        assert result.keys["optimizer.weight_decay"] == 0.0
        assert "optimizer.adamw.beta1" not in result.keys
    assert convert_configuration({"optimizer": {"type": "AdamW"}}).keys["learning_rate.peak"] == 1e-3
    assert (
        "memory.recompute"
        not in convert_configuration({"pipeline": {"activation_checkpoint_interval": 0}}).keys
    )


def test_every_key_exists() -> None:
    made = {
        key.format(optimizer="sgd" if "momentum" in key or "nesterov" in key else "adamw")
        for rule in deepspeed_table().rules.values()
        for key in rule.keys
    }
    assert {key for key in made if field_of(key) is None} == set()
    assert len(made) > 25
    table = deepspeed_table()
    assert {name for group in table.defaults for name in group["values"]} <= table.rules.keys()
    functions = {rule.row.get("as", rule.row.get("check", "integer")) for rule in table.rules.values()}
    assert all(name in CONVERSIONS or f"_{name}" in vars(deepspeed) for name in functions)


def test_values_out_of_range_are_reported() -> None:
    batch = {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    assert convert_configuration(batch | {"zero_optimization": {"stage": 7}}).unsupported == {
        "gradient_accumulation_steps = 3": (
            "must divide train_batch_size = 10 together with the micro-batch, but their product is 12"
        ),
        "zero_optimization.stage = 7": "becomes layout.zero, which must be a whole number from 0 to 3",
    }


def test_one_bit_adam_is_adamw_with_compressed_gradients() -> None:
    table: Table = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 400}}}
    result = convert_configuration(table)
    assert result.keys["optimizer.name"] == "adamw" and not result.unsupported
    assert result.keys["communication.compress"] == "onebit" and result.keys["communication.warmup"] == 400
    assert (
        convert_configuration({"optimizer": {"type": "OneBitAdam"}}).keys["communication.warmup"] == 100_000
    )
