"""Published parameter counts, by closed forms that know nothing of the model's code."""

from __future__ import annotations

from typing import get_args

import pytest

from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.deck.families import FAMILIES, family_values
from hpctrain.deck.presets import Preset, PresetName, presets
from hpctrain.deck.read import parse_deck
from hpctrain.deck.sections.rope_scaling import RopeScaling
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape


def gpt2_parameters(preset: Preset) -> float:
    """The design's formula (Narayanan 2021), plus the final LayerNorm that it leaves out."""
    layers, hidden = preset.model["layers"], preset.model["hidden"]
    vectors = (preset.model["vocabulary"] + preset.sequence) / (12 * layers * hidden)
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + vectors) + 2 * hidden


def llama_parameters(preset: Preset, chosen: int | None = None) -> int:
    """Embedding, head, final norm; per layer q, k, v, output, gate, up, down and two norms; or a router and
    experts, all or those that are `chosen`.
    """
    hidden = preset.model["hidden"]
    model = {**family_values(preset.model["family"], hidden), **preset.model}
    size = model.get("head_size", hidden // model["heads"])
    queries, keys = size * model["heads"], size * model["key_value_heads"]
    norms = {"none": 0, "head": 2 * size}.get(model["query_key_norm"], queries + keys)
    matrices = ACTIVATIONS[model["activation"]].input_projections + 1
    expanded = matrices * hidden * model["mlp"]
    if model["mlp_bias"]:
        expanded += (matrices - 1) * model["mlp"] + hidden
    dense, dense_layers = expanded, 0
    if preset.experts:
        experts = {**FAMILIES[preset.model["family"]].experts, **preset.experts}
        dense_layers = experts.get("dense_first", 0)
        expert = 3 * hidden * experts["mlp"] + model["mlp_bias"] * (2 * experts["mlp"] + hidden)
        expanded = expert * (experts["count"] if chosen is None else chosen) + hidden * experts["count"]
        expanded += experts.get("router_bias", 0) * experts["count"]
        expanded += experts.get("shared", 0) * expert + experts.get("shared_gate", 0) * hidden
    projected = queries + 2 * keys
    biases = {"none": 0, "query_key_value": projected, "all": projected + hidden}[model["attention_bias"]]
    expanded += model["heads"] if model["attention_sinks"] else 0
    of_norm = hidden * ((model["norm_weight"] != "none") + model["norm_bias"])
    count_of_norms = {"before": 2, "after": 2, "both": 4}[model["norm_placement"]]
    count_of_norms -= model["parallel_residual"] == "one_norm"
    attention = 2 * hidden * (queries + keys)
    if preset.latent:
        attention = latent_parameters(preset, hidden, model["heads"], size)
    layer = attention + count_of_norms * of_norm + norms + biases
    tables, sparse_layers = 1 if model["tied"] else 2, model["layers"] - dense_layers
    layers = model["layers"] * layer + dense_layers * dense + sparse_layers * expanded
    return int(tables * model["vocabulary"] * hidden + layers + of_norm)


def latent_parameters(preset: Preset, hidden: int, heads: int, size: int) -> int:
    """Latents of keys and values and perhaps of queries, their norms, keys, values, queries and output."""
    rank, rotated, values = (preset.latent[name] for name in ("key_value_rank", "rotary_size", "value_size"))
    queries = heads * size * hidden
    if query_rank := preset.latent.get("query_rank"):
        queries = query_rank * (hidden + 1 + heads * size)
    keys_and_values = rank * (1 + heads * (size - rotated + values))
    return queries + hidden * (rank + rotated) + keys_and_values + heads * values * hidden


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-355m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama-1b", 1_100_048_384),
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-65b", 65_285_660_672),
        ("llama-70b", 68_976_648_192),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
        ("mistral-7b", 7_248_023_552),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("ministral-8b", 8_019_808_256),
        ("mistral-12b", 12_247_782_400),
        ("mistral-24b", 23_572_403_200),
        ("yi-6b", 6_061_035_520),
        ("yi-34b", 34_388_917_248),
        ("deepseek-7b", 6_910_365_696),
        ("gemma-2b", 2_506_172_416),
        ("gemma-7b", 8_537_680_896),
        ("gemma2-2b", 2_614_341_888),
        ("gemma2-9b", 9_241_705_984),
        ("gemma2-27b", 27_227_128_320),
        ("gemma3-270m", 268_098_176),
        ("gemma3-1b", 999_885_952),
        ("gemma3-4b", 3_880_263_168),
        ("gemma3-12b", 11_766_034_176),
        ("gemma3-27b", 27_009_346_304),
        ("olmo3-7b", 7_298_011_136),
        ("olmo3-32b", 32_233_522_176),
        ("starcoder2-3b", 3_030_371_328),
        ("starcoder2-7b", 7_173_923_840),
        ("starcoder2-15b", 15_957_889_024),
        ("phi-3-mini", 3_821_079_552),
        ("olmo-1b", 1_176_764_416),
        ("olmo-7b", 6_888_095_744),
        ("olmo-7b-0424", 6_888_095_744),
        ("olmo2-1b", 1_484_916_736),
        ("olmo2-7b", 7_298_617_344),
        ("olmo2-13b", 13_716_198_400),
        ("olmo2-32b", 32_234_279_936),
        ("granite-3-2b", 2_533_531_648),
        ("granite-3-8b", 8_170_848_256),
        ("pythia-70m", 70_426_624),
        ("pythia-160m", 162_322_944),
        ("pythia-410m", 405_334_016),
        ("pythia-1b", 1_011_781_632),
        ("pythia-1.4b", 1_414_647_808),
        ("pythia-2.8b", 2_775_208_960),
        ("pythia-6.9b", 6_857_302_016),
        ("pythia-12b", 11_846_072_320),
        ("gpt-neox-20b", 20_554_567_680),
        ("stablelm-3b", 2_795_443_200),
        ("stablelm-2-1.6b", 1_644_515_328),
        ("stablelm-2-12b", 12_143_185_920),
        ("command-r-35b", 34_980_831_232),
        ("command-r7b", 8_028_033_024),
        ("command-r-plus-104b", 103_810_674_688),
        ("glm-4-9b", 9_399_951_360),
        ("phi-3-medium", 13_960_238_080),
        ("phi-4", 14_659_507_200),
        ("smollm3-3b", 3_075_098_624),
        ("ernie-4.5-0.3b", 360_748_032),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2-236b", 235_741_434_880),
        ("deepseek-v3-671b", 671_026_404_352),
        ("moonlight-16b-a3b", 15_960_108_544),
    ],
)
def test_parameters_are_those_published(name: PresetName, count: int) -> None:
    preset = presets()[name]
    parameters = gpt2_parameters(preset) if preset.model["family"] == "gpt2" else llama_parameters(preset)
    assert parameters == pytest.approx(count, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 140.6, 39.1),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
        ("qwen2-57b-a14b", 57.4, 14.25),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235.1, 22.2),
        ("olmoe-1b-7b", 6.9, 1.3),
        ("gpt-oss-20b", 20.9, 3.61 + 0.58),  # published without the embedding of tokens
        ("gpt-oss-120b", 116.8, 5.13 + 0.58),
        ("granite-3-1b-a400m", 1.33, 0.43),
        ("granite-3-3b-a800m", 3.3, 0.88),
        ("deepseek-v2-236b", 235.74, 21.38),
        ("deepseek-v3-671b", 671.03, 37.55),
    ],
)
def test_mixtures_have_the_billions_that_are_published(name: PresetName, total: float, active: float) -> None:
    preset = presets()[name]
    assert llama_parameters(preset) / 1e9 == pytest.approx(total, abs=0.05)
    assert llama_parameters(preset, preset.experts["per_token"]) / 1e9 == pytest.approx(active, abs=0.06)


