"""Tests of deck/convert/deck_text.py: `hpctrain deck --from` writes a deck or reports an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.deck import command
from hpctrain.deck.convert.deck_text import converted_deck
from hpctrain.deck.read import parse_deck
from hpctrain.errors import HpctrainError, InputOutputError

ARGUMENTS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --micro-batch-size 2 --swiglu"
    " --global-batch-size 8 --train-iters 100 --lr 1e-3 --min-lr 1e-4 --bf16 --normalization RMSNorm"
    " --position-embedding-type rope --disable-bias-linear --qk-layernorm --use-distributed-optimizer"
    " --tensor-model-parallel-size 2 --sequence-parallel --untie-embeddings-and-output-weights"
)
TOKENS = "data.tokens=t.h5"


def test_a_converted_deck_can_be_read() -> None:
    text = converted_deck(ARGUMENTS)
    deck = parse_deck(text, [TOKENS])
    assert (deck.model.family, deck.model.query_key_norm, deck.model.tied) == ("llama", "head", False)
    assert (deck.layout.tensor, deck.layout.zero, deck.layout.sequence_parallel) == (2, 1, True)
    assert (deck.batch.global_size, deck.batch.sequence) == (8, 128)
    assert (deck.value("optimizer.adamw.beta2"), deck.learning_rate.floor, deck.model.dropout) == (
        0.999,
        0.1,
        0.1,
    )
    assert "\nbeta2 = 0.999  # Megatron-LM's default\n" in text
    assert "\n# tokens =   # required: Token file of `hpctrain prepare`" in text
    assert "does not have" not in text


def test_a_script_of_latent_attention_becomes_a_deck_that_can_be_read() -> None:
    deck = parse_deck(
        converted_deck(
            "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --micro-batch-size 2"
            " --global-batch-size 8 --train-iters 100 --lr 1e-3 --swiglu --normalization RMSNorm"
            " --norm-epsilon 1e-6 --position-embedding-type rope --disable-bias-linear --qk-layernorm"
            " --multi-latent-attention --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16"
            " --v-head-dim 32 --hidden-dropout 0 --attention-dropout 0 --rotary-scaling-factor 4"
            " --mscale-all-dim 1 --mtp-num-layers 1 --window-size 31,0 --window-attn-skip-freq 2"
        ),
        [TOKENS],
    )
    latent = deck.model.latent
    assert latent is not None and (latent.key_value_rank, latent.query_rank) == (64, None)
    assert (deck.model.head_size, deck.model.windows, deck.model.mtp_layers) == (48, (32, 0), 1)
    assert deck.model.rope_scaling is not None and deck.model.rope_scaling.kind == "yarn"
    assert deck.objective.mtp_weight == 0.1


def test_missing_required_keys_are_comments(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(
        json.dumps(
            {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "strange\n[run]\nsteps = 3": "a\x1bb"}
        )
    )
    text = converted_deck(str(path))
    overrides = ["run.steps=3", "model.preset=gpt2-124m", TOKENS]
    assert parse_deck(text, overrides).layout.zero == 2
    required = ("steps", "family", "layers", "hidden", "heads", "tokens", "sequence")
    assert [row.split()[1] for row in text.splitlines() if "# required:" in row] == list(required)
    assert "\x1b" not in text
    assert not any(row.startswith(("[run]", "steps")) and row != "[run]" for row in text.splitlines())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be a DeepSpeed configuration (JSON, such as ds_config.json) or a script with arguments"),
        (b"[run]\nsteps = 3\n", "must be a DeepSpeed configuration"),
        (b"[1, 2]", "must be a DeepSpeed configuration"),
        (b'{"train_batch_size": 8,', "is not JSON"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b'{"a":' * 100_000, "is not JSON: nested too deeply"),
        (b"--num-layers 2\n" * 100_000, "too large"),
        (
            b"--x " + b"${x:-" * 3000 + b"}" * 3000,
            "x: has more than 100 nested expressions, such as ${A:-${B",
        ),
        (b"--x " + b"$((1+" * 3000 + b"))" * 3000, "x: has more than 100 nested expressions"),
        (b"--x '" + b"${x:-" * 3000 + b"}" * 3000 + b" --y'", "x: has more than 100 nested expressions"),
    ],
)
def test_other_files_are_errors(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(HpctrainError) as error:
        converted_deck(str(tmp_path / "x"))
    assert len(error.value.problems) == 1
    assert message in error.value.problems[0]
    with pytest.raises(InputOutputError):
        converted_deck(str(tmp_path / "missing"))


def test_the_verb_prints_the_converted_deck(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--from", ARGUMENTS])
    assert (result.exit_code, result.output) == (0, converted_deck(ARGUMENTS))
    for others in (["deck.toml"], ["--set", "run.steps=3"], ["--reference"]):
        result = CliRunner().invoke(command, ["--from", ARGUMENTS, *others])
        assert result.exit_code == 2
        assert "conflicts with DECK, --set, --reference and --migrate" in result.output


@pytest.mark.parametrize("source", ["", " "])
def test_an_empty_name_is_an_error(source: str) -> None:
    with pytest.raises(HpctrainError, match=r"^--from: requires a file"):
        converted_deck(source)
