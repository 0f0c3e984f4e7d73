"""Checks of the special tokens that the files next to a tokenizer name.

`eos_token` decides which token ends a document. `eos_token_id` and `bos_token_id` belong to the model, and
often contradict it, for example in folders whose tokenizer was replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hpctrain.data.tokenizer_settings import (
    GENERATION_CONFIG,
    MODEL_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    TokenizerSettings,
    is_id,
    token_text,
)
from hpctrain.deck.sources import clipped_json

_OTHER_ROLES = ("bos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def eos_token_problem(settings: TokenizerSettings, ids: Mapping[str, int]) -> str:
    """Return what is wrong with `eos_token`, with its file and value; "" if it is right or missing.

    Args:
        settings: The settings.
        ids: Ids of all tokens by their text.
    """
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP):
        value = settings.file(name).get("eos_token")
        if value is None:
            continue
        title = f"{name}: eos_token = {clipped_json(value)}"
        texts = [token_text(each) for each in (value if isinstance(value, list) else [value])]
        if not texts or None in texts:
            return f"{title}: must be a token or a list of tokens"
        missing = [text for text in texts if text not in ids]
        if missing and len(texts) > 1:
            return f"{title}: {missing[0]!r} is not in the vocabulary"
        return f"{title} is not in the vocabulary" if missing else ""
    return ""


def special_token_warnings(
    settings: TokenizerSettings, ids: Mapping[str, int], control: Collection[int]
) -> Iterator[str]:
    """Yield what is wrong with special tokens that are ignored, each with its file, key and value.

    Args:
        settings: The settings.
        ids: Ids of all tokens by their text.
        control: Ids of the control tokens.
    """
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP):
        for role in _OTHER_ROLES:
            value = settings.file(name).get(role)
            if value is not None and token_text(value) is None:
                yield f"{name}: {role} = {clipped_json(value)} is ignored, since it must be a token"
    for name in (GENERATION_CONFIG, MODEL_CONFIG):
        yield from _id_warnings(settings, name, "bos_token", ids, control)
        yield from _id_warnings(settings, name, "eos_token", ids, control)


def _id_warnings(
    settings: TokenizerSettings, name: str, role: str, ids: Mapping[str, int], control: Collection[int]
) -> Iterator[str]:
    """Yield what is wrong with the ids that a file gives for a role."""
    value = settings.file(name).get(f"{role}_id")
    if value is None:
        return
    title, texts = (
        f"{name}: {role}_id = {clipped_json(value)}",
        {number: text for text, number in ids.items()},
    )
    is_end = role == "eos_token"
    numbers = value if isinstance(value, list) and is_end else [value]
    if not all(is_id(number) for number in numbers):
        wanted = "a token id or a list of token ids" if is_end else "a token id"
        yield f"{title} is ignored, since it must be {wanted}"
        return
    for number in numbers:
        if number not in texts:
            yield f"{title}: token {number} is not in the tokenizer, so it is ignored"
        elif is_end and number not in control:
            yield f"{title}: token {number} is {texts[number]!r}, not a special token, so it is ignored"
    right = {ids[text] for text in settings.tokens_of(role) if text in ids}
    if right and numbers and not right & set(numbers) and set(numbers) <= set(control):
        tokens = ", ".join(map(repr, settings.tokens_of(role)))
        names = ", ".join(repr(texts[number]) for number in numbers)
        use = "generated text ends at either" if is_end else "chat templates receive the latter"
        yield f"{title} is {names}, but {role} is {tokens}: {use}"