def test_a_preset_of_a_mixture_without_experts_is_dense() -> None:
    deck = parse_deck(
        '[run]\nsteps = 1\n[model]\npreset = "qwen3-30b-a3b"\nexperts = 0\n[data]\ntokens = "t.h5"\n'
        "[batch]\nglobal_size = 1\n"
    )
    assert (deck.model.experts, deck.model.mlp, deck.model.head_size) == (None, 6144, 128)


@pytest.mark.parametrize("name", [name for name in presets() if name.startswith("megatron")])
def test_megatron_rows_have_the_billions_of_their_names(name: PresetName) -> None:
    billions = float(name.removeprefix("megatron-").removesuffix("b"))
    preset = presets()[name]
    assert gpt2_parameters(preset) / 1e9 == pytest.approx(billions, abs=0.051 if billions < 1000 else 0.5)
    assert (preset.sequence, preset.model["vocabulary"]) == (2048, 51200)


@pytest.mark.parametrize("name", presets())
def test_the_model_counts_the_same_parameters(name: str) -> None:
    preset = presets()[name]
    deck = parse_deck(
        f'[run]\nsteps = 1\n[model]\npreset = "{name}"\n[data]\ntokens = "t.h5"\n[batch]\nglobal_size = 1\n'
    )
    parameters = gpt2_parameters(preset) if preset.model["family"] == "gpt2" else llama_parameters(preset)
    counted = count(ModelShape.of(deck, preset.model["vocabulary"]))
    assert counted.parameters == pytest.approx(parameters, rel=1e-12)
    active = llama_parameters(preset, preset.experts["per_token"]) if preset.experts else parameters
    assert counted.active_parameters == pytest.approx(active, rel=1e-12)


