"""Writing by all ranks: the checksum's algebra, parts, and many small collective calls."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.data import token_writer
from hpctrain.data.token_writer import TokenPart, TokenWriter, combine
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokens import TokenFile
from hpctrain.errors import HpctrainError, InputOutputError


@pytest.mark.parametrize("length", [0, 1, 5, 1000, (1 << 20) - 1, 1 << 20, (2 << 20) + 17])
def test_checksums_combine(length: int) -> None:
    first, second = os.urandom(123), os.urandom(length)
    assert combine(zlib.crc32(first), zlib.crc32(second), length) == zlib.crc32(first + second)
    assert combine(0, zlib.crc32(second), length) == zlib.crc32(second)


def test_a_part_refuses_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    with TokenPart(tmp_path / "part", Tokenizer("bytes")) as part:
        part.add(np.array([1, 256]))
        with pytest.raises(HpctrainError, match=r"token id 257, out of range \[0, 257\)"):
            part.add(np.array([1, 257]))
        part.finish()
        assert part.read(0, 2).tolist() == [1, 256]
        with pytest.raises(OSError, match="part was truncated"):
            part.read(1, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    tokenizer = Tokenizer("bytes")
    part = TokenPart(tmp_path / "none" / "part", tokenizer)
    with pytest.raises(InputOutputError, match=r"none/part: cannot be written \(No such file"):
        part.add(np.array([1]))
    if Path("/dev/full").exists():
        with TokenPart(tmp_path / "part", tokenizer) as part:
            (tmp_path / "part").symlink_to("/dev/full")
            part.add(np.array([1]))
            with pytest.raises(InputOutputError, match="No space left"):
                part.finish()
    assert list(tmp_path.iterdir()) == []


def ids_of(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 256, count)


def fill(part: TokenPart, rank: int, count: int) -> None:
    if count:
        part.add(ids_of(rank, count))
        part.end_document(256)
    part.finish()


@pytest.mark.mpi
@pytest.mark.parametrize(
    "counts", [[5, 0, 100, 3], [0, 0, 0, 50], [16, 16, 7, 8], [200, 1, 1, 0], [0, 15, 0, 0]]
)
def test_uneven_and_empty_parts(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: list[int]
) -> None:
    """Rank r brings what `counts` gives to r modulo the ranks: pieces of 16 tokens lie over several ranks."""
    monkeypatch.setattr(token_writer, "PIECE_TOKENS", 16)
    monkeypatch.setattr(token_writer, "CALL_BYTES", 20)
    counts = counts[-world.size :] if world.size < len(counts) else counts
    tokenizer = Tokenizer("bytes")
    if not any(counts):
        counts[0] = 3
    mine = counts[world.rank] if world.rank < len(counts) else 0
    with TokenPart(mpi_tmp_path / f"part-{world.rank}", tokenizer) as part:
        fill(part, world.rank, mine)
        TokenWriter(world, tokenizer, "test", lambda *_: None).write(mpi_tmp_path / "out.h5", part)
    expected = [[*ids_of(rank, count), 256] for rank, count in enumerate(counts) if count]
    file = TokenFile(mpi_tmp_path / "out.h5")
    file.verify()
    assert file.read(0, file.tokens).tolist() == [int(i) for part in expected for i in part]
    ends = np.cumsum([len(part) for part in expected])
    assert [file.document_end(i) for i in range(file.documents)] == ends.tolist()
    world.everyone.barrier()
    assert [path.name for path in mpi_tmp_path.iterdir()] == ["out.h5"]


@pytest.mark.mpi(min_size=1, max_size=2)
def test_an_error_of_one_rank_is_everyones(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that cannot read its tokens again still takes part in every call; no file is left."""
    monkeypatch.setattr(token_writer, "CALL_BYTES", 20)
    tokenizer = Tokenizer("bytes")
    (mpi_tmp_path / "out.h5").touch()
    with TokenPart(mpi_tmp_path / f"part-{world.rank}", tokenizer) as part:
        fill(part, world.rank, 100)
        read = part.read

        def fail(start: int, count: int) -> np.ndarray:
            if start and count <= 10:
                raise OSError("the disk is gone")
            return read(start, count)

        if world.rank == world.size - 1:
            monkeypatch.setattr(part, "read", fail)
        with pytest.raises(InputOutputError, match=r"cannot be written \(the disk is gone\)"):
            TokenWriter(world, tokenizer, "test", lambda *_: None).write(mpi_tmp_path / "out.h5", part)
    world.everyone.barrier()
    assert [path.name for path in mpi_tmp_path.iterdir()] == ["out.h5"]
    assert (mpi_tmp_path / "out.h5").stat().st_size == 0  # what was there is what it was


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_full_disk_is_said_beforehand(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_writer.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1}))
    tokenizer = Tokenizer("bytes")
    with TokenPart(mpi_tmp_path / f"part-{world.rank}", tokenizer) as part:
        fill(part, world.rank, 4)
        with pytest.raises(
            InputOutputError, match=f"the token file requires {18 * world.size} bytes, but 1 are free"
        ):
            TokenWriter(world, tokenizer, "test", lambda *_: None).write(mpi_tmp_path / "out.h5", part)
