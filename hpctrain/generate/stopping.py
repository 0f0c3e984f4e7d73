"""The text of one sample as it grows, which ends before the first of some strings."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.data.tokenizer import Tokenizer


class TextStream:
    """The text of token ids that come one after another; unfinished characters wait for their rest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._shown: list[int] = []
        self._waiting: list[int] = []

    def add(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        self._waiting += ids
        text = self.end()
        # What is no UTF-8 yet reads as U+FFFD, and so does what never will be.
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._shown, self._waiting = self._waiting, []
        return text

    def begin(self, ids: Sequence[int]) -> str:
        """The text of the first ids, which is whole."""
        self._shown = list(ids)
        return self.tokenizer.decode(ids)

    def end(self) -> str:
        """The text of what still waits."""
        # Some decoders drop a blank at the start of their ids: those before show that this is none.
        shown = self.tokenizer.decode(self._shown)
        return self.tokenizer.decode(self._shown + self._waiting)[len(shown) :]


class Continuation:
    """What a sample adds to its prompt: `text` so far, without what may yet be the beginning of a stop.

    `why` says how it has ended: by a "stop" string, by the model's "end" of the document or turn, or by
    "length".
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self.beginning = self._stream.begin(prompt)
        self.text, self.why, self.tokens = "", "length", 0
        self._stops, self._held = stops, ""
        self._ends = tokenizer.ends

    @property
    def whole(self) -> str:
        """The text with its prompt."""
        return self.beginning + self.text

    def add(self, token: int) -> bool:
        """Take the next token; whether the sample has ended. What comes after that changes nothing."""
        if self.why != "length":
            return True
        if token in self._ends:
            self.why = "end"
            return True
        self.tokens += 1
        self._take(self._stream.add([token]))
        return self.why != "length"

    def finish(self) -> str:
        """All of the text, once no other token comes."""
        if self.why != "stop":
            self._take(self._stream.end())
        if self.why != "stop":
            self.text, self._held = self.text + self._held, ""
        return self.text

    def _take(self, more: str) -> None:
        held = self._held + more
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.text, self._held, self.why = self.text + held[: min(found)], "", "stop"
            return
        kept = max((_overlap(held, stop) for stop in self._stops), default=0)
        self.text, self._held = self.text + held[: len(held) - kept], held[len(held) - kept :]


def _overlap(text: str, stop: str) -> int:
    """How much of the end of a text is the beginning of a stop string."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
