"""Tests of control tokens, of the token that ends a document, and of random or lossy tokenizers.

Modules: data/control_tokens.py, data/tokenizer_settings.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from hpctrain.checkpoint.exchange.tokenizer_files import tokenizer_files
from hpctrain.comm.world import World
from hpctrain.data.chat_rows import Conversation
from hpctrain.data.chat_template import BUILT_IN, ChatTemplate
from hpctrain.data.chat_tokens import ChatTokenizer
from hpctrain.data.text_bytes import token_bytes
from hpctrain.data.tokenizer import Tokenizer, load_library
from hpctrain.data.tokenizer_argument import read_tokenizer, tokenizer_warnings
from hpctrain.data.tokenizer_difference import tokenizer_difference
from hpctrain.data.tokenizer_settings import TokenizerSettings
from hpctrain.data.tokens import TokenFile
from hpctrain.errors import HpctrainError
from tests.data.chats import bpe, talk
from tests.data.preparing import prepare

LETTERS = "\u2581abcdefghijklmnopqrstuvwxyz<>/"
SPECIAL = ["<unk>", "<s>", "</s>"]


def with_special(library: tokenizers.Tokenizer, *names: str) -> str:
    library.add_special_tokens([AddedToken(name, special=True) for name in names])
    text: str = library.to_str()
    return text


def unigram() -> str:
    pieces = [*((name, 0.0) for name in SPECIAL), *((letter, -5.0) for letter in LETTERS), ("on", -6.0)]
    library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    return with_special(library, *SPECIAL)


def word_level() -> str:
    words = {word: number for number, word in enumerate([*SPECIAL, "say", "no", "now", "one", "two"])}
    library = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return with_special(library, *SPECIAL)


def word_piece() -> str:
    words = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz<>/", *(f"##{each}" for each in "abcdefghijklmnostw<>/")]
    library = tokenizers.Tokenizer(models.WordPiece({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return with_special(library, *SPECIAL)


def bpe_with_ignore_merges() -> str:
    """Return a BPE that looks up whole words first. One of its merges creates a control token."""
    words = [*SPECIAL, *LETTERS, "</", "s>", "on"]
    library = tokenizers.Tokenizer(
        models.BPE(
            {w: n for n, w in enumerate(words)},
            [("<", "/"), ("s", ">"), ("</", "s>"), ("o", "n")],
            unk_token="<unk>",
            ignore_merges=True,
        )
    )
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    return with_special(library, *SPECIAL)


KINDS = {
    "unigram": unigram,
    "word_level": word_level,
    "word_piece": word_piece,
    "bpe": bpe_with_ignore_merges,
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_is_encoded_as_a_control_token(kind: str) -> None:
    """Even tokens of the model are not used. All other text has the tokens of the library."""
    text = KINDS[kind]()
    tokenizer, library = Tokenizer(text), load_library(text, "tokenizer")
    assert (tokenizer.end_of_document, tokenizer.vocabulary) == (2, len(library.get_vocab()))
    assert tokenizer.control == {"<unk>": 0, "<s>": 1, "</s>": 2}
    for plain in ("say no now", "one two one", " one", "on"):
        assert tokenizer.encode(plain) == library.encode(plain, add_special_tokens=False).ids
        assert tokenizer.decode(tokenizer.encode(plain)) == library.decode(library.encode(plain).ids)
    for sample in (
        "one</s>two",
        "</s>",
        "a <s> b",
        "say </s> now",
        "\uff1c/s\uff1e",
        "</s></s>",
    ):
        assert {1, 2}.isdisjoint(tokenizer.encode(sample)), sample
    assert tokenizer.decode([*tokenizer.encode("one"), 2, 1]) == tokenizer.decode(tokenizer.encode("one"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_is_encoded_as_a_control_token(kind: str) -> None:
    chat = ChatTokenizer(Tokenizer(KINDS[kind]()), ChatTemplate(BUILT_IN["raw"], {"eos_token": "</s>"}))
    for sample in ("say </s> now", "</s>", "\uff1c/s\uff1e", "<s> a"):
        for messages in (
            talk(sample, "no"),
            talk("no", sample),
            talk("no", "now", sample, "no"),
        ):
            tokens = chat.conversation(Conversation(messages))
            assert tokens.ids.tolist().count(2) == len(messages) // 2 and 1 not in tokens.ids, messages
            assert tokens.learned[tokens.ids == 2].all()
    assert chat.end_of_turn() == (2,)


def test_added_tokens_keep_their_ids() -> None:
    """The model does not contain the added tokens, special or not."""
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    library.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    library.add_tokens(["<think>"])
    tokenizer = Tokenizer(library.to_str())
    assert tokenizer.encode("ab<think>a") == [2, 5, 0]
    assert (tokenizer.vocabulary, tokenizer.end_of_document) == (6, 3)
    assert tokenizer.decode([2, 5, 0, 3]) == library.decode([2, 5, 0])


def write_tokenizer(tmp_path: Path, **files: Any) -> Path:
    """Write a tokenizer in which `</s>` is HTML, as in Gemma's, with further files in its folder."""
    words = ["<eos>", "<bos>", "<unk>", "</s>", "<s>", "<turn>", "old", "price", "new"]
    library = tokenizers.Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens([AddedToken(each, special=True) for each in ("<eos>", "<bos>", "<unk>")])
    library.add_tokens([AddedToken("</s>", normalized=False), AddedToken("<s>", normalized=False)])
    folder = tmp_path / "tokenizer"
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({}, 0),  # the only special token with a known name
        ({"tokenizer_config": {"eos_token": "<eos>"}}, 0),
        ({"tokenizer_config": {"eos_token": {"content": "<turn>"}}}, 5),
        ({"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "<bos>"}}, 1),
        ({"special_tokens_map": {"eos_token": {"content": "<bos>"}}}, 1),
        ({"tokenizer_config": {"eos_token": "<turn>"}, "special_tokens_map": {"eos_token": "<bos>"}}, 5),
        ({"generation_config": {"eos_token_id": [1, 0]}}, 1),
        ({"config": {"eos_token_id": 1}}, 1),
        ({"generation_config": {"eos_token_id": 1}, "config": {"eos_token_id": 0}}, 1),
        (
            {"config": {"eos_token_id": 7}},
            0,
        ),  # a word, from a default of the library
        ({"config": {"eos_token_id": 50256}}, 0),
    ],
)
def test_end_of_document_in_the_files(tmp_path: Path, files: dict[str, Any], end: int) -> None:
    folder = write_tokenizer(tmp_path, **files)
    for argument in (folder, folder / "tokenizer.json"):
        tokenizer = read_tokenizer(str(argument))
        assert tokenizer.end_of_document == end and end in tokenizer.ends
        assert tokenizer.encode("old <s>price</s> new") == [6, 4, 7, 3, 8]
        name = tokenizer.end_name
        assert end not in tokenizer.encode(f"old {name} {name}")
    assert read_tokenizer(str(folder), "</s>").end_of_document == 3
    assert 3 not in read_tokenizer(str(folder), "</s>").encode("old <s>price</s> new")


