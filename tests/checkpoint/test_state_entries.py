"""Where a run finds, in a file of other ranks or replicas, what it is to go on with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hpctrain.checkpoint.checkpoint_index import StoredTensor
from hpctrain.checkpoint.state_entries import resumed_entries
from hpctrain.parallel.shards import Shard
from hpctrain.sharding.state import MODEL, ResumeMode, StateTensor

PIECE = Shard("a", (8, 3), (4, 0), (4, 3), frozenset({"tensor"}))


def tensor(
    kind: str, resume_mode: ResumeMode, number: int | None, count: int, per_replica: bool
) -> StateTensor:
    """Of the piece, number `number` of `count` if any."""
    shard = PIECE if number is None else PIECE.stacked(number, count)
    return StateTensor(kind, shard, torch.zeros(12), 0, (0, 1), True, resume_mode, False, per_replica)


@pytest.mark.parametrize(
    ("kind", "number", "stored", "expected"),
    [
        ("optimizer/m", 3, {"/replicas.optimizer/m": (2, 8, 3)}, ("/replicas.optimizer/m", (1, 4, 0))),
        ("optimizer/m", 3, {"/optimizer/m": (8, 3)}, ("/optimizer/m", (4, 0))),
        ("optimizer/m", None, {"/replicas.optimizer/m": (3, 8, 3)}, ("/replicas.optimizer/m", (0, 4, 0))),
        (MODEL, 1, {"/model": (8, 3), "/replicas.master": (2, 8, 3)}, ("/replicas.master", (1, 4, 0))),
        (MODEL, None, {"/model": (8, 3), "/replicas.master": (2, 8, 3)}, ("/model", (4, 0))),
        (MODEL, 1, {"/model": (8, 3), "/master": (8, 3)}, ("/master", (4, 0))),
    ],
)
def test_replicas_go_on_from_other_numbers_of_them(
    kind: str, number: int | None, stored: dict[str, tuple[int, ...]], expected: tuple[str, tuple[int, ...]]
) -> None:
    file = {f"{of}/a": StoredTensor(f"{of}/a", "float32", shape, 0, 0) for of, shape in stored.items()}
    state = [tensor(kind, "always", number, 4, number is not None)]
    ((entry,), left) = resumed_entries(state, file)
    assert (entry.dataset, entry.shard.start, left) == (f"{expected[0]}/a", expected[1], set())
    assert entry.shape == file[entry.dataset].shape


@pytest.mark.parametrize(("count", "read"), [(1, [0]), (2, [0]), (3, [0, 2]), (6, [0, 2, 4])])
def test_what_ranks_had_of_their_own_goes_to_one_each(count: int, read: list[int]) -> None:
    file = {"/reducer/r/a": StoredTensor("/reducer/r/a", "float32", (count, 8, 3), 0, 0)}
    entries, left = resumed_entries([tensor("reducer/r", "as a sum", 0, 2, False)], file)
    assert [entry.shard.start[0] for entry in entries] == read and not left
    assert [entry.added for entry in entries] == [number > 0 for number in read]
    others, _ = resumed_entries([tensor("reducer/r", "as a sum", 1, 2, False)], file)
    starts = [entry.shard.start[0] for entry in (*entries, *others)]
    assert sorted(starts) == list(range(count)) and all(entry.shape[0] == count for entry in entries)


@pytest.mark.parametrize(("number", "expected"), [(0, [("/optimizer/m/a", (4, 0), (8, 3))]), (1, [])])
def test_a_sum_that_a_file_lacks_begins_with_its_whole_on_one_rank(
    number: int, expected: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
) -> None:
    """The whole is added to the other ranks' zeros: read twice, it would count twice."""
    file = {"/optimizer/m/a": StoredTensor("/optimizer/m/a", "float32", (8, 3), 0, 0)}
    part = replace(tensor("reducer/mean", "as a sum", number, 2, False), fallback_kind="optimizer/m")
    entries, left = resumed_entries([part], file)
    assert [(entry.dataset, entry.shard.start, entry.shape) for entry in entries] == expected and not left


@pytest.mark.parametrize(("kind", "shape"), [("float32", (8, 4)), ("bfloat16", (8, 3))])
def test_state_of_another_shape_or_type_is_left(kind: str, shape: tuple[int, ...]) -> None:
    file = {"/product/h/a": StoredTensor("/product/h/a", kind, shape, 0, 0)}
    assert resumed_entries([tensor("product/h", "if stored", None, 1, False)], file) == ([], {"product/h"})
