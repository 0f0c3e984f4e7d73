"""Tokenizers and files of conversations for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT = ["system user assistant hello there, what is two and two? four. é ü\n\n", "the end of it all \n now"]


def bpe(folder: Path, template: str | None = None, config: dict[str, Any] | None = None) -> Path:
    """A folder with a small byte-level BPE that has the tokens of chatml, and its chat template."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(TEXT * 3, trainer)
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **(config or {})}
    told |= {"chat_template": template} if template is not None else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """A file with these lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def talk(*contents: str, system: str = "") -> list[dict[str, str]]:
    """A user and an assistant, who say these in turns."""
    said = [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]
    return [*([{"role": "system", "content": system}] if system else []), *said]
