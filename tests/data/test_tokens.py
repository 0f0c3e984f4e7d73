"""Token files: what is read, and that no damage goes unseen."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data import token_writer
from hpctrain.data.tokens import TokenFile, token_type
from hpctrain.errors import InputOutputError
from hpctrain.host.memory import resident_bytes
from tests.data.preparing import prepare

WORDS = [b"hello ", b"\xef\xbf\xbd\x01 world", "é".encode() * 20]


@pytest.fixture
def path(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A token file of three documents, with a checksum for every 16 tokens."""
    monkeypatch.setattr(token_writer, "PIECE_TOKENS", 16)
    for i, word in enumerate(WORDS):
        (tmp_path / f"{i}.txt").write_bytes(word)
    prepare(world.single_rank_world(), tmp_path / "tokens.h5", [str(tmp_path)])
    return tmp_path / "tokens.h5"


def test_reading_leaves_no_pages_in_the_process(world: World, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_bytes(b"some text\n" * 3_000_000)
    prepare(world.single_rank_world(), tmp_path / "tokens.h5", [str(tmp_path)])
    file = TokenFile(tmp_path / "tokens.h5")
    file.read(0, 1)
    before = resident_bytes()
    for start in range(0, file.tokens - 512, 30_000):
        file.read(start, 512)
    assert resident_bytes() - before < file.tokens // 4


def contents(file: TokenFile) -> object:
    ends = [file.document_end(i) for i in range(file.documents)]
    return file.header, file.tokenizer_text, file.read(0, file.tokens).tolist(), ends


def test_what_is_stored_is_read(path: Path) -> None:
    file = TokenFile(path)
    expected = []
    for word in WORDS:
        expected += [*word.decode("utf-8", "replace").encode(), 256]
    assert torch.equal(file.read(0, file.tokens), torch.tensor(expected))
    assert torch.equal(file.read(5, 7), torch.tensor(expected[5:12]))
    assert file.read(file.tokens, 0).shape == (0,)
    assert (file.vocabulary, file.end_of_document, file.documents) == (257, 256, 3)
    assert [file.document_end(i) for i in range(3)] == [7, 18, 59]
    assert file.tokenizer_text == "bytes"
    assert file.dtype == np.uint16
    assert file.tokenizer.decode(file.read(0, 7).tolist()) == "hello "
    file.verify()
    with h5py.File(path) as plain:  # any HDF5 reader sees the same
        assert plain["tokens"][:].tolist() == expected
        assert plain.attrs["format"] == b"hpctrain tokens"
        assert plain["checksums"].shape == (4,)
        assert bytes(plain["tokenizer"][:]) == b"bytes"


@pytest.mark.parametrize(("vocabulary", "size"), [(256, 1), (257, 2), (65536, 2), (65537, 4), (2**32, 4)])
def test_the_smallest_type_is_taken(vocabulary: int, size: int) -> None:
    assert token_type(vocabulary).itemsize == size


def test_every_flipped_byte_is_seen_or_harmless(path: Path) -> None:
    whole = path.read_bytes()
    expected = contents(TokenFile(path))
    data = set()
    with h5py.File(path) as plain:
        for dataset in plain.values():
            begin = dataset.id.get_offset()
            data |= set(range(begin, begin + dataset.nbytes))
    for place in sorted({*range(0, len(whole), 5), *data}):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            file = TokenFile(path)
            file.verify()
        except InputOutputError:
            continue
        assert place not in data
        assert contents(file) == expected, place


def test_every_truncation_is_seen_at_once(path: Path) -> None:
    whole = path.read_bytes()
    expected = contents(TokenFile(path))
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        path.write_bytes(whole[:length])
        try:
            file = TokenFile(path)
        except InputOutputError:
            continue
        assert contents(file) == expected, length  # only what lies behind the last dataset was lost


def test_damage_is_located(path: Path) -> None:
    with h5py.File(path) as plain:
        offset = plain["tokens"].id.get_offset()
    data = bytearray(path.read_bytes())
    data[offset + 2 * 20] ^= 1
    data[offset + 2 * 58] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputOutputError) as caught:
        TokenFile(path, key="file").verify()
    assert list(caught.value.problems) == [
        f"file = {path}: piece {piece} of 4, tokens {span}, is damaged (wrong checksum); "
        "copy or prepare the file again"
        for piece, span in ((2, "16 to 31"), (4, "48 to 58"))
    ]
    TokenFile(path).verify(0, 4)  # another rank's share
    with pytest.raises(InputOutputError, match="16 to 31"):
        TokenFile(path).verify(1, 4)


