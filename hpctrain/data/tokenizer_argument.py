"""The tokenizer that a user names: bytes, a JSON file, a folder, or a token file that was made with it."""

from __future__ import annotations

from pathlib import Path

import h5py

from hpctrain.data.control_tokens import lossy_rules, require_token
from hpctrain.data.tokenizer import BYTES, Tokenizer, parse_tokenizer
from hpctrain.data.tokens import TokenFile


def named_tokenizer(argument: str, end_of_document: str | None = None) -> Tokenizer:
    """Read the tokenizer that a user names.

    Args:
        argument: as of `Tokenizer.from_argument`, or the path of a token file.
        end_of_document: name of the token that ends a document; None for what the files say.

    Raises:
        HpctrainError: there is no tokenizer that can be used, or nothing tells the end of a document.
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


def remarks_on(tokenizer: Tokenizer, argument: str) -> list[str]:
    """Return sentences on what its file asks for and is not done, and on text that it does not keep."""
    if tokenizer.text == BYTES:
        return []
    where, remarks = f"tokenizer = {argument}", []
    if off := tokenizer.turned_off:
        told = "which would make tokens depend on chance, or cut or fill texts"
        remarks.append(f"{where}: turned off {', '.join(off)}, {told}")
    if rules := lossy_rules(parse_tokenizer(tokenizer.text, where)):
        remarks.append(f"{where}: does not keep all of a text: {', '.join(rules)}")
    return remarks
