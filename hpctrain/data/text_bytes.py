"""How many bytes of text each token is, where its tokenizer tells: what bits per byte are counted in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hpctrain.data.tokenizer import BYTES, Tokenizer
from hpctrain.files import parse_json


def token_bytes(tokenizer: Tokenizer) -> Tensor | None:
    """Bytes of text of each id [vocabulary], int64; None where its vocabulary does not tell.

    The ends of documents and other special tokens are no text. Byte-level vocabularies have a letter for
    every byte; in others a token's text depends on those beside it.
    """
    sizes = torch.zeros(tokenizer.vocabulary, dtype=torch.int64)
    if tokenizer.text == BYTES:
        sizes[: tokenizer.end_of_document] = 1
        return sizes
    content: dict[str, Any] = parse_json(tokenizer.text)
    if "ByteLevel" not in _kinds(content.get("decoder")):
        return None
    vocabulary: Mapping[str, int] = content["model"]["vocab"]
    for letters, token in vocabulary.items():
        sizes[token] = len(letters)
    for added in content.get("added_tokens") or ():
        sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    sizes[list(tokenizer.control.values())] = 0
    return sizes


def _kinds(decoder: Any) -> Iterator[str]:
    """The kinds of a decoder, which may be a sequence of others."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for each in decoder.get("decoders") or ():
            yield from _kinds(each)
