"""Sampling of tokens: filters of probabilities, and random numbers that depend only on seed and position.

The token of a text at a position is a function of the logits there, the seed, the numbers of the text and the
position. Therefore it depends neither on the layout nor on the other texts of a pass.
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
from hpctrain.generate.continuous_batching import GeneratedText
from hpctrain.parallel.random import key_of
from hpctrain.splitmix import GOLDEN, mix
from hpctrain.text import text_problem


@dataclass(frozen=True)
class Sampling:
    """Options by which tokens are sampled and a text ends.

    `probabilities` applies the filters in the order temperature, top_k, top_p, min_p, after `KeyedSampler`
    has applied the repetition penalty.

    Attributes:
        tokens: Largest number of tokens that are generated for each text.
        temperature: Divisor of the logits; 0 for greedy decoding.
        top_k: Number of most likely tokens to sample from; None for all.
        top_p: Sample from the smallest set of most likely tokens whose total probability reaches this value
            (nucleus sampling, arXiv 1904.09751); None for all.
        seed: Seed of the random numbers; None for another one in each run, see `with_seed`.
        samples: Number of texts for each prompt.
        min_p: Sample from tokens at least `min_p` times as likely as the most likely one (arXiv 2407.01082);
            None for all.
        repetition_penalty: Divisor of positive logits, and factor of negative ones, of tokens that the text
            contains (CTRL, arXiv 1909.05858); 1 has no effect.
        stops: Strings before which a text ends.
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
        """Check the ranges of all options.

        Raises:
            HpctrainError: Some options are out of range. The error names all of them.
        """
        problems = []
        if self.tokens < 1:
            problems.append(f"--tokens {self.tokens}: must be at least 1")
        if not 0 <= self.temperature < inf:
            problems.append(f"--temperature {self.temperature:g}: must be 0 (greedy decoding) or more")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"--top-k {self.top_k}: must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"--top-p {self.top_p:g}: must be above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            problems.append(
                f"--min-p {self.min_p:g}: must be from 0 (all tokens) to 1 (the most likely token)"
            )
        if not 0 < self.repetition_penalty < inf:
            expected = "must be above 0 (1 has no effect, 1.2 penalizes tokens of the text)"
            problems.append(f"--repetition-penalty {self.repetition_penalty:g}: {expected}")
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
        """Return the probabilities with which tokens are sampled, without the repetition penalty.

        Args:
            logits: Finite logits [b, V].

        Returns:
            Probabilities [b, V] in fp64, 0 for tokens that the filters exclude.
        """
        if self.temperature and self.top_k is None and self.top_p is None and self.min_p is None:
            values = logits.double()
            return ((values - values.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        # Stable, so that of equal logits the first counts as the larger one, as in argmax.
        values, order = logits.double().sort(dim=-1, descending=True, stable=True)
        count = 1 if self.temperature == 0 else self.top_k or values.shape[-1]
        values[:, count:] = -inf
        probabilities = ((values - values[:, :1]) / (self.temperature or 1.0)).softmax(-1)
        if self.top_p is not None:
            before = probabilities.cumsum(-1) - probabilities
            probabilities[before >= self.top_p] = 0.0
            probabilities /= probabilities.sum(-1, keepdim=True)
        if self.min_p is not None:
            probabilities[probabilities < self.min_p * probabilities[:, :1]] = 0.0
            probabilities /= probabilities.sum(-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)

    def with_seed(self, group: Group) -> Sampling:
        """Return these options with a seed: a random one of the group's rank 0 if they have none.

        Collective over the group.
        """
        if self.seed is not None:
            return self
        return replace(self, seed=group.broadcast_object(secrets.randbits(62)))


class KeyedSampler:
    """TokenSampler whose random numbers depend only on the seed, the numbers of a text and the position.

    Args:
        sampling: Options, with a seed.
        vocabulary: Number of tokens of the tokenizer. Further logits are ignored.
        name: Name of the model, for error messages.
        group: Ranks that have the same logits. Each samples for a share of the texts.
    """

    def __init__(self, sampling: Sampling, vocabulary: int, name: str, group: Group) -> None:
        assert sampling.seed is not None
        self.sampling, self.vocabulary, self.name, self.group = sampling, vocabulary, name, group
        self._keys: dict[tuple[int, int], int] = {}

    def __call__(self, texts: Sequence[GeneratedText], logits: Tensor) -> list[int]:
        """Return the next token of each text. Collective over the group.

        Args:
            texts: The texts so far.
            logits: Their logits [texts, V].

        Raises:
            HpctrainError: Some logits are not finite.
        """
        ranks, rank = self.group.size, self.group.rank
        finite = bool(logits.isfinite().all())
        if not finite:
            sentence = "the model's logits are not finite, so no token can be sampled"
            raise HpctrainError(f"{self.name}: {sentence}")
        numbers = range(rank, len(texts), ranks)
        own_tokens = torch.zeros(-(-len(texts) // ranks), dtype=torch.int64)
        if numbers:
            own_logits = logits[rank::ranks, : self.vocabulary].float().cpu()
            own_tokens[: len(numbers)] = self._sample([texts[number] for number in numbers], own_logits)
        if ranks == 1:
            return own_tokens.tolist()
        gathered = self.group.all_gather(own_tokens.to(self.group.device)).view(ranks, -1).t().flatten()
        tokens: list[int] = gathered[: len(texts)].tolist()
        return tokens

    def _sample(self, texts: Sequence[GeneratedText], logits: Tensor) -> Tensor:
        """Return the next tokens [texts], int64, by logits [texts, vocabulary] in fp32 on the host. Local."""
        penalty = self.sampling.repetition_penalty
        if penalty != 1:
            rows = zip(logits, texts, strict=True)
            logits = torch.stack([apply_repetition_penalty(row, text.tokens, penalty) for row, text in rows])
        if self.sampling.temperature == 0:
            # The first of equal maxima.
            return (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        sums = self.sampling.probabilities(logits).cumsum(-1)
        uniform = uniform_numbers([self._key(text) for text in texts], [len(text.tokens) for text in texts])
        return torch.searchsorted(sums, torch.from_numpy(uniform).unsqueeze(1) * sums[:, -1:], right=True)[
            :, 0
        ]

    def _key(self, text: GeneratedText) -> int:
        """Return the key of a text's random numbers."""
        numbers = text.prompt_number, text.sample_number
        if numbers not in self._keys:
            assert self.sampling.seed is not None
            name = f"text {text.prompt_number} {text.sample_number}"
            self._keys[numbers] = key_of(self.sampling.seed, name)
        return self._keys[numbers]


def uniform_numbers(keys: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return random numbers in [0, 1) with 53 bits, each a function of its key and position."""
    words = np.array(positions, np.uint64) * np.uint64(GOLDEN) + np.array(keys, np.uint64)
    numbers: npt.NDArray[np.float64] = (mix(words) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def apply_repetition_penalty(logits: Tensor, tokens: Sequence[int], penalty: float) -> Tensor:
    """Return logits that are lower for tokens which a text contains.

    Args:
        logits: Logits [V] of the next token of the text.
        tokens: Token ids of the text. Ids from V on are ignored.
        penalty: Divisor of positive logits and factor of negative ones.
    """
    ids = torch.tensor(tokens).unique()
    ids = ids[ids < logits.shape[0]]
    earlier = logits[ids]
    return logits.index_put((ids,), torch.where(earlier < 0, earlier * penalty, earlier / penalty))
