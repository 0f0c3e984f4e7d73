"""Text to token file over 1, 2 and 4 ranks, against the tokens made by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import h5py
import pytest
import tokenizers

from hpctrain.comm.world import World
from hpctrain.data import token_writer
from hpctrain.data.tokens import TokenFile
from hpctrain.errors import HpctrainError
from tests.data.preparing import prepare

PLAIN = {
    "a.txt": "hello wörld\n" * 9,
    "b/deep.md": "x" * 70,
    "c.py": "print(1)\r\n" * 30,
    "d.txt": "",
    "e.txt": "é",
}
LINES = [f"document {i}\n" * (i % 5) for i in range(23)]
NOISE = b"\xff\xfe not UTF-8 \xc3\n" * 3


def corpus(world: World, folder: Path) -> Path:
    """The files, written by rank 0 for all."""
    if world.rank == 0:
        for name, text in PLAIN.items():
            (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "in" / name).write_bytes(text.encode())
        rows = "".join(json.dumps({"body": text}) + "\n" for text in LINES)
        (folder / "in/f.jsonl").write_text(rows)
        with gzip.open(folder / "in/g.jsonl.gz", "wt") as packed:
            packed.write(rows)
        (folder / "in/h.txt.gz").write_bytes(gzip.compress(NOISE))
    world.everyone.barrier()
    return folder / "in"


def documents() -> list[str]:
    """What `corpus` says, in the order of the names, the last one without its bytes that are no text."""
    texts = [PLAIN["a.txt"], PLAIN["b/deep.md"], PLAIN["c.py"], PLAIN["e.txt"]]
    return [*texts, *(text for text in LINES * 2 if text), NOISE.decode("utf-8", "replace")]


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("piece_bytes", [16, 100, 1 << 20])
def test_bytes_are_what_they_are(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(token_writer, "PIECE_TOKENS", 32)
    monkeypatch.setattr(token_writer, "CALL_BYTES", 100)
    folder, out = corpus(world, mpi_tmp_path), mpi_tmp_path / "made" / "out.h5"
    made = prepare(world, out, [str(folder)], text_key="body", piece_bytes=piece_bytes, binary=True)
    expected, ends = [], []
    for data in (*(text.encode() for text in documents()[:-1]), NOISE):
        expected += [*data, 256]
        ends.append(len(expected))
    file = TokenFile(out)
    file.verify()
    assert file.read(0, file.tokens).tolist() == expected
    assert [file.document_end(i) for i in range(file.documents)] == ends
    assert (made.files, made.documents, made.tokens, made.vocabulary) == (7, len(ends), len(expected), 257)
    assert made.size == sum(path.stat().st_size for path in folder.rglob("*.*") if path.is_file())
    world.everyone.barrier()
    assert [path.name for path in out.parent.iterdir()] == ["out.h5"]


@pytest.mark.mpi
@pytest.mark.parametrize("bpe", [None, 300])
def test_the_file_does_not_depend_on_the_ranks(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bpe: int | None
) -> None:
    monkeypatch.setattr(token_writer, "PIECE_TOKENS", 32)
    folder = str(corpus(world, mpi_tmp_path))
    options = {"text_key": "body", "train_bpe": bpe, "piece_bytes": 64, "binary": True}
    prepare(world, mpi_tmp_path / "all.h5", [folder], **options)
    if world.rank == 0:
        prepare(world.single_rank_world(), mpi_tmp_path / "one.h5", [folder], **options)
        with h5py.File(mpi_tmp_path / "all.h5") as many, h5py.File(mpi_tmp_path / "one.h5") as one:
            names = {"tokens", "document_ends", "tokenizer", "tokenizer_settings", "checksums"}
            assert set(many) == set(one) == names
            for name in many:
                assert many[name].dtype == one[name].dtype
                assert many[name][:].tobytes() == one[name][:].tobytes(), name
                assert dict(many[name].attrs) == dict(one[name].attrs), name
            assert dict(many.attrs) == dict(one.attrs)
    world.everyone.barrier()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_trained_bpe_is_stored(world: World, mpi_tmp_path: Path) -> None:
    folder, out = corpus(world, mpi_tmp_path), mpi_tmp_path / "out.h5"
    prepare(world, out, [str(folder)], text_key="body", train_bpe=300, binary=True)
    file = TokenFile(out)
    assert file.tokenizer_text != "bytes"
    library = tokenizers.Tokenizer.from_str(file.tokenizer_text)
    starts = [0, *(file.document_end(i) for i in range(file.documents))]
    for text, start, end in zip(documents(), starts, starts[1:], strict=False):
        ids = file.read(start, end - start).tolist()
        assert ids == [*library.encode(text).ids, file.end_of_document]
        assert file.tokenizer.decode(ids) == text
    assert file.documents == len(documents())
    assert file.vocabulary == library.get_vocab_size()
    path = mpi_tmp_path / "tokenizer.json"
    if world.rank == 0:
        path.write_text(file.tokenizer_text)
    world.everyone.barrier()
    prepare(
        world, mpi_tmp_path / "again.h5", [str(folder)], text_key="body", tokenizer=str(path), binary=True
    )
    again = TokenFile(mpi_tmp_path / "again.h5")
    assert again.read(0, again.tokens).tolist() == file.read(0, file.tokens).tolist()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_is_no_text_is_refused_unless_asked_for(world: World, mpi_tmp_path: Path) -> None:
    folder, out = mpi_tmp_path / "in", mpi_tmp_path / "out.h5"
    data = {
        "a.txt": b"text\n" * 50,
        "b.txt": b"caf\xe9\n" * 50,
        "c.md": b"\x00\xff\xef\xbb\xbf" * 50,
        "d.txt": b"b" * 200 + b"\0",
        "e.txt": b"",
        "f.jsonl": b'{"text": "\xff\\udc80"}\n',
    }
    if world.rank == 0:
        folder.mkdir()
        for name, content in data.items():
            (folder / name).write_bytes(content)
    world.everyone.barrier()

    def tokens(*paths: str, **options: object) -> tuple[list[int], list[str]]:
        said: list[str] = []
        given = [str(folder / path) for path in paths]
        prepare(world, out, given, piece_bytes=64, replace=True, say=said.append, **options)
        file = TokenFile(out)
        assert said == [] or world.rank == 0
        return file.read(0, file.tokens).tolist(), world.everyone.broadcast_object(said)

    found, said = tokens(".")
    assert found == [*data["a.txt"], 256]
    assert said == [
        f"left out as empty: 1 file ({folder / 'e.txt'})",
        f"left out as binary: 2 files ({folder / 'c.md'}, {folder / 'd.txt'}); --binary reads them",
        f"left out as not UTF-8: 2 files ({folder / 'b.txt'}, {folder / 'f.jsonl'}); --binary reads them",
    ]
    with pytest.raises(HpctrainError) as caught:
        tokens("a.txt", "b.txt", "c.md")
    assert caught.value.problems == (
        f"{folder / 'b.txt'}: is not UTF-8, so it is not text; give --binary to read it",
        f"{folder / 'c.md'}: is binary, so it is not text; give --binary to read it",
    )
    found, said = tokens(".", binary=True)
    raw = [data[name] for name in ("a.txt", "b.txt", "c.md", "d.txt")] + ["\ufffd\ufffd".encode()]
    assert found == [number for content in raw for number in (*content, 256)]
    assert said == [f"left out as empty: 1 file ({folder / 'e.txt'})"]
    world.everyone.barrier()
    found, said = tokens("b.txt", binary=True, train_bpe=1000)
    assert TokenFile(out).tokenizer.decode(found) == "caf\ufffd\n" * 50
    size = TokenFile(out).vocabulary
    assert size < 300
    assert said == [
        f"--train-bpe 1000: the tokenizer has only {size} tokens, since the text has no more pairs to merge"
    ]
    if world.rank == 0:
        (folder / "a.txt").unlink()
    world.everyone.barrier()
    with pytest.raises(HpctrainError, match="no text found"):
        tokens(".")


@pytest.mark.mpi
def test_more_ranks_than_files_and_an_existing_output(world: World, mpi_tmp_path: Path) -> None:
    out, name = mpi_tmp_path / "out.h5", str(mpi_tmp_path / "a.txt")
    if world.rank == 0:
        Path(name).write_text("a")
    world.everyone.barrier()
    prepare(world, out, [name])
    assert TokenFile(out).read(0, 2).tolist() == [97, 256]
    world.everyone.barrier()
    if world.rank == 0:
        Path(name).write_text("b")
    with pytest.raises(HpctrainError, match=r"already exists \(--force replaces it\)"):
        prepare(world, out, [name])
    assert TokenFile(out).read(0, 1).item() == 97
    world.everyone.barrier()
    prepare(world, out, [name], replace=True)
    assert TokenFile(out).read(0, 1).item() == 98


@pytest.mark.mpi(min_size=1, max_size=2)
def test_mistakes_are_everyones(world: World, mpi_tmp_path: Path) -> None:
    out = mpi_tmp_path / "out.h5"
    if world.rank == 0:
        (mpi_tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' * 40 + "{bad\n" + '{"text": 1}\n')
        (mpi_tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"hello" * 99)[:-9])
        (mpi_tmp_path / "empty").mkdir()
        (mpi_tmp_path / "empty.txt").touch()
        (mpi_tmp_path / "blank.jsonl").write_text('{"text": ""}\n\n')
    world.everyone.barrier()

    def problems(code: int, *names: str, **options: object) -> tuple[str, ...]:
        with pytest.raises(HpctrainError) as caught:
            prepare(world, out, [str(mpi_tmp_path / name) for name in names], piece_bytes=64, **options)
        assert caught.value.exit_code == code
        world.everyone.barrier()
        left = [path.name for path in mpi_tmp_path.iterdir() if path.name.startswith((".", "out"))]
        world.everyone.barrier()
        assert left == []
        return caught.value.problems

    for training in (None, 300):
        first, second = problems(2, "bad.jsonl", train_bpe=training)
        assert "bad.jsonl:41: is not JSON" in first
        assert "bad.jsonl:42: has no text under 'text'; see --field" in second
    assert "is damaged or truncated gzip" in problems(3, "cut.txt.gz")[0]
    assert "no such file or folder" in problems(3, "none.txt")[0]
    assert "no file in this folder matches" in problems(2, "empty")[0]
    assert "no text found" in problems(2, "empty.txt")[0]
    assert "no text found" in problems(2, "blank.jsonl")[0]
    assert "no such file" in problems(3, "bad.jsonl", tokenizer=str(mpi_tmp_path / "none.json"))[0]
    assert "conflicts with --tokenizer" in problems(2, "bad.jsonl", tokenizer="x.json", train_bpe=300)[0]
    assert "conflicts with --tokenizer" in problems(2, "bad.jsonl", tokenizer="bytes", train_bpe=300)[0]


@pytest.mark.mpi(min_size=1, max_size=2)
def test_files_named_twice_and_the_output_itself(world: World, mpi_tmp_path: Path) -> None:
    out, other = mpi_tmp_path / "out.h5", str(mpi_tmp_path / "other.txt")
    name, again = str(mpi_tmp_path / "a.txt"), str(mpi_tmp_path / "." / "link.txt")
    if world.rank == 0:
        Path(name).write_text("a")
        Path(other).write_text("b")
        Path(again).symlink_to(name)
    world.everyone.barrier()
    said: list[str] = []
    prepare(world, out, [name, other, again, name], say=said.append)
    assert TokenFile(out).read(0, 4).tolist() == [97, 256, 98, 256]
    assert said == ([f"{name}: is given more than once, but read once"] if world.rank == 0 else [])
    prepare(world, out, [str(mpi_tmp_path)], replace=True, say=said.append)
    for paths in ([str(out)], [name, str(out), str(out)]):
        with pytest.raises(HpctrainError) as caught:
            prepare(world, out, paths, replace=True)
        assert set(caught.value.problems) == {f"{out}: is OUT, the file to write (give another name for OUT)"}
    assert TokenFile(out).tokens == 4


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("bpe", [None, 300])
def test_half_of_a_pair_is_no_text(world: World, mpi_tmp_path: Path, bpe: int | None) -> None:
    out, name = mpi_tmp_path / "out.h5", str(mpi_tmp_path / "a.jsonl")
    if world.rank == 0:
        Path(name).write_text('{"text": "\\ud83d\\ude00"}\n{"text": "a\\ud800b"}\n')
    world.everyone.barrier()
    with pytest.raises(HpctrainError) as caught:
        prepare(world, out, [name], train_bpe=bpe)
    sentence = "has text that is not UTF-8 (U+D800); give --binary to read it"
    assert caught.value.problems == (f"{name}:2: {sentence}",)
    prepare(world, out, [name], train_bpe=bpe, binary=True)
    file = TokenFile(out)
    assert file.tokenizer.decode(file.read(0, file.tokens).tolist()) == "\U0001f600a\ufffdb"
