"""The benchmark of widths: what it measures and tells, on ranks that share it out.

Tests of report/widths.py, too.
"""

from __future__ import annotations

import json
from math import nan
from pathlib import Path

import click
import pytest
import torch

from hpctrain.bench.mup import (
    KINDS,
    WidthBenchOptions,
    WidthResults,
    bench_mup,
    best_rate,
    change_width,
    check_coordinates,
    measure_spreads,
    rate_rows,
    ratio,
    spread_rows,
    with_base,
)
from hpctrain.cli.bench import numbers
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.errors import HpctrainError
from hpctrain.model.part import logits_of
from hpctrain.report.widths import picture
from tests.bench.prepared import prepared
from tests.engines import DECK, LLAMA, small_deck, trainer


def test_a_width_has_more_heads_or_wider_ones() -> None:
    deck = with_base(small_deck(*LLAMA))  # 32 wide, 8 heads of 4, 2 of keys, mlp 48
    more, wider = (change_width(deck, 64, "mup", wider_heads) for wider_heads in (False, True))
    assert (more.model.heads, more.model.key_value_heads, more.model.head_size) == (16, 4, 4)
    assert (wider.model.heads, wider.model.key_value_heads, wider.model.head_size) == (8, 2, 8)
    for each in (more, wider):
        assert (each.model.hidden, each.model.mlp, each.model.base_width) == (64, 96, 32)
        assert (each.model.base_head_size, each.model.parametrization) == (4, "mup")
    scaled = small_deck("model.parametrization=mup", "model.base_width=8", "model.base_head_size=4")
    assert with_base(scaled).model.base_width == 8
    with pytest.raises(
        HpctrainError,
        match=r"--widths: 40: the number of heads must be a whole number \(use a multiple of 16",
    ):
        change_width(deck, 40, "mup", False)
    with pytest.raises(HpctrainError, match="--widths: 24: the head size"):
        change_width(deck, 24, "mup", True)


def test_spreads_are_those_of_what_layers_give(world: World) -> None:
    model = trainer(world, small_deck()).engine.model
    tokens = torch.randint(0, 61, (2, 32))
    found = measure_spreads(model, tokens)
    assert set(found) == set(KINDS)
    with torch.no_grad():
        assert found["logits"] == pytest.approx(float(logits_of(model, tokens).std()), rel=1e-6)
        table, positions = model.layers[0].table, model.layers[0].positions.table
        assert found["embedding"] == pytest.approx(float((table[tokens] + positions[:32]).std()), rel=1e-6)
    assert not any(module._forward_hooks for layer in model.layers for module in layer.modules())


@pytest.mark.parametrize("optimizer", ["adafactor", "adam-mini"])
def test_values_do_not_follow_the_width_where_updates_are_of_blocks(world: World, optimizer: str) -> None:
    """The coordinate check: what three steps lead to, at four times the width, is as large, or is not."""
    deck = with_base(small_deck(f"optimizer.name={optimizer}"))
    batches, figures = Batches(SyntheticSource(32, 61), 0), WidthResults()
    check_coordinates(world, deck, batches, WidthBenchOptions((32, 128), 3), figures)
    for kind in ("attention", "feed_forward", "block"):
        usual, ours = (
            [steps[-1] for steps in figures.spread[name][kind].values()] for name in ("standard", "mup")
        )
        assert usual[1] > 4 * usual[0]
        assert ratio(ours) < 1.5
        assert figures.spread["mup"][kind][32] == figures.spread["standard"][kind][32]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            ("optimizer.name=muon", 'optimizer.muon.matrices=["blocks.*","head.weight"]'),
            "rate of head.weight has no known",
        ),
        ((*LLAMA, "optimizer.name=sgd", "model.query_key_norm=head"), 'no known rule (use "all" or "none")'),
        (("model.from=FOLDER/hf",), "conflicts with bench mup"),
        (("objective.kind=reward",), "objective.kind=reward: is unsupported in bench mup"),
        (
            ("objective.kind=ppo", 'policy.reward=["exact-match"]', "policy.tokens=8"),
            "kind=ppo: is unsupported",
        ),
    ],
)
def test_what_would_be_no_family_of_widths_is_refused_before_anything_is_trained(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.setattr("hpctrain.bench.mup._make_trainer", lambda *_: pytest.fail("was trained"))
    (tmp_path / "deck.toml").write_text(DECK)
    (tmp_path / "hf").mkdir()
    config = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 8,
        "vocab_size": 61,
        "n_positions": 32,
    }
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    given = [key.replace("FOLDER", str(tmp_path)) for key in keys]
    wish = WidthBenchOptions((32,), 1, random_tokens=True)
    with pytest.raises(HpctrainError) as refused:
        bench_mup(world, tmp_path / "deck.toml", given, wish, None, None)
    (problem,) = refused.value.problems
    assert sentence in problem


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1.0: (0 - 1) ** 2, 2.0: 0.0, 4.0: 1.0}, 2.0),
        ({2**x: (x - 1.25) ** 2 for x in (0, 1, 2, 3)}, 2**1.25),
        ({1.0: 1.0, 2.0: 0.5, 4.0: nan}, 2.0),
        ({1.0: nan}, None),
    ],
)
def test_the_best_rate_lies_between_those_tried(losses: dict[float, float], expected: float | None) -> None:
    assert best_rate(losses) == (None if expected is None else pytest.approx(expected))


