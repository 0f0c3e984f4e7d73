"""The range of learning rates: rates that updates really have, on any layout, and where the loss falls most.

Tests of report/rate.py, too.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import log, nan
from pathlib import Path

import numpy as np
import pytest

from hpctrain.bench.rate_range import (
    RateBenchOptions,
    RatePoint,
    RateRangeResult,
    RisingRate,
    bench_rate,
    has_diverged,
    moving_average,
    result_lines,
    steepest_rate,
    train_with_rising_rate,
    without_schedules,
)
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.errors import HpctrainError
from hpctrain.report.rate import picture
from tests.data.preparing import prepare
from tests.engines import reference, small_deck, trainer

SGD = ("optimizer.name=sgd", "optimizer.sgd.momentum=0", "optimizer.weight_decay=0", "optimizer.clip=1e9")


def test_updates_have_the_rates_that_are_told(world: World) -> None:
    """Of plain SGD an update is as long as the gradient, times the rate; the deck's warm-up is left out."""
    deck = without_schedules(small_deck(*SGD, "learning_rate.warmup=3"))
    trained = trainer(world.single_rank_world(), deck)
    lengths, norms = [], []
    before = {name: values.clone() for name, values in trained.parameters().items()}
    real = trained.train_step

    def watched() -> object:
        nonlocal before
        result = real()
        now = {name: values.clone() for name, values in trained.parameters().items()}
        lengths.append(sum(float((now[name] - before[name]).square().sum()) for name in now) ** 0.5)
        norms.append(result.grad_norm)
        before = now
        return result

    trained.train_step = watched  # type: ignore[assignment]
    figures = train_with_rising_rate(trained, RateBenchOptions(1e-3, 1e-1, 10))
    rates = [point.rate for point in figures.points]
    assert rates == pytest.approx(np.geomspace(1e-3, 1e-1, 10).tolist())
    assert [length / norm for length, norm in zip(lengths, norms, strict=True)] == pytest.approx(
        rates, rel=1e-3
    )
    assert trained.engine.control.learning_rate.at(0, 8) == deck.learning_rate.peak  # as before


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", ["layout.zero=3", "layout.tensor=2", "layout.pipeline=2"])
def test_any_layout_finds_the_same(layout: str, world: World) -> None:
    wish, deck = RateBenchOptions(1e-3, 3.0, 16), without_schedules(small_deck(layout))
    found, expected = (
        train_with_rising_rate(trainer(world, deck), wish),
        train_with_rising_rate(reference(world, deck), wish),
    )
    losses = [[point.loss for point in figures.points] for figures in (found, expected)]
    first = slice(0, 8)  # rounding grows with the rate
    assert losses[0][first] == pytest.approx(losses[1][first], rel=1e-4)
    assert len({world.communicator.bcast(len(losses[0])), len(losses[0])}) == 1


def test_it_ends_where_the_loss_diverges(world: World) -> None:
    figures = train_with_rising_rate(
        trainer(world.single_rank_world(), without_schedules(small_deck(*SGD))),
        RateBenchOptions(1e-2, 1000, 40),
    )
    assert "diverged at rate" in figures.ended or "not finite at rate" in figures.ended
    assert len(figures.points) < 40 and figures.suggestion is not None
    assert 1e-2 <= figures.suggestion < figures.points[-1].rate


def points(losses: list[float]) -> list[RatePoint]:
    return [RatePoint(10.0 ** (number / 10 - 4), loss, loss) for number, loss in enumerate(losses)]


def test_the_steepest_descent_is_that_over_the_logarithm() -> None:
    rates = np.arange(41) / 10  # decades
    losses = (5 - 2 / (1 + np.exp(-6 * (rates - 2))) + np.exp(3 * (rates - 3.6))).tolist()
    assert steepest_rate(points(losses)) == pytest.approx(1e-2)  # the middle of the fall
    assert steepest_rate(points(losses), first_step=10) == pytest.approx(1e-2)
    noise = np.random.default_rng(1).normal(0, 0.1, 41)
    noisy = [
        RatePoint(p.rate, p.loss, mean)
        for p, mean in zip(points(losses), moving_average(losses + noise, 5), strict=True)
    ]
    assert steepest_rate(noisy, first_step=2) == pytest.approx(1e-2, rel=0.7)  # nor does smoothing move it
    assert steepest_rate(points([1.0, 2.0, 3.0, 4.0])) is None
    assert steepest_rate(points([3.0, nan])) is None and steepest_rate([]) is None


def test_smoothed_losses_are_means_around_each() -> None:
    assert moving_average([1.0, 2.0, 6.0, 4.0, 9.0], 3) == [1.0, 3.0, 4.0, 19 / 3, 9.0]
    assert moving_average([1.0, 2.0], 1) == [1.0, 2.0]
    assert moving_average([1.0, 3.0, nan], 3)[:2] == [1.0, 3.0]


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_figure_of_a_set_is_that_of_its_evaluation(world: World) -> None:
    """After each step, which it does not change."""
    deck = without_schedules(small_deck(*SGD))
    batches = Batches(SyntheticSource(deck.batch.sequence, deck.model.vocabulary or 0, seed=5), 1)
    trained, other = trainer(world, deck), trainer(world, deck)
    wish = RateBenchOptions(1e-3, 1e-1, 10)
    figures = train_with_rising_rate(trained, wish, evaluate=lambda: trained.evaluate(batches, 6)["loss"])
    expected = []
    other.engine.control.learning_rate = RisingRate(
        **{**vars(other.engine.control.learning_rate), "peak": 1e-3}, factor=1.0
    )
    for rate in np.geomspace(1e-3, 1e-1, 10):
        other.engine.control.learning_rate = RisingRate(
            **{**vars(other.engine.control.learning_rate), "peak": float(rate)}
        )
        other.train_step()
        expected.append(other.evaluate(batches, 6)["loss"])
    assert [point.loss for point in figures.points] == pytest.approx(expected, rel=1e-6)


