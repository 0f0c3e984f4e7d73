"""Tokens of conversations, and which of them are learned: the messages of the assistant, with their ends.

Only text of the template becomes special tokens. Text of messages stays ordinary text, even if it contains
the name of a special token. To distinguish them, such names in messages are marked by two unused characters
during a second rendering.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hpctrain.data.chat_roles import ASSISTANT
from hpctrain.data.chat_rows import Conversation
from hpctrain.data.chat_template import ChatTemplate
from hpctrain.data.template_process import Range, Rendering, RenderRequest, TemplateLimitError
from hpctrain.data.tokenizer import BYTES, GuardedTokenizer, Tokenizer, lost_text, parse_tokenizer
from hpctrain.errors import HpctrainError

# Noncharacters of Unicode, which text normally does not contain.
_NO_CHARACTERS = [chr(point) for point in range(0xFDD0, 0xFDF0)]


TokensWithOffsets = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]
"""Token ids [n], and the index of the first character of each [n] and of the one after its last [n]."""


class TokenRequest(NamedTuple):
    """A conversation to tokenize; with `prompt`, only up to where the assistant's answer begins."""

    conversation: Conversation
    prompt: bool = False


class ConversationTokens(NamedTuple):
    """Tokens of a conversation.

    Attributes:
        ids: Token ids, [n].
        learned: 1 for each token that is learned, else 0, [n].
    """

    ids: npt.NDArray[np.uint32]
    learned: npt.NDArray[np.uint8]


