"""DeepSpeed's configurations: what becomes of each setting, and of what is wrong."""

from __future__ import annotations

import pytest

from hpctrain.deck.convert.deepspeed import DEFAULTS, RULES, translated
from hpctrain.deck.convert.rules import Theirs, UntranslatedError
from hpctrain.deck.schema import fields

Table = dict[str, object]


def keys(configuration: Table) -> dict[str, object]:
    found = translated(configuration)
    return {key: value for key, value in found.keys.items() if key not in found.defaults}


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
                "optimizer.beta1": 0.8,
                "optimizer.beta2": 0.99,
                "optimizer.epsilon": 1e-7,
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
    assert not translated(configuration).left


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation.stage = 3: is no setting of DeepSpeed"),
        ({"zero_optimization": True}, "zero_optimization: is no setting of DeepSpeed"),
        ({"train_batch_size": "auto"}, "train_batch_size = auto: is filled in by what starts DeepSpeed"),
        ({"gradient_accumulation_steps": 4}, "follows in a deck from batch.global_size"),
        (
            {"optimizer": {"type": "OneBitLamb"}},
            'optimizer.type = OneBitLamb: is not what a deck can say (of "adam"',
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "optimizer.type = Adam: with adam_w_mode = false decays through the gradient",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupLR"}},
            "scheduler.params.warmup_type = log: the warm-up is linear (that is its default)",
        ),
        (
            {
                "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}},
            },
            "optimizer.params.lr = 0.01: gives way to scheduler.params.warmup_max_lr = 0.001",
        ),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type = OneCycle: is not what a deck can say"),
        ({"fp16": {"enabled": True, "initial_scale_power": 32}}, "is more than 24"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "the loss scale is dynamic"),
        ({"flops_profiler": {"enabled": True, "profile_step": 1}}, "flops_profiler: is what `hpctrain plan`"),
        ({"compression_training": {"weight_quantization": {}}}, "compression_training: is another method"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype = bf16: is not what"),
        ({"optimizer": {"type": "adam", "params": {"betas": [0.9]}}}, "are no two numbers"),
        ({"zero_optimization": {"stage": [3]}}, "zero_optimization.stage = [3]: is no number"),
    ],
)
def test_what_no_key_says_is_told(configuration: Table, words: str) -> None:
    assert words in "; ".join(f"{name}: {why}" for name, why in translated(configuration).left.items())


def test_what_is_off_is_not_told() -> None:
    off: Table = {"tensorboard": {"enabled": False, "output_path": "x"}, "amp": {"enabled": False}}
    assert not translated(off).left


def test_what_it_takes_by_itself_is_told_as_its_default() -> None:
    found = translated({"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}})
    assert {key: found.keys[key] for key in found.defaults} == {
        "optimizer.clip": 0.0,
        "layout.zero": 0,
        "run.log_every": 10,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.999,
        "optimizer.weight_decay": 0.0,
        "learning_rate.decay": "constant",
        "learning_rate.warmup": 0,
    }


def test_defaults_of_other_optimizers_are_told() -> None:
    for kind in ("SGD", "Lion"):
        found = translated({"optimizer": {"type": kind, "params": {"lr": 0.1}}})
        assert found.keys["optimizer.weight_decay"] == 0.0
        assert "optimizer.beta1" not in found.keys
    assert translated({"optimizer": {"type": "AdamW"}}).keys["learning_rate.peak"] == 1e-3
    assert "memory.recompute" not in translated({"pipeline": {"activation_checkpoint_interval": 0}}).keys


def test_every_key_is_one_of_a_deck() -> None:
    made = set()
    for rule in RULES.values():
        for value in (2, True, "cpu", "adam", "WarmupLR", "WarmupDecayLR", [0.1, 0.2], "fp32", "/x"):
            try:
                made |= set(rule(value, Theirs({})))
            except UntranslatedError:
                continue
    assert {key for key in made if key.split(".")[1] not in fields(key.split(".")[0])} == set()
    assert len(made) > 25
    assert set(DEFAULTS) <= set(RULES)


def test_numbers_that_do_not_fit_are_told() -> None:
    batch = {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    assert translated(batch | {"zero_optimization": {"stage": 7}}).left == {
        "gradient_accumulation_steps = 3": (
            "x the micro-batch makes 12, of which train_batch_size = 10 is no multiple"
        ),
        "zero_optimization.stage = 7": "is in a deck layout.zero, which is a whole number from 0 to 3",
    }


def test_one_bit_adam_is_adam_whose_sums_are_signs() -> None:
    table: Table = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 400}}}
    found = translated(table)
    assert found.keys["optimizer.name"] == "adamw" and not found.left
    assert found.keys["communication.compress"] == "onebit" and found.keys["communication.warmup"] == 400
    assert translated({"optimizer": {"type": "OneBitAdam"}}).keys["communication.warmup"] == 100_000
