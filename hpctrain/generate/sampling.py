"""How tokens are drawn: by which chances, and by which random numbers.

What is drawn for a text at a position is a function of the logits there and of the seed, the text's numbers
and the position alone, so that neither layout nor what is beside it changes it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError
from hpctrain.generate.continuing import GeneratedText
from hpctrain.parallel.random import key_of
from hpctrain.splitmix import GOLDEN, mix
from hpctrain.text import text_problem


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and where a text ends.

    First logits of tokens that the text has are lowered: positive ones divided by `repetition_penalty`,
    negative ones multiplied with it (CTRL, arXiv 1909.05858). `temperature` 0 takes the likeliest token.
    Then, in this order, only the `top_k` likeliest tokens are drawn, of these only the fewest whose
    probability reaches `top_p` (nucleus sampling, arXiv 1904.09751), and of these those that are at least
    `min_p` times as likely as the likeliest (arXiv 2407.01082). `seed` None is another one each time. A text
    ends before any of `stops`.
    """

    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    samples: int = 1
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stops: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise HpctrainError with every option that is out of range."""
        problems = []
        if self.tokens < 1:
            problems.append(f"--tokens {self.tokens}: must be at least 1")
        if not 0 <= self.temperature < inf:
            asked = "must be 0 (greedy decoding) or more"
            problems.append(f"--temperature {self.temperature:g}: {asked}")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"--top-k {self.top_k}: must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"--top-p {self.top_p:g}: must be above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            problems.append(
                f"--min-p {self.min_p:g}: must be from 0 (all tokens) to 1 (the most likely token)"
            )
        if not 0 < self.repetition_penalty < inf:
            asked = "must be above 0 (1 has no effect, 1.2 penalizes tokens of the text)"
            problems.append(f"--repetition-penalty {self.repetition_penalty:g}: {asked}")
        if not all(self.stops):
            problems.append("--stop: must not be empty")
        if problem := next(filter(None, map(text_problem, self.stops)), ""):
            problems.append(f"--stop: {problem}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            problems.append(f"--seed {self.seed}: must be from 0 to 2^63 - 1")
        if self.samples < 1:
            problems.append(f"--samples {self.samples}: must be at least 1")
        if self.samples > 1 and (self.temperature == 0 or self.top_k == 1):
            why = "--temperature 0" if self.temperature == 0 else "--top-k 1"
            problems.append(
                f"--samples {self.samples} conflicts with {why}, which gives the same text each time"
            )
        if problems:
            raise HpctrainError(problems)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities [b, V] fp64, zero for what may not be drawn, of finite logits [b, V]."""
        if self.temperature and self.top_k is None and self.top_p is None and self.min_p is None:
            values = logits.double()
            return ((values - values.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        # Stable, so that of equal logits the first counts as the larger one, as in argmax.
        values, order = logits.double().sort(dim=-1, descending=True, stable=True)
        count = 1 if self.temperature == 0 else self.top_k or values.shape[-1]
        values[:, count:] = -inf
        chances = ((values - values[:, :1]) / (self.temperature or 1.0)).softmax(-1)
        if self.top_p is not None:
            before = chances.cumsum(-1) - chances
            chances[before >= self.top_p] = 0.0
            chances /= chances.sum(-1, keepdim=True)
        if self.min_p is not None:
            chances[chances < self.min_p * chances[:, :1]] = 0.0
            chances /= chances.sum(-1, keepdim=True)
        return torch.zeros_like(chances).scatter_(-1, order, chances)

    def settled(self, group: Group) -> Sampling:
        """The same with a seed, if it has none that of the group's rank 0. Collective."""
        if self.seed is not None:
            return self
        return replace(self, seed=group.broadcast_object(secrets.randbits(62)))


class KeyedSampler:
    """Tokens of settled Sampling, drawn by all ranks of a group that have the same logits; see Draw."""

    def __init__(self, sampling: Sampling, vocabulary: int, name: str, group: Group) -> None:
        assert sampling.seed is not None
        self.sampling, self.vocabulary, self.name, self.group = sampling, vocabulary, name, group
        self._keys: dict[tuple[int, int], int] = {}

    def __call__(self, texts: Sequence[GeneratedText], logits: Tensor) -> list[int]:
        """The next token of each text, by logits [texts, V]. Collective; HpctrainError where some are not
        finite, with the name of the model.
        """
        ranks, rank = self.group.size, self.group.rank
        finite = bool(logits.isfinite().all())
        if not finite:
            sentence = "the model's logits are not finite, so no token can be sampled"
            raise HpctrainError(f"{self.name}: {sentence}")
        own = range(rank, len(texts), ranks)
        drawn = torch.zeros(-(-len(texts) // ranks), dtype=torch.int64)
        if own:
            of_own = logits[rank::ranks, : self.vocabulary].float().cpu()
            drawn[: len(own)] = self._draw([texts[number] for number in own], of_own)
        if ranks == 1:
            return drawn.tolist()
        every = self.group.all_gather(drawn.to(self.group.device)).view(ranks, -1).t().flatten()
        found: list[int] = every[: len(texts)].tolist()
        return found

    def _draw(self, texts: Sequence[GeneratedText], logits: Tensor) -> Tensor:
        penalty = self.sampling.repetition_penalty
        if penalty != 1:
            rows = zip(logits, texts, strict=True)
            logits = torch.stack([penalized(row, text.tokens, penalty) for row, text in rows])
        if self.sampling.temperature == 0:
            # Of equal ones the first.
            return (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        sums = self.sampling.probabilities(logits).cumsum(-1)
        uniform = uniforms([self._key(text) for text in texts], [len(text.tokens) for text in texts])
        return torch.searchsorted(sums, torch.from_numpy(uniform).unsqueeze(1) * sums[:, -1:], right=True)[
            :, 0
        ]

    def _key(self, text: GeneratedText) -> int:
        of = text.number, text.sample
        if of not in self._keys:
            assert self.sampling.seed is not None
            self._keys[of] = key_of(self.sampling.seed, f"text {text.number} {text.sample}")
        return self._keys[of]


def uniforms(keys: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Random numbers from 0 to below 1, of 53 bits, each a function of its key and position."""
    words = np.array(positions, np.uint64) * np.uint64(GOLDEN) + np.array(keys, np.uint64)
    found: npt.NDArray[np.float64] = (mix(words) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def penalized(logits: Tensor, tokens: Sequence[int], penalty: float) -> Tensor:
    """The logits [V] of the next token of a text of these tokens, lower where it has that already."""
    if penalty == 1:
        return logits
    had_tokens = torch.tensor(tokens).unique()
    had_tokens = had_tokens[had_tokens < logits.shape[0]]
    had = logits[had_tokens]
    return logits.index_put((had_tokens,), torch.where(had < 0, had * penalty, had / penalty))
