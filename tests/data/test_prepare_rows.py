"""Conversations, preferences and prompts as token files: what is in them, on any ranks, and bad rows.

Tests of data/prepare_rows.py, data/prepare_any.py, data/file_contents.py and data/stored.py.
"""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.data import template_limits, token_writer
from hpctrain.data.chat_rows import Conversation, conversation_of, preference_of, prompt_of
from hpctrain.data.chat_template import CHATML, ChatTemplate
from hpctrain.data.chat_tokens import ChatTokenizer
from hpctrain.data.file_contents import Contents
from hpctrain.data.prepare_any import prepare_any, result_text
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokens import TokenFile
from hpctrain.errors import HpctrainError, InputOutputError
from tests.data.chats import bpe, talk, write_rows
from tests.data.preparing import prepare, prepare_rows

CHATS = [{"messages": talk(f"hello {n}" * (n % 5 + 1), f"four {n}", "and?", "the end")} for n in range(40)]
PAIRS = [{"prompt": f"p {n}", "chosen": f"good {n}", "rejected": "bad", "margin": n} for n in range(40)]
PROMPTS = [{"prompt": f"two and {n}?", "answer": str(n), "ü": [n]} for n in range(40)]
KINDS = {"chat": CHATS, "preferences": PAIRS, "prompts": PROMPTS}


def documents(file: TokenFile) -> list[tuple[list[int], list[int]]]:
    """Tokens, and whether they are learned, of each."""
    ends = [0, *file.document_ends().tolist()]
    return [
        (file.read(begin, end - begin).tolist(), file.learned(begin, end - begin).int().tolist())
        for begin, end in pairwise(ends)
    ]


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_what_its_rows_are_on_any_ranks(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(token_writer, "PIECE_TOKENS", 64)
    folder, source, out = mpi_tmp_path / "bpe", mpi_tmp_path / "rows.jsonl", mpi_tmp_path / "out.h5"
    if world.rank == 0:
        bpe(folder, CHATML)
        write_rows(source, KINDS[kind])
        prepare_rows(
            world.single_rank_world(),
            mpi_tmp_path / "one.h5",
            [str(source)],
            kind=kind,
            tokenizer=str(folder),
        )
    world.everyone.barrier()
    made = prepare_rows(world, out, [str(source)], kind=kind, tokenizer=str(folder), piece_bytes=300)
    world.everyone.barrier()
    if world.rank:
        return
    assert out.read_bytes() == (mpi_tmp_path / "one.h5").read_bytes()
    assert sorted(each.name for each in mpi_tmp_path.iterdir()) == ["bpe", "one.h5", "out.h5", "rows.jsonl"]
    file = TokenFile(out)
    file.verify()
    chat = ChatTokenizer(file.tokenizer, ChatTemplate.from_json(file.template_text))
    assert chat.template.text == CHATML
    expected = []
    for row in KINDS[kind]:
        if kind == "chat":
            expected.append(chat.conversation(conversation_of(row)))
        elif kind == "preferences":
            expected += [chat.conversation(each) for each in preference_of(row)[:2]]
        else:
            expected.append(chat.prompt(prompt_of(row).conversation))
    assert documents(file) == [(each.ids.tolist(), each.learned.tolist()) for each in expected]
    learned = sum(int(each.learned.sum()) for each in expected)
    assert (file.kind, file.contents.rows, file.contents.learned) == (kind, 40, learned)
    assert (made.kind, made.rows, made.learned, made.documents) == (kind, 40, learned, len(expected))
    if kind != "chat":
        keys = [{"margin": n} if kind == "preferences" else {"answer": str(n), "ü": [n]} for n in range(40)]
        assert [file.other_keys(row) for row in range(40)] == keys


def test_of_text_nothing_changes(world: World, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    prepare(world.single_rank_world(), tmp_path / "t.h5", [str(tmp_path / "a.txt")])
    file = TokenFile(tmp_path / "t.h5")
    assert file.contents == Contents() and file.kind == "text" and file.learned(0, 5).all()
    with h5py.File(tmp_path / "t.h5") as stored:
        assert set(stored) == {"tokenizer", "tokenizer_settings", "checksums", "document_ends", "tokens"}
        assert stored.attrs["version"] == 1 and "kind" not in stored.attrs


def said_of(world: World, out: Path, source: str, **choices: Any) -> list[str]:
    """All that `hpctrain prepare` says."""
    said: list[str] = []
    usual = {"train_bpe": None, "text_key": "text", "binary": False, "globs": (), "tokenizer": "bytes"}
    made = prepare_any(
        world.single_rank_world(), out, [source], {**usual, **choices}, said.append, lambda *_: None
    )
    return [*said, result_text(made)]


def test_what_is_said(world: World, tmp_path: Path) -> None:
    rows = [*CHATS[:3], {"messages": talk("alone")}, {"messages": talk("again")}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    spelled, left, made = said_of(world, tmp_path / "o.h5", source, kind="chat", template="chatml")
    assert "tokens of 3 conversations, 99 of them learned, vocabulary 257" in made
    assert (
        left == f"left out 2 conversations, in which there is no assistant message ({source}:4, {source}:5)"
    )
    words = "--template chatml: <|im_end|> or <|im_start|> is not in the vocabulary, so text of messages"
    assert spelled == f"{words} can imitate it"
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "b"}, *PAIRS[:2]]
    source = write_rows(tmp_path / "p.jsonl", pairs)
    left, made = said_of(world, tmp_path / "p.h5", source, kind="preferences", template="plain")
    assert left == f"left out 1 pair, whose answers are equal ({source}:1)" and "of 2 pairs, " in made
    refused: list[tuple[dict[str, Any], str]] = [
        ({"kind": "chat", "train_bpe": 300}, "--train-bpe conflicts with --chat"),
        ({"template": "plain"}, "--template requires --chat, --preferences or --prompts"),
        ({"kind": "prompts", "binary": True}, "--binary conflicts with --prompts"),
        ({"kind": "chat"}, "has no chat template; give --template"),
    ]
    for choices, wanted in refused:
        with pytest.raises(HpctrainError) as caught:
            said_of(world, tmp_path / "q.h5", source, **choices)
        assert wanted in str(caught.value) and len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("kind", "lines", "wanted"),
    [
        ("chat", ['{"messages": [{"content": "x"}]}'], ":1: message 1 of 1 has no `role`"),
        ("chat", ["", '{"messages"'], ":2: is not JSON"),
        ("chat", ['{"prompt": "a", "response": "b"}', "3"], ":2: is an int, not an object"),
        (
            "chat",
            ['{"prompt": "a", "response": "b"}', "[" * 100_000],
            ":2: is not JSON that can be read",
        ),
        (
            "chat",
            ['{"messages": [{"role": "user", "content": "x"}]}'],
            "no conversation with an assistant message found",
        ),
        ("chat", ["\n\n"], "no conversation with an assistant message found"),
        ("chat", [], "no rows found"),
        ("prompts", ["", ""], "no prompt found"),
        (
            "preferences",
            ['{"prompt": "a", "chosen": "b", "rejected": "b"}'],
            "no pair of different answers found",
        ),
        (
            "preferences",
            ['{"prompt": "a", "chosen": 3, "rejected": "b"}'],
            ":1: has an int for `chosen`, not text",
        ),
    ],
)
def test_bad_rows(world: World, tmp_path: Path, kind: str, lines: list[str], wanted: str) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(lines))
    with pytest.raises(HpctrainError) as caught:
        prepare_rows(world.single_rank_world(), tmp_path / "o.h5", [str(source)], kind=kind, template="plain")
    assert wanted in str(caught.value) and str(source) in str(caught.value)
    assert len(caught.value.problems) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["rows.jsonl"]


