"""`hpctrain check` of plans that split modules: right ones pass, wrong ones are told by name.

Of train/layout_verification.py and train/layout_difference.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm.world import World
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError
from hpctrain.train.layout_check import check
from tests.model.modules.tensor_parallel.test_apply_plan import (
    GPT2,
    GPT2_PLAN,
    GPT_PLAN,
    LLAMA,
    LLAMA_PLAN,
    NEOX,
    PHI3_PLAN,
    TOKENS,
)

FOLDER = Path(__file__).parents[1]
GPT = f"{FOLDER}/model/modules/models.py:gpt"
TWICE = f"{FOLDER}/model/modules/models.py:twice"
WIDE = f"{FOLDER}/train/wrong_modules.py:Wide"
WIDE_PLAN = {"up": "column", "down": "row"}
QWEN3 = {**LLAMA, "head_dim": 8}
QWEN3_PLAN = {
    "model.layers.*.self_attn.[qkv]_proj": {"split": "column", "unit": 8},
    "model.layers.*.self_attn.[qk]_norm": "partial",
    "model.layers.*.self_attn.o_proj": "row",
}
NEOX_PLAN = {
    "gpt_neox.layers.*.attention.query_key_value": {"split": "column", "unit": 24},
    "gpt_neox.layers.*.attention.dense": "row",
}
TWICE_PLAN = {"up": "column", "level": "partial", "down": "row", "mix": "gathered column"}
KINDS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "gpt": (GPT, {"layers": 2}, "layers.*", GPT_PLAN),
    "llama": ("transformers:LlamaForCausalLM", LLAMA, "model.layers.*", LLAMA_PLAN),
    "gpt2": ("transformers:GPT2LMHeadModel", GPT2, "transformer.h.*", GPT2_PLAN),
    "phi3": ("transformers:Phi3ForCausalLM", {**LLAMA, **TOKENS}, "model.layers.*", PHI3_PLAN),
    "qwen3": ("transformers:Qwen3ForCausalLM", QWEN3, "model.layers.*", QWEN3_PLAN),
    "neox": ("transformers:GPTNeoXForCausalLM", NEOX, "gpt_neox.layers.*", NEOX_PLAN),
    "twice": (TWICE, {}, "", TWICE_PLAN),
    "wide": (WIDE, {}, "", WIDE_PLAN),
}
DECK = """
[run]
title = "split"
steps = 3
[model]
module = {module}
{blocks}
plan = {plan}
arguments = {arguments}
[data]
tokens = "none"
[batch]
global_size = 8
sequence = 16
[layout]
tensor = 2
sequence_parallel = {pieces}
"""


def told(
    world: World, folder: Path, which: str, change: dict[str, Any], pieces: bool, **arguments: object
) -> tuple[int, str]:
    """The exit code, and what is shown, or the error, on one line; changes of the plan may be None."""
    module, given, blocks, plan = KINDS[which]
    changed = {name: style for name, style in {**plan, **change}.items() if style is not None}
    path = folder / "deck.toml"
    if world.rank == 0:
        text = DECK.format(
            module=toml_value(module),
            blocks=f'blocks = "{blocks}"' if blocks else "",
            plan=toml_value(changed),
            arguments=toml_value({**given, **arguments}),
            pieces=str(pieces).lower(),
        )
        path.write_text(text)
    world.everyone.barrier()
    shown = list[str]()
    try:
        code = check(world, path, (), shown.append)
    except HpctrainError as error:
        code, shown = error.exit_code, [" ".join(error.problems)]
    text = world.everyone.broadcast_object(shown[0] if shown else None)
    return code, " ".join(text.split())


RIGHT = [(kind, pieces) for kind in ("gpt", "llama", "gpt2", "phi3") for pieces in (False, True)]
RIGHT += [(kind, False) for kind in ("qwen3", "neox", "twice", "wide")]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(("kind", "pieces"), RIGHT)
def test_right_plans_raise_no_alarm(world: World, mpi_tmp_path: Path, kind: str, pieces: bool) -> None:
    code, text = told(world, mpi_tmp_path, kind, {}, pieces)
    assert code == 0, text


MISSING = "a sum over the tensor axis (2 ranks) is likely missing"
DOUBLED = "it is 2 times the expected value"
WRONG: dict[str, tuple[str, dict[str, Any], bool, dict[str, Any], tuple[str, ...]]] = {
    "norm summed without pieces": (
        "gpt",
        {"layers.*.norm?": "partial"},
        False,
        {},
        ("layers.0.norm1.weight", DOUBLED),
    ),
    "norm of all summed twice": ("gpt", {"norm": "partial"}, False, {}, ("gradient of norm.weight", DOUBLED)),
    "norm of pieces not summed": (
        "gpt",
        {"layers.*.norm?": None, "layers.*.norm1": "sequence"},
        True,
        {},
        ("layers.0.norm2.weight", MISSING),
    ),
    "scale of pieces not summed": ("gpt", {"scale": None}, True, {}, ("gradient of scale", MISSING)),
    "last norm not summed": (
        "llama",
        {"model.norm": None},
        True,
        {},
        ("gradient of model.norm.weight", MISSING),
    ),
    "packed as one": (
        "gpt",
        {"layers.*.attention.qkv": {"split": "column", "unit": 8}},
        False,
        {},
        ("output of layers.0.attention",),
    ),
    "heads not told": (
        "gpt",
        {"layers.*.attention.heads": None},
        False,
        {},
        ("in submodule layers.0.attention",),
    ),
    "heads told of whole": (
        "gpt",
        {"layers.*.attention.qkv": None},
        False,
        {},
        ("in submodule layers.0.attention",),
    ),
    "column after column": ("gpt", {"layers.*.attention.out": "column"}, False, {}, ("attention.out",)),
    "no row after column": ("gpt", {"layers.*.mlp.2": None}, False, {}, ("mlp.2",)),
    "row of whole": ("gpt", {"layers.*.mlp.0": None}, False, {}, ("mlp.2",)),
    "tied on one side": ("gpt", {"head": None}, False, {}, ("head",)),
    "table as column": ("gpt", {"embed": "column"}, False, {}, ("embed",)),
    "local positions": ("llama", {"model.layers.0": None}, True, {}, ("model.",)),
    "attention of pieces": ("llama", {"model.layers.*.self_attn": None}, True, {}, ("self_attn",)),
    "query norm not summed": (
        "qwen3",
        {"model.layers.*.self_attn.[qk]_norm": None},
        False,
        {},
        ("self_attn.q_norm.weight", MISSING),
    ),
    "key norm not summed": (
        "qwen3",
        {"model.layers.*.self_attn.[qk]_norm": None, "model.layers.*.self_attn.q_norm": "partial"},
        False,
        {},
        ("self_attn.k_norm.weight", MISSING),
    ),
    "size of parts not told": ("gpt2", {"transformer.h.*.attn.split_size": None}, False, {}, ("attn",)),
    "gate and up as one": (
        "phi3",
        {"model.layers.*.mlp.gate_up_proj": "column"},
        False,
        {},
        ("output of model.layers.0.mlp",),
    ),
    "keys' heads not told": (
        "phi3",
        {"model.layers.*.self_attn.num_key_value_heads": None},
        False,
        {},
        ("self_attn",),
    ),
    "interleaved as parts": (
        "neox",
        {"gpt_neox.layers.*.attention.query_key_value": {"split": "column", "parts": 3, "unit": 8}},
        False,
        {},
        ("output of gpt_neox.layers.0.attention",),
    ),
    "level not summed": ("twice", {"level": None}, False, {}, ("gradient of level", MISSING)),
    "needs all features": ("twice", {"mix": "column", "back": "row"}, False, {}, ("output of back",)),
    "softmax of a piece": ("wide", {}, False, {"kind": "softmax"}, ("output of down",)),
    "mean of a piece": ("wide", {}, False, {"kind": "mean"}, ("output of down",)),
    "norm of a piece": ("wide", {}, False, {"kind": "norm"}, ("output of down",)),
    "scale by a piece's size": ("wide", {}, False, {"kind": "scale"}, ("output of down",)),
    "gate not summed": ("wide", {}, False, {"kind": "gate"}, ("gradient of gate", MISSING)),
    "features by number": ("wide", {}, False, {"kind": "first"}, ("output of down",)),
    "positions of a piece": (
        "wide",
        {"embed": "vocabulary", "norm": "sequence", "head": "vocabulary"},
        True,
        {"kind": "local"},
        ("output of norm differs from the one-rank run, and from its own code",),
    ),
    "no such part": (
        "gpt",
        {"layers.*.attn.qkv": "column"},
        False,
        {},
        ("layers.*.attn.qkv", "layers.*.attention"),
    ),
    "does not divide": ("wide", {"head": "column"}, False, {}, ("head", "31")),
    "no such style": ("wide", {"up": "colum"}, False, {}, ("up", "column")),
}


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_plans_are_told_by_name(world: World, mpi_tmp_path: Path, wrong: str) -> None:
    kind, change, pieces, arguments, names = WRONG[wrong]
    code, text = told(world, mpi_tmp_path, kind, change, pieces, **arguments)
    assert code in {1, 2}, text
    for name in names:
        assert name in text, text
