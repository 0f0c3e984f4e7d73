"""Plans that split a module over tensor ranks: what patterns match, and refused plans.

Also model/modules/tensor_parallel/split_styles.py, model/modules/tensor_parallel/expert_styles.py and
model/modules/tensor_parallel/transformers_plan.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.model.modules.tensor_parallel.split_plan import SplitPlan, make_plan
from hpctrain.model.modules.tensor_parallel.split_styles import (
    Column,
    DividedAttribute,
    PartialFeatures,
    PartialGradient,
    Row,
    RowWithSplitOutput,
    SplitExperts,
    SplitExpertsWithIdentities,
    SplitParameter,
    SplitSortedExperts,
    SummedResult,
    Vocabulary,
)
from hpctrain.model.modules.tensor_parallel.transformers_plan import transformers_plan
from tests.model.modules import models


class Scaled(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 2


class ByItself(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)


class Mine(nn.Linear):
    pass


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 3
        self.flag = True
        self.scaled, self.alone = Scaled(10, 4), ByItself(10, 4)
        self.short = nn.Embedding(10, 4, max_norm=1.0)
        self.mine, self.odd = Mine(4, 4), nn.Linear(3, 5)
        self.packed = nn.Linear(4, 24)
        self.tied = nn.Linear(4, 10)
        self.tied.weight = self.scaled.weight
        self.same = self.packed
        self.act = nn.GELU()
        self.outer = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
        self.narrow = nn.Linear(4, 3)


def plan(given: dict[str, Any], ranks: int = 2, pieces: bool = False) -> SplitPlan:
    with torch.device("meta"):
        return make_plan(Several(), given, ranks, pieces)


def test_patterns_are_within_names_and_parts_have_their_first_name() -> None:
    with torch.device("meta"):
        gpt = models.gpt()
    given = {"layers.*.mlp.0": "column", "layers.[12].attention.heads": "divided", "scale": "sequence"}
    made = make_plan(gpt, given, 2, False)
    assert made.problems == ()
    assert list(made.styles) == [
        *(f"layers.{number}.mlp.0" for number in range(3)),
        *(f"layers.{number}.attention.heads" for number in (1, 2)),
        "scale",
    ]
    assert list(plan({"same": {"split": "column", "parts": 3}}).styles) == ["packed"]
    assert plan({"pack*": {"split": "column", "parts": [16, 4, 4], "unit": 2}}).styles["packed"] == Column(
        (16, 4, 4), 2
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": (
        {"pakced": "column"},
        '"pakced": matches no submodule or parameter (did you mean packed?)',
    ),
    "nothing near": ({"layers.*.q": "row"}, "(the module has scaled, alone, short, mine, odd, packed)"),
    "style": ({"packed": "colum"}, '"packed": unknown style "colum" (did you mean column?)'),
    "no style": (
        {"packed": 3},
        'must be a style in quotes, or a table such as {split = "column", parts = 3}',
    ),
    "other key": (
        {"packed": {"split": "row", "parts": 3}},
        'unknown option parts of the style "row" (it has none)',
    ),
    "packed and gathered": (
        {"packed": {"split": "gathered column", "parts": 3}},
        'unknown option parts of the style "gathered column" (it has none)',
    ),
    "no number": ({"packed": {"split": "column", "unit": 0}}, "unit must be a whole number above 0"),
    "expert": ({"packed": "expert"}, 'packed has the class Linear, for which "expert" is unsupported'),
    "kind": ({"act": "column"}, 'act has the class GELU, which does not support "column" (nn.Linear and'),
    "made of it": ({"mine": "row"}, 'mine has the class Mine, which does not support "row"'),
    "lookup": (
        {"alone": "vocabulary"},
        "its class ByItself does not use the forward method of nn.Embedding",
    ),
    "norm": ({"short": "vocabulary"}, "it has max_norm"),
    "no table": ({"act": "vocabulary"}, "it has the class GELU (nn.Embedding and nn.Linear are supported)"),
    "outputs": ({"odd": "column"}, "odd has 5 outputs, which must be a multiple of layout.tensor = 2"),
    "inputs": ({"odd": "row"}, "odd has 3 inputs, which must be a multiple of layout.tensor = 2"),
    "parts": (
        {"packed": {"split": "column", "parts": 5}},
        "packed has 24 outputs, which do not divide into 5",
    ),
    "sizes": (
        {"packed": {"split": "column", "parts": [4, 4]}},
        "packed has 24 outputs, but parts = [4, 4] add up to 8",
    ),
    "part": (
        {"packed": {"split": "column", "parts": 8}},
        "packed has 3 outputs in a part, which must be a multiple of layout.tensor = 2",
    ),
    "units": (
        {"packed": {"split": "column", "unit": 5}},
        "packed has 24 outputs, which must be a multiple of unit = 5",
    ),
    "heads": (
        {"packed": {"split": "column", "unit": 8}},
        "packed has 24 outputs in 3 units of 8, which must be a multiple or a divisor of layout.tensor = 2",
    ),
    "divided": ({"heads": "divided"}, "heads = 3 must be a multiple of 2"),
    "no integer": ({"flag": "divided"}, '"flag": matches no integer attribute of a submodule'),
    "twice": ({"packed": "column", "pack*": "row"}, 'packed matches both "packed" and "pack*"'),
    "twice within": (
        {"outer.0.0": "column", "outer.*": "partial"},
        "outer.0.0.weight belongs to both outer.0.0 and outer.0 of the plan",
    ),
    "one side": (
        {"scaled": "vocabulary"},
        'scaled.weight and tied.weight are one parameter: tied must have the style "vocabulary", too',
    ),
    "other side": (
        {"tied": "column"},
        'are one parameter: scaled and tied must have the style "vocabulary", too',
    ),
    "parameter": (
        {"mine.weight": "column"},
        'mine.weight is a parameter, for which only "partial", "sequence" and "split parameter" are',
    ),
    "two heads": ({"tied": "vocabulary", "odd": "vocabulary", "scaled": "vocabulary"}, "only one layer"),
    "no parameters": ({"act": "sequence"}, 'act has no parameters, which "sequence" requires'),
    "no features": ({"odd": "partial features"}, 'odd requires the option features of "partial features"'),
    "features": (
        {"odd": {"split": "partial features", "features": 6}},
        "odd has 5 outputs, fewer than features = 6",
    ),
    "gathered features": (
        {"outer": "gather", "outer.0.0": {"split": "partial features", "features": 2}},
        "outer.0.0 is inside outer, which is already gathered",
    ),
    "submodule": (
        {"odd": "split parameter"},
        'odd is a submodule, for which "split parameter" is unsupported (use the name of a parameter)',
    ),
    "dim": (
        {"odd.bias": {"split": "split parameter", "dim": 1}},
        "odd.bias has 1 dims, so dim = 1 does not exist",
    ),
    "size": (
        {"odd.weight": {"split": "split parameter", "dim": 1}},
        "odd.weight has the size 3 in dim 1, which must be a multiple of layout.tensor = 2",
    ),
    "two names": (
        {"tied.weight": "split parameter"},
        'scaled.weight and tied.weight are one parameter, for which "split parameter" is unsupported',
    ),
    "split output": (
        {"narrow": "row with split output"},
        "narrow has 3 outputs, which must be a multiple of layout.tensor = 2",
    ),
    "sorted expert": (
        {"mine": "sorted expert"},
        'mine has the class Mine, for which "sorted expert" is unsupported',
    ),
    "summed": (
        {"outer": "sum", "outer.0.0.weight": "split parameter"},
        'outer.0.0.bias is inside outer, which has the style "sum", and must have the style',
    ),
    "summed twice": (
        {"outer": "sum", "outer.0.0": "row"},
        'outer.0.0 is inside outer, which has the style "sum", and must have the style "split parameter"',
    ),
    "within": (
        {"outer": "gather", "outer.0": "gather"},
        "outer.0 is inside outer, which is already gathered",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plan_is_told_in_a_sentence(case: str) -> None:
    given, expected = WRONG[case]
    problems = plan(given).problems
    assert any(expected in told for told in problems), problems
    assert all("\n" not in told for told in problems)


def test_all_that_is_wrong_is_told_at_once() -> None:
    given = {"pakced": "column", "act": "row", "heads": "divided", "odd": "colum"}
    assert len(plan(given).problems) == 4


def test_rows_divide_inputs_alone() -> None:
    assert plan({"narrow": "row"}).problems == ()


def test_units_are_shared_by_as_many_ranks() -> None:
    assert plan({"packed": {"split": "column", "unit": 12}}, 4).problems == ()
    assert plan({"heads": {"split": "divided", "units": 2}}, 6).problems == ()
    told = plan({"heads": {"split": "divided", "units": 4}}, 6).problems
    assert told == ("heads: units = 4 must be a multiple or a divisor of layout.tensor = 6",)


def test_pieces_of_sequences_begin_somewhere() -> None:
    (told,) = plan({"packed": "column"}, pieces=True).problems
    assert told.startswith("must split sequences with layout.sequence_parallel")
    assert plan({"outer": "cut"}, pieces=True).problems == ()
    both = {"scaled": "vocabulary", "tied": "vocabulary"}
    assert plan(both, pieces=True).problems == ()


def test_whole_sequences_are_required() -> None:
    styles = {"packed": {"split": "partial features", "features": 8}, "outer": "cut"}
    assert plan(styles).problems == ()
    (problem,) = plan(styles, pieces=True).problems
    assert problem == 'packed has the style "partial features", which conflicts with layout.sequence_parallel'


def plan_of_transformers(
    name: str, config: dict[str, Any], ranks: int = 2, pieces: bool = False
) -> SplitPlan:
    import transformers

    kind = getattr(transformers, name)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    with torch.device("meta"):
        module = kind(kind.config_class(**sizes | config))
    return transformers_plan(module, ranks, pieces)


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}


def test_a_modules_own_plan_is_read() -> None:
    made = plan_of_transformers("LlamaForCausalLM", HEADS)
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert made.problems == ()
    assert made.styles == {
        "model.embed_tokens": Vocabulary(),
        "lm_head": Vocabulary(),
        **{f"{attention}.{name}_proj": Column(unit=4) for name in "qkv"},
        f"{attention}.o_proj": Row(),
        f"{mlp}.gate_proj": Column(),
        f"{mlp}.up_proj": Column(),
        f"{mlp}.down_proj": Row(),
    }


def test_experts_are_spread() -> None:
    sizes = {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
    made = plan_of_transformers("Qwen3MoeForCausalLM", HEADS | sizes)
    assert made.problems == ()
    assert made.styles["model.layers.0.mlp.experts"] == SplitExperts()
    assert made.styles["model.layers.0.self_attn.q_norm"] == PartialGradient()
    assert not any("gate_up_proj" in name for name in made.styles)
    (told,) = plan_of_transformers("Qwen3MoeForCausalLM", HEADS | sizes | {"num_experts": 5}).problems
    assert told == ("model.layers.0.mlp.experts has 5 experts, which must be a multiple of layout.tensor = 2")


def test_ranks_that_share_keys_have_fewer_queries_of_each() -> None:
    made = plan_of_transformers("LlamaForCausalLM", HEADS, ranks=4)
    assert made.problems == ()
    assert made.styles["model.layers.0.self_attn.num_key_value_groups"] == DividedAttribute(units=2)


def test_queries_keys_and_values_of_a_head_stay_together() -> None:
    """In GPT-NeoX those of head 0 come first, then those of head 1: head of 8 features, 24 outputs."""
    name = "gpt_neox.layers.0.attention.query_key_value"
    made = plan_of_transformers("GPTNeoXForCausalLM", {"num_attention_heads": 4})
    assert made.problems == () and made.styles[name] == Column(unit=3 * 8)


LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
}


def test_latent_attention_shares_features_of_its_keys_and_has_sinks() -> None:
    made = plan_of_transformers("HYV4ForCausalLM", LATENT)
    attention = "model.layers.0.self_attn"
    assert made.problems == ()
    assert {name: style for name, style in made.styles.items() if name.startswith(attention)} == {
        f"{attention}.q_b_proj": Column(),
        f"{attention}.kv_a_proj_with_mqa": PartialFeatures(4),
        f"{attention}.kv_b_proj": Column(),
        f"{attention}.gate_proj": Column(),
        f"{attention}.sinks": SplitParameter(),
        f"{attention}.o_proj": Row(),
    }
    few = {"num_attention_heads": 3, "num_key_value_heads": 3}
    assert (
        f"{attention} has 3 heads, which must be a multiple of layout.tensor = 2"
        in plan_of_transformers("HYV4ForCausalLM", LATENT | few).problems
    )


def test_queries_of_latent_attention_are_split_if_they_are_not_compressed() -> None:
    made = plan_of_transformers("Glm4MoeLiteForCausalLM", LATENT | {"q_lora_rank": None})
    assert made.problems == () and made.styles["model.layers.0.self_attn.q_proj"] == Column()


def test_heads_of_values_have_their_own_size() -> None:
    sizes = HEADS | {"head_dim": 6, "v_head_dim": 4, "n_routed_experts": 4}
    made = plan_of_transformers("MiMoV2FlashForCausalLM", sizes)
    attention = "model.layers.0.self_attn"
    assert made.problems == ()
    assert made.styles[f"{attention}.k_proj"] == Column(unit=6)
    assert made.styles[f"{attention}.v_proj"] == Column(unit=4)


def test_shared_experts_are_summed_and_split_by_features() -> None:
    from transformers import InklingTextConfig

    sparse = {"mlp_layer_types": ["sparse"], "n_routed_experts": 4, "moe_intermediate_size": 16}
    assert InklingTextConfig().n_shared_experts > 1
    made = plan_of_transformers("InklingForCausalLM", sparse)
    experts = "model.layers.0.mlp.shared_experts"
    assert made.problems == ()
    assert made.styles[experts] == SummedResult()
    assert made.styles[f"{experts}.gate_proj"] == SplitParameter(dim=1)
    assert made.styles[f"{experts}.up_proj"] == SplitParameter(dim=1)
    assert made.styles[f"{experts}.down_proj"] == SplitParameter(dim=2)


def test_experts_of_llama_4_take_sorted_rows() -> None:
    made = plan_of_transformers("Llama4ForCausalLM", HEADS | {"head_dim": 4, "num_local_experts": 4})
    assert made.problems == ()
    assert made.styles["model.layers.0.feed_forward.experts"] == SplitSortedExperts()


def test_identities_are_no_experts_that_ranks_split() -> None:
    sizes = LATENT | {"zero_expert_num": 3, "expert_ffn_hidden_size": 16, "num_hidden_layers": 2}
    made = plan_of_transformers("LongcatFlashForCausalLM", sizes)
    assert made.problems == ()
    assert made.styles["model.layers.0.mlp.experts"] == SplitExpertsWithIdentities()
    (problem,) = plan_of_transformers("LongcatFlashForCausalLM", sizes | {"n_routed_experts": 5}).problems
    assert (
        problem == "model.layers.0.mlp.experts has 5 experts, which must be a multiple of layout.tensor = 2"
    )


def test_attention_with_the_keys_of_another_block_divides_them_too() -> None:
    """Norms without a scale have no style, although plans name them."""
    sizes = {
        **HEADS,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "pad_token_id": 0,
    }
    made = plan_of_transformers("Gemma3nForCausalLM", sizes, ranks=4)
    attention = [f"model.layers.{number}.self_attn" for number in range(4)]
    assert made.problems == ()
    assert f"{attention[3]}.k_proj" not in made.styles and f"{attention[0]}.v_norm" not in made.styles
    assert all(made.styles[f"{each}.num_key_value_groups"] == DividedAttribute(units=2) for each in attention)


def test_a_wrong_plan_of_transformers_is_corrected() -> None:
    made = plan_of_transformers("DogeForCausalLM", HEADS)
    attention = "model.layers.0.self_attn"
    assert made.problems == ()
    assert made.styles[f"{attention}.A"] == SplitParameter()
    assert made.styles[f"{attention}.dt_proj"] == RowWithSplitOutput()
    assert made.styles[f"{attention}.q_norm"] == made.styles[f"{attention}.k_norm"] == PartialGradient()


def test_what_is_not_read_of_an_own_plan_is_told() -> None:
    (told,) = plan_of_transformers("GPT2LMHeadModel", {"n_embd": 32, "n_head": 4}).problems
    assert told == "GPT2LMHeadModel has no plan (use a table of patterns)"
    with torch.device("meta"):
        module = Several()
    module.tp_plan = {"packed": "mla_kv_a_proj", "act": "replicate", "layers.*.no": "colwise"}
    (told,) = transformers_plan(module, 2, False).problems
    assert told == 'Several has the unsupported style "mla_kv_a_proj" for packed in its plan'
    module.tp_plan = {"packed.weight": "packed_rowwise"}
    (told,) = transformers_plan(module, 2, False).problems
    assert told == 'Several has the unsupported style "packed_rowwise" for packed.weight in its plan'
    (told,) = plan_of_transformers("LlamaForCausalLM", HEADS, pieces=True).problems
    assert "conflicts with layout.sequence_parallel" in told
