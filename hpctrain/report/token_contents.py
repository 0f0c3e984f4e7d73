"""What a token file holds, for `hpctrain inspect`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.data.chat_template import ChatTemplate
from hpctrain.data.contents import NOUNS, PREFERENCES, PROMPTS, TEXT_KIND
from hpctrain.data.tokenizer import BYTES
from hpctrain.data.tokens import FORMAT, TokenFile
from hpctrain.errors import InputOutputError
from hpctrain.hdf5 import format_of
from hpctrain.report.contents import UNVERIFIED
from hpctrain.text import counted, escaped


def is_token_file(path: Path) -> bool:
    """Return whether a file calls itself a token file; TokenFile says what else is wrong with it."""
    return format_of(path) == FORMAT


def token_contents(path: Path, verify: bool = False) -> dict[str, Any]:
    """What is known of a token file; errors as of TokenFile, which is read whole to `verify` it."""
    file = TokenFile(path, "token file")
    if verify:
        file.verify()
    tokenizer = BYTES if file.tokenizer_text == BYTES else "JSON of tokenizers"
    found = {"file": str(path), "kind": file.kind, "rows": file.documents, "learned": file.tokens}
    found |= asdict(file.header) | {"tokenizer": tokenizer, "fingerprint": file.fingerprint}
    if file.kind != TEXT_KIND:
        found |= {"rows": file.contents.rows, "learned": file.contents.learned}
        try:
            found["template"] = ChatTemplate.from_json(file.template_text).text
        except (ValueError, TypeError):
            raise InputOutputError(f"{file.where}: is damaged (/template is no chat template)") from None
    return found | ({"verified": True} if verify else {})


def token_contents_text(found: dict[str, Any]) -> list[str]:
    """The same for people."""
    kind, rows = found["kind"], counted(found["rows"], NOUNS[found["kind"]])
    lines = [f"{escaped(found['file'])}: a token file of {kind}: {rows}, {found['tokens']} tokens"]
    if kind not in {TEXT_KIND, PROMPTS}:
        share = 100 * found["learned"] / found["tokens"]
        lines[0] += f", {found['learned']} of them learned ({share:.1f}%)"
    if kind == PREFERENCES:
        lines.append("each pair is two documents, what is preferred first")
    lines += [
        f"vocabulary {found['vocabulary']} ({found['tokenizer']}), "
        f"token {found['end_of_document']} ends a document",
        f"made from {escaped(found['source'])} by hpctrain {escaped(found['package'])}",
    ]
    if "template" in found:
        lines += ["chat template:", *(f"  {escaped(each)}" for each in found["template"].splitlines())]
    return [*lines, "All data match their checksums." if "verified" in found else UNVERIFIED]
