"""Mirrors in the memory of nodes: what is found there again is what a checkpoint of that moment holds.

Tests of checkpoint/mirror_slot.py, checkpoint/mirror_search.py and checkpoint/mirror_folder.py beside
checkpoint/memory_mirror.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
import torch

from hpctrain.checkpoint import memory_mirror, mirror_folder
from hpctrain.checkpoint.memory_mirror import Mirror, neighbour_ranks
from hpctrain.checkpoint.mirror_folder import (
    create_mirror_folder,
    new_token,
    read_token,
    sweep_mirrors,
    write_token,
)
from hpctrain.checkpoint.mirror_folder import (
    mirror_folder as folder_of,
)
from hpctrain.checkpoint.mirror_search import find_mirror, write_mirror
from hpctrain.checkpoint.mirror_slot import MirrorSlot, SlotContents, SlotCopy, read_part
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.checkpoint.verify_checksums import verify
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError
from tests.checkpoint.conftest import LAYOUTS, Tensors, entry
from tests.checkpoint.test_save import STATE, contents

ROUNDS = 3


@pytest.fixture
def memory(world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm, and a run's folder in it."""
    folder = mpi_tmp_path / "shm"
    if world.rank == 0:
        (folder / "run").mkdir(parents=True)
    world.everyone.barrier()
    for module in (memory_mirror, mirror_folder):
        monkeypatch.setattr(module, "MEMORY", folder)
    return folder


def held_in(layout: str, tensors: Tensors, world: World) -> list[TensorRange]:
    """As ranks of a layout hold the tensors; of half of them a step changes something before the update."""
    held = LAYOUTS[layout](tensors, world.rank, world.size)
    return [replace(each, changes_in_step=crc32(each.dataset.encode()) % 2 == 0) for each in held]


def mirror_of(
    world: World, memory: Path, held: list[TensorRange], nodes: tuple[int, ...] | None = None
) -> Mirror:
    nodes = tuple(range(world.size)) if nodes is None else nodes
    run = memory / "run"
    return Mirror(world, nodes, run, held, STATE, lambda token: write_token(run, token))


def make(mirror: Mirror, held: list[TensorRange], step: int) -> None:
    """A mirror, with training that changes all values as soon as it may."""
    mirror.begin(held, {**STATE, "step": step}, step, ROUNDS)
    mirror.protect(update=False)
    for each in held:
        if each.changes_in_step:
            each.values.zero_()
    mirror.protect()
    for each in held:
        each.values.zero_()
    for _ in range(ROUNDS):
        mirror.advance()
        assert mirror.newest != step
    mirror.advance()
    assert mirror.newest == step
    mirror.world.everyone.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lost", [None, 0, 1])
def test_what_is_mirrored_is_what_a_checkpoint_holds(
    layout: str, lost: int | None, world: World, memory: Path, mpi_tmp_path: Path, tensors: Tensors
) -> None:
    """With all nodes there, and without one."""
    held = held_in(layout, tensors, world)
    values = [each.values.clone() for each in held]  # type: ignore[union-attr]
    mirror = mirror_of(world, memory, held)
    make(mirror, held, 4)
    for each, value in zip(held, values, strict=True):
        each.values.copy_(value)
    save(mpi_tmp_path / "a.h5", world.everyone, held, {**STATE, "step": 8})
    make(mirror, held, 8)
    if lost is not None and world.rank == 0:
        shutil.rmtree(folder_of(mirror.token) / f"node-{lost}")
    world.everyone.barrier()
    found, sentences = find_mirror(world, mirror.token)
    assert found is not None
    assert (found.step, sentences) == (8, [])
    write_mirror(found, mpi_tmp_path / "b.h5", world)
    assert contents(mpi_tmp_path / "a.h5") == contents(mpi_tmp_path / "b.h5")
    verify(mpi_tmp_path / "b.h5", world.everyone)
    mirror.close()
    assert [path.name for path in memory.iterdir()] == ["run"]


@pytest.mark.mpi(min_size=2)
def test_of_two_neighbours_that_are_lost_nothing_is_left(
    world: World, memory: Path, tensors: Tensors
) -> None:
    held = held_in("flat", tensors, world)
    mirror = mirror_of(world, memory, held)
    make(mirror, held, 4)
    if world.rank == 0:
        for node in (0, 1):
            shutil.rmtree(folder_of(mirror.token) / f"node-{node}")
    world.everyone.barrier()
    found, sentences = find_mirror(world, mirror.token)
    assert found is None
    gone = "ranks 0-1 of 2 ranks" if world.size == 2 else f"rank 0 of {world.size} ranks"
    expected = [f"the mirror of step 4 is incomplete: no remaining node has the state of {gone}"]
    assert sentences == ([] if world.size == 2 else expected)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("rounds", [0, 1, ROUNDS])
