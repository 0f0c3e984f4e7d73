"""Arguments of Megatron-LM in scripts, and their conversion to a deck.

Tests of deck/convert/megatron.py, deck/convert/layer_lists.py, deck/convert/shell_script.py,
deck/convert/rule_table.py and deck/convert/option_values.py.
"""

from __future__ import annotations

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.deck.convert import megatron
from hpctrain.deck.convert.megatron import convert_script, megatron_table
from hpctrain.deck.convert.option_values import CONVERSIONS, integer
from hpctrain.deck.convert.shell_script import parse_arguments
from hpctrain.deck.reading.old_keys import new_names
from hpctrain.deck.schema import field_of

SCRIPT = """#!/bin/bash
# --num-layers 7 has no effect in a comment
LAYERS=24; export BATCH="64"
OUT=$1
DISTRIBUTED_ARGS=(
    --nproc_per_node 8
    --nnodes $NODES
)
MODEL_ARGS=(
    --num-layers $LAYERS
    --hidden-size=1024 --num-attention-heads 16
    --seq-length 2048  # tokens
)
OTHERS="
    --swiglu \\
    --normalization RMSNorm --use-rotary-position-embeddings \\
    --disable-bias-linear --bf16"
MOE="--moe-layer-freq '([0]*1+[1]*23)'"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} --global-batch-size ${BATCH} \\
    --save $OUT --lr 1e-4 $OTHERS > log.txt 2>&1
"""


def keys(arguments: str) -> dict[str, object]:
    result = convert_script(arguments)
    return {key: value for key, value in result.keys.items() if key not in result.defaults}


def unsupported(arguments: str) -> dict[str, str]:
    return convert_script(arguments).unsupported


def test_scripts_are_read_as_a_shell_does() -> None:
    assert parse_arguments(SCRIPT) == {
        "--nproc-per-node": "8",
        "--nnodes": "$NODES",
        "--num-layers": "24",
        "--hidden-size": "1024",
        "--num-attention-heads": "16",
        "--seq-length": "2048",
        "--swiglu": True,
        "--normalization": "RMSNorm",
        "--use-rotary-position-embeddings": True,
        "--disable-bias-linear": True,
        "--bf16": True,
        "--moe-layer-freq": "([0]*1+[1]*23)",
        "--global-batch-size": "64",
        "--save": "$OUT",
        "--lr": "1e-4",
    }


def test_variables_have_one_value_or_none() -> None:
    script = """
    A=${A:-3}
    B="${B:-4}"; C='5'
    if [ $X = 1 ]; then
        D=6
    else
        D=7
    fi
    E=$((A + 1))
    F="$C"
    MORE=" --swiglu"
    ARGS="--num-layers $A --hidden-size ${B} --seed $C --train-iters $D --micro-batch-size $E"
    python pretrain_gpt.py $ARGS --seq-length $F --bf16 \\
        $MORE --lr 1e-4 | tee log.txt
    """
    assert parse_arguments(script) == {
        "--swiglu": True,
        "--num-layers": "3",
        "--hidden-size": "4",
        "--seed": "5",
        "--train-iters": "$D",
        "--micro-batch-size": "4",
        "--seq-length": "5",
        "--bf16": True,
        "--lr": "1e-4",
    }


APPENDING = """
ARGS=(--num-layers 4
      --bf16)  # and more below
ARGS+=(--use-distributed-optimizer)
ARGS+=( --lr 1e-3 --min-lr=1e-4 )
MORE="--swiglu"; MORE+=" --seed 3"
if [ "$FAST" = 1 ]; then ARGS+=(--recompute-activations); fi
NODES=2; GPUS=(0 1 2 3)
export RANKS=$((NODES * ${#GPUS[@]}))
srun bash -c "torchrun --nnodes $NODES pretrain_gpt.py --global-batch-size $((RANKS * 8 / 3 - 1)) \
  --micro-batch-size ${GPUS[2]} ${ARGS[*]}" "${MORE}" "--save" "/runs/$((3 + FAST))/a b" \\
  --load "$(pwd)/x y" it's
"""


