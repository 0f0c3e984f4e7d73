"""Texts that grow beside each other, of different lengths: who takes part in which forward pass.

Each pass has the next token of every text that has come so far, and tokens of prompts as there is room. A
text that ends makes room for the next one at once (continuous batching, Orca, OSDI 2022). Texts that begin
alike, as the samples of a prompt do, have one of them compute that beginning for all (arXiv 2309.06180).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpctrain.errors import HpctrainError


@dataclass(eq=False)
class GeneratedText:
    """The `tokens` of a text, those given and those added, at most `limit`.

    `number` and `sample` tell it from others in what is drawn. It has `ended` when it grows no more.
    """

    tokens: list[int]
    limit: int
    number: int = 0
    sample: int = 0
    given: int = field(init=False)
    ended: bool = False

    def __post_init__(self) -> None:
        self.given = len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens that it will have at the most."""
        return self.given + self.limit


Draw = Callable[[Sequence[GeneratedText], Tensor], Sequence[int]]
"""The next token of each text by logits [texts, V], the same on all ranks that compute these."""

Drawn = Callable[[], Sequence[int]]
"""Waits for what is being drawn."""

Grown = Callable[[GeneratedText, int], bool]
"""Called with a token that a text has got: whether the text has ended with it."""


class PassTokens(NamedTuple):
    """Tokens of one text that a pass with the cache computes.

    Attributes:
        place: Place of the text in the cache, which has the tokens before these.
        first: Position of the first token.
        tokens: The tokens.
        predicts: True if the logits after the last token are needed.
        text_length: Number of tokens that the text has, on which scaled rotary positions may depend.
    """

    place: int
    first: int
    tokens: Sequence[int]
    predicts: bool
    text_length: int


class ForwardPasses(Protocol):
    """Forward passes of a model that continues texts.

    A pass with the cache computes at most `rows` tokens of texts that have a place in the cache. A pass
    without the cache computes the last `window` tokens of each text.

    Attributes:
        window: Largest number of tokens that the model can attend to.
        reach: Largest number of tokens of a text in the cache.
        rows: Largest number of tokens of a pass with the cache.
        places: Number of texts that fit into the cache.
        turns: Number of groups of texts. Each group has its pass before the next tokens of the other groups
            are known.
        longest_short_text: Number of tokens after which all positions of a text rotate otherwise, so that its
            cached keys have to be computed again. None if there is no such number.
    """

    window: int
    reach: int
    rows: int
    places: int
    turns: int
    longest_short_text: int | None

    def open(self) -> int:
        """Reserve a place in the cache for a text, and return it."""

    def close(self, place: int) -> None:
        """Release the place of a text that has ended or has become too long."""

    def share(self, source: int, place: int, count: int) -> None:
        """Copy the first `count` tokens of the text in `source` into the empty place `place`."""

    def cached(self, pieces: Sequence[PassTokens]) -> Tensor:
        """Return the logits [n, V] of the pieces that predict a token, in their order."""

    def windowed(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, V] of the tokens after windows, int64 [b, s], without the cache."""

    def start_draw(self, draw: Draw, texts: Sequence[GeneratedText], logits: Tensor) -> Drawn:
        """Start to draw the next tokens of texts from their logits, which only some ranks may have."""


def at_once(draw: Draw, texts: Sequence[GeneratedText], logits: Tensor) -> Drawn:
    """What is drawn already, as on ranks that all have the logits."""
    return partial(list, draw(texts, logits))


_NOTHING: Drawn = partial(tuple[int, ...], ())

WINDOWS = 8
"""Windows that share a pass, which bounds the memory of activations."""


@dataclass(eq=False)
class _Growing:
    """A text in its `place`, if it has one, with so many tokens in the cache. While it has a `source`, it
    waits for all but the last of the tokens that both were given.
    """

    text: GeneratedText
    place: int | None
    done: int = 0
    source: _Growing | None = None

    @property
    def shared(self) -> int:
        """What it takes from a source: of the last token's row the next one is drawn."""
        return self.text.given - 1


def continue_texts(
    passes: ForwardPasses, texts: Iterable[GeneratedText], draw: Draw, grown: Grown
) -> Iterator[list[GeneratedText]]:
    """Have all texts grow until each has ended; after each pass those that have come by a token.

    What does not fit into the model's window has no cache: positions would be others with each token. Where
    several ranks have parts of the model, all of them are to stop after the same pass, if before the end.
    """
    waiting = iter(texts)
    shares = [len(range(turn, passes.places, passes.turns)) for turn in range(passes.turns)]
    turns = deque((_grow(passes, waiting, draw, grown, share), _NOTHING) for share in shares if share)
    try:
        while turns:
            growing, _ = turns.popleft()
            for step in growing:
                if not isinstance(step, list):
                    turns.append((growing, step))
                    break
                yield step
    except (HpctrainError, GeneratorExit):
        # What is on its way to this rank is to arrive there.
        for _, drawn in turns:
            with suppress(HpctrainError):
                drawn()
        raise


