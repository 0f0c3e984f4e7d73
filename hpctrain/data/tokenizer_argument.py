"""Reader of the argument `--tokenizer`: "bytes", a JSON file, a folder or a token file."""

from __future__ import annotations

from pathlib import Path

import h5py

from hpctrain.data.control_tokens import lossy_rules, require_token, token_ids
from hpctrain.data.special_token_check import special_token_warnings
from hpctrain.data.tokenizer import BYTES, Tokenizer, parse_tokenizer
from hpctrain.data.tokens import TokenFile


def read_tokenizer(argument: str, end_of_document: str | None = None) -> Tokenizer:
    """Read the tokenizer that `--tokenizer` names.

    Args:
        argument: An argument of `Tokenizer.from_argument`, or the path of a token file.
        end_of_document: Name of the token that ends a document; None to take it from the tokenizer's files.

    Raises:
        HpctrainError: there is no usable tokenizer, or the token that ends a document is unknown.
        InputOutputError: a file cannot be read.
    """
    path, where = Path(argument), f"tokenizer = {argument}"
    if not path.is_file() or not h5py.is_hdf5(path):
        return Tokenizer.from_argument(argument, end_of_document)
    tokenizer = TokenFile(path, "tokenizer").tokenizer
    if end_of_document is None or end_of_document == tokenizer.end_name:
        return tokenizer
    require_token(tokenizer.control, end_of_document, f"{where}: --end-of-document")
    return Tokenizer.of_files(tokenizer.text, tokenizer.settings, where, end_of_document)


def tokenizer_warnings(tokenizer: Tokenizer, argument: str) -> list[str]:
    """Return warnings about settings of a tokenizer's file that are ignored, and about text that it loses.

    Args:
        tokenizer: The tokenizer.
        argument: The argument that it was read from, for messages.
    """
    if tokenizer.text == BYTES:
        return []
    where, warnings = f"tokenizer = {argument}", []
    if ignored := tokenizer.ignored_settings:
        reason = "since tokens must not be random, truncated or padded"
        warnings.append(f"{where}: ignored {', '.join(ignored)}, {reason}")
    content = parse_tokenizer(tokenizer.text, where)
    control = tokenizer.control.values()
    wrong = special_token_warnings(tokenizer.settings, token_ids(content), control)
    warnings += [f"{where}: {each}" for each in wrong]
    if rules := lossy_rules(content):
        warnings.append(f"{where}: does not preserve all of the text: {', '.join(rules)}")
    return warnings
