"""Token files that are read as one against their tokens end to end, and files that do not go together.

Tests of data/deck_tokens.py beside data/token_files.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data.deck_tokens import open_entries, vocabulary_of
from hpctrain.data.token_files import TokenFiles, open_tokens, token_paths
from hpctrain.data.tokens import TokenFile
from hpctrain.deck.read import parse_deck
from hpctrain.errors import HpctrainError, InputOutputError
from tests.data.preparing import prepare
from tests.deck.small_text import SMALL

TEXTS = {"a": "one\n", "b": "the second text, a longer one", "c": "3"}


@pytest.fixture
def folder(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in TEXTS.items():
        Path(f"{name}.txt").write_text(text)
        Path("more.jsonl").write_text('{"text": "x y"}\n{"text": "z"}\n')
        prepare(world.single_rank_world(), Path(f"{name}.h5"), [f"{name}.txt", "more.jsonl"])
    return tmp_path


def test_shards_are_one_stream(folder: Path) -> None:
    shards = open_tokens(["*.h5"], "data.tokens")
    assert isinstance(shards, TokenFiles)
    files = [TokenFile(f"{name}.h5") for name in TEXTS]
    tokens = torch.cat([file.read(0, file.tokens) for file in files])
    assert (shards.tokens, shards.documents, shards.vocabulary) == (len(tokens), 9, 257)
    assert shards.where == 'data.tokens = "*.h5"'
    for start in range(len(tokens)):
        for end in (start, start + 1, min(start + 9, len(tokens)), len(tokens)):
            assert torch.equal(shards.read(start, end - start), tokens[start:end])
    ends = [shards.document_end(document) for document in range(9)]
    assert ends == [i + 1 for i, token in enumerate(tokens.tolist()) if token == 256]
    assert shards.tokenizer.decode(shards.read(0, 3).tolist()) == "one"


def test_order_and_content_make_the_fingerprint(folder: Path) -> None:
    marks = [
        open_tokens(names, "k").fingerprint
        for names in (["a.h5", "b.h5"], ["b.h5", "a.h5"], ["a.h5", "c.h5"], ["a.h5"], ["[ab].h5"])
    ]
    assert len(set(marks)) == 4 and marks[0] == marks[4]


def test_one_file_is_itself(folder: Path) -> None:
    assert isinstance(open_tokens(["a.h5"], "data.tokens"), TokenFile)
    assert isinstance(open_tokens(["a*.h5"], "data.tokens"), TokenFile)


def test_what_names_no_files(folder: Path) -> None:
    with pytest.raises(InputOutputError, match=r"^data.tokens = no\*: no file matches this pattern$"):
        token_paths(["no*"], "data.tokens")
    with pytest.raises(
        HpctrainError, match=r"^data.tokens: ./a.h5 is given twice \(also as a.h5\); give each file once"
    ):
        token_paths(["a.h5", "./a.h5"], "data.tokens")
    with pytest.raises(InputOutputError, match=r"no file matches this pattern\n.* is given twice"):
        token_paths(["no*", "a.h5", "a.h5"], "data.tokens")
    with pytest.raises(InputOutputError) as caught:
        open_tokens(["a.h5", "x.h5", "y.h5"], "data.tokens")
    assert [problem.split(" (")[0] for problem in caught.value.problems] == [
        "data.tokens = x.h5: no such file",
        "data.tokens = y.h5: no such file",
    ]


def test_files_of_other_tokenizers_are_refused(world: World, folder: Path) -> None:
    Path("long.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    prepare(world.single_rank_world(), Path("bpe.h5"), ["long.txt"], train_bpe=270)
    with pytest.raises(
        HpctrainError, match=r"its tokenizer is not that of data.tokens = a.h5: BPE"
    ) as caught:
        open_tokens(["a.h5", "b.h5", "bpe.h5"], "data.tokens")
    assert len(caught.value.problems) == 1 and caught.value.exit_code == 2
    entries = '[{tokens="a.h5", weight=1}, {tokens="bpe.h5", weight=1}]'
    deck = parse_deck(SMALL, ["data.tokens=", f"data.mixture={entries}"])
    with pytest.raises(
        HpctrainError, match=r'entry "bpe": tokens = bpe.h5: its tokenizer is not that of .* "a"'
    ):
        open_entries(deck)


def test_a_missing_file_is_told_with_the_line_that_names_it(folder: Path) -> None:
    mixture = '[[data.mixture]]\ntokens = "a.h5"\nweight = 1\n[[data.mixture]]\ntokens = "no.h5"\nweight = 1'
    for names, key in (('tokens = "no.h5"', "data.tokens"), (mixture, 'data.mixture, entry "no": tokens')):
        text = SMALL.replace('tokens = "tokens.h5"', names)
        line = 1 + SMALL.splitlines().index('tokens = "tokens.h5"')
        with pytest.raises(InputOutputError, match=rf"^deck.toml:{line}: {key} = no.h5: no such file"):
            open_entries(parse_deck(text))


def test_a_file_in_two_entries_is_refused(folder: Path) -> None:
    entries = '[{tokens="*.h5", weight=1, name="all"}, {tokens="./b.h5", weight=1}]'
    deck = parse_deck(SMALL, ["data.tokens=", f"data.mixture={entries}"])
    with pytest.raises(HpctrainError) as caught:
        open_entries(deck)
    (sentence,) = caught.value.problems
    assert sentence.startswith('data.mixture: b.h5: entries "all" and "b" both contain it')
    apart = entries.replace("*.h5", "[ac].h5")
    assert vocabulary_of(parse_deck(SMALL, ["data.tokens=", f"data.mixture={apart}"])) == 257