def test_unknown_end_of_document_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, tokenizer_config={"eos_token": "<none>"})
    for argument, named, message in [
        (folder, None, 'tokenizer_config.json: eos_token = "<none>" is not in the vocabulary'),
        (folder, "<other>", "--end-of-document '<other>' is not in the vocabulary"),
        ("bytes", "</s>", "--end-of-document </s>: requires --tokenizer FILE.json"),
    ]:
        with pytest.raises(HpctrainError, match=r"is not in the vocabulary|leave it out") as caught:
            read_tokenizer(str(argument), named)
        assert message in str(caught.value) and caught.value.exit_code == 2
    path = tmp_path / "several.json"
    library = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    library.save(str(path))
    with pytest.raises(
        HpctrainError, match=r"so the token that ends a document is unknown.*--end-of-document"
    ):
        read_tokenizer(str(path))
    library.add_special_tokens(["</s>", "<|endoftext|>"])
    library.save(str(path))
    with pytest.raises(HpctrainError, match=r"several special tokens .*\(<\|endoftext\|>, </s>\)"):
        read_tokenizer(str(path))
    assert read_tokenizer(str(path), "</s>").end_of_document == 1


def test_dropout_truncation_and_padding_are_disabled(tmp_path: Path) -> None:
    text = Tokenizer.train(["the quick brown fox jumps over the lazy dog"] * 9, 290).text
    library = tokenizers.Tokenizer.from_str(text)
    library.model.dropout = 0.5
    library.enable_truncation(3)
    library.enable_padding(length=90)
    path = tmp_path / "dropout.json"
    library.save(str(path))
    plain, tokenizer = Tokenizer(text), read_tokenizer(str(path))
    sample = "the quick brown fox jumps"
    expected = plain.encode(sample)
    for each in (tokenizer, Tokenizer(path.read_text())):  # as in a token file of an earlier version
        assert all(each.encode(sample) == expected for _ in range(20))
    chat = ChatTokenizer(Tokenizer(path.read_text()), ChatTemplate(BUILT_IN["raw"]))
    made = [chat.prompt(Conversation(talk(sample))).ids.tolist() for _ in range(20)]
    assert made == [expected] * 20
    assert tokenizer_difference(tokenizer.text, path.read_text()) == ""
    [warning] = tokenizer_warnings(tokenizer, str(path))
    assert "ignored model.dropout = 0.5, truncation, padding" in warning
    assert json.loads(tokenizer.text)["model"]["dropout"] is None


