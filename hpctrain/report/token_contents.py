"""Contents of a token file, for `hpctrain inspect`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.data.chat_template import ChatTemplate
from hpctrain.data.file_contents import NOUNS, PREFERENCES, PROMPTS, TEXT_KIND
from hpctrain.data.tokenizer import BYTES
from hpctrain.data.tokens import FORMAT, TokenFile
from hpctrain.errors import InputOutputError
from hpctrain.hdf5 import format_of
from hpctrain.report.contents import UNVERIFIED
from hpctrain.text import counted, escaped


def is_token_file(path: Path) -> bool:
    """Return True if a file is marked as a token file. It may be damaged nevertheless."""
    return format_of(path) == FORMAT


def token_contents(path: Path, verify: bool = False) -> dict[str, Any]:
    """Return the contents of a token file.

    Args:
        path: The file.
        verify: True to read all of it and compare its checksums.

    Raises:
        HpctrainError: As in TokenFile.
    """
    file = TokenFile(path, "token file")
    if verify:
        file.verify()
    tokenizer = BYTES if file.tokenizer_text == BYTES else "JSON of tokenizers"
    contents = {"file": str(path), "kind": file.kind, "rows": file.documents, "learned": file.tokens}
    contents |= asdict(file.header) | {"tokenizer": tokenizer, "fingerprint": file.fingerprint}
    if file.kind != TEXT_KIND:
        contents |= {"rows": file.contents.rows, "learned": file.contents.learned}
        try:
            contents["template"] = ChatTemplate.from_json(file.template_text).text
        except (ValueError, TypeError):
            raise InputOutputError(f"{file.where}: is damaged (/template is no chat template)") from None
    return contents | ({"verified": True} if verify else {})


def token_contents_text(contents: dict[str, Any]) -> list[str]:
    """Return the result of `token_contents` as lines of text."""
    kind, rows = contents["kind"], counted(contents["rows"], NOUNS[contents["kind"]])
    lines = [f"{escaped(contents['file'])}: a token file of {kind}: {rows}, {contents['tokens']} tokens"]
    if kind not in {TEXT_KIND, PROMPTS}:
        share = 100 * contents["learned"] / contents["tokens"]
        lines[0] += f", {contents['learned']} of them learned ({share:.1f}%)"
    if kind == PREFERENCES:
        lines.append("each pair is two documents: first the preferred answer, then the other one")
    lines += [
        f"vocabulary {contents['vocabulary']} ({contents['tokenizer']}), "
        f"token {contents['end_of_document']} ends a document",
        f"made from {escaped(contents['source'])} by hpctrain {escaped(contents['package'])}",
    ]
    if "template" in contents:
        lines += ["chat template:", *(f"  {escaped(each)}" for each in contents["template"].splitlines())]
    return [*lines, "All data match their checksums." if "verified" in contents else UNVERIFIED]
