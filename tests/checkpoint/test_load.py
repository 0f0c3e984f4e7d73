"""Loading: any layout from any layout, and nothing that is damaged.

Tests of checkpoint/checkpoint_index.py beside checkpoint/load.py.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpctrain.checkpoint.checksum import PIECE
from hpctrain.checkpoint.load import load, read_state
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.checkpoint.verify_checksums import verify
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError
from tests.checkpoint.conftest import LAYOUTS, Tensors, columns, entry, rows, whole

Flip = Callable[[Path, int], None]


def emptied(entries: Sequence[TensorRange]) -> list[TensorRange]:
    return [replace(held, values=torch.full_like(held.values, 77)) for held in entries]


def check(found: Sequence[TensorRange], tensors: Tensors, expected: Sequence[TensorRange]) -> None:
    """The values, bit for bit, and zero where the expected entry has padding (there it has ones)."""
    for one, other in zip(found, expected, strict=True):
        bare = replace(other.shard, start=other.shard.start)
        name = other.dataset.removeprefix("/model/")
        piece = bare.take(tensors[name]).reshape(-1)[other.offset : other.offset + other.values.numel()]
        assert torch.equal(one.values, piece), other.dataset


@pytest.mark.mpi
@pytest.mark.parametrize("written", ["flat", "columns", "stages"])
def test_any_layout_reads_what_another_wrote(
    written: str, world: World, mpi_tmp_path: Path, tensors: Tensors
) -> None:
    group = world.everyone
    path = mpi_tmp_path / "a.h5"
    save(path, group, LAYOUTS[written](tensors, group.rank, group.size), {"step": 3})
    for layout in LAYOUTS.values():
        expected = layout(tensors, group.rank, group.size)
        found = emptied(expected)
        assert load(path, group, found, buffer_bytes=10_000)["step"] == 3
        check(found, tensors, expected)


@pytest.mark.mpi(min_size=2)
def test_fewer_ranks_read_what_more_wrote(world: World, mpi_tmp_path: Path, tensors: Tensors) -> None:
    path = mpi_tmp_path / "a.h5"
    save(path, world.everyone, columns(tensors, world.rank, world.size), {})
    # Each rank alone, then pairs of ranks, each pair by itself, reading the same file.
    alone = world.single_rank_world().everyone
    ranks = tuple(r for r in range(world.size) if r // 2 == world.rank // 2)
    for group in (alone, world.new_group(("data",), ranks, "mpi")):
        for layout in (whole, rows):
            expected = layout(tensors, group.rank, group.size)
            found = emptied(expected)
            load(path, group, found)
            check(found, tensors, expected)


@pytest.mark.mpi
def test_reads_only_what_is_asked_for(world: World, mpi_tmp_path: Path, tensors: Tensors, flip: Flip) -> None:
    """Damage where nobody reads is not noticed; where half a piece is read, it is, in either half."""
    group = world.everyone
    path = mpi_tmp_path / "a.h5"
    held = [
        replace(one, dataset=one.dataset.replace("model", "optimizer/m"))
        for one in whole(tensors, group.rank, group.size)
    ]
    save(path, group, [*held, *whole(tensors, group.rank, group.size)], {})
    if group.rank == 0:
        with h5py.File(path, "r") as file:
            place = file["/optimizer/m/matrix"].id.get_offset()
            half = file["/model/half"].id.get_offset()
        flip(path, place + 3)
    group.barrier()
    load(path, group, emptied(whole(tensors, group.rank, group.size)))
    with pytest.raises(InputOutputError, match="/optimizer/m/matrix is damaged"):
        load(path, group, emptied(held))
    group.barrier()
    if group.rank == 0:
        flip(path, half + 1)
    group.barrier()
    part = [one.part(4, 9) for one in whole(tensors, 0, 1) if one.dataset == "/model/half"]
    with pytest.raises(InputOutputError, match="/model/half is damaged"):
        load(path, group, emptied(part), strict=False)


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_every_piece_that_a_range_touches_is_verified(
    damaged: int, world: World, tmp_path: Path, flip: Flip
) -> None:
    group = world.single_rank_world().everyone
    path = tmp_path / "a.h5"
    held = entry("a", torch.ones(2 * PIECE + 1000, dtype=torch.uint8))
    save(path, group, [held], {})
    part = held.part(PIECE - 10, 2 * PIECE + 10)
    load(path, group, [part])
    with h5py.File(path, "r") as file:
        place = file["/model/a"].id.get_offset()
    flip(path, place + damaged * PIECE + 500)
    with pytest.raises(InputOutputError, match=f"a is damaged: elements {damaged * PIECE} to"):
        load(path, group, [part])


@pytest.mark.mpi
def test_undeclared_replicas_and_parts_are_verified_too(
    world: World, mpi_tmp_path: Path, tensors: Tensors
) -> None:
    group = world.everyone
    path = mpi_tmp_path / "a.h5"
    save(path, group, whole(tensors, group.rank, group.size), {})
    expected = [one.part(one.values.numel() // 3, one.values.numel()) for one in whole(tensors, 0, 1)]
    found = emptied(expected)
    load(path, group, found)
    check(found, tensors, expected)


@pytest.mark.mpi
def test_another_model_is_refused(world: World, mpi_tmp_path: Path, tensors: Tensors) -> None:
    group = world.everyone
    path = mpi_tmp_path / "a.h5"
    save(path, group, whole(tensors, group.rank, group.size), {})
    other = dict(tensors) | {"matrix": torch.zeros(37, 20), "half": torch.zeros(11), "new": torch.zeros(2)}
    with pytest.raises(HpctrainError) as error:
        load(path, group, whole(other, group.rank, group.size))
    assert error.value.exit_code == 2
    assert error.value.problems == (
        f"{path}: /model/matrix: has shape [37, 19], expected [37, 20] (and 2 more differ)",
    )
    for name, tensor, message in (
        ("half", torch.zeros(11), "has type float16, expected float32"),
        ("new", torch.zeros(2), "not in this checkpoint, expected with shape [2]"),
    ):
        with pytest.raises(HpctrainError) as error:
            load(path, group, whole(dict(tensors) | {name: tensor}, group.rank, group.size))
        assert error.value.problems == (f"{path}: /model/{name}: {message}",)
    fewer = {name: tensor for name, tensor in tensors.items() if name != "matrix"}
    with pytest.raises(HpctrainError, match="/model/matrix: in this checkpoint, but not in this model"):
        load(path, group, whole(fewer, group.rank, group.size))
    load(path, group, whole(fewer, group.rank, group.size), strict=False)


@pytest.fixture
def small(world: World, tmp_path: Path) -> Path:
    path = tmp_path / "small.h5"
    held = [entry("a", torch.arange(1.0, 40.0)), entry("b.c", torch.ones(3, 4).bfloat16())]
    save(path, world.single_rank_world().everyone, held, {"step": 12, "deck": "[run]\nseed = 3\n"})
    return path


def test_one_flipped_byte_anywhere(world: World, small: Path, flip: Flip) -> None:
    """Noticed in all that is stored; elsewhere at worst harmless. Never another error or other values."""
    group = world.single_rank_world().everyone
    good = small.read_bytes()
    state = read_state(small)
    with h5py.File(small, "r") as file:
        regions = {
            name: range(
                file[name].id.get_offset(), file[name].id.get_offset() + file[name].id.get_storage_size()
            )
            for name in ("/model/a", "/model/b.c", "/state", "/deck", "/checksums")
        }
    noticed = 0
    offsets = sorted({*range(0, len(good), 7), *(offset for region in regions.values() for offset in region)})
    for offset in offsets:
        flip(small, offset)
        name = next((name for name, region in regions.items() if offset in region), "")
        found = [entry("a", torch.zeros(39)), entry("b.c", torch.zeros(3, 4).bfloat16())]
        told = ""
        try:
            loaded = load(small, group, found)
        except HpctrainError as error:
            told = str(error)
        if told:
            noticed += 1
            assert str(small) in told, offset
            assert name in told, offset
        else:
            assert not name, (offset, name)
            assert torch.equal(found[0].values, torch.arange(1.0, 40.0)), offset
            assert loaded == state, offset
        flip(small, offset)
    assert small.read_bytes() == good
    assert noticed > len(offsets) // 2


def test_a_folder_whose_names_cannot_be_read(
    world: World, tmp_path: Path, launch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """HDF5, asked for them in order, frees what it never filled: in memory full of noise it crashes."""
    path = tmp_path / "many.h5"
    save(
        path, world.single_rank_world().everyone, [entry(f"tensor {n}", torch.ones(3)) for n in range(40)], {}
    )
    content = path.read_bytes()
    place = content.index(b"FHDB") + 5  # a block of names tells where its header lies
    path.write_bytes(content[:place] + b"\xff\xff" + content[place + 2 :])
    program = (
        "import sys; from pathlib import Path; from hpctrain.checkpoint.checkpoint_index import examine; "
    )
    done = launch(0, "-c", program + "examine(Path(sys.argv[1]))", path, MALLOC_PERTURB_="165")
    assert done.returncode == 1, done.stderr
    assert "InputOutputError" in done.stderr
    assert f"{path}: damaged or truncated" in done.stderr


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, 0.9, -1])
def test_truncated(kept: float, world: World, small: Path) -> None:
    content = small.read_bytes()
    small.write_bytes(content[: int(len(content) * kept) if 0 < kept < 1 else int(kept)])
    with pytest.raises(InputOutputError, match=r"small.h5: .*truncated"):
        read_state(small)


@pytest.mark.parametrize("value", [[1, 2], "text of any length"])
def test_an_attribute_of_wrong_type(value: object, world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    save(path, world.single_rank_world().everyone, [entry("a", torch.ones(3, dtype=torch.bfloat16))], {})
    with h5py.File(path, "r+") as file:
        file["/model/a"].attrs["dtype"] = value
    with pytest.raises(InputOutputError, match=r"a.h5: damaged .*: the attribute dtype is not a text"):
        read_state(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", -1),
        ("step", "three"),
        ("samples", None),
        ("tokens", float("nan")),
        ("updates", 2**70),
        ("loss_scale", 0.0),
        ("corpus", {}),
        ("split", []),
        ("spikes", {"window": [[1.0]]}),
        ("companions", {"critic": {"updates": "many"}}),
        ("tokenizer", 7),
        ("compiled", {"functions": True}),
    ],
)
def test_a_state_of_other_types_is_refused(key: str, value: object, world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    held = [entry("a", torch.ones(3))]
    with pytest.raises(InputOutputError, match=rf"a\.h5: damaged .*: its state has a wrong value for {key}"):
        save(path, world.single_rank_world().everyone, held, {key: value})
    assert not path.exists()


def test_checksums_that_lie_elsewhere_are_not_followed(world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    save(path, world.single_rank_world().everyone, [entry("a", torch.ones(3))], {})
    with h5py.File(path, "r+") as file:
        layout = h5py.VirtualLayout((1,), "<u8")
        layout[:] = h5py.VirtualSource(".", "checksums", (1,))
        del file["checksums"]
        file.create_virtual_dataset("checksums", layout).attrs["crc32"] = 0
    with pytest.raises(InputOutputError, match=r"a\.h5: damaged .*/checksums is not one contiguous range"):
        read_state(path)


def test_datasets_of_other_types_are_damage(world: World, tmp_path: Path) -> None:
    path, group = tmp_path / "a.h5", world.single_rank_world().everyone
    save(path, group, [entry("a", torch.ones(3, dtype=torch.float64))], {})
    with pytest.raises(InputOutputError, match=r"a\.h5: /model/a: has type float64, expected float32"):
        load(path, group, [entry("a", torch.ones(3))])


@pytest.mark.parametrize("marked", [None, b"bool", b"float32"])
def test_a_type_that_is_not_marked_right(marked: bytes | None, world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    save(path, world.single_rank_world().everyone, [entry("a", torch.ones(3, dtype=torch.bfloat16))], {})
    with h5py.File(path, "r+") as file:
        del file["/model/a"].attrs["dtype"]
        if marked is not None:
            file["/model/a"].attrs["dtype"] = np.bytes_(marked)
    told = rf"a.h5: damaged .*: /model/a has type uint16, but is marked as {marked and marked.decode()}"
    with pytest.raises(InputOutputError, match=told):
        read_state(path)


def test_truncated_while_it_is_read(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = world.single_rank_world().everyone
    path = tmp_path / "a.h5"
    held = [entry("a", torch.ones(100_000))]
    save(path, group, held, {})
    from hpctrain.checkpoint import load as load_module

    original = load_module.examine

    def shortening(path: Path, group: object) -> object:
        structure = original(path, group)
        path.write_bytes(path.read_bytes()[:200_000])
        return structure

    monkeypatch.setattr(load_module, "examine", shortening)
    with pytest.raises(InputOutputError, match=r"a\.h5: truncated: it ends at byte 200000"):
        load(path, group, held)


@pytest.mark.mpi
def test_not_ours(world: World, mpi_tmp_path: Path) -> None:
    group = world.everyone
    text, other, newer, unfinished, linked = (mpi_tmp_path / f"{name}.h5" for name in "tonul")
    if group.rank == 0:
        text.write_text("step = 100, and some more text")
        with h5py.File(other, "w") as file:
            file["model"] = [1, 2]
        save(newer, world.single_rank_world().everyone, [entry("a", torch.ones(3))], {})
        shutil.copy(newer, unfinished)
        shutil.copy(newer, linked)
        with h5py.File(newer, "r+") as file:
            file.attrs.modify("version", 2)
        with h5py.File(unfinished, "r+") as file:
            file.attrs.modify("complete", 0)
        with h5py.File(linked, "r+") as file:
            del file["/model/a"]
            file["/model/a"] = h5py.ExternalLink(str(other), "/model")
    group.barrier()
    for path, kind, words in (
        (mpi_tmp_path / "none.h5", InputOutputError, "no such checkpoint"),
        (mpi_tmp_path, HpctrainError, "a folder, not a checkpoint file"),
        (text, HpctrainError, "not an HDF5 file"),
        (other, HpctrainError, "an HDF5 file, but not a checkpoint of hpctrain"),
        (newer, HpctrainError, "checkpoint format 2 is unsupported; this hpctrain reads formats up to 1"),
        (unfinished, InputOutputError, "is incomplete, since writing it did not finish"),
        (linked, InputOutputError, "damaged"),
    ):
        for call in (
            lambda p: read_state(p, group),
            lambda p: load(p, group, []),
            lambda p: verify(p, group),
        ):
            with pytest.raises(HpctrainError, match=words) as error:
                call(path)
            assert type(error.value) is kind
            assert str(path) in str(error.value)


def test_state_comes_back(world: World, tmp_path: Path) -> None:
    state = {"step": 5, "samples": 10**12, "nested": {"losses": [1.5, None, "é\n"]}, "deck": "é = 1\n\n"}
    save(tmp_path / "a.h5", world.single_rank_world().everyone, [], state)
    found = read_state(tmp_path / "a.h5")
    assert found.pop("versions")["hpctrain"]
    assert found == state
