"""Finding, cutting and reading text, against the files read whole."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest

from hpctrain.data.input_files import BINARY, NOT_UTF8, TextSource, find_sources
from hpctrain.data.text_pieces import (
    TextPiece,
    cut_into_pieces,
    examine_piece,
    read_piece,
    read_rows,
    share_of,
)
from hpctrain.errors import HpctrainError, InputOutputError


def documents(path: Path, size: int, complaints: list[str] | None = None) -> list[str]:
    """All documents of a file, read in pieces of `size` bytes."""
    found, parts = [], []

    def handle_error(error: HpctrainError) -> None:
        assert complaints is not None, error
        complaints.extend(error.problems)

    for piece in cut_into_pieces([TextSource(str(path), path.stat().st_size)], size):
        for text, ends in read_piece(piece, "text", handle_error):
            parts.append(text)
            if ends:
                found.append("".join(parts))
                parts = []
    assert not parts
    return found


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("size", [8, 9, 10, 11, 1000])
def test_what_is_no_text_is_known(tmp_path: Path, size: int) -> None:
    text = "漢字 é and\nmore, " * 40
    for name, data, expected in (
        ("text", text.encode(), None),
        ("bom", b"\xef\xbb\xbf" + text.encode(), None),
        ("late", text.encode() + b"\xe9", NOT_UTF8),
        ("cut", text.encode() + "é".encode()[:1], NOT_UTF8),
        ("zero", text.encode() + b"\0", BINARY),
        ("both", b"\xff" * 50 + text.encode() + b"\0", BINARY),
        ("utf-16", text.encode("utf-16"), BINARY),
    ):
        for path in (
            write(tmp_path / f"{name}.txt", data),
            write(tmp_path / f"{name}.txt.gz", gzip.compress(data)),
            write(tmp_path / f"{name}.jsonl", data),
        ):
            pieces = cut_into_pieces([TextSource(str(path), path.stat().st_size)], size)
            found = [examine_piece(piece, pytest.fail) for piece in pieces]
            assert min((each for each in found if each is not None), default=None) == expected, path


@pytest.mark.parametrize("size", [8, 13, 1000])
def test_raw_sources_keep_every_byte(tmp_path: Path, size: int) -> None:
    data = b"\xef\xbb\xbf" + random.Random(2).randbytes(3000)
    for path in (write(tmp_path / "a.txt", data), write(tmp_path / "a.txt.gz", gzip.compress(data))):
        pieces = cut_into_pieces([TextSource(str(path), path.stat().st_size, raw=True)], size)
        parts = [text for piece in pieces for text, _ in read_piece(piece, "text", pytest.fail)]
        assert "".join(parts).encode("utf-8", "surrogateescape") == data


@pytest.mark.parametrize("size", [8, 64, 999, 1000, 5000])
@pytest.mark.parametrize("kind", ["lines", "words", "letters", "noise", "exact"])
def test_a_plain_file_is_one_document_however_it_is_cut(tmp_path: Path, size: int, kind: str) -> None:
    chance = random.Random(4)
    data = {
        "lines": "".join("é" * chance.randrange(20) + "\r\n" for _ in range(100)).encode(),
        "words": " ".join("漢字" * chance.randrange(9) for _ in range(200)).encode(),
        "letters": ("é漢a" * 300).encode(),
        "noise": chance.randbytes(2000),
        "exact": b"x" * 999 + b"\n",
    }[kind]
    plain = write(tmp_path / "a.txt", data)
    packed = write(tmp_path / "a.txt.gz", gzip.compress(data))
    assert documents(packed, size) == documents(plain, size)
    [text] = documents(plain, size)
    if kind == "noise" and size < 64:
        return  # a cut may fall into what would have been one wrong sequence
    assert text == data.decode("utf-8", errors="replace")


def test_pieces_end_behind_newlines_or_before_spaces(tmp_path: Path) -> None:
    data = "one two\nthree\nfour five\nsix seven eight nine ten\n"
    path = write(tmp_path / "a.txt", data)
    pieces = cut_into_pieces([TextSource(str(path), len(data))], 10)
    assert [piece.size for piece in pieces] == [10, 10, 10, 10, 9]
    parts = [part for piece in pieces for part in read_piece(piece, "text", pytest.fail)]
    assert parts == [
        ("one two\nthree\n", False),
        ("four five\n", False),
        ("six seven", False),
        (" eight nine ten\n", False),
        ("", True),
    ]


@pytest.mark.parametrize("size", [8, 33, 10000])
def test_lines_of_json_are_documents(tmp_path: Path, size: int) -> None:
    chance = random.Random(1)
    texts = ["é\n" * chance.randrange(30) for _ in range(60)]
    lines = [json.dumps({"id": i, "text": text}, ensure_ascii=bool(i % 2)) for i, text in enumerate(texts)]
    data = "\ufeff" + "\n\n".join(lines)
    plain = write(tmp_path / "a.jsonl", data)
    packed = write(tmp_path / "a.jsonl.gz", gzip.compress(data.encode()))
    wanted = [text for text in texts if text]
    assert documents(plain, size) == wanted
    assert documents(packed, size) == wanted


def rows_of(path: Path, complaints: list[str] | None = None) -> list[object]:
    """The rows of a file that is found as `prepare` finds it."""
    told: list[HpctrainError] = []
    sources, _ = find_sources([str(path)], [])
    found = [row.value for piece in cut_into_pieces(sources, 16) for row in read_rows(piece, told.append)]
    if complaints is None:
        assert not told
    else:
        complaints += map(str, told)
    return found


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["a.json", "a.JSON.GZ", "a.jsonl"])
def test_lists_of_json_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, indent: int | None
) -> None:
    monkeypatch.setattr(
        "hpctrain.data.text_pieces._LIST_BLOCK", 7
    )  # entries lie across what is read at a time
    rows = [{"text": "é]\\n" * n, "n": n * 1234567} for n in range(9)] + [12345678, "x", None, []]
    data = ("\ufeff " + json.dumps(rows, indent=indent, ensure_ascii=False) + "\n").encode()
    path = write(tmp_path / name, gzip.compress(data) if name.endswith("GZ") else data)
    assert rows_of(path) == rows
    complaints: list[str] = []
    (source,), _ = find_sources([str(path)], [])
    pieces = cut_into_pieces([source], 16)
    texts = [
        text for piece in pieces for text, _ in read_piece(piece, "text", lambda e: complaints.append(str(e)))
    ]
    assert texts == [row["text"] for row in rows[1:9] if isinstance(row, dict)]
    assert complaints[0].startswith(f"{path}: entry 10: has no text under 'text'")


@pytest.mark.parametrize("name", ["a.json", "a.ndjson", "a.jsonlines", "a.JSONL"])
def test_lines_of_json_under_any_usual_name(tmp_path: Path, name: str) -> None:
    lines = [json.dumps({"text": str(n)}) for n in range(3)]
    assert rows_of(write(tmp_path / name, "\n".join(lines))) == [json.loads(line) for line in lines]
    path = write(tmp_path / f"lists-{name}", "[1]\n[2, 3]\n")
    assert rows_of(path) == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ('[{"a": 1}, {"a": }]', "entry 2 is not JSON (Expecting value)"),
        ('[{"a": 1}, ', "entry 2 is missing: the list has no end"),
        ('[{"a": 1}', "entry 2 is missing: the list has no end"),
        (f"[1, {'[' * 100_000}", "entry 2 is not JSON that can be read (nested too deeply)"),
        (f"[1, {'9' * 5000}]", "entry 2 is not JSON that can be read (a number has too many digits)"),
        ('{\n "a": 1\n}', "is a single JSON value; expected a JSON list of rows, or one row per line"),
    ],
)
def test_bad_lists_are_one_sentence(tmp_path: Path, data: str, told: str) -> None:
    complaints: list[str] = []
    path = write(tmp_path / "a.json", data)
    assert len(rows_of(path, complaints)) == (0 if data.startswith("{") else 1)
    (sentence,) = complaints
    assert sentence.startswith(f"{path}: ") and told in sentence


@pytest.mark.parametrize("size", [8, 16, 1000])
def test_bad_lines_are_named(tmp_path: Path, size: int) -> None:
    data = '{"text": "a"}\n{"text": 3}\n\nnot json\n[1]\n{"no": "text"}\n{"text": "b"}\n'
    for path in (
        write(tmp_path / "a.jsonl", data),
        write(tmp_path / "b.jsonl.gz", gzip.compress(data.encode())),
    ):
        complaints: list[str] = []
        assert documents(path, size, complaints) == ["a", "b"]
        assert [text.split(": ")[0] for text in complaints] == [f"{path}:{line}" for line in (2, 4, 5, 6)]
        assert "is not JSON" in complaints[1]
        assert "--field" in complaints[0]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    whole = gzip.compress(os.urandom(5000))
    for name, data in {"a.txt.gz": b"no gzip", "b.txt.gz": whole[:3000], "c.jsonl.gz": whole[:9]}.items():
        errors: list[HpctrainError] = []
        path = write(tmp_path / name, data)
        list(
            read_piece(TextPiece(TextSource(str(path), len(data)), 0, len(data), 100), "text", errors.append)
        )
        assert len(errors) == 1
        assert f"{path}: is damaged or truncated gzip" in str(errors[0])
    errors = []
    list(read_piece(TextPiece(TextSource(str(tmp_path / "gone.txt"), 10), 0, 10, 10), "text", errors.append))
    short = write(tmp_path / "short.txt", "abc")
    list(read_piece(TextPiece(TextSource(str(short), 10), 0, 10, 10), "text", errors.append))
    assert all(isinstance(error, InputOutputError) for error in errors)
    assert "gone.txt: cannot be read (No such file or directory)" in str(errors[0])
    assert "was truncated while" in str(errors[1])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 50])
def test_shares_are_contiguous_whole_and_balanced(ranks: int) -> None:
    chance = random.Random(ranks)
    pieces = cut_into_pieces([TextSource(f"{i}.txt", chance.randrange(1, 400)) for i in range(40)], 100)
    shares = [share_of(pieces, rank, ranks) for rank in range(ranks)]
    assert [piece for share in shares for piece in share] == pieces
    total = sum(piece.size for piece in pieces)
    assert all(abs(sum(piece.size for piece in share) - total / ranks) <= 100 for share in shares)
    assert list(share_of([], 0, ranks)) == []