def test_lists_that_grow_arithmetic_and_quotes_are_read() -> None:
    assert parse_arguments(APPENDING) == {
        "--num-layers": "4",
        "--bf16": True,
        "--use-distributed-optimizer": True,
        "--lr": "1e-3",
        "--min-lr": "1e-4",
        "--swiglu": True,
        "--seed": "3",
        "--recompute-activations": True,
        "--nnodes": "2",
        "--global-batch-size": "20",
        "--micro-batch-size": "2",
        "--save": "/runs/$((3 + FAST))/a b",
        "--load": "$(pwd)/x y its",
    }


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (" --x ", "$(( --x ))"),
        ("7 / 2", "3"),
        ("-7 / 2", "-3"),
        ("-7 % 4", "-3"),
        ("2 * (3 + N)", "16"),
        ("1 / 0", "$((1 / 0))"),
        ("9 ** 9 ** 9", "$((9 ** 9 ** 9))"),
        ("1 << 3", "$((1 << 3))"),
    ],
)
def test_arithmetic_is_that_of_a_shell(expression: str, value: str) -> None:
    assert parse_arguments(f"N=5\npython x.py --seed $(({expression}))") == {"--seed": value}


@given(text=st.text(alphabet="-a=$(){}\"'`\\ \n+#[]@1;", max_size=60))
def test_any_text_is_read(text: str) -> None:
    assert all(isinstance(name, str) for name in parse_arguments(text))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "--num-layers 4 --hidden-size 256 --num-attention-heads 8",
            {"layers": 4, "hidden": 256, "heads": 8},
        ),
        ("--group-query-attention --num-query-groups 2", {"key_value_heads": 2}),
        (
            "--use-rotary-position-embeddings --normalization RMSNorm --swiglu --add-qkv-bias"
            " --disable-bias-linear --use-rope-scaling --rope-scaling-factor 32",
            {
                "attention_bias": "query_key_value",
                "rope_scaling.kind": "llama3",
                "rope_scaling.factor": 32.0,
                "rope_scaling.original_sequence": 8192,
            },
        ),
        ("--num-layers 4 --use-rope-scaling --add-qkv-bias", {"layers": 4}),
        ("--kv-channels 128 --vocab-size 512", {"head_size": 128, "vocabulary": 512}),
        ("--untie-embeddings-and-output-weights", {"tied": False}),
        ("--hidden-dropout 0.0 --attention-dropout 0", {"dropout": 0.0}),
        ("--norm-epsilon 1e-6 --init-method-std 0.01", {"norm_epsilon": 1e-6, "initial_std": 0.01}),
        (
            "--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 128 --moe-router-dtype fp32",
            {"experts": 8, "experts_per_token": 4, "expert_mlp": 128, "router_dtype": "fp32"},
        ),
        ("--num-experts 8", {"experts": 8, "router_dtype": "compute"}),
        (
            "--num-experts 8 --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3"
            " --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4"
            " --moe-router-dtype fp32",
            {
                "experts": 8,
                "router_dtype": "fp32",
                "balance": "bias",
                "balance_rate": 1e-3,
                "balance_over": "sequence",
                "balance_loss": 1e-4,
            },
        ),
        (
            "--moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 128",
            {"expert_mlp": 64, "shared_experts": 2},
        ),
        ("--moe-layer-freq ([0]*3+[1]*58)", {"dense_first": 3}),
        ("--moe-layer-freq 3", {"experts.pattern": [True, False, False]}),
        ("--moe-layer-freq 5 --num-layers 2", {"experts.pattern": [True, False], "layers": 2}),
        ("--moe-layer-freq 1 --moe-router-pre-softmax", {"router_normalize": False}),
        ("--moe-router-pre-softmax --moe-router-score-function sigmoid", {"router": "sigmoid"}),
        ("--group-query-attention", {}),
        ("--moe-router-score-function sigmoid", {"router": "sigmoid"}),
        ("--moe-layer-freq [0,1,1,0]", {"experts.pattern": [False, True, True, False]}),
        ("--moe-layer-freq 2*([0]*2+[1])", {"experts.pattern": [False, False, True] * 2}),
        (
            "--moe-router-topk 6 --moe-router-group-topk 6",
            {"experts_per_token": 6, "experts.router_groups_per_token": 6, "experts.router_group_best": 1},
        ),
        ("--num-layers 4 --window-size 127,0", {"layers": 4, "windows": [128]}),
        ("--window-size -1,0", {}),
        ("--window-size (127,0) --window-attn-skip-freq 3", {"windows": [128, 128, 0]}),
        ("--window-size 7,0 --window-attn-skip-freq 9 --num-layers 2", {"windows": [8], "layers": 2}),
        ("--window-size 7,0 --window-attn-skip-freq ([0]+[1])*2", {"windows": [0, 8, 0, 8]}),
        ("--softmax-type learnable", {"attention_sinks": True}),
        (
            "--num-layers 2 --use-rotary-position-embeddings --rotary-percent 0.5 --no-rope-freq 4"
            " --rotary-seq-len-interpolation-factor 2",
            {
                "layers": 2,
                "positions": "rotary",
                "rotary_fraction": 0.5,
                "rope_scaling.kind": "linear",
                "rope_scaling.factor": 2.0,
            },
        ),
        (
            "--position-embedding-type rope --swiglu --no-rope-freq [0,1] --disable-bias-linear",
            {"rotation_pattern": [True, False], "norm": "layer", "norm_bias": True},
        ),
        (
            "--swiglu --normalization RMSNorm --apply-layernorm-1p --rotary-base 500000",
            {"positions": "learned", "norm_weight": "one_plus", "attention_bias": "all", "mlp_bias": True},
        ),
        ("--num-layers 2 --disable-bias-linear", {"layers": 2, "attention_bias": "none", "mlp_bias": False}),
        (
            "--num-layers 2 --disable-bias-linear --add-qkv-bias",
            {"layers": 2, "attention_bias": "query_key_value", "mlp_bias": False},
        ),
        (
            "--num-layers 2 --position-embedding-type none --quick-geglu --glu-linear-offset 1.0"
            " --activation-func-clamp-value 7.0",
            {"layers": 2, "positions": "none", "activation": "swiglu-clamped"},
        ),
    ],
)
def test_models(arguments: str, expected: dict[str, object]) -> None:
    result = {key: value for key, value in keys(arguments).items() if key != "model.family"}
    names = {name: (*new_names(f"model.{name}"), f"model.{name}")[0] for name in expected}
    assert result == {names[name]: value for name, value in expected.items()}
    assert not unsupported(arguments)


