"""Frontiers against brute force, and what is drawn of them."""

from __future__ import annotations

import random

import pytest

from hpctrain.report.pareto import LayoutCandidate, draw_pareto, frontier


def brute(candidates: list[LayoutCandidate]) -> set[tuple[float, float]]:
    """Memory and time of those that fit and that no other that fits beats."""
    fitting = [each for each in candidates if each.limit is None or each.bytes <= each.limit]
    return {
        (one.bytes, one.seconds)
        for one in fitting
        if not any(
            other.bytes <= one.bytes
            and other.seconds <= one.seconds
            and (other.bytes, other.seconds) != (one.bytes, one.seconds)
            for other in fitting
        )
    }


@pytest.mark.parametrize("limit", [None, 6.0])
def test_the_frontier_is_that_of_brute_force(limit: float | None) -> None:
    chance = random.Random(1)
    for _ in range(300):
        some = [
            LayoutCandidate(str(number), chance.randint(1, 9), chance.randint(1, 9), limit)
            for number in range(chance.randint(0, 12))
        ]
        found = [(each.bytes, each.seconds) for each in frontier(some)]
        assert found == sorted(brute(some))


def test_the_picture_marks_the_frontier_and_the_limit() -> None:
    few = [
        LayoutCandidate("small", 9.0, 1e9, 5e9),
        LayoutCandidate("worse", 9.5, 2e9, 5e9),
        LayoutCandidate("fast", 1.0, 4e9, 5e9),
        LayoutCandidate("large", 0.5, 6e9, 5e9),
    ]
    figure = draw_pareto("title", few)
    (axes,) = figure.axes
    line, limit = axes.lines
    assert list(line.get_xdata()) == [1e9, 4e9] and list(line.get_ydata()) == [9.0, 1.0]
    assert set(limit.get_xdata()) == {5e9}
    words = axes.get_legend_handles_labels()[1]
    assert {"fits", "does not fit", "memory limit: 5 GB"} <= set(words)
    told = figure.get_supxlabel()
    assert told.splitlines() == ["1: small (9 s, 1 GB)", "2: fast (1 s, 4 GB)"]
    assert [text.get_text() for text in axes.texts] == ["1", "2"]


def test_of_a_long_frontier_some_are_named_the_ends_among_them() -> None:
    many = [LayoutCandidate(f"c{number}", 100.0 - number, 1e6 + number) for number in range(60)]
    named = draw_pareto("title", many).get_supxlabel().splitlines()
    assert len(named) == 20 and "c0 " in named[0] and "c59 " in named[-1]


def test_marks_that_lie_close_are_told_apart() -> None:
    close = [
        LayoutCandidate(f"{number}", 10.13 + 0.004 * number, 66.6e9 - 1e6 * number) for number in range(5)
    ]
    far = [
        LayoutCandidate(f"{number}", 10.0 + 900 * number, 1e9 + 3e10 * (5 - number)) for number in range(5)
    ]
    for candidates in (close, far):
        figure = draw_pareto("t", candidates)
        figure.canvas.draw()
        for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
            labels = [label.get_text() for label in axis.get_ticklabels()]
            assert len(set(labels)) == len(labels) > 2
            assert all(label.split()[-1] in {"GB", "s", "min", "0"} for label in labels), labels
