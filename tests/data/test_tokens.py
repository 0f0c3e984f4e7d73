"""Token files: what is read, and that no damage goes unseen."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data import write
from hpctrain.data.prepare import prepare
from hpctrain.data.tokens import TokenFile, token_type
from hpctrain.errors import InputOutputError
from hpctrain.plan.libraries import resident_bytes

WORDS = [b"hello ", b"\xff\x00 world", "é".encode() * 20]


@pytest.fixture
def path(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A token file of three documents, with a checksum for every 16 tokens."""
    monkeypatch.setattr(write, "PIECE_TOKENS", 16)
    for i, word in enumerate(WORDS):
        (tmp_path / f"{i}.txt").write_bytes(word)
    prepare(world.alone(), tmp_path / "tokens.h5", [str(tmp_path)])
    return tmp_path / "tokens.h5"


def test_reading_leaves_no_pages_in_the_process(world: World, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_bytes(b"some text\n" * 3_000_000)
    prepare(world.alone(), tmp_path / "tokens.h5", [str(tmp_path)])
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
    assert file.tokenizer_json is None
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
        f"file = {path}: tokens {span} are damaged (wrong checksum)" for span in ("16 to 31", "48 to 58")
    ]
    TokenFile(path).verify(0, 4)  # another rank's share
    with pytest.raises(InputOutputError, match="16 to 31"):
        TokenFile(path).verify(1, 4)


def test_what_is_no_token_file(path: Path, tmp_path: Path) -> None:
    def sentence(file: Path) -> str:
        with pytest.raises(InputOutputError) as caught:
            TokenFile(file)
        [problem] = caught.value.problems
        assert problem.startswith(f"data.tokens = {file}: ")
        assert caught.value.exit_code == 3
        return problem

    assert "no such file; `hpctrain prepare` makes one" in sentence(tmp_path / "none.h5")
    assert "is a folder" in sentence(tmp_path)
    assert "is no token file" in sentence(tmp_path / "0.txt")
    (tmp_path / "empty.h5").touch()
    assert "is no token file" in sentence(tmp_path / "empty.h5")
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["tokens"] = np.arange(5)
    assert "no token file of ours" in sentence(tmp_path / "other.h5")
    for name, value, wanted in [
        ("version", 2, "version 2; this hpctrain reads up to 1"),
        ("vocabulary", 300, "header has a wrong checksum"),
        ("tokens", 58, "header has a wrong checksum"),
        ("source", "elsewhere", "header has a wrong checksum"),
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


def test_tokens_are_mapped_not_copied(path: Path) -> None:
    file = TokenFile(path)
    view = file.view(0, 10)
    assert isinstance(view, np.memmap)
    assert not view.flags.writeable
    with h5py.File(path) as plain:
        offset = plain["tokens"].id.get_offset()
    with path.open("r+b") as raw:  # a change of the file is seen: there is no copy
        raw.seek(offset)
        raw.write(struct.pack("<H", 7))
    assert file.read(0, 1).item() == 7
