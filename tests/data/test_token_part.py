"""What a process that was killed has left of its tokens, and what one that goes on makes of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.data import prepare_text as preparation
from hpctrain.data.token_part import TokenPart, part_path, remove_stale_files
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokens import TokenFile
from hpctrain.errors import HpctrainError
from tests.data.preparing import prepare

BYTES = Tokenizer("bytes")


def left(folder: Path, pieces: int, key: str = "k") -> TokenPart:
    """What is left where a process is ended in the midst of a piece."""
    part = TokenPart(folder / "part", BYTES, key)
    for piece in range(pieces):
        part.add(np.arange(piece, piece + 5))
        part.end_document(256)
        part.add(np.array([piece]))  # of a document that goes on
        part.end_piece()
    part.add(np.array([99, 98]))
    part.__exit__(KeyboardInterrupt)
    return part


def test_what_is_whole_is_taken_up(tmp_path: Path) -> None:
    before = left(tmp_path, 3)
    with TokenPart(tmp_path / "part", BYTES, "k") as part:
        assert part.resume() == 3
        assert part.tokens == 21 and part.ends.tolist() == [6, 13, 20]
        part.add(np.array([7]))
        part.end_document(256)
        part.end_piece()
        part.finish()
        assert part.read(0, part.tokens)[-2:].tolist() == [7, 256]
        assert part.read(0, 21).tolist() == np.fromfile(before.path, before.dtype, 21).tolist()
        part.__exit__(KeyboardInterrupt)
    with TokenPart(tmp_path / "part", BYTES, "k") as part:
        assert part.resume() == 0  # the one before was left in good order, and took its files along


def test_it_goes_on_after_it_went_on(tmp_path: Path) -> None:
    left(tmp_path, 2)
    part = TokenPart(tmp_path / "part", BYTES, "k")
    assert part.resume() == 2
    part.end_document(256)
    part.end_piece()
    part.__exit__(KeyboardInterrupt)
    again = TokenPart(tmp_path / "part", BYTES, "k")
    assert again.resume() == 3 and again.ends.tolist() == [6, 13, 15]


@pytest.mark.parametrize("harm", ["other text", "cut tokens", "other tokens", "no journal", "no tokens"])
def test_what_is_not_the_same_is_begun_anew(tmp_path: Path, harm: str) -> None:
    part = left(tmp_path, 2)
    if harm == "cut tokens":
        part.path.write_bytes(part.path.read_bytes()[:9])
    elif harm == "other tokens":
        content = bytearray(part.path.read_bytes())
        content[3] ^= 1
        part.path.write_bytes(content)
    elif harm == "no journal":
        part.journal.unlink()
    elif harm == "no tokens":
        part.path.unlink()
    with TokenPart(tmp_path / "part", BYTES, "other" if harm == "other text" else "k") as new:
        assert new.resume() == 0 and new.tokens == 0
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [1, 5, 15])
def test_a_torn_line_is_made_again(tmp_path: Path, cut: int) -> None:
    part = left(tmp_path, 3)
    part.journal.write_bytes(part.journal.read_bytes()[:-cut])
    with TokenPart(tmp_path / "part", BYTES, "k") as new:
        assert new.resume() == 2 and new.tokens == 14


def test_only_what_is_ours_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "out.h5"
    ours = [part_path(out, 3), tmp_path / ".out.h5.part-3.done", tmp_path / ".out.h5.partial"]
    others = [out, part_path(out, 1), tmp_path / ".other.h5.part-3", tmp_path / ".out.h5.part-3.txt"]
    for path in (*ours, *others):
        path.write_bytes(b"")
    remove_stale_files(out, 2)
    assert sorted(tmp_path.iterdir()) == sorted(others)


class KilledError(BaseException):
    """Stands for the end of the process."""


def test_prepare_goes_on(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended after any piece, it makes the same file, of what is not yet tokens alone."""
    alone, text, out = world.single_rank_world(), tmp_path / "a.txt", tmp_path / "out.h5"
    text.write_text("".join(f"line {n}\n" for n in range(300)))
    rows = tmp_path / "b.jsonl"
    rows.write_text("".join(f'{{"text": "row {n}"}}\n' for n in range(100)))
    paths = [str(text), str(rows)]
    prepare(alone, tmp_path / "whole.h5", paths, piece_bytes=500)
    whole = TokenFile(tmp_path / "whole.h5")
    read = preparation.read_piece
    begun: list[int] = []

    def ending(piece, *arguments):  # type: ignore[no-untyped-def]
        begun.append(1)
        if len(begun) > most:
            raise KilledError
        return read(piece, *arguments)

    monkeypatch.setattr(preparation, "read_piece", ending)
    most = 0
    for end in (1, 3, 4):
        begun.clear()
        most = end
        with pytest.raises(KilledError):
            prepare(alone, out, paths, piece_bytes=500)
        assert not out.exists()
    said: list[str] = []
    begun.clear()
    most = 1000
    prepare(alone, out, paths, piece_bytes=500, say=said.append)
    assert said == ["continues an interrupted run: 8 of 10 pieces of text are tokenized"] and len(begun) == 2
    file = TokenFile(out)
    assert file.fingerprint == whole.fingerprint and file.documents == 101
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.jsonl", "out.h5", "whole.h5"]


def test_a_wrong_line_is_told_again(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found wrong before the end is not passed over by the next one."""
    rows = tmp_path / "b.jsonl"
    rows.write_text("{bad\n" + "".join(f'{{"text": "row {n}"}}\n' for n in range(100)))
    read, begun = preparation.read_piece, []

    def ending(piece, *arguments):  # type: ignore[no-untyped-def]
        begun.append(1)
        if len(begun) == 3:
            raise KilledError
        return read(piece, *arguments)

    monkeypatch.setattr(preparation, "read_piece", ending)
    with pytest.raises(KilledError):
        prepare(world.single_rank_world(), tmp_path / "out.h5", [str(rows)], piece_bytes=500)
    monkeypatch.setattr(preparation, "read_piece", read)
    with pytest.raises(HpctrainError, match=r"b.jsonl:1: is not JSON"):
        prepare(world.single_rank_world(), tmp_path / "out.h5", [str(rows)], piece_bytes=500)


def test_a_killed_process_leaves_no_output(tmp_path: Path) -> None:
    """SIGKILL at the third piece: nothing is there by the file's name, and the next one goes on."""
    (tmp_path / "a.txt").write_text("some text\n" * 1000)
    program = """
import os, signal, sys
from pathlib import Path
from hpctrain.comm.world import World
from hpctrain.data import prepare_text
from hpctrain.data.prepare_options import TextOptions
read, begun = prepare_text.read_piece, []
def ending(*arguments):
    begun.append(1)
    if len(begun) == 3 and "die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(*arguments)
prepare_text.read_piece = ending
options = TextOptions(piece_bytes=1000)
prepare_text.prepare_text(World.start("cpu"), Path("out.h5"), ["a.txt"], options, print, lambda *_: None)
"""
    run = [sys.executable, "-c", program]
    assert subprocess.run([*run, "die"], cwd=tmp_path, check=False).returncode == -9
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".out.h5.part-0",
        ".out.h5.part-0.done",
        "a.txt",
    ]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "continues an interrupted run: 2 of 10 pieces of text are tokenized\n"
    assert TokenFile(tmp_path / "out.h5").tokens == 10001
