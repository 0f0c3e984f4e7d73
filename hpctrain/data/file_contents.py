"""Format of token files of conversations, preferences and prompts: kind, learned tokens and other keys.

Besides the datasets of `data/tokens.py`, such a file has

    /                  attributes: contents_checksum and the fields of Contents
    /learned           uint8 [tokens], 1 for a token that is learned: the token before it predicts it
    /learned_checksums uint32 [pieces], CRC-32 of every `piece` elements of /learned
    /template          uint8 [bytes], UTF-8: JSON with the chat template's text, and names that it uses

A file of preferences or prompts also has the other keys of its rows, each row as JSON, end to end:

    /others            uint8 [bytes], with /others_checksums as above
    /others_ends       int64 [rows], position after the last byte of each row

A conversation or prompt is one document. A pair of preferences is two, the preferred one first. Documents end
as the template ends them, without an added end of document. A file of text has none of these datasets and
attributes, and version 1.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

TEXT_KIND, CHAT, PREFERENCES, PROMPTS = KINDS = ("text", "chat", "preferences", "prompts")
CONTENTS_VERSION = 2
"""Version of files of other kinds than text, which old versions of hpctrain refuse."""

NOUNS = {CHAT: "conversation", PREFERENCES: "pair", PROMPTS: "prompt", TEXT_KIND: "document"}
"""Name of a row of each kind, for messages."""


@dataclass(frozen=True)
class Contents:
    """Description of the contents, which is stored in the attributes of the file.

    Attributes:
        kind: One of KINDS.
        rows: Number of rows.
        learned: Number of learned tokens.
        others: Size of the other keys of all rows, in bytes of JSON.
        others_ends_checksum: CRC-32 of /others_ends.
        template_checksum: CRC-32 of /template.
    """

    kind: str = TEXT_KIND
    rows: int = 0
    learned: int = 0
    others: int = 0
    others_ends_checksum: int = 0
    template_checksum: int = 0

    @property
    def is_text(self) -> bool:
        """True if the file is a corpus of text."""
        return self.kind == TEXT_KIND

    @property
    def has_other_keys(self) -> bool:
        """True if the file stores other keys of its rows."""
        return self.kind in {PREFERENCES, PROMPTS}

    def require_bounds(self, tokens: int, documents: int) -> None:
        """Raise ValueError if these contents do not fit a file of so many tokens and documents."""
        if self.kind not in KINDS:
            raise ValueError(f"kind = {self.kind!r}, expected one of {', '.join(KINDS)}")
        rows = documents // 2 if self.kind == PREFERENCES else documents
        if not self.is_text and self.rows != rows:
            raise ValueError(f"rows = {self.rows}, expected {rows} for {documents} documents")
        if not (0 <= self.learned <= tokens and self.others >= 0):
            raise ValueError(f"learned = {self.learned} or others = {self.others} is out of range")

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the file; none if it is a corpus of text."""
        if self.is_text:
            return {}
        values = {**asdict(self), "contents_checksum": self.checksum}
        return {
            name: np.bytes_(each.encode()) if isinstance(each, str) else each for name, each in values.items()
        }

    @property
    def checksum(self) -> int:
        """CRC-32 of all fields."""
        return zlib.crc32(json.dumps(asdict(self), sort_keys=True).encode())
