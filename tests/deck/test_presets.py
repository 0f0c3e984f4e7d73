"""Published parameter counts, by closed forms that know nothing of the model's code.

Tests of deck/families/gpt2.py and deck/families/llama_presets.py beside deck/presets.py.
"""

from __future__ import annotations

import pytest

from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.deck.families import FAMILIES, family_values
from hpctrain.deck.presets import Preset, PresetName, presets
from hpctrain.deck.read import parse_deck
from hpctrain.deck.sections.rope_scaling import RopeScaling
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from tests.deck.published_counts import ACTIVE, TOTALS


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


def require_count(parameters: float, published: str) -> None:
    """Raise AssertionError if a count is not a published one, which may be rounded or cut to its digits."""
    digits = published.removesuffix("B").replace(",", "")
    unit = 10.0 ** (9 - len(digits.partition(".")[2])) if published.endswith("B") else 1.0
    value = float(digits) * (1e9 if published.endswith("B") else 1.0)
    more = parameters - value
    assert abs(more) <= unit / 2 or 0 <= more < unit, f"{parameters:,} instead of {published}"


def parameter_count(preset: Preset) -> float:
    return gpt2_parameters(preset) if preset.model["family"] == "gpt2" else llama_parameters(preset)


@pytest.mark.parametrize("name", TOTALS)
def test_parameters_are_those_published(name: PresetName) -> None:
    published, _source = TOTALS[name]
    require_count(parameter_count(presets()[name]), published)


@pytest.mark.parametrize("name", ACTIVE)
def test_parameters_that_a_token_uses_are_those_published(name: PresetName) -> None:
    published, tables, _source = ACTIVE[name]
    preset = presets()[name]
    all_tables = 1 if preset.model.get("tied", family_values(preset.model["family"], 1)["tied"]) else 2
    table = preset.model["vocabulary"] * preset.model["hidden"]
    not_counted = max(0, all_tables - tables) * table
    require_count(llama_parameters(preset, preset.experts["per_token"]) - not_counted, published)


@pytest.mark.parametrize("name", [name for name in TOTALS if name.startswith("megatron")])
def test_megatron_rows_have_the_sequence_and_the_vocabulary_of_their_table(name: PresetName) -> None:
    preset = presets()[name]
    assert (preset.sequence, preset.model["vocabulary"]) == (2048, 51200)


def test_all_presets_have_a_published_count() -> None:
    assert set(presets()) - set(TOTALS) == {"mixtral-tiny"}
    assert {name for name, preset in presets().items() if preset.experts} - set(ACTIVE) == {"mixtral-tiny"}


def test_a_preset_of_a_mixture_without_experts_is_dense() -> None:
    deck = parse_deck(
        '[run]\nsteps = 1\n[model]\npreset = "qwen3-30b-a3b"\nexperts = 0\n[data]\ntokens = "t.h5"\n'
        "[batch]\nglobal_size = 1\n"
    )
    assert (deck.model.experts, deck.model.mlp, deck.model.head_size) == (None, 6144, 128)


@pytest.mark.parametrize("name", presets())
def test_the_model_counts_the_same_parameters(name: str) -> None:
    preset = presets()[name]
    deck = parse_deck(
        f'[run]\nsteps = 1\n[model]\npreset = "{name}"\n[data]\ntokens = "t.h5"\n[batch]\nglobal_size = 1\n'
    )
    parameters = parameter_count(preset)
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


def test_keys_beside_a_preset_win_and_others_follow_them() -> None:
    deck = parse_deck(
        '[run]\nsteps = 1\n[model]\npreset = "llama-70b"\nhidden = 256\nheads = 4\nlayers = 2\n'
        '[data]\ntokens = "t.h5"\n[batch]\nglobal_size = 1\nsequence = 32\n'
    )
    assert (deck.model.hidden, deck.model.heads, deck.model.key_value_heads) == (256, 4, 4)
    assert (deck.model.mlp, deck.model.vocabulary, deck.batch.sequence) == (768, 32000, 32)
