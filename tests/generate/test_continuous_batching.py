"""Texts that grow beside each other, by scripted logits: who is in which pass, what is drawn, who ends.

Tests of generate/continuous_batching.py and of the draws of generate/sampling.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.generate.continuation import Continuation
from hpctrain.generate.continuous_batching import (
    GeneratedText,
    PassTokens,
    PendingTokens,
    TokenSampler,
    continue_texts,
    sample_now,
)
from hpctrain.generate.sampling import KeyedSampler, Sampling, uniform_numbers

BYTES = Tokenizer("bytes")
END = BYTES.end_of_document


class Windows:
    """Passes without a cache, by what gives the logits of windows."""

    max_cached_length, max_tokens_per_pass, group_count = 0, 1, 1
    start_sampling = staticmethod(sample_now)

    def __init__(self, windowed: Callable[[Tensor], Tensor], window: int, places: int = 8) -> None:
        self.run_windows, self.window, self.slot_count = windowed, window, places

    def allocate_slot(self) -> int:
        raise AssertionError

    def free_slot(self, _: int) -> None:
        raise AssertionError

    def share_prefix(self, *_: int) -> None:
        raise AssertionError

    def run_cached(self, _: Sequence[PassTokens]) -> Tensor:
        raise AssertionError


class Recorded:
    """Passes with a cache, whose logits say that what comes behind a text is its length; what came when."""

    group_count = 1
    short_text_limit: int | None = None
    start_sampling = staticmethod(sample_now)

    def __init__(self, window: int, rows: int, places: int) -> None:
        self.window, self.max_tokens_per_pass = window, rows
        self.slot_count, self.max_cached_length = places, window
        self.texts: dict[int, list[int]] = {}
        self.passes: list[list[PassTokens]] = []
        self.most = self.shared = 0

    def allocate_slot(self) -> int:
        place = min(set(range(self.slot_count)) - set(self.texts))
        self.texts[place] = []
        self.most = max(self.most, len(self.texts))
        return place

    def free_slot(self, place: int) -> None:
        del self.texts[place]

    def share_prefix(self, source: int, place: int, count: int) -> None:
        assert self.texts[place] == [] and count <= len(self.texts[source])
        self.texts[place] += self.texts[source][:count]
        self.shared += count

    def run_cached(self, pieces: Sequence[PassTokens]) -> Tensor:
        assert 0 < sum(len(piece.tokens) for piece in pieces) <= self.max_tokens_per_pass
        self.passes.append(list(pieces))
        for piece in pieces:
            assert len(self.texts[piece.slot]) == piece.first
            self.texts[piece.slot] += piece.tokens
        lengths = [len(self.texts[piece.slot]) for piece in pieces if piece.predicts]
        return likely(lengths)

    def run_windows(self, tokens: Tensor) -> Tensor:
        return likely([100 + tokens.shape[1]] * len(tokens))


def likely(tokens: Sequence[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.int64), BYTES.vocabulary).float() * 50


def scripted(*columns: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Logits of one call after another, whose likeliest token is the given one of each sample."""
    calls = iter(columns)
    return lambda _: likely(next(calls))


def continued_by(
    windowed: Callable[[Tensor], Tensor],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    group: Group,
    window: int = 8,
    ends: Callable[[GeneratedText, int], bool] = lambda _, token: token == END,
) -> list[list[int]]:
    """What is added to each prompt."""
    texts = [GeneratedText(list(prompt), sampling.tokens, number) for number, prompt in enumerate(prompts)]
    draws = KeyedSampler(sampling.with_seed(group), BYTES.vocabulary, "model", group)
    for _ in continue_texts(Windows(windowed, window), texts, draws, ends):
        pass
    assert all(text.is_finished for text in texts)
    return [text.tokens[text.prompt_length :] for text in texts]


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (3, None), (None, 0.9)])
def test_tokens_are_drawn_as_often_as_they_are_likely(
    world: World, top_k: int | None, top_p: float | None
) -> None:
    chances = torch.tensor([2.0, 1.0, 0.0, -1.0]).softmax(0)
    logits = torch.full((BYTES.vocabulary,), -100.0)
    logits[:4] = chances.log()
    sampling = Sampling(tokens=4000, temperature=1.0, top_k=top_k, top_p=top_p, seed=5)
    group = world.single_rank_world().everyone
    [drawn] = continued_by(lambda context: logits.expand(len(context), -1), [[0]], sampling, group)
    expected = chances if top_k is top_p is None else chances * torch.tensor([1, 1, 1, 0])
    counts = torch.bincount(torch.tensor(drawn), minlength=4)
    assert torch.allclose(counts / 4000, expected / expected.sum(), atol=0.03)