class Rendered(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: The text.
        learned: Ranges of it that are learned.
        literals: Ranges in which a user's text contains the name of a special token; they stay text.
        marks: Two characters that mark these ranges in a second rendering, if that is still needed; else
            empty.
    """

    text: str
    learned: Sequence[Range]
    literals: Sequence[Range]
    marks: tuple[str, ...] = ()


class ChatTokenizer:
    """Conversion of conversations to tokens, by a chat template and a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.template, self.tokenizer, self.special = template, tokenizer, tokenizer.control
        self._guarded_tokenizer: GuardedTokenizer | None = None
        self._library: Any = None
        if tokenizer.text != BYTES:
            from tokenizers import processors

            content = parse_tokenizer(tokenizer.text, "tokenizer")
            self._guarded_tokenizer = GuardedTokenizer(content, tokenizer.settings, "tokenizer")
            self._library = self._guarded_tokenizer.library
            # Add no special tokens around a text, and include spaces in the offsets of tokens.
            self._library.post_processor = processors.ByteLevel(trim_offsets=False)
        self._special_pattern = _pattern(self.special)
        self._beginnings = {token[:n] for token in self.special for n in range(1, len(token))}
        self._longest = max(map(len, self._beginnings), default=0)

    @property
    def unknown_tokens(self) -> list[str]:
        """Names in the template that look like special tokens but are not in the vocabulary.

        They are ordinary text, so text of messages can imitate them.
        """
        written = re.findall(r"<\|[a-z_]+\|>", self.template.text)
        known = {*self.special}
        if self._library is not None:
            known.update(self._library.get_vocab(with_added_tokens=True))
        return sorted({each for each in written if each not in known})

    def end_of_turn(self) -> tuple[int, ...]:
        """Return the id of the control token with which the template ends an assistant's turn.

        The tuple is empty if the template ends turns with ordinary text, or rejects a minimal conversation.
        """
        messages = [{"role": role, "content": "a"} for role in ("user", ASSISTANT)]
        try:
            tokens = self.conversation(Conversation(messages))
        except TemplateLimitError:
            raise
        except HpctrainError:
            return ()
        learned = tokens.ids[tokens.learned.astype(bool)]
        if len(learned) and int(learned[-1]) in self.special.values():
            return (int(learned[-1]),)
        return ()

    def conversation(self, conversation: Conversation) -> ConversationTokens:
        """Return the tokens of a conversation.

        Raises:
            HpctrainError: The conversation cannot be rendered or encoded.
        """
        return self._tokens_of_one(TokenRequest(conversation))

    def prompt(self, conversation: Conversation) -> ConversationTokens:
        """Return the tokens up to where the assistant answers, none of which is learned."""
        return self._tokens_of_one(TokenRequest(conversation, prompt=True))

    def _tokens_of_one(self, request: TokenRequest) -> ConversationTokens:
        [outcome] = self.tokens_of([request])
        if isinstance(outcome, HpctrainError):
            raise outcome
        return outcome

    def tokens_of(self, requests: Sequence[TokenRequest]) -> list[ConversationTokens | HpctrainError]:
        """Return the tokens of each conversation, or its error. All are rendered by one request."""
        outcomes = self.template.process.render([self._request(each) for each in requests])
        parts = [self._rendered(*each) for each in zip(requests, outcomes, strict=True)]
        marked = [
            (number, part) for number, part in enumerate(parts) if isinstance(part, Rendered) and part.marks
        ]
        again = [self._marked_request(requests[number], part.marks) for number, part in marked]
        for (number, part), outcome in zip(marked, self.template.process.render(again), strict=True):
            parts[number] = self._with_literals(part, outcome)
        return [each if isinstance(each, HpctrainError) else self._encoded(each) for each in parts]

    def _encoded(self, rendered: Rendered) -> ConversationTokens | HpctrainError:
        try:
            return self.encode(rendered)
        except HpctrainError as error:
            return error

    def encode(self, rendered: Rendered) -> ConversationTokens:
        """Return the tokens of a rendered conversation. A token is learned if any of its characters is."""
        text = rendered.text
        covered = np.zeros(len(text) + 2, np.int64)
        for begin, end in rendered.learned:
            covered[begin + 1 : end + 1] = 1
        covered = covered.cumsum()
        ids, begins, ends = self._encode_bytes(rendered) if self._library is None else self._encode(rendered)
        ends = np.minimum(np.maximum(ends, begins + 1), len(text))  # a token may have no characters
        begins = np.minimum(begins, len(text))
        return ConversationTokens(ids.astype(np.uint32), (covered[ends] > covered[begins]).astype(np.uint8))

    def _of_template(self, rendered: Rendered) -> Iterator[re.Match[str]]:
        """Yield the control tokens that the template writes, not those in messages, in order."""
        at = 0
        for match in self._special_pattern.finditer(rendered.text):
            begin, end = match.span()
            if begin >= at and not any(begin < last and first < end for first, last in rendered.literals):
                yield match
                at = end

    def _encode_bytes(self, rendered: Rendered) -> TokensWithOffsets:
        """Return the bytes of the text as ids, and the range of characters of each."""
        text, at, pieces = rendered.text, 0, list[TokensWithOffsets]()
        for match in self._of_template(rendered):
            begin, end = match.span()
            pieces.append(_bytes_of(text[at:begin], at))
            pieces.append((np.array([self.special[match[0]]]), np.array([begin]), np.array([end])))
            at = end
        pieces.append(_bytes_of(text[at:], at))
        ids, begins, ends = map(np.concatenate, zip(*pieces, strict=True))
        return ids, begins, ends

    def _encode(self, rendered: Rendered) -> TokensWithOffsets:
        """Return the token ids of the text, and the range of characters of each.

        Control tokens that the template writes are replaced by their new names in the guarded tokenizer. So
        the text is encoded in one call, and names of control tokens in messages stay ordinary text.
        """
        assert self._guarded_tokenizer is not None
        text, at, hidden = rendered.text, 0, self._guarded_tokenizer.hidden
        parts, positions, ends = list[str](), list[npt.NDArray[np.int64]](), 0
        for match in self._of_template(rendered):
            begin, end = match.span()
            name = hidden[match[0]]
            parts += [text[at:begin], name]
            positions += [np.arange(at, begin), np.full(len(name), begin)]
            at, ends = end, ends + (match[0] == self.tokenizer.end_name)
        position = np.concatenate([*positions, np.arange(at, len(text) + 1)])
        guarded = "".join([*parts, text[at:]]).encode("utf-8", "replace").decode()
        try:
            encoding = self._library.encode(guarded, add_special_tokens=False)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise HpctrainError(f"cannot be encoded: {error}") from None
        ids, offsets = np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)
        lost = self.tokenizer.end_of_document
        if self._guarded_tokenizer.marks_lost_text and int((ids == lost).sum()) > ends:
            raise HpctrainError(lost_text(self._library, text, lost))
        # `position` maps offsets to the original text, in which names of control tokens are shorter.
        return ids, position[offsets[:, 0]], position[offsets[:, 1]]

    def _request(self, request: TokenRequest) -> RenderRequest:
        """Return the request for the whole text, and for the prefixes that determine what is learned."""
        conversation = request.conversation
        prefixes = [(len(conversation.messages), request.prompt)]
        if not request.prompt and "endgeneration" in self.template.text:
            prefixes += [(conversation.first, False)] if conversation.first else []
            prefixes += [(count, False) for n in conversation.unlearned for count in (n, n + 1)]
        elif not request.prompt:
            prefixes += [prefix for n in conversation.learned for prefix in ((n, True), (n + 1, False))]
        return RenderRequest(conversation.messages, conversation.tools, prefixes)

    def _rendered(
        self, request: TokenRequest, outcome: list[Rendering] | HpctrainError
    ) -> Rendered | HpctrainError:
        """Return the rendered conversation with its learned ranges, and with marks if it needs any."""
        if isinstance(outcome, HpctrainError):
            return outcome
        text = outcome[0][0]
        try:
            learned = [] if request.prompt else self._learned(request.conversation, outcome)
            return Rendered(text, learned, [], self._marks(request.conversation, text))
        except HpctrainError as error:
            return error

    def _learned(self, conversation: Conversation, outcome: list[Rendering]) -> list[Range]:
        """Return the ranges of the text that are learned."""
        text, generated = outcome[0]
        if "endgeneration" in self.template.text:
            lengths = iter([len(before) for before, _ in outcome[1:]])
            first = next(lengths) if conversation.first else 0
            generated = [each for each in generated if each[0] >= first]
            for start, end in zip(lengths, lengths, strict=True):  # of messages that are not learned
                generated = [each for each in generated if not start <= each[0] < end]
            return generated
        pairs = zip(conversation.learned, outcome[1::2], outcome[2::2], strict=True)
        return [
            self._turn(conversation, number, text, before, through)
            for number, (before, _), (through, _) in pairs
        ]

    def _turn(self, conversation: Conversation, number: int, text: str, before: str, through: str) -> Range:
        """Return the range of an assistant's message in the whole text, including the end of its turn.

        Args:
            conversation: The conversation.
            number: Index of the message.
            text: Text of the whole conversation.
            before: Text before the message, with the generation prompt.
            through: Text up to and including the message.
        """
        content = conversation.messages[number]["content"].strip()
        turn, begin = through[len(before) :], len(before)
        if through.startswith(before) and text.startswith(before):
            if text.startswith(turn, begin):
                return begin, begin + _turn_length(turn, content)
            # Some templates leave out the reasoning of turns that others follow.
            inside, at = turn.rfind(content), text.find(content, begin)
            tail = turn[inside + len(content) :]
            if content and inside >= 0 and at >= 0 and text.startswith(tail, at + len(content)):
                return begin, at + _turn_length(content + tail, content)
        raise HpctrainError(
            f"{self.template.title}: renders message {number + 1} differently if others follow it, so the "
            "text of the assistant is unknown (mark it by {% generation %} blocks in the template)"
        )

    def _marks(self, conversation: Conversation, text: str) -> tuple[str, ...]:
        """Return two unused characters if messages contain names of special tokens; else an empty tuple."""
        strings = list(_strings([conversation.messages, conversation.tools]))
        if not any(self._special_pattern.search(each) or self._beginning_length(each) for each in strings):
            return ()
        free = [each for each in _NO_CHARACTERS if each not in text and not any(each in s for s in strings)]
        if len(free) < 2:
            raise HpctrainError(
                "has names of special tokens together with Unicode noncharacters, which is unsupported"
            )
        return free[0], free[1]

    def _with_literals(
        self, rendered: Rendered, outcome: list[Rendering] | HpctrainError
    ) -> Rendered | HpctrainError:
        """Return the rendered conversation with the ranges in which messages contain names of special tokens.

        Args:
            rendered: The text without marks.
            outcome: The same conversation, rendered with marks.
        """
        if isinstance(outcome, HpctrainError):
            return outcome
        inside, (opening, closing) = outcome[0][0], rendered.marks
        if re.sub(f"[{opening}{closing}]", "", inside) != rendered.text:
            return HpctrainError(
                f"{self.template.title}: depends on message text that contains the name of a special token, "
                "so the token and the text cannot be distinguished"
            )
        return Rendered(rendered.text, rendered.learned, _between(inside, opening, closing))

    def _marked_request(self, request: TokenRequest, marks: tuple[str, ...]) -> RenderRequest:
        """Return the request for the whole text, with marks around names of special tokens in messages."""
        opening, closing = marks
        conversation = _mapped(
            request.conversation._asdict(), lambda each: self._marked(each, opening, closing)
        )
        prefixes = [(len(request.conversation.messages), request.prompt)]
        return RenderRequest(conversation["messages"], conversation["tools"], prefixes)

    def _beginning_length(self, text: str) -> int:
        """Return how many characters at the end of a text, without spaces, may begin a special token."""
        text = text.rstrip()
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in self._beginnings), 0)

    def _marked(self, text: str, opening: str, closing: str) -> str:
        """Return a text with marks around names of special tokens, also around a partial one at its end."""
        length, end = self._beginning_length(text), len(text.rstrip())
        if length:
            text = f"{text[: end - length]}{opening}{text[end - length : end]}{closing}{text[end:]}"
        return self._special_pattern.sub(lambda match: f"{opening}{match[0]}{closing}", text)