def test_what_diverges_is_far_above_the_least_or_the_first() -> None:
    assert not has_diverged([5.0, 4.0, 6.0], 1) and has_diverged([5.0, 4.0, 6.3], 1)
    assert has_diverged([5.0, 1.0, 4.1], 1) and not has_diverged([5.0, 1.0, 3.9], 1)
    assert not has_diverged([5.0, 4.0, 7.0], 2) and has_diverged([5.0, 4.0, 8.0, 4.0], 2)
    assert not has_diverged([-1.0, -2.0, -0.5], 1) and not has_diverged([5.0], 10)


def test_the_table_marks_what_counts() -> None:
    deck = small_deck("learning_rate.reference_batch=16")
    figures = RateRangeResult(
        [*points([5.0, 4.0, 3.0]), RatePoint(9.0, nan, nan)], 10**-3.9, "the loss was not finite"
    )
    lines = result_lines(figures, RateBenchOptions(), deck)
    assert lines[2].split() == ["2", "0.000126", "4.0000", "4.0000", "steepest"]
    assert lines[3].endswith("lowest") and lines[4].split()[2:] == ["not", "finite", "not", "finite"]
    assert "the loss was not finite after 4 of 100 steps" in lines
    assert "steepest fall of the loss at rate 0.000126: --set learning_rate.peak=0.00025" in lines
    assert any("the peak applies to learning_rate.reference_batch = 16, not 8" in line for line in lines)
    assert (
        "no suggestion"
        in result_lines(RateRangeResult(points([1.0, 2.0]), None, ""), RateBenchOptions(), deck)[-1]
    )


def test_the_picture_has_both_losses_and_the_rate() -> None:
    (axes,) = picture("a $b", [(1e-3, 5.0, 5.0), (1e-2, 3.0, 4.0), (1e-1, nan, nan)], 1e-2).axes
    assert [line.get_label() for line in axes.lines] == ["loss", "smoothed", "steepest: 0.01"]
    assert axes.get_xscale() == "log" and axes.get_title(loc="left") == r"Learning rate: a \$b"


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        (RateBenchOptions(1.0, 0.1), "--from 1 --to 0.1: must be above 0"),
        (RateBenchOptions(nan, 0.1), "must be above 0"),
        (RateBenchOptions(steps=3), "--steps 3: must be from 10"),
        (RateBenchOptions(window=60), "--window 60: must be from 1"),
    ],
)
def test_options_out_of_range_are_told(wish: RateBenchOptions, told: str) -> None:
    with pytest.raises(HpctrainError, match=told):
        wish.check()


def test_a_deck_is_tried_and_nothing_is_left(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{n * n % 997} lines of text\n" for n in range(600)))
    prepare(world.single_rank_world(), tmp_path / "tokens.h5", [str(tmp_path / "text.txt")])
    (tmp_path / "deck.toml").write_text(
        '[run]\nsteps = 5\ntitle = "tried"\n[model]\nfamily = "gpt2"\nlayers = 1\nhidden = 16\nheads = 2\n'
        '[data]\ntokens = "tokens.h5"\n[batch]\nglobal_size = 4\nmicro_size = 2\nsequence = 16\n'
        '[learning_rate]\nwarmup = 4\n[memory]\noptimizer = "disk"\n'
    )
    capsys.readouterr()
    before = {*tmp_path.iterdir()}
    wish = RateBenchOptions(1e-4, 1.0, 20)
    bench_rate(
        world.single_rank_world(), Path("deck.toml"), ["run.seed=3"], wish, Path("a.json"), Path("a.png")
    )
    assert {path.name for path in {*tmp_path.iterdir()} - before} == {"a.json", "a.png"}
    figures = json.loads((tmp_path / "a.json").read_text())
    shown = capsys.readouterr().out
    assert "2 of 20: rate 0.000162, loss" in shown
    assert (
        len(figures["points"]) > 10
        and figures["suggestion"]
        and f"--set learning_rate.peak={figures['suggestion']:.2g}" in shown
    )
    with pytest.raises(HpctrainError, match=r"communication\.server"):
        bench_rate(world, Path("deck.toml"), ["communication.server.mode=sync"], wish, None, None)
    with pytest.raises(
        HpctrainError,
        match=r"--figure validation: requires an evaluation set \(add "
        r"data\.validation",
    ):
        bench_rate(
            world, Path("deck.toml"), ["data.validation=0"], RateBenchOptions(metric="validation"), None, None
        )
    wish, held_out = (
        RateBenchOptions(1e-3, 0.1, 10, metric="validation/bits_per_byte"),
        ["data.validation=0.1"],
    )
    bench_rate(world.single_rank_world(), Path("deck.toml"), held_out, wish, Path("b.json"), None)
    bits = [point["loss"] for point in json.loads((tmp_path / "b.json").read_text())["points"]]
    bench_rate(
        world.single_rank_world(),
        Path("deck.toml"),
        held_out,
        replace(wish, metric="validation"),
        Path("c.json"),
        None,
    )
    losses = [point["loss"] for point in json.loads((tmp_path / "c.json").read_text())["points"]]
    ratios = [one / other for one, other in zip(bits, losses, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * 10) and ratios[0] >= 1 / log(2)
    assert "validation bits/byte" in capsys.readouterr().out