@pytest.mark.parametrize("name", presets())
def test_a_preset_fills_the_model_and_the_sequence(name: PresetName) -> None:
    deck = parse_deck(
        f'[run]\nsteps = 1\n[model]\npreset = "{name}"\n[data]\ntokens = "t.h5"\n[batch]\nglobal_size = 1\n'
    )
    preset = presets()[name]
    assert deck.batch.sequence == preset.sequence
    own = {key: tuple(value) if isinstance(value, list) else value for key, value in preset.model.items()}
    assert {key: deck.value(f"model.{key}") for key in own} == own
    for table, keys in preset.tables.items():
        assert {key: deck.value(f"model.{table}.{key}") for key in keys} == keys


def test_rope_scaling_of_a_preset_can_be_changed() -> None:
    head = '[run]\nsteps = 1\n[data]\ntokens = "t.h5"\n[batch]\nglobal_size = 1\n'
    head += '[model]\npreset = "llama-3.1-8b"\n'

    def scaling(text: str) -> RopeScaling | None:
        return parse_deck(head + text).model.rope_scaling

    assert scaling('rope_scaling = "none"\n') is None
    changed = RopeScaling(kind="llama3", factor=16.0, original_sequence=8192)
    assert scaling("rope_scaling.factor = 16\n") == changed
    assert scaling('rope_scaling = {kind = "linear", factor = 2}\n') == RopeScaling(kind="linear", factor=2.0)


def test_the_schema_has_the_names_of_the_file() -> None:
    assert get_args(PresetName) == tuple(presets())


def test_keys_beside_a_preset_win_and_others_follow_them() -> None:
    deck = parse_deck(
        '[run]\nsteps = 1\n[model]\npreset = "llama-70b"\nhidden = 256\nheads = 4\nlayers = 2\n'
        '[data]\ntokens = "t.h5"\n[batch]\nglobal_size = 1\nsequence = 32\n'
    )
    assert (deck.model.hidden, deck.model.heads, deck.model.key_value_heads) == (256, 4, 4)
    assert (deck.model.mlp, deck.model.vocabulary, deck.batch.sequence) == (768, 32000, 32)
