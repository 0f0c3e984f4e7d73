"""What is told of a token file, for people and as JSON. Tests of report/token_contents.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.report.inspect import InspectOptions, inspect
from tests.data.chats import talk, write_rows
from tests.data.preparing import prepare, prepare_rows


def told(world: World, path: Path, **wish: bool) -> str:
    said: list[str] = []
    assert inspect(world.single_rank_world().everyone, path, InspectOptions(**wish), said.append) == 0
    return "\n".join(said)


def test_what_is_told(world: World, tmp_path: Path) -> None:
    rows = [{"messages": talk("hello", "four"), "prompt": "x", "chosen": "a", "rejected": "b"}] * 3
    source = write_rows(tmp_path / "a.jsonl", rows)
    for kind, wanted in [
        ("chat", "a token file of chat: 3 conversations, 30 tokens, 15 of them learned (50.0%)"),
        (
            "preferences",
            "a token file of preferences: 3 pairs, 18 tokens, 12 of them learned (66.7%)\neach pair is",
        ),
        ("prompts", "a token file of prompts: 3 prompts, 3 tokens\n"),
    ]:
        path = tmp_path / f"{kind}.h5"
        prepare_rows(world.single_rank_world(), path, [source], kind=kind, template="raw")
        text = told(world, path, verify=True)
        assert wanted in text and "vocabulary 257 (bytes), token 256 ends a document" in text
        assert "chat template:\n  {% for message in messages %}" in text and "match their checksums" in text
        found = json.loads(told(world, path, as_json=True))
        assert (found["kind"], found["rows"]) == (kind, 3)
    (tmp_path / "t.txt").write_text("text")
    prepare(world.single_rank_world(), tmp_path / "t.h5", [str(tmp_path / "t.txt")])
    assert "a token file of text: 1 document, 5 tokens\n" in told(world, tmp_path / "t.h5")


def test_what_is_damaged_or_not_asked_of_tokens(world: World, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("text" * 100)
    path = tmp_path / "t.h5"
    prepare(world.single_rank_world(), path, [str(tmp_path / "t.txt")])
    with pytest.raises(HpctrainError, match=r"t.h5: is a token file, so that --tensors has no effect"):
        told(world, path, tensors=True)
    content = bytearray(path.read_bytes())
    content[content.index("texttext".encode("utf-16-le")) + 6] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputOutputError, match=r"piece 1 of 1, tokens 0 to 400, is damaged"):
        told(world, path, verify=True)
