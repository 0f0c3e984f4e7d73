"""Tokenizers that give the same ids, however they are written, and those that do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpctrain.data.tokenizer import Tokenizer, bytes_json
from hpctrain.data.tokenizer_difference import tokenizer_difference
from hpctrain.errors import HpctrainError

TEXT = ["the quick brown fox jumps over the lazy dog", "the other dog thought about the fox"] * 3
BPE = Tokenizer.train(TEXT, 275).text


def changed(**keys: Any) -> str:
    """The tokenizer with other values; `model__name` for those within its model."""
    content = json.loads(BPE)
    for key, value in keys.items():
        section, _, name = key.rpartition("__")
        (content[section] if section else content)[name] = value
    return json.dumps(content)


def test_what_makes_no_other_ids_is_no_difference() -> None:
    content = json.loads(BPE)
    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
    for same in (
        BPE,
        json.dumps(content, indent=7, sort_keys=True),
        changed(model__merges=merges),
        changed(model__vocab=dict(reversed(content["model"]["vocab"].items()))),
        changed(truncation={"max_length": 5, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}),
        changed(decoder=None),
        changed(post_processor={**content["pre_tokenizer"], "trim_offsets": False}),
        changed(pre_tokenizer={**content["pre_tokenizer"], "trim_offsets": False}),
    ):
        assert tokenizer_difference(BPE, same) == tokenizer_difference(same, BPE) == ""
    assert tokenizer_difference("bytes", bytes_json()) == tokenizer_difference(bytes_json(), "bytes") == ""


def test_what_makes_other_ids_is_told() -> None:
    content = json.loads(BPE)
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    swapped = dict(vocabulary)
    first, second = list(vocabulary)[100:102]
    swapped[first], swapped[second] = vocabulary[second], vocabulary[first]
    extra = {**content["added_tokens"][0], "id": 275, "content": "<pad>"}
    plain = {**extra, "special": False}
    for other, words in {
        changed(model__vocab=swapped): "2 of the 275 common ids stand for different tokens, the first is",
        changed(model__merges=merges[::-1]): "the order of merges differs",
        changed(model__byte_fallback=True): "byte_fallback is false instead of true",
        changed(normalizer={"type": "NFC"}): "the normalizer differs",
        changed(
            pre_tokenizer={**content["pre_tokenizer"], "add_prefix_space": True}
        ): "the pre_tokenizer differs",
        changed(
            added_tokens=[*content["added_tokens"], extra]
        ): '1 ids are missing, the first is 275 ("<pad>")',
        changed(
            added_tokens=[*content["added_tokens"], plain]
        ): "the added tokens that text is searched for differ",
    }.items():
        found = tokenizer_difference(BPE, other)
        assert words in found, found
        assert tokenizer_difference(other, BPE), words
    assert tokenizer_difference("bytes", BPE).startswith(
        "bytes of 257 tokens instead of BPE of 275 tokens: 257 of the 257 common ids stand for "
        'different tokens, the first is 0 ("\\u0100" instead of "<|endoftext|>"); 18 ids are missing, '
    )


def test_scores_of_a_unigram_model_count() -> None:
    def unigram(score: float) -> str:
        vocabulary = [["<unk>", 0.0], ["</s>", 0.0], ["a", -1.0], ["b", score]]
        return json.dumps(
            {
                **json.loads(BPE),
                "added_tokens": [],
                "model": {"type": "Unigram", "unk_id": 0, "vocab": vocabulary},
            }
        )

    assert tokenizer_difference(unigram(-2.0), unigram(-2.0) + " ") == ""
    assert tokenizer_difference(unigram(-2.0), unigram(-2.5)).endswith("the scores of tokens differ")


def test_what_is_no_tokenizer_is_named() -> None:
    with pytest.raises(HpctrainError, match="there: is not a `tokenizers` JSON"):
        tokenizer_difference(BPE, "{}", "here", "there")
    with pytest.raises(HpctrainError, match="here: is not a `tokenizers` JSON"):
        tokenizer_difference("{}", BPE, "here", "there")