def _bytes_of(text: str, at: int) -> TokensWithOffsets:
    """Return the bytes of a text as ids, and the character of each. The text begins at character `at`."""
    sizes = [len(each.encode("utf-8", "replace")) for each in text]
    begins = np.repeat(np.arange(len(text)), sizes) + at
    return np.frombuffer(text.encode("utf-8", "replace"), np.uint8), begins, begins + 1


def _pattern(tokens: Mapping[str, int]) -> re.Pattern[str]:
    """Return a pattern that matches any of the tokens, the longest one first."""
    longest = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


def _turn_length(turn: str, content: str) -> int:
    """Return the length of a turn up to and including its end.

    Spaces after the end belong to the template, unless they are the only text that ends the turn.
    """
    stripped = turn.rstrip()
    has_end = turn.lstrip().startswith(content) and len(content) < len(stripped.lstrip())
    return len(turn) if content and stripped.endswith(content) and not has_end else len(stripped)


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts in lists and objects, and the keys of objects that are not identifiers."""
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
    """Return a copy with all texts changed, except keys that are identifiers, which templates may use."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        named = ((key if key.isidentifier() else change(key), each) for key, each in value.items())
        return {key: _mapped(each, change) for key, each in named}
    return [_mapped(each, change) for each in value] if isinstance(value, list | tuple) else value


def _between(text: str, opening: str, closing: str) -> list[Range]:
    """Return the ranges between marks, as positions in the text without marks."""
    ranges, at, begin = [], 0, 0
    for character in text:
        if character == opening:
            begin = at
        elif character == closing:
            ranges.append((begin, at))
        else:
            at += 1
    return ranges
