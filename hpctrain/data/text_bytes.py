"""Number of bytes of text of each token, from which bits per byte are computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpctrain.data.control_tokens import rule_steps
from hpctrain.data.tokenizer import BYTES, Tokenizer
from hpctrain.files import parse_json


def token_bytes(tokenizer: Tokenizer) -> Tensor | None:
    """Return the number of bytes of text of each token id, int64 [vocabulary], or None if it is unknown.

    Special tokens, such as ends of documents, have no text. It is known for byte-level vocabularies, which
    have one character per byte. In others, the text of a token depends on its neighbors.
    """
    sizes = torch.zeros(tokenizer.vocabulary, dtype=torch.int64)
    if tokenizer.text == BYTES:
        sizes[: tokenizer.end_of_document] = 1
        return sizes
    content: dict[str, Any] = parse_json(tokenizer.text)
    if all(step.get("type") != "ByteLevel" for step in rule_steps(content.get("decoder"))):
        return None
    vocabulary: Mapping[str, int] = content["model"]["vocab"]
    for characters, token in vocabulary.items():
        sizes[token] = len(characters)
    for added in content.get("added_tokens") or ():
        sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    sizes[list(tokenizer.control.values())] = 0
    return sizes