LATENT = (
    "--multi-latent-attention --kv-lora-rank 512 --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6"
    " --swiglu --disable-bias-linear --position-embedding-type rope --num-layers 27 --kv-channels 16"
)


def test_latent_attention() -> None:
    found = convert_script(f"{LATENT} --q-lora-rank 1536 --rotary-scaling-factor 1.0")
    assert not found.unsupported
    latent = {key: value for key, value in found.keys.items() if key.startswith("model.latent")}
    assert latent == {
        "model.latent.key_value_rank": 512,
        "model.latent.query_rank": 1536,
        "model.latent.rotary_size": 64,
        "model.latent.value_size": 128,
    }
    assert found.keys["model.head_size"] == 192 and "model.latent.value_size" in found.defaults
    assert not found.keys.keys() & {
        "model.rope_scaling.kind",
        "model.attention_scale",
        "objective.mtp_weight",
    }
    assert found.keys.keys() >= {"model.family", "model.norm_epsilon"}
    assert "model.attention_bias" not in found.keys and "model.query_key_norm" not in found.keys


@pytest.mark.parametrize(
    ("arguments", "kind", "attention_factor", "mscale"),
    [
        ("--mscale 0.707 --mscale-all-dim 0.707", "yarn", 1.0, 0.0707 * log(40) + 1),
        ("--mscale 1.0", "yarn", 0.1 * log(40) + 1, 1.0),
        ("--rope-type rope --mscale-all-dim 1", None, None, 0.1 * log(40) + 1),
    ],
)
def test_yarn_of_latent_attention(
    arguments: str, kind: str | None, attention_factor: float | None, mscale: float
) -> None:
    found = keys(f"{LATENT} --rotary-scaling-factor 40 {arguments}")
    assert found.get("model.rope_scaling.kind") == kind
    assert found.get("model.rope_scaling.original_sequence") == (4096 if kind else None)
    assert found.get("model.rope_scaling.attention_factor") == (
        None if attention_factor is None else pytest.approx(attention_factor)
    )
    assert found.get("model.attention_scale", 192**-0.5) == pytest.approx(mscale**2 * 192**-0.5)


