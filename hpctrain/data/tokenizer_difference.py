"""Whether two tokenizers give the same ids to the same text, and in words, in what they differ.

Compared is what decides on ids: vocabulary, merges, settings of the model, normalizer, pre-tokenizer and
which added tokens are looked for in text. What only makes text of ids again, what frames a text with
special tokens (we never do), and how the JSON is written, is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.data.tokenizer import BYTES, bytes_json, load_library

TOKEN_LENGTH = 24  # of a token that is shown, at most


@dataclass(frozen=True)
class Rules:
    """What a tokenizer makes ids by: `vocabulary` is tokens by id, `model` the rest of its model."""

    name: str
    vocabulary: Mapping[int, str]
    model: Mapping[str, Any]
    normalizer: Any
    pre_tokenizer: Any
    looked_for: Mapping[str, Any]

    @classmethod
    def of(cls, text: str, where: str) -> Rules:
        """Of "bytes" or a tokenizer's JSON; HpctrainError, beginning with `where`, where it is none."""
        content = bytes_json()
        library = load_library(content if text == BYTES else text, where)
        rules = json.loads(library.to_str())
        vocabulary = {number: token for token, number in library.get_vocab(with_added_tokens=True).items()}
        # Tokens with scores, as in a unigram model, are a list; else ids say all of a vocabulary.
        model = {k: v for k, v in rules["model"].items() if k != "vocab" or isinstance(v, list)}
        model.pop("dropout", None)  # which is turned off wherever tokens are made
        plain = text == BYTES or rules["model"] == json.loads(content)["model"]
        kind = "bytes" if plain else model.get("type", "a tokenizer")
        return cls(
            f"{kind} of {len(vocabulary)} tokens",
            vocabulary,
            model,
            rules["normalizer"],
            _without_offsets(rules["pre_tokenizer"]),
            # Text that spells a special token is text to us.
            {each["content"]: each for each in rules["added_tokens"] if not each["special"]},
        )


def tokenizer_difference(text: str, other: str, where: str = "tokenizer", there: str = "tokenizer") -> str:
    """In words, how a tokenizer differs from another one, as `... instead of ...: ...`; "" where it does not.

    HpctrainError where one cannot be read, which the sentence calls `where` or `there`.
    """
    if text == other:
        return ""
    mine, theirs = Rules.of(text, where), Rules.of(other, there)
    differences = "; ".join(_differences(mine, theirs))
    return f"{mine.name} instead of {theirs.name}: {differences}" if differences else ""


def _differences(mine: Rules, theirs: Rules) -> Iterator[str]:
    both = mine.vocabulary.keys() & theirs.vocabulary.keys()
    apart = sorted(each for each in both if mine.vocabulary[each] != theirs.vocabulary[each])
    if apart:
        first = apart[0]
        yield (
            f"{len(apart)} of the {len(both)} common ids stand for different tokens, the first is "
            f"{first} ({_shown(mine.vocabulary[first])} instead of {_shown(theirs.vocabulary[first])})"
        )
    for ids, words in (
        (mine.vocabulary.keys() - both, "are additional"),
        (theirs.vocabulary.keys() - both, "are missing"),
    ):
        if ids:
            token = (mine.vocabulary if min(ids) in mine.vocabulary else theirs.vocabulary)[min(ids)]
            yield f"{len(ids)} ids {words}, the first is {min(ids)} ({_shown(token)})"
    if not apart and mine.model.get("merges") != theirs.model.get("merges"):
        yield "the order of merges differs"
    keys = [key for key in {**mine.model, **theirs.model} if key not in {"merges", "vocab"}]
    for key in keys:
        if mine.model.get(key) != theirs.model.get(key):
            yield f"{key} is {_shown(mine.model.get(key))} instead of {_shown(theirs.model.get(key))}"
    if not apart and mine.model.get("vocab") != theirs.model.get("vocab"):
        yield "the scores of tokens differ"
    for name in ("normalizer", "pre_tokenizer"):
        if getattr(mine, name) != getattr(theirs, name):
            yield f"the {name} differs"
    if mine.looked_for != theirs.looked_for:
        yield "the added tokens that text is searched for differ"


def _without_offsets(rule: Any) -> Any:
    """A rule without what it says of places in the text, which no id hangs on."""
    if isinstance(rule, dict):
        return {key: _without_offsets(value) for key, value in rule.items() if key != "trim_offsets"}
    return [_without_offsets(each) for each in rule] if isinstance(rule, list) else rule


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= TOKEN_LENGTH else f"{text[:TOKEN_LENGTH]}..."