def test_what_is_no_token_file(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sentence(file: Path) -> str:
        with pytest.raises(InputOutputError) as caught:
            TokenFile(file)
        [problem] = caught.value.problems
        assert problem.startswith(f"data.tokens = {file}: ")
        assert caught.value.exit_code == 3
        return problem

    none = tmp_path / "none.h5"
    assert f"no such file; create it with `hpctrain prepare {none} TEXT`" in sentence(none)
    monkeypatch.chdir(tmp_path)
    assert f"no such file (looked for {none}, relative to the working directory); " in sentence(
        Path("none.h5")
    )
    assert "is a folder" in sentence(tmp_path)
    assert "is not a token file" in sentence(tmp_path / "0.txt")
    (tmp_path / "empty.h5").touch()
    assert "is not a token file" in sentence(tmp_path / "empty.h5")
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["tokens"] = np.arange(5)
    assert "is an HDF5 file, but not a token file" in sentence(tmp_path / "other.h5")
    for name, value, wanted in [
        ("version", 3, "version 3, but this hpctrain reads versions up to 2"),
        ("vocabulary", 300, "header has a wrong checksum"),
        ("tokens", 58, "header has a wrong checksum"),
        ("source", np.bytes_(b"elsewhere"), "header has a wrong checksum"),
        ("documents", "many", "is damaged"),
    ]:
        shutil.copy(path, tmp_path / "changed.h5")
        with h5py.File(tmp_path / "changed.h5", "r+") as changed:
            changed.attrs[name] = value
        assert wanted in sentence(tmp_path / "changed.h5")
    shutil.copy(path, tmp_path / "changed.h5")
    with h5py.File(tmp_path / "changed.h5", "r+") as changed:
        del changed["document_ends"]
    assert "is damaged" in sentence(tmp_path / "changed.h5")


def change(path: Path, token: int, value: int) -> None:
    """Write another value over a token, in place."""
    with h5py.File(path) as plain:
        offset = plain["tokens"].id.get_offset()
    with path.open("r+b") as raw:
        raw.seek(offset + 2 * token)
        raw.write(struct.pack("<H", value))


def test_pieces_are_verified_when_they_are_read(path: Path) -> None:
    change(path, 20, 7)
    file = TokenFile(path)
    file.read(0, 16)
    file.read(32, 27)
    for start, count in ((16, 1), (31, 1), (0, 59), (10, 7), (31, 2)):
        for _ in range(2):  # what was refused once is not trusted the next time
            with pytest.raises(InputOutputError, match=r"piece 2 of 4, tokens 16 to 31, is damaged"):
                file.read(start, count)


def test_document_boundaries_are_verified_when_they_are_read(path: Path) -> None:
    with h5py.File(path, "r+") as plain:
        plain["document_ends"][2] -= 1
    file = TokenFile(path)
    for _ in range(2):
        with pytest.raises(InputOutputError, match="the document boundaries are damaged"):
            file.document_end(0)


def test_a_piece_is_summed_up_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[int] = []
    crc32 = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda *data: sums.append(1) or crc32(*data))
    file = TokenFile(path)
    sums.clear()
    for start in (0, 3, 15, 16, 40, 58, 0):
        file.read(start, 1)
    assert len(sums) == 4
    file.read(0, 59)
    assert len(sums) == 4


