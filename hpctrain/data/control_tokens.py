"""Functions that keep text from being encoded as the control tokens of a tokenizer.

A control token ends a document or a turn, or has another meaning beyond text. `encode_special_tokens` of the
`tokenizers` library prevents that text is encoded as an added token, but not as a token of the model itself:
a Unigram or WordLevel vocabulary may contain `</s>`, and a BPE with `ignore_merges` looks up whole words.
Therefore the control tokens are renamed: their new names contain a random number, in the model and among the
added tokens. Their ids and the tokens of all other text stay the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hpctrain.errors import HpctrainError

Content = dict[str, Any]
"""Parsed content of a tokenizer's JSON file."""

_SAMPLING = ("dropout", "alpha", "nbest_size")
"""Keys of a tokenizer's model that make its tokens random."""

_BYTE_VALUES = 256


def disable_randomness(content: Content) -> list[str]:
    """Remove settings that make tokens random, and truncation and padding, from `content` in place.

    Returns:
        The removed settings, such as "model.dropout = 0.1" or "padding".
    """
    removed = []
    for key in _SAMPLING:
        if content["model"].get(key):
            removed.append(f"model.{key} = {content['model'][key]}")
            content["model"][key] = None
    for key in ("truncation", "padding"):
        if content.get(key):
            removed.append(key)
            content[key] = None
    return removed


def token_ids(content: Content) -> dict[str, int]:
    """Return the ids of all tokens of the model and all added tokens, by their text."""
    vocabulary = content["model"].get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: a list of [token, score]
        ids = {piece[0]: number for number, piece in enumerate(vocabulary)}
    else:
        ids = dict(vocabulary)
    for token in content.get("added_tokens") or ():
        ids.setdefault(token["content"], token["id"])
    return ids


def unknown_id(content: Content) -> int | None:
    """Return the id that replaces text outside the vocabulary; None if the tokenizer has none."""
    model = content["model"]
    if isinstance(number := model.get("unk_id"), int):
        return number
    return token_ids(content).get(model.get("unk_token"))


def special_tokens(content: Content) -> set[str]:
    """Return the added tokens that are marked as special."""
    return {token["content"] for token in content.get("added_tokens") or () if token.get("special")}


def hide_control_tokens(content: Content, names: Iterable[str]) -> dict[str, str]:
    """Rename control tokens in `content` so that no text contains their names.

    Args:
        content: The tokenizer's JSON, which is changed in place; ids stay the same.
        names: Control tokens, each in the vocabulary.

    Returns:
        The new names by the old ones.
    """
    secret, ids = secrets.token_hex(16), token_ids(content)
    hidden = {name: f"{secret}{name}" for name in names}
    _rename_in_model(content["model"], hidden)
    added = content["added_tokens"] = list(content.get("added_tokens") or ())
    present = {token["content"] for token in added}
    for number, token in enumerate(added):
        if token["content"] in hidden:
            added[number] = {**token, "content": hidden[token["content"]], "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    missing = sorted(hidden.keys() - present, key=ids.__getitem__)
    added += [{"id": ids[name], "content": hidden[name], **flags, "special": True} for name in missing]
    return hidden


def _rename_in_model(model: dict[str, Any], hidden: Mapping[str, str]) -> None:
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, list):
        model["vocab"] = [[hidden.get(piece[0], piece[0]), *piece[1:]] for piece in vocabulary]
        return
    model["vocab"] = {hidden.get(token, token): number for token, number in vocabulary.items()}
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    if model.get("merges"):
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            merge
            for merge in model["merges"]
            if not any(token in hidden for token in _tokens_of_merge(merge, prefix))
        ]


def _tokens_of_merge(merge: Any, prefix: str) -> tuple[str, ...]:
    """Return both tokens of a BPE merge and the token that they are merged into."""
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first, second, first + second.removeprefix(prefix)


def mark_lost_text(content: Content, end: str) -> bool:
    """Let the tokenizer encode characters outside its vocabulary as `end` if it would silently drop them.

    A BPE model without `unk_token` drops such characters; other models raise an error. No other text is
    encoded as `end`, so an `end` among the tokens of a text shows that the text lost characters.

    Args:
        content: The tokenizer's JSON, which is changed in place.
        end: Name of the control token that ends a document.

    Returns:
        True if the tokenizer would drop characters, so that it now marks them.
    """
    model = content["model"]
    if model.get("type", "BPE") != "BPE" or "merges" not in model or model.get("unk_token") is not None:
        return False
    vocabulary: dict[str, int] = model["vocab"]
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(_BYTE_VALUES)):
        return False
    rules = (content.get("normalizer"), content.get("pre_tokenizer"))
    is_byte_level = any(step.get("type") == "ByteLevel" for rule in rules for step in rule_steps(rule))
    if is_byte_level and all(character in vocabulary for character in byte_characters()):
        return False
    for token in content["added_tokens"]:  # so that the ids of all added tokens stay the same
        vocabulary.setdefault(token["content"], token["id"])
    model["unk_token"] = end
    return True


def lossy_rules(content: Content) -> list[str]:
    """Return descriptions of the rules by which a tokenizer loses parts of a text, such as its spaces."""
    sections = ("normalizer", "pre_tokenizer")
    steps = [(section, step) for section in sections for step in rule_steps(content.get(section))]
    lossy = [f"{section} {step.get('type')}" for section, step in steps if _is_lossy(step)]
    lossy += [
        f"added token {token['content']!r} removes spaces next to it"
        for token in content.get("added_tokens") or ()
        if not token.get("special") and (token.get("lstrip") or token.get("rstrip"))
    ]
    return list(dict.fromkeys(lossy))


_LOSSY = {
    *("Strip", "StripAccents", "Lowercase", "BertNormalizer", "Nmt", "Precompiled", "NFKC", "NFKD"),
    *("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"),
}


def _is_lossy(rule: Mapping[str, Any]) -> bool:
    if rule.get("type") == "Replace":
        return rule.get("content") == ""
    return rule.get("type") in _LOSSY or rule.get("behavior") == "Removed"


def rule_steps(rule: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, also those of nested sequences."""
    if isinstance(rule, dict):
        yield rule
        for key in ("normalizers", "pretokenizers", "decoders"):
            for each in rule.get(key) or ():
                yield from rule_steps(each)


def byte_characters() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary such as GPT-2's.

    A byte whose own character is printable is represented by that character.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(_BYTE_VALUES)]


def control_names(content: Content, configured: Iterable[str], end: str) -> list[str]:
    """Return the names of all control tokens, sorted by id.

    Args:
        content: The tokenizer's JSON.
        configured: Tokens that the files next to the JSON call special.
        end: Token that ends a document.
    """
    ids = token_ids(content)
    names = {*special_tokens(content), *(name for name in configured if name in ids), end}
    return sorted(names, key=ids.__getitem__)


def require_token(ids: Mapping[str, int], name: str, where: str) -> int:
    """Return the id of the token `name`.

    Raises:
        HpctrainError: the vocabulary has no such token. The message begins with `where`.
    """
    if name not in ids:
        raise HpctrainError(f"{where} {name!r} is not in the vocabulary; give a token of the vocabulary")
    return ids[name]
