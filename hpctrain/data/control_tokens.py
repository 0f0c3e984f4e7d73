"""Control tokens of a tokenizer's JSON, and how text is kept from spelling them.

A control token ends a document or a turn, or has another meaning that no text has. `encode_special_tokens`
of the library keeps text from the added tokens, but not from pieces of the model itself: a Unigram or
WordLevel vocabulary has `</s>` among its pieces, and a BPE with `ignore_merges` looks up whole words. Hence
the control tokens get names that contain a random number, in the model and among the added tokens. Their ids
stay the same, and so do the tokens of all other text.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hpctrain.errors import HpctrainError

Content = dict[str, Any]
"""A tokenizer's JSON."""

_SAMPLING = ("dropout", "alpha", "nbest_size")
"""Keys of a model by which tokens depend on chance."""

_BYTE_VALUES = 256


def without_chance(content: Content) -> list[str]:
    """Turn off all that makes tokens depend on chance, or cuts or fills texts.

    Returns:
        What was turned off, as `key = value`.
    """
    off = []
    for key in _SAMPLING:
        if content["model"].get(key):
            off.append(f"model.{key} = {content['model'][key]}")
            content["model"][key] = None
    for key in ("truncation", "padding"):
        if content.get(key):
            off.append(key)
            content[key] = None
    return off


def token_ids(content: Content) -> dict[str, int]:
    """Return the id of each token of the model and of each added token."""
    vocabulary = content["model"].get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: pieces with their scores
        ids = {piece[0]: number for number, piece in enumerate(vocabulary)}
    else:
        ids = dict(vocabulary)
    for token in content.get("added_tokens") or ():
        ids.setdefault(token["content"], token["id"])
    return ids


def unknown_id(content: Content) -> int | None:
    """Return the id that stands for text which the vocabulary lacks; None without one."""
    model = content["model"]
    if isinstance(number := model.get("unk_id"), int):
        return number
    return token_ids(content).get(model.get("unk_token"))


def special_tokens(content: Content) -> set[str]:
    """Return the added tokens that the JSON calls special."""
    return {token["content"] for token in content.get("added_tokens") or () if token.get("special")}


def hide_control_tokens(content: Content, names: Iterable[str]) -> dict[str, str]:
    """Give control tokens names that no text can spell; `content` is changed.

    Args:
        content: the JSON, whose ids stay as they are.
        names: control tokens, each in the vocabulary.

    Returns:
        The new name of each.
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
    others = sorted(hidden.keys() - present, key=ids.__getitem__)
    added += [{"id": ids[name], "content": hidden[name], **flags, "special": True} for name in others]
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
            merge for merge in model["merges"] if not any(each in hidden for each in _tokens(merge, prefix))
        ]


def _tokens(merge: Any, prefix: str) -> tuple[str, ...]:
    """Return both tokens of a merge, and the one that it makes."""
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first, second, first + second.removeprefix(prefix)


def mark_lost_text(content: Content, end: str) -> bool:
    """Have text that the vocabulary lacks become the token `end`, if the model would drop it in silence.

    A BPE without `unk_token` drops characters that it does not know. The models of other types raise errors.
    No text becomes the token `end` otherwise, so that it tells of a loss.

    Returns:
        True if text can be lost, and is marked.
    """
    model = content["model"]
    if model.get("type", "BPE") != "BPE" or "merges" not in model or model.get("unk_token") is not None:
        return False
    vocabulary: dict[str, int] = model["vocab"]
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(_BYTE_VALUES)):
        return False
    rules = (content.get("normalizer"), content.get("pre_tokenizer"))
    of_bytes = any(each.get("type") == "ByteLevel" for rule in rules for each in steps_of(rule))
    if of_bytes and all(letter in vocabulary for letter in byte_letters()):
        return False
    for token in content["added_tokens"]:  # which fixes the ids of all added tokens
        vocabulary.setdefault(token["content"], token["id"])
    model["unk_token"] = end
    return True


def lossy_rules(content: Content) -> list[str]:
    """Return, in words, the rules of a tokenizer by which it does not keep all of a text."""
    sections = ("normalizer", "pre_tokenizer")
    steps = [(section, step) for section in sections for step in steps_of(content.get(section))]
    found = [f"{section} {step.get('type')}" for section, step in steps if _loses(step)]
    found += [
        f"added token {token['content']!r} with the spaces beside it"
        for token in content.get("added_tokens") or ()
        if not token.get("special") and (token.get("lstrip") or token.get("rstrip"))
    ]
    return list(dict.fromkeys(found))


_LOSSY = {
    *("Strip", "StripAccents", "Lowercase", "BertNormalizer", "Nmt", "Precompiled", "NFKC", "NFKD"),
    *("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"),
}


def _loses(rule: Mapping[str, Any]) -> bool:
    if rule.get("type") == "Replace":
        return rule.get("content") == ""
    return rule.get("type") in _LOSSY or rule.get("behavior") == "Removed"


def steps_of(rule: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, which may be a sequence of others."""
    if isinstance(rule, dict):
        yield rule
        for key in ("normalizers", "pretokenizers", "decoders"):
            for each in rule.get(key) or ():
                yield from steps_of(each)


def byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a byte-level vocabulary, as of GPT-2.

    It is the byte's own character if that is visible.
    """
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(unseen)) for byte in range(_BYTE_VALUES)]


def control_names(content: Content, named: Iterable[str], end: str) -> list[str]:
    """Return all control tokens in order of their ids: special ones, those `named`, and the end."""
    ids = token_ids(content)
    names = {*special_tokens(content), *(name for name in named if name in ids), end}
    return sorted(names, key=ids.__getitem__)


def require_token(ids: Mapping[str, int], name: str, where: str) -> int:
    """Return the id of a token.

    Raises:
        HpctrainError: the vocabulary has no such token. The message begins with `where`.
    """
    if name not in ids:
        raise HpctrainError(f"{where} {name!r} is not in the vocabulary; name a token of it")
    return ids[name]