def test_random_numbers_are_even_and_differ() -> None:
    found = torch.from_numpy(uniform_numbers([7] * 20000 + [8] * 20000, [*range(20000), *range(20000)]))
    assert 0 <= found.min() < 1e-3 and 0.999 < found.max() < 1
    assert torch.histc(found, 20).sub(2000).abs().max() < 200
    assert len(found.unique()) == 40000
    pair = found[:20000], found[20000:]
    assert abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) < 0.03
    assert uniform_numbers([8], [3])[0] == found[20003]


@pytest.mark.mpi(min_size=1, max_size=3)
def test_each_text_ends_by_itself_and_all_together_end_the_work(world: World) -> None:
    logits = scripted([1, 2], [END, 3], [5], [END])
    sampling = Sampling(tokens=100, temperature=0.0)
    assert continued_by(logits, [[9], [8]], sampling, world.everyone) == [[1, END], [2, 3, 5, END]]


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_text_ends_with_its_stop_and_is_in_no_pass_any_more(world: World) -> None:
    samples = [Continuation(BYTES, [0], ["b"]), Continuation(BYTES, [0], ["b"])]
    drawn = continued_by(
        scripted([97, 97], [98, 97], [97], [98]),
        [[0], [0]],
        Sampling(tokens=9, temperature=0.0),
        world.everyone,
        ends=lambda text, token: samples[text.prompt_number].add(token),
    )
    assert drawn == [[97, 98], [97, 97, 97, 98]]
    assert [sample.finish() for sample in samples] == ["a", "aaa"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2, 3], [[1, 2, 3], [1, 2, 3, 10], [2, 3, 10, 11]]),
        ([1, 2, 3, 4, 5, 6], [[3, 4, 5, 6], [4, 5, 6, 10], [5, 6, 10, 11]]),
    ],
)
def test_the_model_sees_the_last_tokens_of_its_window(
    world: World, prompt: list[int], expected: list[list[int]]
) -> None:
    seen: list[list[int]] = []
    follow = scripted([10], [11], [12])

    def windowed(context: Tensor) -> Tensor:
        seen.extend(context.tolist())
        return follow(context)

    sampling, group = Sampling(tokens=3, temperature=0.0), world.single_rank_world().everyone
    assert continued_by(windowed, [prompt], sampling, group, window=4) == [[10, 11, 12]]
    assert seen == expected


def greedy(passes: Recorded, texts: Sequence[GeneratedText]) -> list[list[GeneratedText]]:
    def draw(_: Sequence[GeneratedText], logits: Tensor) -> list[int]:
        found: list[int] = logits.argmax(-1).tolist()
        return found

    return list(continue_texts(passes, texts, draw, lambda *_: False))


def test_forty_prompts_by_five_places() -> None:
    texts = [GeneratedText(list(range(1 + 7 * number % 23)), 1 + number % 11, number) for number in range(40)]
    passes = Recorded(window=64, rows=16, places=5)
    greedy(passes, texts)
    for text in texts:
        assert text.is_finished
        assert text.tokens == list(range(text.max_length))
    assert passes.most == 5
    assert passes.texts == {}
    whole = sum(text.max_length - 1 for text in texts)
    assert sum(len(piece.tokens) for each in passes.passes for piece in each) == whole - passes.shared
    # Few places are idle before the last prompts.
    assert len(passes.passes) < 1.5 * max(sum(text.max_new_tokens for text in texts) / 5, whole / 16)


def test_groups_take_turns_before_the_tokens_of_others_are_known() -> None:
    happened: list[str] = []
    texts = [GeneratedText([0] * (1 + number), 2, number) for number in range(5)]

    class Turns(Recorded):
        group_count = 2

        def run_cached(self, pieces: Sequence[PassTokens]) -> Tensor:
            happened.append("pass")
            return super().run_cached(pieces)

        def start_sampling(  # type: ignore[override]
            self, sampler: TokenSampler, texts: Sequence[GeneratedText], logits: Tensor
        ) -> PendingTokens:
            def drawn() -> Sequence[int]:
                happened.append("drawn " + "".join(str(text.prompt_number) for text in texts))
                return sampler(texts, logits)

            return drawn

    steps = greedy(Turns(window=64, rows=16, places=3), texts)
    assert happened == [
        "pass", "pass", "drawn 01", "pass", "drawn 2", "pass", "drawn 01", "pass", "drawn 2", "drawn 34",
        "pass", "drawn 34",
    ]  # fmt: skip
    numbers = [[text.prompt_number for text in step] for step in steps]
    assert numbers == [[0, 1], [2], [0, 1], [2], [3, 4], [3, 4]]
    for text in texts:
        assert text.tokens[text.prompt_length :] == [text.prompt_length, text.prompt_length + 1]