def test_text_outside_the_vocabulary_is_refused() -> None:
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    library.add_special_tokens(["</s>"])
    library.add_tokens(["<think>"])
    assert library.encode("xab").ids == [2]  # the library drops the x
    tokenizer = Tokenizer(library.to_str())
    assert tokenizer.encode("ab<think>ba") == [2, 4, 1, 0]
    with pytest.raises(HpctrainError, match=r"'x' \(U\+0078\) is not in the vocabulary, and without model"):
        tokenizer.encode("abxab")
    chat = ChatTokenizer(tokenizer, ChatTemplate(BUILT_IN["raw"], {"eos_token": "</s>"}))
    assert chat.conversation(Conversation(talk("b", "a"))).ids.tolist() == [1, 0, 3]
    with pytest.raises(HpctrainError, match=r"'x' \(U\+0078\) is not in the vocabulary"):
        chat.conversation(Conversation(talk("ax", "b")))
    for model in (
        models.WordLevel({"a": 0, "</s>": 1}, unk_token="<unk>"),
        models.Unigram([("a", -1.0), ("</s>", 0.0)]),
    ):
        with pytest.raises(HpctrainError, match=r"cannot encode a text: .*[Mm]issing"):
            Tokenizer(with_special(tokenizers.Tokenizer(model), "</s>")).encode("zz")


def test_error_names_the_file_that_cannot_be_encoded(world: World, tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "few.json"))
    for name, text in (("good", "abba"), ("bad", "abxab"), ("other", "ab y")):
        (tmp_path / f"{name}.txt").write_text(text)
    with pytest.raises(HpctrainError) as caught:
        prepare(
            world.single_rank_world(),
            tmp_path / "o.h5",
            [str(tmp_path)],
            tokenizer=str(tmp_path / "few.json"),
        )
    bad, other = caught.value.problems
    assert bad.startswith(f"{tmp_path / 'bad.txt'}: tokenizer = ") and "'x' (U+0078)" in bad
    assert other.startswith(f"{tmp_path / 'other.txt'}: ") and "' ' (U+0020)" in other
    assert not (tmp_path / "o.h5").exists()


