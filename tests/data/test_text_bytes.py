"""Bytes of tokens, against the bytes of the text that they were made of."""

from __future__ import annotations

import pytest

from hpctrain.data.text_bytes import token_bytes
from hpctrain.data.tokenizer import Tokenizer, bytes_json

TEXT = "Grüße, 世界! The quick brown fox jumps over the lazy dog, again and again.\n\n🙂 <|endoftext|>"


@pytest.mark.parametrize("kind", ["bytes", "json", "bpe"])
def test_tokens_of_a_text_have_its_bytes(kind: str) -> None:
    trained = {"bytes": lambda: Tokenizer("bytes"), "json": lambda: Tokenizer(bytes_json())}
    tokenizer = trained.get(kind, lambda: Tokenizer.train([TEXT * 3], 300))()
    sizes = token_bytes(tokenizer)
    assert sizes is not None
    assert len(sizes) == tokenizer.vocabulary
    ids = [*tokenizer.encode(TEXT), tokenizer.end_of_document]
    assert int(sizes[ids].sum()) == len(TEXT.encode())
    assert kind != "bpe" or len(ids) < len(TEXT.encode()) // 2


def test_a_vocabulary_of_words_does_not_tell() -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models

    library = Library(models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="a"))
    assert token_bytes(Tokenizer(library.to_str())) is None
    library.decoder = decoders.Metaspace()
    assert token_bytes(Tokenizer(library.to_str())) is None
