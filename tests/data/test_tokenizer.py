"""Tokenizers against what bytes are, and against the `tokenizers` library called by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from hpctrain.data.tokenizer import END_OF_TEXT, Tokenizer
from hpctrain.errors import HpctrainError, InputOutputError

TEXTS = ["the cat sat on the mat\n", "the dog sat on the log\n", "héllo wörld\n"] * 20


def word_level(vocabulary: dict[str, int], special: list[str]) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens(special)
    return library


def test_bytes() -> None:
    tokenizer = Tokenizer("bytes")
    assert (tokenizer.vocabulary, tokenizer.end_of_document, tokenizer.text) == (257, 256, "bytes")
    assert tokenizer.encode("aé\n") == [97, 0xC3, 0xA9, 10]
    assert tokenizer.decode([97, 0xC3, 0xA9, 256, 10, 300]) == "aé\n"
    assert tokenizer.decode([97, 0xC3]) == "a\ufffd"
    assert tokenizer.decode([97, 0xC3], errors="ignore") == "a"
    assert tokenizer.encode("") == []
    assert tokenizer.encode("\ud800") == [ord("?")]


def test_trained_bpe() -> None:
    tokenizer = Tokenizer.train(TEXTS, 300)
    assert 257 < tokenizer.vocabulary <= 300
    library = tokenizers.Tokenizer.from_str(tokenizer.text)
    assert tokenizer.end_of_document == library.token_to_id(END_OF_TEXT)
    assert tokenizer.encode("the cat sat") == library.encode("the cat sat").ids
    assert len(tokenizer.encode("the cat sat")) < 8
    for text in [*TEXTS[:3], "never seen: 漢字 \x00\n"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert Tokenizer.train(TEXTS, 300).text == tokenizer.text


def test_a_special_token_spelled_in_text_is_text() -> None:
    tokenizer = Tokenizer.train(TEXTS, 300)
    ids = tokenizer.encode(f"the {END_OF_TEXT} cat")
    assert tokenizer.end_of_document not in ids
    assert tokenizer.decode(ids) == f"the {END_OF_TEXT} cat"
    assert tokenizer.decode([*tokenizer.encode("the"), tokenizer.end_of_document, 10**6]) == "the"


def test_json_from_elsewhere(tmp_path: Path) -> None:
    library = word_level({"?": 0, "a": 1, "b": 7}, ["<s>", "<|endoftext|>"])
    library.enable_truncation(2)
    library.enable_padding(length=5)
    library.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 3)])
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    tokenizer = Tokenizer.from_argument(str(path))
    assert tokenizer.encode("a b a a") == [1, 7, 1, 1]  # not cut, filled or begun
    assert tokenizer.vocabulary == 1 + max(library.get_vocab().values())
    assert tokenizer.end_of_document == library.token_to_id("<|endoftext|>")


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for text, sentence in [
        ("hello", "it is not JSON"),
        ('{"a": 1}', "no `model`"),
        ('{"model": {"type": "none such"}}', "can read"),
        (word_level({"?": 0, "a": 1}, []).to_str(), "so the token that ends a document is unknown"),
    ]:
        path.write_text(text)
        with pytest.raises(HpctrainError, match=sentence) as caught:
            Tokenizer.from_argument(str(path))
        assert str(path) in str(caught.value)
        assert caught.value.exit_code == 2
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(HpctrainError, match="it is not JSON"):
        Tokenizer.from_argument(str(path))
    with pytest.raises(InputOutputError, match=r"no such file; give .* or the Hugging Face folder"):
        Tokenizer.from_argument(str(tmp_path / "none.json"))
    with pytest.raises(HpctrainError, match="at least 257"):
        Tokenizer.train(TEXTS, 256)


def test_json_is_kept_as_it_is() -> None:
    text = Tokenizer.train(TEXTS, 280).text
    assert Tokenizer(text).text == text
    assert json.loads(text)["model"]["type"] == "BPE"
