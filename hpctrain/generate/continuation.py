"""Text of one sample while its tokens are generated, which ends before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.data.tokenizer import Tokenizer


class TextStream:
    """Decoder of token ids that come one after another. It keeps incomplete characters back.

    Args:
        tokenizer: Tokenizer of the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._previous_ids: list[int] = []
        self._incomplete_ids: list[int] = []

    def start(self, ids: Sequence[int]) -> str:
        """Begin with the ids of a prompt, and return their text."""
        self._previous_ids = list(ids)
        return self.tokenizer.decode(ids)

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete; an empty text if their last character is incomplete."""
        self._incomplete_ids += ids
        text = self.incomplete_text()
        # Bytes that are no UTF-8 read as U+FFFD, whether further bytes complete them or not.
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._previous_ids, self._incomplete_ids = self._incomplete_ids, []
        return text

    def incomplete_text(self) -> str:
        """Return the text of the ids that are kept back, with U+FFFD for incomplete characters."""
        # Some decoders drop a blank at the start of a text, so the previous ids are decoded, too.
        previous = self.tokenizer.decode(self._previous_ids)
        return self.tokenizer.decode(self._previous_ids + self._incomplete_ids)[len(previous) :]


class Continuation:
    """Text that a sample adds to its prompt.

    Args:
        tokenizer: Tokenizer of the model.
        prompt: Token ids of the prompt.
        stops: Strings that end the text. It does not contain them.

    Attributes:
        prompt_text: Text of the prompt.
        text: Text so far, without an end that may be the beginning of a stop string.
        finish_reason: "stop" for a stop string, "end" for an end token of the model, else "length".
        token_count: Number of tokens that were generated, without an end token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self.prompt_text = self._stream.start(prompt)
        self.text, self.finish_reason, self.token_count = "", "length", 0
        self._stops, self._possible_stop = stops, ""
        self._end_tokens = tokenizer.ends

    @property
    def full_text(self) -> str:
        """Text of the prompt and of its continuation."""
        return self.prompt_text + self.text

    def add(self, token: int) -> bool:
        """Add the next token, and return True if the text has ended. Further tokens have no effect then."""
        if self.finish_reason != "length":
            return True
        if token in self._end_tokens:
            self.finish_reason = "end"
            return True
        self.token_count += 1
        self._append(self._stream.add([token]))
        return self.finish_reason != "length"

    def finish(self) -> str:
        """Return all of the text, after the last token was added."""
        if self.finish_reason != "stop":
            self._append(self._stream.incomplete_text())
        if self.finish_reason != "stop":
            self.text, self._possible_stop = self.text + self._possible_stop, ""
        return self.text

    def _append(self, text: str) -> None:
        """Append text up to a stop string, and keep an end back that may be the beginning of one."""
        text = self._possible_stop + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.text, self._possible_stop = self.text + text[: min(starts)], ""
            self.finish_reason = "stop"
            return
        size = max((_overlap(text, stop) for stop in self._stops), default=0)
        self.text, self._possible_stop = self.text + text[: len(text) - size], text[len(text) - size :]


def _overlap(text: str, stop: str) -> int:
    """Return the size of the longest end of a text that is the beginning of a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