def test_tables_tell_how_far_widths_are_apart() -> None:
    spread = {"mup": {"block": {32: [1.0, 2.0], 64: [1.0, 3.0]}}}
    loss = {"mup": {32: {1.0: 2.0, 2.0: 1.0, 4.0: 2.0}, 64: {1.0: 1.0, 2.0: nan, 4.0: 2.0}}}
    figures = WidthResults(spread, loss)
    assert spread_rows(figures)[1] == ["block", "mup", "2", "3", "1.500", "1.000"]
    assert rate_rows(figures)[1][-2:] == ["2", "2.00"]
    assert rate_rows(figures)[2] == ["64", "mup", "1.0000", "not finite", "2.0000", "1", ""]
    assert len(picture(spread, loss, best_rate).axes) == 3


@pytest.mark.mpi(min_size=1, max_size=2)
def test_ranks_share_the_trainings_out(world: World, mpi_tmp_path: Path) -> None:
    """muP keeps the residual stream; figures do not depend on who made them."""
    folder = mpi_tmp_path
    path, tokens = prepared(world, folder)
    keys = [tokens, "data.validation=0", "run.steps=4"]
    wish = WidthBenchOptions((32, 64), 2, 1, (0.001, 0.01), (32, 64))
    bench_mup(world, path, keys, wish, folder / "figures.json", folder / "widths.png")
    if world.rank == 0:
        bench_mup(world.single_rank_world(), path, keys, wish, folder / "alone.json", None)
        figures = json.loads((folder / "figures.json").read_text())
        assert figures == json.loads((folder / "alone.json").read_text())
        assert (folder / "widths.png").read_bytes()[1:4] == b"PNG"
        for kind in KINDS:
            assert figures["spread"]["mup"][kind]["32"] == figures["spread"]["standard"][kind]["32"]
            assert figures["spread"]["mup"][kind]["64"] != figures["spread"]["standard"][kind]["64"]
        assert set(figures["loss"]["mup"]["64"]) == {"0.001", "0.01"}
    random = WidthBenchOptions((32,), 1, 1, (0.1,), (32,), random_tokens=True)
    with pytest.raises(HpctrainError, match="--rates conflicts with --random-tokens"):
        bench_mup(world, path, keys, random, None, None)
    random = WidthBenchOptions((32,), 1, random_tokens=True)
    bench_mup(world, path, ["data.tokens=none"], random, None, None)


@pytest.mark.parametrize("widths", ["", "a", "64,-1", "nan"])
def test_widths_are_numbers(widths: str) -> None:
    with pytest.raises(click.BadParameter, match="must be positive numbers, separated by commas"):
        numbers("--widths", widths, int)
    assert numbers("--rates", "", float) == ()
    assert numbers("--rates", "1e-3, 2e-3,1e-3", float) == (1e-3, 2e-3)