def test_a_change_while_the_file_is_read_is_seen(path: Path) -> None:
    file = TokenFile(path)
    before = file.read(0, 59)
    path.touch()
    assert torch.equal(file.read(0, 59), before)  # written to, but the same
    os.utime(path, ns=(0, 0))  # so that the next change has another time, however soon it comes
    file.read(0, 59)
    change(path, 58, 7)
    file.read(0, 48)
    with pytest.raises(InputOutputError, match="piece 4 of 4, tokens 48 to 58"):
        file.read(50, 2)
    with h5py.File(path) as stored:
        offset = stored["tokens"].id.get_offset()
    os.truncate(path, offset + 50)
    with pytest.raises(InputOutputError, match="was truncated after it was opened"):
        file.read(50, 2)


def test_a_disk_that_fails_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TokenFile(path)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(InputOutputError, match=rf"data.tokens = {path}: cannot be read \(Input/output"):
        file.read(0, 1)


def test_a_fingerprint_is_of_the_tokens(world: World, path: Path, tmp_path: Path) -> None:
    texts = [str(tmp_path / f"{i}.txt") for i in range(len(WORDS))]
    for name, paths in (("same.h5", texts), ("other.h5", texts[::-1])):
        prepare(world.single_rank_world(), tmp_path / name, paths)
    marks = [TokenFile(file).fingerprint for file in (path, tmp_path / "same.h5", tmp_path / "other.h5")]
    assert marks[0] == marks[1] != marks[2]


def rewrite_header(path: Path, **values: int) -> None:
    """Change fields of the header of a token file, and its checksum with them."""
    header = asdict(TokenFile(path).header) | values
    with h5py.File(path, "r+") as file:
        for name, value in values.items():
            file.attrs[name] = value
        file.attrs["header_checksum"] = zlib.crc32(json.dumps(header, sort_keys=True).encode())


@pytest.mark.parametrize("name", ["vocabulary", "end_of_document", "tokens", "documents", "piece"])
@pytest.mark.parametrize("value", [-1, 2**62])
def test_a_header_out_of_bounds_is_refused(path: Path, name: str, value: int) -> None:
    rewrite_header(path, **{name: value})
    with pytest.raises(InputOutputError, match=rf"tokens\.h5: is damaged .*{name} = {value} is out of range"):
        TokenFile(path)


@pytest.mark.parametrize("name", ["vocabulary", "tokens", "documents", "piece"])
def test_a_header_of_zeros_is_refused(path: Path, name: str) -> None:
    rewrite_header(path, **{name: 0})
    with pytest.raises(InputOutputError, match=rf"tokens\.h5: is damaged .*{name} = 0 is out of range"):
        TokenFile(path)


@pytest.mark.parametrize("change", [lambda ends: ends[::-1], lambda ends: ends - 50, lambda ends: ends + 1])
def test_document_ends_out_of_order_are_refused(
    path: Path, change: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
) -> None:
    with h5py.File(path, "r+") as file:
        ends = np.ascontiguousarray(change(file["document_ends"][()]))
        file["document_ends"][...] = ends
    rewrite_header(path, document_ends_checksum=zlib.crc32(ends.data))
    file = TokenFile(path)
    for use in (file.document_ends, lambda: file.document_end(0), file.verify):
        with pytest.raises(InputOutputError, match=r"tokens\.h5: .*boundaries do not increase from 0 to"):
            use()


def test_token_ids_beyond_the_vocabulary_are_refused(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["tokens"][3] = 60_000
        file["checksums"][0] = zlib.crc32(file["tokens"][:16].data)
    with pytest.raises(InputOutputError, match=r"tokens\.h5: token \d+ is 60000, out of range \[0, 257\)"):
        TokenFile(path).read(0, 1)


def test_a_stored_tokenizer_that_is_none_names_the_file(path: Path) -> None:
    text = np.frombuffer(b"{}", "u1")
    rewrite_header(path, tokenizer_checksum=zlib.crc32(text.data))
    with h5py.File(path, "r+") as file:
        del file["tokenizer"]
        file["tokenizer"] = text
    with pytest.raises(InputOutputError, match=r"tokens\.h5: its tokenizer: is no"):
        _ = TokenFile(path).tokenizer
