"""A corpus as several token files, against one file of the same text: on any ranks, after kills, replaced."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data.prepare_options import PreparationResult
from hpctrain.data.token_files import TokenFiles, Tokens, open_tokens
from hpctrain.data.tokens import TokenFile
from hpctrain.errors import HpctrainError
from tests.data.preparing import prepare

LINES = [f"document {number} " + "x" * (number * 7 % 60) for number in range(200)]


@pytest.fixture
def text(world: World, mpi_tmp_path: Path) -> Path:
    """Lines of JSON, of which each is a document, and one long file between others."""
    if world.rank == 0:
        rows = [f'{{"text": "{line}"}}\n' for line in LINES]
        (mpi_tmp_path / "a.jsonl").write_text("".join(rows[:100]))
        (mpi_tmp_path / "b.txt").write_text("a long document\n" * 200)
        (mpi_tmp_path / "c.jsonl").write_text("".join(rows[100:]))
    world.everyone.barrier()
    return mpi_tmp_path


def made(world: World, folder: Path, name: str, most: int | None, **options: object) -> PreparationResult:
    paths = [str(folder / each) for each in ("a.jsonl", "b.txt", "c.jsonl")]
    return prepare(world, folder / name, paths, shard_bytes=most, piece_bytes=300, **options)  # type: ignore[arg-type]


def same(found: Tokens, whole: Tokens) -> None:
    assert (found.tokens, found.documents) == (whole.tokens, whole.documents)
    assert torch.equal(found.read(0, found.tokens), whole.read(0, whole.tokens))
    ends = [[each.document_end(number) for number in range(whole.documents)] for each in (found, whole)]
    assert ends[0] == ends[1]


@pytest.mark.mpi(min_size=1, max_size=4)
@pytest.mark.parametrize("most", [1, 1000, 2402, 1 << 20])
def test_files_have_the_tokens_of_one(world: World, text: Path, most: int) -> None:
    made(world, text, "one.h5", None)
    found = made(world, text, "out.h5", most)
    whole, names = TokenFile(text / "one.h5"), str(text / "out-*.h5")
    assert found.path == text / "out-*.h5" and found.tokens == whole.tokens
    shards = open_tokens([names], "data.tokens")
    files = shards.files if isinstance(shards, TokenFiles) else (shards,)
    same(shards, whole)
    assert len(files) == found.shards and [each.path.name for each in files] == [
        f"out-{number:05d}.h5" for number in range(found.shards)
    ]
    for each in files:
        each.verify()
        assert each.tokens * 2 <= most or each.documents == 1
        assert each.read(each.tokens - 1, 1).item() == 256
    for one, next_one in pairwise(files):  # none has room for the next one's first
        assert 2 * (one.tokens + next_one.document_end(0)) > most
    world.everyone.barrier()
    left = {path.name for path in text.iterdir()} - {each.path.name for each in files}
    assert left == {"a.jsonl", "b.txt", "c.jsonl", "one.h5"}


@pytest.mark.mpi(min_size=1, max_size=2)
def test_fewer_files_replace_more_when_asked_to(world: World, text: Path) -> None:
    first = made(world, text, "out.h5", 600).shards
    if world.rank == 0:
        (text / "out-20261126.h5").touch()  # eight digits: none of ours
        (text / "out-00999.h5").touch()  # nor does it go on from there
    world.everyone.barrier()
    with pytest.raises(HpctrainError, match=r"out-00000\.h5: already exists \(--force replaces it\)"):
        made(world, text, "out.h5", 6000)
    second = made(world, text, "out.h5", 6000, replace=True).shards
    assert 1 < second < first
    world.everyone.barrier()
    names = [*(f"out-{number:05d}.h5" for number in range(second)), "out-00999.h5", "out-20261126.h5"]
    assert sorted(path.name for path in text.glob("out-*")) == sorted(names)


PROGRAM = """
import os, signal, sys
from pathlib import Path
from hpctrain.comm.world import World
from hpctrain.data import prepare_text
from hpctrain.data.prepare_options import TextOptions
kind, number = sys.argv[1], int(sys.argv[2])
world = World.start("cpu")  # removes what dead jobs of this machine have left
calls = []
def ending(function, counts=lambda *_: True):
    def call(*arguments, **named):
        calls.extend([1] * counts(*arguments))
        if len(calls) == number and counts(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return call
if kind == "piece":
    prepare_text.read_piece = ending(prepare_text.read_piece)
elif kind == "written":
    from hpctrain.data.token_writer import TokenWriter
    TokenWriter._write = ending(TokenWriter._write)
elif kind == "named":
    Path.replace = ending(Path.replace)
elif kind == "removed":
    Path.unlink = ending(Path.unlink, lambda path, *_: path.name.endswith('.naming'))
names = ["a.jsonl", "b.txt", "c.jsonl"]
options = TextOptions(piece_bytes=300, shard_bytes=2402)
prepare_text.prepare_text(world, Path("out.h5"), names, options, print, lambda *_: None)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "number"), [("piece", 20), ("written", 3), ("named", 1), ("named", 4), ("removed", 1)]
)
def test_what_was_killed_goes_on(world: World, tmp_path: Path, kind: str, number: int) -> None:
    """By SIGKILL while it tokenizes, writes the third file, gives them names, or has given all of them."""
    rows = [f'{{"text": "{line}"}}\n' for line in LINES]
    for name, content in (("a.jsonl", rows[:100]), ("b.txt", ["long\n"] * 800), ("c.jsonl", rows[100:])):
        (tmp_path / name).write_text("".join(content))
    run = [sys.executable, "-c", PROGRAM]
    killed = subprocess.run([*run, kind, str(number)], cwd=tmp_path, check=False)
    assert killed.returncode == -9
    named = [path.name for path in tmp_path.glob("out-*.h5")]
    assert len(named) == {"named": number - 1, "removed": 9}.get(kind, 0)
    done = subprocess.run([*run, "no", "0"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("continues an interrupted run: ")
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.txt", "c.jsonl")]
    prepare(world.single_rank_world(), tmp_path / "one.h5", paths)
    same(open_tokens([str(tmp_path / "out-*.h5")], "data.tokens"), TokenFile(tmp_path / "one.h5"))
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
