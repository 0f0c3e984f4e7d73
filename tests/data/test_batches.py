"""Sequences and micro-batches against slices of the tokens, for every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data.batches import Batches, SplitSequences
from hpctrain.data.order import SampleOrder
from hpctrain.data.tokens import TokenFile
from hpctrain.errors import HpctrainError
from tests.data.preparing import prepare

TEXT = bytes(range(32, 127)) * 3  # 285 bytes and an end of document
TOKENS = torch.tensor([*TEXT, 256])


@pytest.fixture
def file(world: World, tmp_path: Path) -> TokenFile:
    (tmp_path / "a.txt").write_bytes(TEXT)
    prepare(world.single_rank_world(), tmp_path / "a.h5", [str(tmp_path / "a.txt")])
    return TokenFile(tmp_path / "a.h5")


def test_splits_cut_the_tokens(file: TokenFile) -> None:
    train = SplitSequences(file, 10, 0.2, "train")
    held_out = SplitSequences(file, 10, 0.2, "validation")
    assert (train.count, held_out.count) == (23, 5)  # of the 28 sequences in 286 tokens
    for i in range(28):
        source, index = (train, i) if i < 23 else (held_out, i - 23)
        tokens, targets = source.sequence(index)
        assert torch.equal(tokens, TOKENS[10 * i : 10 * i + 10])
        assert torch.equal(targets, TOKENS[10 * i + 1 : 10 * i + 11])
        assert tokens.dtype == targets.dtype == torch.int64
    assert SplitSequences(file, 10, 0.0, "train").count == 28
    assert SplitSequences(file, 10, 0.0, "validation").count == 0
    assert SplitSequences(file, 10, 1e-9, "validation").count == 1
    assert SplitSequences(file, 285, 0.0, "train").count == 1
    assert SplitSequences(file, 142, 0.99, "train").count == 1


def test_too_few_tokens(file: TokenFile) -> None:
    with pytest.raises(HpctrainError, match=r"has 286 tokens, but batch.sequence = 286 .* at least 287"):
        SplitSequences(file, 286, 0.0, "train")
    with pytest.raises(HpctrainError, match=r"data.validation = 0.1 needs at least 287") as caught:
        SplitSequences(file, 143, 0.1, "validation")
    assert str(file.path) in str(caught.value)


@pytest.mark.parametrize(("ranks", "micro_size"), [(1, 1), (1, 12), (2, 1), (2, 3), (3, 4), (4, 3), (12, 1)])
def test_every_layout_has_the_same_samples(file: TokenFile, ranks: int, micro_size: int) -> None:
    source = SplitSequences(file, 10, 0.2, "train")
    batches, order = Batches(source, seed=6), SampleOrder(23, 6)
    for first in (0, 17, 10**6):  # also over the end of an epoch
        micro_batches = [list(batches.step(first, 12, rank, ranks, micro_size)) for rank in range(ranks)]
        for j in range(12):
            k, place = divmod(j, ranks * micro_size)
            rank, row = divmod(place, micro_size)
            tokens, targets = source.sequence(int(order.at(np.array([first + j]))[0]))
            assert torch.equal(micro_batches[rank][k].tokens[row], tokens)
            assert torch.equal(micro_batches[rank][k].targets[row], targets)
        assert {len(each) for each in micro_batches} == {12 // (ranks * micro_size)}


@pytest.mark.parametrize(("size", "ranks", "micro_size"), [(5, 2, 2), (1, 4, 1), (7, 3, 2), (4, 2, 2)])
def test_what_does_not_fill_is_masked(file: TokenFile, size: int, ranks: int, micro_size: int) -> None:
    batches = Batches(SplitSequences(file, 10, 0.0, "train"), seed=0)
    for steps in (
        [list(batches.step(0, size, rank, ranks, micro_size)) for rank in range(ranks)],
        [list(batches.evaluation(size, rank, ranks, micro_size)) for rank in range(ranks)],
    ):
        assert {len(each) for each in steps} == {-(-size // (ranks * micro_size))}
        rows = [row for each in steps for batch in each for row in batch.targets]
        assert all(batch.tokens.shape == (micro_size, 10) for each in steps for batch in each)
        assert sum(bool((row >= 0).all()) for row in rows) == size
        assert sum(bool((row == -1).all()) for row in rows) == len(rows) - size


def test_evaluation_is_in_order_and_ends_with_the_file(file: TokenFile) -> None:
    source = SplitSequences(file, 10, 0.2, "validation")
    batches = Batches(source, seed=0)
    tokens = torch.cat([batch.tokens for batch in batches.evaluation(3, 0, 1, 3)])
    assert torch.equal(tokens, TOKENS[230:260].reshape(3, 10))
    assert len(list(batches.evaluation(1000, 0, 1, 1))) == 5
    assert list(Batches(SplitSequences(file, 10, 0.0, "validation"), 0).evaluation(4, 0, 2, 1)) == []