def test_multi_token_prediction() -> None:
    found = convert_script("--mtp-num-layers 1 --hidden-dropout 0")
    assert found.keys["model.mtp_layers"] == 1 and found.keys["objective.mtp_weight"] == 0.1
    assert "objective.mtp_weight" in found.defaults
    weighted = keys("--hidden-dropout 0.0 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3")
    assert (weighted["model.mtp_layers"], weighted["objective.mtp_weight"]) == (2, 0.3)
    for none in ("--mtp-num-layers 0", "--num-layers 2"):
        assert not convert_script(none).keys.keys() & {"model.mtp_layers", "objective.mtp_weight"}
    for refused, reason in (("-1 --hidden-dropout 0", "must not be below 0"), ("1", "requires --hidden-dro")):
        found = convert_script(f"--mtp-num-layers {refused} --mtp-loss-scaling-factor 0.3")
        assert not found.keys.keys() & {"model.mtp_layers", "objective.mtp_weight"}
        assert found.unsupported[f"--mtp-num-layers = {refused.split()[0]}"].startswith(reason)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--train-samples 1000 --global-batch-size 64", {"run.steps": 15, "batch.global_size": 64}),
        ("--reset-attention-mask --reset-position-ids --eod-mask-loss", {"data.document_mask": True}),
        ("--lr 2e-4 --min-lr 2e-5", {"learning_rate.peak": 2e-4, "learning_rate.floor": 0.1}),
        (
            "--lr-warmup-fraction 0.01 --train-iters 5000",
            {"learning_rate.warmup": 50, "run.steps": 5000},
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 10 --lr-wsd-decay-style linear",
            {"decay": "wsd", "cooldown": 10},
        ),
        ("--lr-decay-style constant --lr 1e-3 --min-lr 1e-5", {"decay": "constant", "peak": 1e-3}),
        ("--lr-decay-style inverse-square-root", {"learning_rate.decay": "inverse-sqrt"}),
        ("--lr-decay-style constant --lr-decay-iters 7", {"learning_rate.decay": "constant"}),
        ("--lr-decay-iters 7", {"learning_rate.decay_steps": 7}),
        (
            "--optimizer muon --adam-beta1 0.8 --adam-eps 1e-6",
            {"name": "muon", "optimizer.muon.beta1": 0.8, "optimizer.muon.epsilon": 1e-6},
        ),
        (
            "--rampup-batch-size 16 16 96 --global-batch-size 64",
            {"global_size": 64, "ramp_from": 16, "ramp_steps": 2 + 1 + 0},
        ),
        ("--pipeline-model-parallel-size 4 --num-layers 16", {"layout.pipeline": 4}),
        (
            "--pipeline-model-parallel-size 4 --num-layers 16 --num-layers-per-virtual-pipeline-stage 2",
            {"layout.pipeline": 4, "layout.schedule": "interleaved", "layout.chunks": 2},
        ),
        ("--context-parallel-size 2 --cp-comm-type a2a", {"context": 2, "context_form": "all_to_all"}),
        ("--use-distributed-optimizer --overlap-grad-reduce", {"layout.zero": 1}),
        ("--data-parallel-sharding-strategy optim_grads_params", {"layout.zero": 3}),
        ("--recompute-activations", {"memory.recompute": "selective"}),
        ("--recompute-granularity full --recompute-method uniform", {"memory.recompute": "full"}),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            {"memory.recompute": 4},
        ),
        ("--bf16", {"precision.compute": "bf16", "precision.gradients": "fp32"}),
        ("--fp16", {"precision.compute": "fp16", "precision.gradients": "compute"}),
        (
            "--fp16 --accumulate-allreduce-grads-in-fp32",
            {"precision.compute": "fp16", "precision.gradients": "fp32"},
        ),
        (
            "--bf16 --fp8-format hybrid --fp8-recipe blockwise",
            {"compute": "fp8", "fp8_gradients": "e5m2", "fp8": "block", "gradients": "fp32"},
        ),
        ("--optimizer sgd --sgd-momentum 0.9", {"optimizer.name": "sgd", "optimizer.sgd.momentum": 0.9}),
        ("--exit-duration-in-mins 230", {"run.time_limit": "230 min"}),
        ("--split 969,30,1", {"data.validation": 0.03}),
        ("--tensor-model-parallel-size 2 --sequence-parallel", {"tensor": 2, "sequence_parallel": True}),
        ("--use_torch_fsdp2 --seed 7", {"layout.zero": 3, "run.seed": 7}),
    ],
)
def test_steps_and_layouts(arguments: str, expected: dict[str, object]) -> None:
    result = {key: value for key, value in keys(arguments).items() if not key.startswith("model.")}
    assert {name.split(".")[-1]: value for name, value in result.items()} == {
        name.split(".")[-1]: value for name, value in expected.items()
    }
    assert not unsupported(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--no-such-thing 3", "--no-such-thing = 3: is an unknown option of Megatron-LM"),
        (
            "--eod-mask-loss",
            "requires --reset-attention-mask, which becomes data.document_mask",
        ),
        ("--num-layers many", "--num-layers = many: is not a number"),
        ("--num-layers 2.5", "--num-layers = 2.5: is not a whole number"),
        ("--seq-length inf", "--seq-length = inf: is not a number"),
        (
            "--num-layers $N",
            "--num-layers = $N: is a shell variable that the script does not set, or sets to",
        ),
        (
            "--train-iters $((1<<4))",
            "--train-iters = $((1<<4)): is unsupported arithmetic (supported: + - * / %",
        ),
        ("--data-path data/text_document", "text to a token file with `hpctrain prepare`"),
        ("--optimizer lamb", '--optimizer = lamb: is not supported (supported: "adam", "sgd"'),
        ("--wandb-project p", "--wandb-project = p: set WANDB_PROJECT=p"),
        ("--wandb-project p --wandb-exp-name e", "--wandb-exp-name = e: W&B shows a run under its run.title"),
        ("--recompute-granularity full --recompute-method block", "either all blocks are recomputed"),
        ("--hidden-dropout 0.1 --attention-dropout 0.2", "must equal --hidden-dropout"),
        ("--rampup-batch-size 16 8 100 --global-batch-size 64", "first batch size"),
        ("--rampup-batch-size 16 --global-batch-size 64", "must be three numbers"),
        ("--train-samples 1000", "requires --global-batch-size, since a deck"),
        ("--min-lr 1e-5", "requires --lr, since a deck"),
        ("--lr-warmup-fraction 0.1", "requires --train-iters, since a deck"),
        (
            "--multi-latent-attention --qk-layernorm",
            "--multi-latent-attention: becomes [model.latent], which computes as with --disable-bias-linear,"
            " --normalization RMSNorm, --norm-epsilon 1e-06",
        ),
        ("--qk-layernorm", "--qk-layernorm: is supported with --normalization RMSNorm only"),
        ("--apply-layernorm-1p", "--apply-layernorm-1p: is supported with --normalization RMSNorm only"),
        ("--window-size 7,7", "--window-size = 7,7: must be N,0: the N tokens before each token"),
        (
            "--window-size 7,0 --window-attn-skip-freq 0",
            "--window-size = 7,0: --window-attn-skip-freq 0 must be above 0",
        ),
        ("--softmax-type off-by-one", 'is not supported (supported: "learnable" or "vanilla")'),
        ("--quick-geglu", "requires --glu-linear-offset 1 and --activation-func-clamp-value 7"),
        ("--glu-linear-offset 1.0", "is supported with --quick-geglu only"),
        ("--position-embedding-type relative", "(supported: rope, learned_absolute or none)"),
        ("--rope-type yarn", "--rope-type = yarn: is supported with --multi-latent-attention only"),
        ("--num-layers 4 --num-layers-per-virtual-pipeline-stage 3", "must divide --num-layers"),
        (
            "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 0",
            "must divide --num-layers",
        ),
        ("--initial-loss-scale 4294967296", "must be a number from 6.103515625e-05 to 16777216.0"),
        ("--loss-scale 128", "the loss scale is always dynamic"),
        ("--bf16 perhaps", "--bf16 = perhaps: must be true or false"),
        ("--hidden-dropout 0.0", "--attention-dropout = 0.1: must equal --hidden-dropout"),
        (
            "--lr-decay-style WSD",
            "--lr-wsd-decay-style = exponential: the cooldown of a deck is linear (this is",
        ),
        (
            "--moe-expert-capacity-factor 1.0",
            "--moe-token-drop-policy = probs: experts of a deck drop the last tokens",
        ),
        ("--moe-layer-freq [0]*3", "--moe-layer-freq = [0]*3: has no layer with experts"),
        ("--moe-layer-freq [2]", "must be a number or a list of 0 and 1 for all layers"),
        ("--moe-layer-freq [1]*99999", "must be a number or a list of 0 and 1 for all layers"),
        ("--moe-layer-freq [1]*9999+[1]*9999", "must be a number or a list of 0 and 1 for all layers"),
        ("--moe-layer-freq [1]*len(x)", "must be a number or a list of 0 and 1 for all layers"),
        ("--moe-router-load-balancing-type sinkhorn", "is not supported"),
        ("--split 0,0", "must have a number above 0"),
        ("--bf16 --fp16", "would set precision.compute = fp16, but another option sets bf16"),
    ],
)
def test_unsupported_arguments_are_reported(arguments: str, message: str) -> None:
    assert message in "; ".join(f"{name}: {reason}" for name, reason in unsupported(arguments).items())