def _grow(
    passes: ForwardPasses, waiting: Iterator[GeneratedText], draw: Draw, grown: Grown, places: int
) -> Iterator[list[GeneratedText] | Drawn]:
    """Have texts grow in so many places. Begins to draw, and leaves it to others to have their turn; then
    gives those that have come by a token.
    """
    growing = list[_Growing]()
    while True:
        while len(growing) < places and (coming := next(waiting, None)) is not None:
            each = _Growing(coming, None)
            if coming.given <= passes.reach:
                each.source = _with_its_beginning(passes, growing, coming)
                each.place = passes.open()
                _share(passes, each)
            growing.append(each)
        if not growing:
            return
        ready, logits = _pass(passes, growing)
        drawn = passes.start_draw(draw, [each.text for each in ready], logits) if ready else _NOTHING
        yield drawn
        for each, token in zip(ready, drawn(), strict=True):
            text = each.text
            text.tokens.append(token)
            text.ended = grown(text, token) or len(text.tokens) == text.longest
            if each.place is None:
                continue
            if text.ended or len(text.tokens) > passes.reach:
                passes.close(each.place)
                each.place = None
            elif _is_long(passes, len(text.tokens)) and not _is_long(passes, len(text.tokens) - 1):
                passes.close(each.place)  # other texts may share its pages
                each.place, each.done = passes.open(), 0
        growing = [each for each in growing if not each.text.ended]
        if ready:
            yield [each.text for each in ready]


def _pass(passes: ForwardPasses, growing: Sequence[_Growing]) -> tuple[list[_Growing], Tensor]:
    """Bring all as far as rows go: those of which the next token can be drawn, and logits of these."""
    cached = [each for each in growing if each.place is not None and each.source is None]
    # Those of which least is missing come first, which are those that have their prompts behind them.
    cached.sort(key=lambda each: len(each.text.tokens) - each.done)
    pieces, ready, rows = list[PassTokens](), list[_Growing](), passes.rows
    for each in cached:
        tokens = each.text.tokens[each.done : each.done + rows]
        if not tokens:
            break
        assert each.place is not None
        predicts = each.done + len(tokens) == len(each.text.tokens)
        pieces.append(PassTokens(each.place, each.done, tokens, predicts, len(each.text.tokens)))
        each.done += len(tokens)
        rows -= len(tokens)
        if predicts:
            ready.append(each)
    found = [passes.cached(pieces)] if pieces else []
    for each in growing:
        _share(passes, each)
    for some in _windows(growing, passes.window):
        windows = [each.text.tokens[-passes.window :] for each in some]
        found.append(passes.windowed(torch.tensor(windows)))
        ready += some
    return ready, torch.cat(found)


def _is_long(passes: ForwardPasses, length: int) -> bool:
    """Return True if a text of so many tokens has the rotations of long texts."""
    return passes.longest_short_text is not None and length > passes.longest_short_text


def _with_its_beginning(
    passes: ForwardPasses, growing: Sequence[_Growing], text: GeneratedText
) -> _Growing | None:
    """Return a text whose cached keys the same prompt can take; None if there is none."""
    for each in growing:
        there = each.place is not None and each.source is None
        there = there and _is_long(passes, len(each.text.tokens)) == _is_long(passes, text.given)
        if there and 1 < each.text.given == text.given and each.text.tokens[: text.given] == text.tokens:
            return each
    return None


def _share(passes: ForwardPasses, each: _Growing) -> None:
    """Let it have what it waits for, if that is there."""
    source = each.source
    if source is None or source.done < each.shared:
        return
    assert source.place is not None and each.place is not None
    passes.share(source.place, each.place, each.shared)
    each.done, each.source = each.shared, None


def _windows(growing: Sequence[_Growing], window: int) -> Iterator[list[_Growing]]:
    """Those without a place, by how much the model sees of them, WINDOWS at a time."""
    lengths: dict[int, list[_Growing]] = {}
    for each in growing:
        if each.place is None:
            lengths.setdefault(min(window, len(each.text.tokens)), []).append(each)
    for same in lengths.values():
        for first in range(0, len(same), WINDOWS):
            yield same[first : first + WINDOWS]