def test_samples_of_a_prompt_compute_it_once() -> None:
    texts = [GeneratedText(list(range(20)), 3, 0, sample) for sample in range(4)]
    texts += [
        GeneratedText(list(range(20))[::-1], 3, 1),
        GeneratedText([0], 3, 2),
        GeneratedText([0], 3, 2, 1),
    ]
    passes = Recorded(window=64, rows=64, places=6)
    steps = greedy(passes, texts)
    for text in texts[:4]:
        assert text.tokens == list(range(23))
    assert passes.shared == 3 * 19
    assert [[len(piece.tokens) for piece in each] for each in passes.passes] == [
        [1, 20, 20], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1], [1], [1],
    ]  # fmt: skip
    assert len(steps[0]) == 3
    assert all(text.is_finished for text in texts)


def test_a_source_that_ends_with_its_first_token_has_given_before() -> None:
    texts = [GeneratedText(list(range(20)), 1 + 2 * (sample == 2), 0, sample) for sample in range(3)]
    passes = Recorded(window=64, rows=8, places=3)
    greedy(passes, texts)
    assert [len(text.tokens) for text in texts] == [21, 21, 23]
    assert passes.shared == 2 * 19
    assert passes.texts == {}


def test_who_comes_later_takes_what_is_there() -> None:
    lengths = (1, 5, 4, 3)
    texts = [GeneratedText(list(range(9)), length, 0, sample) for sample, length in enumerate(lengths)]
    passes = Recorded(window=64, rows=64, places=2)
    greedy(passes, texts)
    assert [text.tokens[9:] for text in texts] == [list(range(9, 9 + length)) for length in lengths]
    assert passes.shared == 3 * 8


def test_a_text_with_other_rotations_is_computed_again() -> None:
    lengths = (3, 8, 2)  # the second text is long when the third one takes the place of the first one
    texts = [GeneratedText(list(range(9)), length, 0, sample) for sample, length in enumerate(lengths)]
    passes = Recorded(window=64, rows=64, places=2)
    passes.short_text_limit = 9
    greedy(passes, texts)
    assert [text.tokens for text in texts] == [list(range(9 + length)) for length in lengths]
    counts = [[(len(piece.tokens), piece.text_length) for piece in each] for each in passes.passes]
    assert counts == [
        [(9, 9)], [(1, 9), (10, 10)], [(1, 11), (10, 10)], [(1, 11), (9, 9)], [(1, 12), (10, 10)],
        *[[(1, length)] for length in (13, 14, 15, 16)],
    ]  # fmt: skip
    assert passes.shared == 8


@pytest.mark.parametrize("long_first", [False, True])
def test_long_prompts_come_in_pieces_beside_texts_that_grow(long_first: bool) -> None:
    texts = [GeneratedText([0], 6, 0), GeneratedText(list(range(30)), 2, 1)]
    passes = Recorded(window=64, rows=8, places=2)
    greedy(passes, texts[::-1] if long_first else texts)
    assert [[len(piece.tokens) for piece in each] for each in passes.passes] == [
        [1, 7], [1, 7], [1, 7], [1, 7], [1, 2], [1, 1],
    ]  # fmt: skip


def test_beyond_the_window_there_is_no_cache() -> None:
    texts = [GeneratedText([0, 1], 6, 0), GeneratedText(list(range(9)), 2, 1)]
    passes = Recorded(window=4, rows=8, places=2)
    greedy(passes, texts)
    assert texts[0].tokens == [0, 1, 2, 3, 4, 104, 104, 104]
    assert texts[1].tokens[9:] == [104, 104]
    assert passes.texts == {}


@pytest.mark.mpi(min_size=1, max_size=3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neither_ranks_nor_other_texts_change_what_is_drawn(world: World, temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(20, 300, generator=generator)
    logits[:, 257:] = 100  # beyond the vocabulary of the tokenizer
    logits[0, 5] = logits[0, 9] = 50
    texts = [GeneratedText([0] * (1 + number % 4), 5, number, number % 3) for number in range(20)]
    sampling = Sampling(temperature=temperature, seed=4)
    together = KeyedSampler(sampling, 257, "model", world.everyone)(texts, logits)
    alone = KeyedSampler(sampling, 257, "model", world.single_rank_world().everyone)
    assert together == [alone([text], logits[n : n + 1])[0] for n, text in enumerate(texts)]
    assert together[0] == 5 or temperature
    if temperature:
        other = KeyedSampler(Sampling(temperature=1.0, seed=5), 257, "model", world.everyone)
        assert other(texts, logits) != together
        same = [GeneratedText([0], 5, number, sample) for number in range(3) for sample in range(3)]
        assert len(set(alone(same, logits[1:2].expand(9, -1)))) > 5
