"""Continuous batching: which tokens of which texts each forward pass computes (Orca, OSDI 2022).

Each pass computes the next token of every text whose prompt is in the cache, and further tokens of prompts as
long as there is room. A waiting text takes the slot of a text that ends. If texts have the same prompt, one
of them computes its keys and values, and the others share them (arXiv 2309.06180).
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
    """Token ids of a prompt and of its continuation.

    Attributes:
        tokens: Ids of the prompt, then of the tokens that were generated so far.
        max_new_tokens: Largest number of tokens that are generated.
        prompt_number: Number of the prompt. With the seed and `sample_number`, it selects the random numbers.
        sample_number: Number of this sample among those of its prompt.
        prompt_length: Number of tokens of the prompt.
        is_finished: True if no further token is generated.
    """

    tokens: list[int]
    max_new_tokens: int
    prompt_number: int = 0
    sample_number: int = 0
    prompt_length: int = field(init=False)
    is_finished: bool = False

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def max_length(self) -> int:
        """Largest number of tokens of the prompt and its continuation."""
        return self.prompt_length + self.max_new_tokens


TokenSampler = Callable[[Sequence[GeneratedText], Tensor], Sequence[int]]
"""Returns the next token of each text by logits [texts, V]; collective over the ranks with these logits."""

PendingTokens = Callable[[], Sequence[int]]
"""Waits until the next tokens of some texts are known on this rank, and returns them."""

TokenCallback = Callable[[GeneratedText, int], bool]
"""Called with each new token of a text, which the text already contains. Returns True to finish the text."""


class PassTokens(NamedTuple):
    """Tokens of one text that a pass with the cache computes.

    Attributes:
        slot: Slot of the text in the cache, which has the tokens before these.
        first: Position of the first token.
        tokens: The token ids.
        predicts: True if the logits after the last token are needed.
        text_length: Number of tokens that the text has, on which scaled rotary positions may depend.
    """

    slot: int
    first: int
    tokens: Sequence[int]
    predicts: bool
    text_length: int


class ForwardPasses(Protocol):
    """Forward passes of a model, by which `continue_texts` generates tokens.

    The cache has a slot for each text that is generated at the same time. A text that is longer than
    `max_cached_length` has no slot, and each of its tokens takes a pass over the last `window` tokens.

    All ranks that share the model make the same calls in the same order. Calls of `run_cached`, `run_windows`
    and `start_sampling` are collective over these ranks, the other ones are local.

    Attributes:
        window: Largest number of tokens that the model can attend to.
        max_cached_length: Largest number of tokens of a text in the cache; 0 without a cache.
        max_tokens_per_pass: Largest number of tokens of a pass with the cache.
        slot_count: Largest number of texts that are generated at the same time.
        group_count: Number of groups of texts. Each group has its pass before the next tokens of the other
            groups are known.
        short_text_limit: Largest number of tokens of a short text. A text longer than this has other rotary
            frequencies, so its cached keys are computed again. None if there is no such limit.
    """

    window: int
    max_cached_length: int
    max_tokens_per_pass: int
    slot_count: int
    group_count: int
    short_text_limit: int | None

    def allocate_slot(self) -> int:
        """Reserve a slot of the cache for a text, and return its number."""

    def free_slot(self, slot: int) -> None:
        """Release the slot of a text that has ended or is too long for the cache."""

    def share_prefix(self, source: int, slot: int, count: int) -> None:
        """Let an empty slot begin with the first `count` tokens of the text in slot `source`."""

    def run_cached(self, pieces: Sequence[PassTokens]) -> Tensor:
        """Compute tokens of texts in the cache.

        Args:
            pieces: Tokens of each text, at most `max_tokens_per_pass` together.

        Returns:
            Logits [n, V] after the n pieces that predict a token, in their order. On stages without the
            output layer of the model, [n, 0].
        """

    def run_windows(self, tokens: Tensor) -> Tensor:
        """Compute whole windows without the cache.

        Args:
            tokens: Last tokens of b texts, int64 [b, s].

        Returns:
            Logits [b, V] after the last tokens. On stages without the output layer of the model, [b, 0].
        """

    def start_sampling(
        self, sampler: TokenSampler, texts: Sequence[GeneratedText], logits: Tensor
    ) -> PendingTokens:
        """Start to sample the next tokens of texts.

        Args:
            sampler: Function that samples, on ranks that have the logits.
            texts: The texts.
            logits: Their logits [texts, V]. They are ignored on stages without the output layer.

        Returns:
            Function that waits for the tokens. Every rank calls it.
        """


def sample_now(sampler: TokenSampler, texts: Sequence[GeneratedText], logits: Tensor) -> PendingTokens:
    """Sample tokens at once, on ranks that all have the logits; see `ForwardPasses.start_sampling`."""
    return partial(list, sampler(texts, logits))


_NO_TOKENS: PendingTokens = partial(tuple[int, ...], ())

WINDOWS_PER_PASS = 8
"""Largest number of windows in a pass without the cache, which bounds the memory of activations."""


@dataclass(eq=False)
class _RunningText:
    """Text that is being generated.

    Attributes:
        text: The text.
        slot: Its slot in the cache; None if it is too long for the cache.
        cached_length: Number of its tokens in the cache.
        prefix_source: Text with the same prompt for whose keys and values it waits; None if it does not.
    """

    text: GeneratedText
    slot: int | None
    cached_length: int = 0
    prefix_source: _RunningText | None = None

    @property
    def shared_length(self) -> int:
        """Number of tokens that it shares: all of the prompt but the last, whose logits it needs itself."""
        return self.text.prompt_length - 1


def continue_texts(
    passes: ForwardPasses,
    texts: Iterable[GeneratedText],
    sampler: TokenSampler,
    on_token: TokenCallback,
) -> Iterator[list[GeneratedText]]:
    """Generate all texts until each has ended, and yield the texts with a new token after each pass.

    Collective over the ranks that share the model. If a caller stops early, it has to do so after the same
    pass on all of these ranks.

    Args:
        passes: Forward passes of the model.
        texts: The texts, which are read when there are free slots. Tokens are appended to them.
        sampler: Function that samples the next tokens.
        on_token: Called with each new token. The text ends if it returns True.

    Raises:
        HpctrainError: The sampler failed. Raised on all ranks that share the model.
    """
    waiting = iter(texts)
    slots_of_groups = [
        len(range(group, passes.slot_count, passes.group_count)) for group in range(passes.group_count)
    ]
    groups = deque(
        (_run_group(passes, waiting, sampler, on_token, slots), _NO_TOKENS)
        for slots in slots_of_groups
        if slots
    )
    try:
        while groups:
            group, _ = groups.popleft()
            for step in group:
                if not isinstance(step, list):
                    groups.append((group, step))
                    break
                yield step
    except (HpctrainError, GeneratorExit):
        # Receive the tokens that were already sent to this rank.
        for _, pending in groups:
            with suppress(HpctrainError):
                pending()
        raise


def _run_group(
    passes: ForwardPasses,
    waiting: Iterator[GeneratedText],
    sampler: TokenSampler,
    on_token: TokenCallback,
    slots: int,
) -> Iterator[list[GeneratedText] | PendingTokens]:
    """Generate texts in a number of slots until no text is waiting and all have ended.

    Yields, for each pass, the function that waits for its tokens, so that other groups have their pass
    meanwhile, and then the texts that have a new token, if there are any.
    """
    running = list[_RunningText]()
    while True:
        while len(running) < slots and (text := next(waiting, None)) is not None:
            each = _RunningText(text, None)
            if text.prompt_length <= passes.max_cached_length:
                each.prefix_source = _find_prefix_source(passes, running, text)
                each.slot = passes.allocate_slot()
                _share_if_ready(passes, each)
            running.append(each)
        if not running:
            return
        predicted, logits = _run_pass(passes, running)
        pending = _NO_TOKENS
        if predicted:
            pending = passes.start_sampling(sampler, [each.text for each in predicted], logits)
        yield pending
        for each, token in zip(predicted, pending(), strict=True):
            text = each.text
            text.tokens.append(token)
            text.is_finished = on_token(text, token) or len(text.tokens) == text.max_length
            if each.slot is None:
                continue
            if text.is_finished or len(text.tokens) > passes.max_cached_length:
                passes.free_slot(each.slot)
                each.slot = None
            elif _is_long(passes, len(text.tokens)) and not _is_long(passes, len(text.tokens) - 1):
                passes.free_slot(each.slot)  # other texts may share its pages
                each.slot, each.cached_length = passes.allocate_slot(), 0
        running = [each for each in running if not each.text.is_finished]
        if predicted:
            yield [each.text for each in predicted]


def _run_pass(passes: ForwardPasses, running: Sequence[_RunningText]) -> tuple[list[_RunningText], Tensor]:
    """Compute one pass with the cache, and those of all texts without a slot.

    Returns:
        The texts whose next token can be sampled, and their logits [texts, V].
    """
    cached = [each for each in running if each.slot is not None and each.prefix_source is None]
    # Texts with the fewest tokens to compute come first: those whose prompts are in the cache.
    cached.sort(key=lambda each: len(each.text.tokens) - each.cached_length)
    pieces, predicted, room = list[PassTokens](), list[_RunningText](), passes.max_tokens_per_pass
    for each in cached:
        tokens = each.text.tokens[each.cached_length : each.cached_length + room]
        if not tokens:
            break
        assert each.slot is not None
        text_length = len(each.text.tokens)
        predicts = each.cached_length + len(tokens) == text_length
        pieces.append(PassTokens(each.slot, each.cached_length, tokens, predicts, text_length))
        each.cached_length += len(tokens)
        room -= len(tokens)
        if predicts:
            predicted.append(each)
    logits = [passes.run_cached(pieces)] if pieces else []
    for each in running:
        _share_if_ready(passes, each)
    for batch in _window_batches(running, passes.window):
        windows = [each.text.tokens[-passes.window :] for each in batch]
        logits.append(passes.run_windows(torch.tensor(windows)))
        predicted += batch
    return predicted, torch.cat(logits)


def _is_long(passes: ForwardPasses, length: int) -> bool:
    """Return True if a text of this number of tokens has the rotations of long texts."""
    return passes.short_text_limit is not None and length > passes.short_text_limit


def _find_prefix_source(
    passes: ForwardPasses, running: Sequence[_RunningText], text: GeneratedText
) -> _RunningText | None:
    """Return a text with the same prompt, whose keys and values can be shared; None if there is none."""
    for each in running:
        is_usable = each.slot is not None and each.prefix_source is None
        is_usable = is_usable and (
            _is_long(passes, len(each.text.tokens)) == _is_long(passes, text.prompt_length)
        )
        length = text.prompt_length
        if is_usable and 1 < each.text.prompt_length == length and each.text.tokens[:length] == text.tokens:
            return each
    return None


def _share_if_ready(passes: ForwardPasses, running_text: _RunningText) -> None:
    """Share the prompt of the text that this one waits for, if all of the prompt is in the cache."""
    source, count = running_text.prefix_source, running_text.shared_length
    if source is None or source.cached_length < count:
        return
    assert source.slot is not None and running_text.slot is not None
    passes.share_prefix(source.slot, running_text.slot, count)
    running_text.cached_length, running_text.prefix_source = count, None


def _window_batches(running: Sequence[_RunningText], window: int) -> Iterator[list[_RunningText]]:
    """Yield the texts without a slot in batches of the same length, at most WINDOWS_PER_PASS each."""
    by_length: dict[int, list[_RunningText]] = {}
    for each in running:
        if each.slot is None:
            by_length.setdefault(min(window, len(each.text.tokens)), []).append(each)
    for same_length in by_length.values():
        for first in range(0, len(same_length), WINDOWS_PER_PASS):
            yield same_length[first : first + WINDOWS_PER_PASS]
