"""Comparison of two tokenizers: whether they encode every text to the same ids, and how they differ.

The comparison covers all that affects ids: vocabulary, merges, settings of the model, normalizer,
pre-tokenizer, and the added tokens that text is searched for. It does not cover the decoder, special tokens
around a text (which are never added), and the format of the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.data.tokenizer import BYTES, bytes_json, load_library

MAX_SHOWN_CHARACTERS = 24
"""Largest number of characters of a token in a message."""


@dataclass(frozen=True)
class Rules:
    """Parts of a tokenizer that determine ids.

    Attributes:
        name: Name in messages, such as "BPE of 512 tokens".
        vocabulary: Tokens by id.
        model: Settings of the model without the vocabulary, such as merges.
        normalizer: Normalizer, as in the JSON.
        pre_tokenizer: Pre-tokenizer, as in the JSON.
        added_tokens: Added tokens that text is searched for, by their text.
    """

    name: str
    vocabulary: Mapping[int, str]
    model: Mapping[str, Any]
    normalizer: Any
    pre_tokenizer: Any
    added_tokens: Mapping[str, Any]

    @classmethod
    def of(cls, text: str, where: str) -> Rules:
        """Return the rules of "bytes" or of a tokenizer's JSON.

        Raises:
            HpctrainError: The text is neither. The message begins with `where`.
        """
        content = bytes_json()
        library = load_library(content if text == BYTES else text, where)
        rules = json.loads(library.to_str())
        vocabulary = {number: token for token, number in library.get_vocab(with_added_tokens=True).items()}
        # Keep a vocabulary that is a list, as in a unigram model, since it has scores.
        model = {k: v for k, v in rules["model"].items() if k != "vocab" or isinstance(v, list)}
        model.pop("dropout", None)  # which `disable_randomness` removes
        is_bytes = text == BYTES or rules["model"] == json.loads(content)["model"]
        kind = "bytes" if is_bytes else model.get("type", "a tokenizer")
        return cls(
            f"{kind} of {len(vocabulary)} tokens",
            vocabulary,
            model,
            rules["normalizer"],
            _without_offsets(rules["pre_tokenizer"]),
            # Special tokens are not searched for: their names in text stay text.
            {each["content"]: each for each in rules["added_tokens"] if not each["special"]},
        )


def tokenizer_difference(text: str, other: str, where: str = "tokenizer", there: str = "tokenizer") -> str:
    """Return how a tokenizer differs from another one, as `... instead of ...: ...`; "" if it does not.

    Args:
        text: "bytes" or the JSON of the tokenizer.
        other: "bytes" or the JSON of the other one.
        where: Beginning of error messages about the tokenizer.
        there: Beginning of error messages about the other one.

    Raises:
        HpctrainError: One of them cannot be read.
    """
    if text == other:
        return ""
    actual, expected = Rules.of(text, where), Rules.of(other, there)
    differences = "; ".join(_differences(actual, expected))
    return f"{actual.name} instead of {expected.name}: {differences}" if differences else ""


def _differences(actual: Rules, expected: Rules) -> Iterator[str]:
    both = actual.vocabulary.keys() & expected.vocabulary.keys()
    changed = sorted(each for each in both if actual.vocabulary[each] != expected.vocabulary[each])
    if changed:
        first = changed[0]
        yield (
            f"{len(changed)} of the {len(both)} common ids stand for different tokens, the first is "
            f"{first} ({_quoted(actual.vocabulary[first])} instead of {_quoted(expected.vocabulary[first])})"
        )
    for ids, words in (
        (actual.vocabulary.keys() - both, "are additional"),
        (expected.vocabulary.keys() - both, "are missing"),
    ):
        if ids:
            token = (actual.vocabulary if min(ids) in actual.vocabulary else expected.vocabulary)[min(ids)]
            yield f"{len(ids)} ids {words}, the first is {min(ids)} ({_quoted(token)})"
    if not changed and actual.model.get("merges") != expected.model.get("merges"):
        yield "the order of merges differs"
    keys = [key for key in {**actual.model, **expected.model} if key not in {"merges", "vocab"}]
    for key in keys:
        if actual.model.get(key) != expected.model.get(key):
            yield f"{key} is {_quoted(actual.model.get(key))} instead of {_quoted(expected.model.get(key))}"
    if not changed and actual.model.get("vocab") != expected.model.get("vocab"):
        yield "the scores of tokens differ"
    for name in ("normalizer", "pre_tokenizer"):
        if getattr(actual, name) != getattr(expected, name):
            yield f"the {name} differs"
    if actual.added_tokens != expected.added_tokens:
        yield "the added tokens that text is searched for differ"


def _without_offsets(rule: Any) -> Any:
    """Return a rule without its settings of offsets, which do not affect ids."""
    if isinstance(rule, dict):
        return {key: _without_offsets(value) for key, value in rule.items() if key != "trim_offsets"}
    return [_without_offsets(each) for each in rule] if isinstance(rule, list) else rule


def _quoted(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."
