"""What a token file holds beside text: conversations, preferences or prompts, and which tokens are learned.

Such a file has, beside the datasets of data/tokens.py,

    /                  attributes: contents_checksum and the fields of Contents
    /learned           uint8 [tokens], 1 for a token that is learned, which the one before it predicts
    /learned_checksums uint32 [pieces], the CRC-32 of every `piece` of these
    /template          uint8 [bytes], UTF-8: JSON with the chat template's text, and names that it uses

of preferences and prompts also what else their rows have, each as JSON, end to end:

    /others            uint8 [bytes], and /others_checksums as above
    /others_ends       int64 [rows], the byte behind each row's last one

A row is a document; of preferences two, the preferred one first. Documents are as the template has them: no
end of document follows. A file of text has none of this, nor an attribute of it, and version 1.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

TEXT_KIND, CHAT, PREFERENCES, PROMPTS = KINDS = ("text", "chat", "preferences", "prompts")
CONTENTS_VERSION = 2
"""Of files that are not of text, which an hpctrain that knows of text alone is to refuse."""

NOUNS = {CHAT: "conversation", PREFERENCES: "pair", PROMPTS: "prompt", TEXT_KIND: "document"}
"""What a row is called."""


@dataclass(frozen=True)
class Contents:
    """Stored as attributes: `rows` of a kind, tokens that are `learned`, bytes of `others`, and checksums."""

    kind: str = TEXT_KIND
    rows: int = 0
    learned: int = 0
    others: int = 0
    others_ends_checksum: int = 0
    template_checksum: int = 0

    @property
    def of_text(self) -> bool:
        """Whether the file is a corpus of text."""
        return self.kind == TEXT_KIND

    @property
    def has_other_keys(self) -> bool:
        """Whether rows have other keys."""
        return self.kind in {PREFERENCES, PROMPTS}

    def pieces(self, piece: int) -> int:
        """How many checksums the other keys have."""
        return -(-self.others // piece)

    def require_bounds(self, tokens: int, documents: int) -> None:
        """Raise ValueError where these contents do not go with a file of so many tokens and documents."""
        if self.kind not in KINDS:
            raise ValueError(f"kind = {self.kind!r}, expected one of {', '.join(KINDS)}")
        rows = documents // 2 if self.kind == PREFERENCES else documents
        if not self.of_text and self.rows != rows:
            raise ValueError(f"rows = {self.rows}, expected {rows} for {documents} documents")
        if not (0 <= self.learned <= tokens and self.others >= 0):
            raise ValueError(f"learned = {self.learned} or others = {self.others} is out of range")

    def attributes(self) -> dict[str, Any]:
        """All of its attributes of the file; none where it is of text."""
        if self.of_text:
            return {}
        values = {**asdict(self), "contents_checksum": self.checksum}
        return {
            name: np.bytes_(each.encode()) if isinstance(each, str) else each for name, each in values.items()
        }

    @property
    def checksum(self) -> int:
        """CRC-32 of all fields."""
        return zlib.crc32(json.dumps(asdict(self), sort_keys=True).encode())