def test_lossy_rules_and_unknown_words_give_warnings(world: World, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (tmp_path / "a.txt").write_text("old cheap new")
    warnings: list[str] = []
    prepare(
        world.single_rank_world(),
        tmp_path / "a.h5",
        [str(tmp_path / "a.txt")],
        tokenizer=str(folder),
        say=warnings.append,
    )
    where = f"tokenizer = {folder}: does not preserve all of the text: pre_tokenizer Whitespace"
    lost = "1 of 4 tokens replace text outside the vocabulary, which is lost"
    assert warnings == [where, lost]


def test_every_token_of_a_list_ends_text(tmp_path: Path) -> None:
    config = {"eos_token": ["<turn>", {"content": "</s>"}]}
    tokenizer = read_tokenizer(str(write_tokenizer(tmp_path, tokenizer_config=config)))
    assert tokenizer.end_of_document == 5 and tokenizer.ends == {5, 3}
    assert not {3, 5} & {*tokenizer.encode("old </s> <turn>")}
    assert read_tokenizer(str(tmp_path / "tokenizer"), "<eos>").ends == {0, 3, 5}
    assert tokenizer.settings.special_tokens["eos_token"] == "<turn>"
    exported = tokenizer_files(tokenizer, 16, None)
    assert exported["tokenizer_config.json"]["eos_token"] == "<turn>"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"eos_token": 5}, "tokenizer_config.json: eos_token = 5: must be a token or a list of tokens"),
        ({"eos_token": []}, "tokenizer_config.json: eos_token = []: must be a token or a list"),
        ({"eos_token": ["<eos>", 5]}, 'eos_token = ["<eos>", 5]: must be a token or a list'),
        ({"eos_token": ["<eos>", "<none>"]}, "'<none>' is not in the vocabulary"),
    ],
)
def test_a_wrong_eos_token_is_refused(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    folder = write_tokenizer(tmp_path, tokenizer_config=config)
    with pytest.raises(HpctrainError, match=re.escape(problem)) as caught:
        read_tokenizer(str(folder))
    assert "name another one with --end-of-document TOKEN" in str(caught.value)
    assert read_tokenizer(str(folder), "<eos>").end_of_document == 0


@pytest.mark.parametrize(
    ("name", "content", "warning"),
    [
        (
            "config",
            {"eos_token_id": 50256},
            "eos_token_id = 50256: token 50256 is not in the tokenizer, so it is",
        ),
        (
            "config",
            {"eos_token_id": "2"},
            'eos_token_id = "2" is ignored, since it must be a token id or a li',
        ),
        ("config", {"bos_token_id": [1]}, "bos_token_id = [1] is ignored, since it must be a token id"),
        ("config", {"bos_token_id": -1}, "bos_token_id = -1 is ignored, since it must be a token id"),
        ("config", {"bos_token_id": 2}, "bos_token_id = 2 is '<unk>', but bos_token is '<bos>': chat templ"),
        ("generation_config", {"eos_token_id": [0, 7]}, "token 7 is 'price', not a special token"),
        (
            "generation_config",
            {"eos_token_id": 1},
            "eos_token_id = 1 is '<bos>', but eos_token is '<eos>': generated t",
        ),
        ("tokenizer_config", {"eos_token": "<eos>", "bos_token": 3}, "bos_token = 3 is ignored, since it mu"),
    ],
)
def test_wrong_special_tokens_are_reported(
    tmp_path: Path, name: str, content: dict[str, Any], warning: str
) -> None:
    files = {"tokenizer_config": {"eos_token": "<eos>", "bos_token": "<bos>"}, name: content}
    folder = write_tokenizer(tmp_path, **files)
    lines = tokenizer_warnings(read_tokenizer(str(folder)), "t")
    assert len(lines) == 2 and "does not preserve" in lines[1]
    assert lines[0].startswith(f"tokenizer = t: {name}.json: ") and warning in lines[0]


@pytest.mark.parametrize("value", [0, [0], [0, 1], [1, 0], None])
def test_right_special_tokens_are_not_reported(tmp_path: Path, value: object) -> None:
    tokens = {"eos_token": "<eos>", "bos_token": None}
    config = {"eos_token_id": value, "bos_token_id": 1}
    folder = write_tokenizer(tmp_path, tokenizer_config=tokens, config=config)
    assert len(tokenizer_warnings(read_tokenizer(str(folder)), "t")) == 1


def test_a_wrong_id_is_named_where_nothing_else_ends_a_document(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, config={"eos_token_id": 50256})
    text = (folder / "tokenizer.json").read_text().replace("<eos>", "<end>")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(HpctrainError, match=r"config.json: eos_token_id = 50256: token 50256 is not in the"):
        read_tokenizer(str(folder))


def test_control_tokens_have_no_bytes() -> None:
    settings = TokenizerSettings({"tokenizer_config.json": {"pad_token": "a"}}, end_of_document=256)
    text = Tokenizer.train(["aaaa"], 257).text
    sizes = token_bytes(Tokenizer(text, settings=TokenizerSettings(settings.files, None, 0)))
    assert sizes is not None
    assert sizes[Tokenizer(text).encode("b")[0]] == 1 and sizes[load_library(text, "t").token_to_id("a")] == 0


def test_token_file_stores_settings_and_serves_as_tokenizer(world: World, tmp_path: Path) -> None:
    """`--tokenizer corpus.h5` encodes as for this file, and uses its chat template."""
    alone = world.single_rank_world()
    folder = bpe(tmp_path / "t", BUILT_IN["chatml"], {"bos_token": "<|im_start|>", "model_max_length": 9})
    (tmp_path / "a.txt").write_text("two and two <|im_end|>")
    prepare(alone, tmp_path / "a.h5", [str(tmp_path / "a.txt")], tokenizer=str(folder))
    first = TokenFile(tmp_path / "a.h5")
    assert first.end_of_document == 2 and first.tokenizer.ends == {2}
    assert first.tokenizer_settings.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert "model_max_length" not in first.tokenizer_settings.file("tokenizer_config.json")
    named = str(tmp_path / "a.h5")
    prepare(alone, tmp_path / "b.h5", [str(tmp_path / "a.txt")], tokenizer=named)
    again = TokenFile(tmp_path / "b.h5")
    assert again.tokenizer_settings == first.tokenizer_settings
    assert (again.read(0, again.tokens) == first.read(0, first.tokens)).all()
    other = read_tokenizer(named, "<|endoftext|>")
    assert (other.end_of_document, other.text) == (0, first.tokenizer_text)
    with pytest.raises(HpctrainError, match="--end-of-document 'two' is not in the vocabulary"):
        read_tokenizer(named, "two")
    template = ChatTemplate.of(None, named, "", first.tokenizer_settings)
    assert template.text == BUILT_IN["chatml"] and template.tokens["bos_token"] == "<|im_start|>"


def test_token_file_without_settings(world: World, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("two and two")
    folder = bpe(tmp_path / "t")
    prepare(
        world.single_rank_world(), tmp_path / "a.h5", [str(tmp_path / "a.txt")], tokenizer=str(folder),
        end_of_document="<|im_start|>",
    )  # fmt: skip
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        del file["tokenizer_settings"]
    old = TokenFile(tmp_path / "a.h5")
    assert old.tokenizer.end_of_document == 1 and old.tokenizer.ends == {1}
    assert old.read(0, old.tokens)[-1] == 1
    assert Tokenizer(old.tokenizer_text).end_of_document == 0  # as a checkpoint of that time means it


def test_trained_tokenizer_is_written_next_to_the_tokens(world: World, tmp_path: Path) -> None:
    alone, out = world.single_rank_world(), tmp_path / "a.h5"
    for name, text in (("a", "to be or not to be\n"), ("b", "quite another text\n")):
        (tmp_path / f"{name}.txt").write_text(text * 9)
    prepare(alone, out, [str(tmp_path / "a.txt")], train_bpe=270)
    written = (tmp_path / "tokenizer.json").read_text()
    assert written == TokenFile(out).tokenizer_text
    prepare(alone, tmp_path / "b.h5", [str(tmp_path / "b.txt")], tokenizer=str(tmp_path / "tokenizer.json"))
    assert TokenFile(tmp_path / "b.h5").tokenizer_text == written
    prepare(alone, out, [str(tmp_path / "a.txt")], train_bpe=270, replace=True)
    with pytest.raises(
        HpctrainError, match=r"tokenizer.json: contains another tokenizer, and --train-bpe .*--force"
    ):
        prepare(alone, tmp_path / "c.h5", [str(tmp_path / "b.txt")], train_bpe=270)
    assert not (tmp_path / "c.h5").exists() and (tmp_path / "tokenizer.json").read_text() == written
    with pytest.raises(HpctrainError, match=r"--end-of-document x: requires --tokenizer FILE.json"):
        prepare(alone, tmp_path / "c.h5", [str(tmp_path / "b.txt")], end_of_document="x")


def test_renamed_control_tokens_change_no_token_of_large_texts() -> None:
    text = Tokenizer.train(["the quick brown fox jumps over the lazy dog"] * 9, 300).text
    library = load_library(text, "t")
    sample = "the fox <|endoftext|> jumps\n\n é \u65e5 " * 50
    library.encode_special_tokens = True
    assert np.array_equal(Tokenizer(text).encode(sample), library.encode(sample).ids)