def test_one_that_is_not_complete_leaves_the_one_before(
    rounds: int, world: World, memory: Path, mpi_tmp_path: Path, tensors: Tensors
) -> None:
    held = held_in("rows", tensors, world)
    save(mpi_tmp_path / "a.h5", world.everyone, held, {**STATE, "step": 4})
    mirror = mirror_of(world, memory, held)
    make(mirror, held, 4)
    mirror.begin(held, {**STATE, "step": 8}, 8, ROUNDS)
    for _ in range(rounds):
        mirror.advance()
    world.everyone.barrier()
    found, _ = find_mirror(world, mirror.token)
    assert found is not None
    assert found.step == 4
    write_mirror(found, mpi_tmp_path / "b.h5", world)
    assert contents(mpi_tmp_path / "a.h5") == contents(mpi_tmp_path / "b.h5")
    mirror.close()


@pytest.mark.mpi(min_size=2)
def test_one_that_is_forgotten_does_not_count_and_later_ones_do(
    world: World, memory: Path, tensors: Tensors
) -> None:
    held = held_in("rows", tensors, world)
    mirror = mirror_of(world, memory, held)
    make(mirror, held, 8)
    mirror.begin(held, {**STATE, "step": 12}, 12, ROUNDS)
    mirror.advance()
    mirror.invalidate()
    assert find_mirror(world, mirror.token) == (None, [])
    make(mirror, held, 4)
    found, sentences = find_mirror(world, mirror.token)
    assert found is not None
    assert (found.step, sentences) == (4, [])
    mirror.close()


@pytest.mark.mpi(min_size=2)
def test_one_that_only_some_ranks_have_leaves_the_one_before(
    world: World, memory: Path, tensors: Tensors
) -> None:
    """As where nodes are lost when the last messages come: rank 1 has its own part and no other."""
    held = held_in("rows", tensors, world)
    mirror = mirror_of(world, memory, held)
    make(mirror, held, 4)
    make(mirror, held, 8)
    if world.rank == 0:
        for path in folder_of(mirror.token).glob("node-*/rank-0.*"):
            part = read_part(path)
            assert part is not None
            if part.step == 8:
                path.write_bytes(bytes(path.stat().st_size))
    world.everyone.barrier()
    found, sentences = find_mirror(world, mirror.token)
    assert found is not None
    assert found.step == 4
    lacking = f"no remaining node has the state of rank 0 of {world.size} ranks"
    assert sentences == [f"the mirror of step 8 is incomplete: {lacking}"]
    mirror.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("place", ["slice", "table", "header", "torn"])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_damaged_part_counts_as_missing(
    place: str,
    copies: int,
    world: World,
    memory: Path,
    mpi_tmp_path: Path,
    tensors: Tensors,
    flip: Callable[[Path, int], None],
) -> None:
    """One copy of it: the other one is taken. Both: the mirror before."""
    held = held_in("flat", tensors, world)
    mirror = mirror_of(world, memory, held)
    save(mpi_tmp_path / "a.h5", world.everyone, held, {**STATE, "step": 4})
    make(mirror, held, 4)
    make(mirror, held, 8)
    if world.rank == 0:
        paths = sorted(folder_of(mirror.token).glob("node-*/rank-1.0"))
        assert len(paths) == 2
        for path in paths[:copies]:
            part = read_part(path)
            assert part is not None
            assert part.step == 8
            end = SlotContents.of(LAYOUTS["flat"](tensors, 1, world.size)).end
            if place == "torn":
                os.truncate(path, end - 100)
            else:
                flip(path, {"slice": part.rows[1][5] + 1, "table": end + 5, "header": 20}[place])
    world.everyone.barrier()
    found, sentences = find_mirror(world, mirror.token)
    assert found is not None
    assert found.step == (8 if copies == 1 else 4)
    damaged = [sentence for sentence in sentences if "rank-1.0: " in sentence]
    # A copy that is not needed is not read beyond its table.
    assert 0 <= len(damaged) <= 1 if copies == 1 and place == "slice" else len(damaged) == copies, sentences
    if copies == 2:
        write_mirror(found, mpi_tmp_path / "b.h5", world)
        assert contents(mpi_tmp_path / "a.h5") == contents(mpi_tmp_path / "b.h5")
    mirror.close()


@pytest.mark.mpi(min_size=2)
def test_any_ranks_on_any_nodes_write_it(
    world: World, memory: Path, mpi_tmp_path: Path, tensors: Tensors
) -> None:
    """Here rank 0 alone, and nodes that have not as many ranks each."""
    nodes = tuple(0 if rank == 0 else 1 for rank in range(world.size))
    held = held_in("columns", tensors, world)
    save(mpi_tmp_path / "a.h5", world.everyone, held, {**STATE, "step": 4})
    mirror = mirror_of(world, memory, held, nodes)
    make(mirror, held, 4)
    alone = world.single_rank_world()
    for lost in (0, 1):
        if world.rank == 0:
            shutil.move(folder_of(mirror.token) / f"node-{lost}", memory / "away")
            found, _ = find_mirror(alone, mirror.token)
            assert found is not None
            write_mirror(found, mpi_tmp_path / f"{lost}.h5", alone)
            assert contents(mpi_tmp_path / "a.h5") == contents(mpi_tmp_path / f"{lost}.h5")
            shutil.move(memory / "away", folder_of(mirror.token) / f"node-{lost}")
        world.everyone.barrier()
    mirror.close()