def test_defaults_of_megatron_are_marked() -> None:
    result = convert_script("--num-layers 2 --hidden-size 512 --swiglu --lr 1e-3")
    defaults = {key: result.keys[key] for key in result.defaults}
    assert defaults == {
        "optimizer.adamw.beta2": 0.999,
        "optimizer.weight_decay": 0.01,
        "model.dropout": 0.1,
        "learning_rate.decay": "linear",
        "learning_rate.floor": 0.0,
        "learning_rate.warmup": 0,
        "run.log_every": 100,
        "run.evaluate_every": 1000,
        "data.validation": 0.03,
        "model.tied": True,
        "model.mlp": 1344,  # 8/3 of 512, down to a multiple of 64
    }
    assert "--adam-beta2" not in result.unneeded


def test_defaults_depend_on_the_optimizer() -> None:
    asked = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --global-batch-size 8"
    for optimizer, momentum in (("adam", 0.0), ("sgd", 0.9), ("lion", 0.0), ("muon", 0.0)):
        result = convert_script(
            f"{asked} --micro-batch-size 1 --train-iters 10 --lr 1e-3 --optimizer {optimizer}"
        )
        assert ("optimizer.adamw.beta2" in result.keys) == (optimizer == "adam")
        assert ("optimizer.muon.beta2" in result.keys) == (optimizer == "muon")
        assert result.keys.get("optimizer.sgd.momentum", 0.0) == momentum
    (queries,) = (convert_script(f"{asked} --group-query-attention").keys["model.key_value_heads"],)
    assert queries == 1


