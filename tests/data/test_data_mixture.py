"""Mixtures against each of their entries alone: on any layout the same samples, in each entry's own order."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data.batches import Batches, SplitSequences
from hpctrain.data.data_mixture import (
    HeldOutMixture,
    JoinedSources,
    MixtureOrder,
    SplitDatasets,
    describe_training_data,
    mixture_lines,
)
from hpctrain.data.deck_tokens import open_entries
from hpctrain.data.order import SampleOrder
from hpctrain.data.tokens import TokenFile
from hpctrain.deck.read import parse_deck
from tests.data.preparing import prepare
from tests.deck.small_text import SMALL

SIZES = {"a": 700, "b": 300, "c": 90}
WEIGHTS = {"a": 2, "b": 5, "c": 1}
ENTRIES = ", ".join(f'{{tokens="{name}.h5", weight={weight}}}' for name, weight in WEIGHTS.items())
KEYS = ["data.tokens=", f"data.mixture=[{ENTRIES}]", "batch.sequence=10", "data.validation=0.2"]


@pytest.fixture
def trained(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SplitDatasets:
    monkeypatch.chdir(tmp_path)
    for number, (name, size) in enumerate(SIZES.items()):
        random = np.random.default_rng(number)
        Path(f"{name}.txt").write_bytes(random.integers(32, 127, size).astype("u1").tobytes())
        prepare(world.single_rank_world(), Path(f"{name}.h5"), [f"{name}.txt"])
    deck = parse_deck(SMALL, KEYS)
    return SplitDatasets.of(deck, open_entries(deck))


def alone(name: str, split: str = "train") -> SplitSequences:
    return SplitSequences(TokenFile(f"{name}.h5"), 10, 0.2, split)


def in_order(trained: SplitDatasets, samples: int) -> list[tuple[str, torch.Tensor]]:
    """The entry and the tokens of the first samples, from entries alone, each in its own order."""
    order = trained.train.order
    assert isinstance(order, MixtureOrder)
    sources, nth = order.interleaving.at(np.arange(samples))
    names, expected = [entry.name for entry in trained.entries], []
    for source, place in zip(sources.tolist(), nth.tolist(), strict=True):
        own = alone(names[source])
        shuffled = SampleOrder(own.count, order.orders[source].seed)
        index = int(shuffled.at(np.array([place]))[0])
        expected.append((names[source], own.sequence(index)[0]))
    return expected


@pytest.mark.parametrize(("ranks", "micro_size"), [(1, 1), (1, 16), (2, 4), (4, 2), (8, 1), (8, 2)])
def test_every_layout_has_the_same_samples(trained: SplitDatasets, ranks: int, micro_size: int) -> None:
    expected = in_order(trained, 176)
    for first in (0, 37, 160):
        parts = [list(trained.train.step(first, 16, rank, ranks, micro_size)) for rank in range(ranks)]
        rows = [row for turn in zip(*parts, strict=True) for each in turn for row in each.tokens]
        assert torch.equal(
            torch.stack(rows), torch.stack([tokens for _, tokens in expected[first : first + 16]])
        )


def test_each_entry_has_every_sequence_once_an_epoch(trained: SplitDatasets) -> None:
    order = trained.train.order
    assert order is not None and trained.counts == (56, 24, 8)
    places = np.arange(2000)
    index, epochs = order.at(places), order.epochs(places)
    begins = np.cumsum([0, *trained.counts])
    for number, count in enumerate(trained.counts):
        here = (index >= begins[number]) & (index < begins[number + 1])
        for epoch in range(int(epochs[here].max())):
            taken = index[here & (epochs == epoch)]
            assert np.array_equal(np.sort(taken), np.arange(begins[number], begins[number + 1]))
        assert len(index[here]) == pytest.approx(2000 * list(WEIGHTS.values())[number] / 8, abs=1)
        told = trained.epochs(2000)["abc"[number]]
        assert told == len(index[here]) / count
    assert len({order.orders[n].seed for n in range(3)}) == 3  # type: ignore[attr-defined]


def test_a_mixture_of_one_is_that_one(trained: SplitDatasets) -> None:
    source = alone("a")
    order = MixtureOrder([replace(trained.entries[0], share=Fraction(1))], [source.count], 1234)
    one, plain = Batches(JoinedSources([source]), 1234, order), Batches(source, 1234)
    for mixed, each in zip(one.step(50, 16, 0, 1, 16), plain.step(50, 16, 0, 1, 16), strict=True):
        assert torch.equal(mixed.tokens, each.tokens) and torch.equal(mixed.targets, each.targets)


def test_held_out_are_those_of_each_entry_in_its_share(trained: SplitDatasets) -> None:
    sources = [alone(name, "validation") for name in SIZES]
    assert [source.count for source in sources] == [14, 6, 1]
    held_out = trained.validation.source
    assert isinstance(held_out, HeldOutMixture) and held_out.count == 21
    rows = [held_out.sequence(index)[0] for index in range(21)]
    every = {tuple(row.tolist()) for row in rows}
    assert every == {tuple(s.sequence(i)[0].tolist()) for s in sources for i in range(s.count)}
    own = {tuple(sources[1].sequence(i)[0].tolist()) for i in range(6)}
    assert sum(tuple(row.tolist()) in own for row in rows[:8]) == 5  # five eighths, as long as there are any


def test_what_is_said(trained: SplitDatasets) -> None:
    assert describe_training_data(trained) == "a mixture of 3 entries: 1.09K tokens"
    lines = mixture_lines(trained, 160)
    assert lines[0] == "  a: 0.25 of all samples; 56 sequences (701 tokens), 0.714 epochs"
    assert lines[1].endswith(" 4.17 epochs")


def test_other_files_or_weights_are_another_mixture(trained: SplitDatasets) -> None:
    marks = [trained.description()["fingerprint"]]
    for weights in (ENTRIES, ENTRIES.replace("weight=5", "weight=4"), ENTRIES.replace("c.h5", "d.h5")):
        Path("d.h5").write_bytes(Path("b.h5").read_bytes())
        deck = parse_deck(SMALL, [*KEYS, f"data.mixture=[{weights}]"])
        marks.append(SplitDatasets.of(deck, open_entries(deck)).description()["fingerprint"])
    assert marks[0] == marks[1] and len(set(marks)) == 3