@pytest.mark.mpi(min_size=2)
def test_no_room_is_told_before_anything_is_made(
    world: World, memory: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_bavail, f_frsize, f_blocks = 3, 4096, 4

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with pytest.raises(
        HpctrainError, match=r"needs .* MB of .*shm on .*, 4 times what its ranks write"
    ) as told:
        mirror_of(world, memory, held_in("flat", tensors, world))
    assert told.value.exit_code == 2
    assert len(told.value.problems) == 1
    assert [path.name for path in memory.iterdir()] == ["run"]


def test_neighbours_are_on_the_next_node() -> None:
    assert [neighbour_ranks((0, 0, 1, 1), rank) for rank in range(4)] == [
        (2, [2]),
        (3, [3]),
        (0, [0]),
        (1, [1]),
    ]
    assert [neighbour_ranks((0, 1, 2), rank) for rank in range(3)] == [(1, [2]), (2, [0]), (0, [1])]
    # A node of two ranks and one of one: that keeps the parts of both.
    assert [neighbour_ranks((0, 0, 1), rank) for rank in range(3)] == [(2, [2]), (2, []), (0, [0, 1])]
    assert [neighbour_ranks((0, 1, 0, 1), rank) for rank in range(4)] == [
        (1, [1]),
        (0, [0]),
        (3, [3]),
        (2, [2]),
    ]


def test_an_update_copies_what_the_thread_has_not(tmp_path: Path) -> None:
    """No thread runs here: who trains copies what changes in the step, then all, and never twice."""
    first, second = torch.arange(5.0), torch.arange(3.0) + 9
    held = [entry("a", first), replace(entry("b", second), changes_in_step=True)]
    own = SlotContents.of(held)
    assert [each.entry.dataset for each in own.slices] == ["/model/b", "/model/a"]
    slot = MirrorSlot(tmp_path / "slot", own.slot_bytes({}))
    copying = SlotCopy(own, slot.memory)
    copying.protect(update=False)
    held[1].values.zero_()
    copying.protect()
    for each in held:
        each.values.zero_()
    copying.run()
    copying.protect()
    found = [each.words(slot.memory).view("f4").tolist() for each in own.slices]
    assert found == [second.tolist(), first.tolist()]


def test_a_table_that_outgrows_its_room_is_told(tmp_path: Path) -> None:
    own = SlotContents.of([entry("a", torch.zeros(3))])
    slot = MirrorSlot(tmp_path / "slot", own.slot_bytes({}))
    with pytest.raises(InputOutputError, match="bytes too long for this file"):
        slot.write_table({"state": "x" * (1 << 17)}, own)


def test_what_ended_runs_left_is_deleted_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm"
    monkeypatch.setattr(mirror_folder, "MEMORY", memory)
    tokens = {}
    for name in ("alive", "may go on", "gone", "went on", "far"):
        run = tmp_path / ("far" if name == "far" else "runs") / name
        run.mkdir(parents=True)
        memory.mkdir(exist_ok=True)
        token = tokens[name] = new_token()
        write_token(run, token)
        node, owner = create_mirror_folder(token, run, 0)
        (node / "rank-0.0").write_bytes(b"x")
        if name == "alive":
            alive = owner
            write_token(run, None)
            continue
        owner.close()
    shutil.rmtree(tmp_path / "runs" / "gone")
    write_token(tmp_path / "runs" / "went on", new_token())
    shutil.rmtree(tmp_path / "far")
    (memory / "hpctrain-mirror.txt").write_text("somebody's")
    foreign = memory / f"hpctrain-mirror.{os.getuid()}.{'0' * 31}g"
    foreign.mkdir()
    (folder_of(tokens["gone"]) / "node-0" / "notes.txt").write_text("mine")
    swept = sweep_mirrors()
    assert sorted(swept) == sorted(folder_of(tokens[name]).name for name in ("gone", "went on"))
    left = {path.name for path in memory.iterdir()}
    kept = {folder_of(tokens[name]).name for name in ("alive", "may go on", "far", "gone")}
    assert left == kept | {"hpctrain-mirror.txt", foreign.name}
    assert [path.name for path in (folder_of(tokens["gone"]) / "node-0").iterdir()] == ["notes.txt"]
    os.utime(folder_of(tokens["far"]), (0, 0))
    assert folder_of(tokens["far"]).name in sweep_mirrors()
    assert not folder_of(tokens["far"]).exists()
    alive.close()
    assert sweep_mirrors()[0] in {folder_of(tokens["alive"]).name, folder_of(tokens["gone"]).name}
    assert not folder_of(tokens["alive"]).exists()


def test_only_a_token_counts_as_one(tmp_path: Path) -> None:
    assert read_token(tmp_path) is None
    token = new_token()
    write_token(tmp_path, token)
    assert read_token(tmp_path) == token
    for text in ("", "[]", "{}", '{"token": 3}', '{"token": "../../etc"}', "x" * 2000):
        (tmp_path / "mirror.json").write_text(text)
        assert read_token(tmp_path) is None
    write_token(tmp_path, None)
    assert not list(tmp_path.iterdir())