def test_every_key_exists() -> None:
    made = {
        key.format(optimizer=optimizer)
        for rule in megatron_table().rules.values()
        for key in rule.keys
        for optimizer in ("adamw", "muon")
    }
    assert {key for key in made if field_of(key) is None} == set()
    assert len(made) > 60
    table = megatron_table()
    assert {name for group in table.defaults for name in group["values"]} <= table.rules.keys()
    functions = {rule.row.get("as", rule.row.get("check", "integer")) for rule in table.rules.values()}
    assert all(name in CONVERSIONS or f"_{name}" in vars(megatron) for name in functions)


def test_sequence_parallelism_needs_several_tensor_ranks() -> None:
    for size in ("", "--tensor-model-parallel-size 1 "):
        result = convert_script(f"{size}--sequence-parallel")
        assert "layout.sequence_parallel" not in result.keys and "--sequence-parallel" in result.unneeded
    assert keys("--tensor-model-parallel-size $TP --sequence-parallel")["layout.sequence_parallel"] is True


def test_the_default_number_of_evaluated_sequences_is_marked() -> None:
    result = convert_script("--global-batch-size 8")
    assert result.keys["run.evaluate_sequences"] == 800 and "run.evaluate_sequences" in result.defaults
    assert keys("--global-batch-size 8 --eval-iters 10")["run.evaluate_sequences"] == 80
    assert not unsupported("--num-layers 4")


def test_values_out_of_range_are_reported() -> None:
    most = 9999999999999999999999999
    assert integer(most) == integer(str(most)) == most
    assert list(unsupported(f"--num-layers {most}")) == [f"--num-layers = {most}"]
    assert unsupported("--num-layers 0 --lr -1") == {
        "--num-layers = 0": "becomes model.layers, which must be a whole number from 1 to 10000",
        "--lr = -1": "becomes learning_rate.peak, which must be a number above 0, at most 1000",
    }
