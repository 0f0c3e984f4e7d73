"""A conversation's tokens, and which of them are learned: the assistant's, the end of its turn included.

What a template itself writes may be special tokens; what people in the conversation write never is, whatever
it spells. Such text is told apart by characters that stand around it while it is rendered, and are nowhere
else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hpctrain.data.chat_rows import ASSISTANT, Conversation
from hpctrain.data.chat_template import ChatTemplate, Range
from hpctrain.data.tokenizer import BYTES, END_OF_TEXT, Tokenizer, load_library
from hpctrain.errors import HpctrainError

# Code points that are no characters, of which text has none.
_NO_CHARACTERS = [chr(point) for point in range(0xFDD0, 0xFDF0)]


_Render = Callable[[Conversation], tuple[str, list[Range]]]


class Tokens(NamedTuple):
    """Ids [n], and 1 for each that is learned, else 0 [n]."""

    ids: npt.NDArray[np.uint32]
    learned: npt.NDArray[np.uint8]


class Rendered(NamedTuple):
    """Text, ranges of it that are learned, and ranges that spell a special token and are none."""

    text: str
    learned: Sequence[Range]
    spelled: Sequence[Range]


class ChatTokenizer:
    """Makes tokens of conversations, by a template and a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.template, self.tokenizer = template, tokenizer
        self._library: Any = None
        if tokenizer.text == BYTES:
            self.special = {END_OF_TEXT: tokenizer.end_of_document}
        else:
            from tokenizers import processors

            self._library = load_library(tokenizer.text, "tokenizer")
            self._library.no_truncation()
            self._library.no_padding()
            # Nothing is to be framed by special tokens, and no space left out of where a token lies.
            self._library.post_processor = processors.ByteLevel(trim_offsets=False)
            added = self._library.get_added_tokens_decoder()
            self.special = {each.content: number for number, each in added.items() if each.special}
        self._any = _pattern(self.special)
        self._beginnings = {token[:n] for token in self.special for n in range(1, len(token))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._prefixed = any(name in tokenizer.text for name in ("Metaspace", '"Prepend"'))

    @property
    def only_text(self) -> list[str]:
        """What the template writes in the manner of special tokens and the vocabulary does not have: text,
        which anybody can spell.
        """
        written = re.findall(r"<\|[a-z_]+\|>", self.template.text)
        known = self.special if self._library is None else self._library.get_vocab(with_added_tokens=True)
        return sorted({each for each in written if each not in known})

    def conversation(self, asked: Conversation) -> Tokens:
        """Tokens of a conversation, and what is learned of it. HpctrainError with what is wrong with it."""
        return self.encode(self._guarded(asked, self._learned))

    def prompt(self, asked: Conversation) -> Tokens:
        """Tokens up to where an assistant goes on, of which none is learned."""
        return self.encode(self._guarded(asked, self._prompt))

    def encode(self, rendered: Rendered) -> Tokens:
        """Tokens of text; one is learned where any of its characters is."""
        text = rendered.text
        covered = np.zeros(len(text) + 2, np.int64)
        for begin, end in rendered.learned:
            covered[begin + 1 : end + 1] = 1
        covered = covered.cumsum()
        ids, begins, ends = map(np.concatenate, zip(*self._pieces(rendered), strict=True))
        ends = np.minimum(np.maximum(ends, begins + 1), len(text))  # a token without characters is at a place
        begins = np.minimum(begins, len(text))
        return Tokens(ids.astype(np.uint32), (covered[ends] > covered[begins]).astype(np.uint8))

    def _pieces(self, rendered: Rendered) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        """Ids, and where each begins and ends in the text."""
        text, at = rendered.text, 0
        empty = np.zeros(0, np.int64)
        yield empty, empty, empty
        if self._library is not None and not rendered.spelled:
            yield self._encode(text, 0, as_text=False)
            return
        for match in self._any.finditer(text):
            begin, end = match.span()
            if begin < at or any(begin < last and first < end for first, last in rendered.spelled):
                continue
            yield self._encode(text[at:begin], at, as_text=True)
            yield np.array([self.special[match[0]]]), np.array([begin]), np.array([end])
            at = end
        yield self._encode(text[at:], at, as_text=True)

    def _encode(self, text: str, at: int, as_text: bool) -> tuple[npt.NDArray[Any], ...]:
        """Of a piece of text from character `at` on, with special tokens or `as_text` alone."""
        if self._library is None:
            sizes = [len(each.encode("utf-8", "replace")) for each in text]
            begins = np.repeat(np.arange(len(text)), sizes) + at
            return np.frombuffer(text.encode("utf-8", "replace"), np.uint8), begins, begins + 1
        text = text.encode("utf-8", "replace").decode()
        self._library.encode_special_tokens = as_text
        # A tokenizer that begins a text with a space is not to begin each piece of one so.
        lead = "\n" if at and self._prefixed else ""
        encoding = self._library.encode(lead + text, add_special_tokens=False)
        ids, offsets = encoding.ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)
        if lead:
            leading = self._library.encode(lead, add_special_tokens=False).ids
            if ids[: len(leading)] == leading:
                ids, offsets = ids[len(leading) :], offsets[len(leading) :]
            else:
                lead, encoding = "", self._library.encode(text, add_special_tokens=False)
                ids, offsets = encoding.ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)
        offsets = np.maximum(offsets - len(lead), 0) + at
        return np.array(ids, np.int64), offsets[:, 0], offsets[:, 1]

    def _prompt(self, asked: Conversation) -> tuple[str, list[Range]]:
        return self.template.render(asked.messages, True, asked.tools)[0], []

    def _learned(self, asked: Conversation) -> tuple[str, list[Range]]:
        """The text, and the ranges of it that are learned."""
        text, generated = self.template.render(asked.messages, tools=asked.tools)
        if "endgeneration" in self.template.text:
            if asked.first:
                before = len(self.template.render(asked.messages[: asked.first], tools=asked.tools)[0])
                generated = [each for each in generated if each[0] >= before]
            return text, generated
        says = [n for n, each in enumerate(asked.messages) if each["role"] == ASSISTANT and n >= asked.first]
        return text, [self._turn(asked, number, text) for number in says]

    def _turn(self, asked: Conversation, number: int, text: str) -> Range:
        """Where in the whole text an assistant's message is, from where it goes on to the end of its turn."""
        messages, content = asked.messages, asked.messages[number]["content"].strip()
        before, _ = self.template.render(messages[:number], True, asked.tools)
        whole, _ = self.template.render(messages[: number + 1], tools=asked.tools)
        turn, begin = whole[len(before) :], len(before)
        if whole.startswith(before) and text.startswith(before):
            if text.startswith(turn, begin):
                return begin, begin + _turn_length(turn, content)
            # Some templates leave out thoughts of turns that others follow.
            inside, at = turn.rfind(content), text.find(content, begin)
            tail = turn[inside + len(content) :]
            if content and inside >= 0 and at >= 0 and text.startswith(tail, at + len(content)):
                return begin, at + _turn_length(content + tail, content)
        raise HpctrainError(
            f"{self.template.title}: writes message {number + 1} in another way where others follow it, so "
            "that nobody knows what is the assistant's ({% generation %} blocks in the template would tell)"
        )

    def _guarded(self, asked: Conversation, render: _Render) -> Rendered:
        """What `render` makes of a conversation, with the places where people spell special tokens."""
        text, learned = render(asked)
        strings = list(_strings([asked.messages, asked.tools]))
        if not any(self._any.search(each) or self._begun(each) for each in strings):
            return Rendered(text, learned, [])
        free = [each for each in _NO_CHARACTERS if each not in text and not any(each in s for s in strings)]
        if len(free) < 2:
            raise HpctrainError("has special tokens beside code points that are no characters")
        opening, closing = free[:2]
        marked = _mapped(asked._asdict(), lambda each: self._marked(each, opening, closing))
        inside = render(Conversation(**marked))[0]
        if re.sub(f"[{opening}{closing}]", "", inside) != text:
            raise HpctrainError(
                f"{self.template.title}: looks into what people say where it spells a special token, which "
                "cannot be told from text there"
            )
        return Rendered(text, learned, _between(inside, opening, closing))

    def _begun(self, text: str) -> int:
        """How many characters at the end of a text, but for space, are how a special token begins."""
        text = text.rstrip()
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in self._beginnings), 0)

    def _marked(self, text: str, opening: str, closing: str) -> str:
        """The text with what spells a special token, or at the end begins to, between two marks."""
        begun, end = self._begun(text), len(text.rstrip())
        if begun:
            text = f"{text[: end - begun]}{opening}{text[end - begun : end]}{closing}{text[end:]}"
        return self._any.sub(lambda found: f"{opening}{found[0]}{closing}", text)


def _pattern(tokens: Mapping[str, int]) -> re.Pattern[str]:
    """Any of the tokens, the longest first."""
    longest = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


def _turn_length(turn: str, content: str) -> int:
    """Of a turn, up to what ends it: space behind that is the template's, if it is not all that ends it."""
    kept = turn.rstrip()
    more = turn.lstrip().startswith(content) and len(content) < len(kept.lstrip())
    return len(turn) if content and kept.endswith(content) and not more else len(kept)


def _strings(value: Any) -> Iterator[str]:
    """All texts in lists and objects, and keys of these that no template asks for."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if not key.isidentifier():
                yield key
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The same with all texts changed, but for keys by which a template may ask for something."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        named = ((key if key.isidentifier() else change(key), each) for key, each in value.items())
        return {key: _mapped(each, change) for key, each in named}
    return [_mapped(each, change) for each in value] if isinstance(value, list | tuple) else value


def _between(text: str, opening: str, closing: str) -> list[Range]:
    """Where marks stand around, in the text without them."""
    found, at, begin = [], 0, 0
    for letter in text:
        if letter == opening:
            begin = at
        elif letter == closing:
            found.append((begin, at))
        else:
            at += 1
    return found