def test_what_a_template_refuses_names_the_line(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "PROCESSOR_SECONDS", 0.5)
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if loop.first and m.role != 'user' %}"
        "{{ raise_exception('must begin with a user') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    source = write_rows(tmp_path / "a.jsonl", [CHATS[0], {"messages": talk("a", "b", system="s")}])
    with pytest.raises(HpctrainError, match=r"a.jsonl:2: --template .*t.jinja: must begin with a user"):
        prepare_rows(
            world.single_rank_world(), tmp_path / "o.h5", [source], kind="chat", template=str(template)
        )
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    of_one = f"{{% if messages[0].content == 's' %}}{endless}{{% endif %}}{{{{ messages | string }}}}"
    for text, where in ((endless, "^"), (of_one, "a.jsonl:2: ")):
        template.write_text(text)
        with pytest.raises(HpctrainError, match=rf"{where}--template .*t.jinja: takes more than 500 ms"):
            prepare_rows(
                world.single_rank_world(), tmp_path / "o.h5", [source], kind="chat", template=str(template)
            )


def test_compressed_files_and_tables(world: World, tmp_path: Path) -> None:
    source = Path(write_rows(tmp_path / "a.jsonl", CHATS))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(source.read_bytes()))
    paths = ["a.jsonl", "a.jsonl.gz"]
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        pass
    else:
        parquet.write_table(pa.Table.from_pylist(CHATS), tmp_path / "a.parquet")
        paths.append("a.parquet")
    files = []
    for path in paths:
        out = tmp_path / f"{path}.h5"
        prepare_rows(world.single_rank_world(), out, [str(tmp_path / path)], kind="chat", template="plain")
        files.append(documents(TokenFile(out)))
    assert all(each == files[0] for each in files)


@pytest.mark.parametrize("dataset", ["learned", "others", "template", "others_ends"])
def test_what_changes_is_noticed(world: World, tmp_path: Path, dataset: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", PAIRS)
    made = tmp_path / "o.h5"
    prepare_rows(world.single_rank_world(), made, [source], kind="preferences", template="plain")
    before = TokenFile(made).fingerprint
    with h5py.File(made, "r+") as file:
        values = np.array(file[dataset])
        values[0] ^= 1
        file[dataset][...] = values
    with pytest.raises(InputOutputError, match=r"is damaged|wrong checksum"):
        TokenFile(made).verify()
    if dataset == "learned":
        with pytest.raises(InputOutputError, match=r"piece 1 of 1, tokens of /learned 0 to .* checksum"):
            TokenFile(made).learned(0, 3)
    other = tmp_path / "other.h5"
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}")
    prepare_rows(world.single_rank_world(), other, [source], kind="preferences", template=str(own))
    assert TokenFile(other).fingerprint != before


def test_a_conversation_of_a_file_is_that_of_memory(world: World, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", CHATS[:1])
    prepare_rows(world.single_rank_world(), tmp_path / "o.h5", [source], kind="chat", template="raw")
    template = ChatTemplate.of("raw", "bytes", "<|endoftext|>")
    messages: Any = CHATS[0]["messages"]
    made = ChatTokenizer(Tokenizer("bytes"), template).conversation(Conversation(messages))
    assert documents(TokenFile(tmp_path / "o.h5")) == [(made.ids.tolist(), made.learned.tolist())]
