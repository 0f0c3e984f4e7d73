"""Rollouts: answers that one version of the policy wrote, and the samples that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.data.batches import MASKED, MicroBatch, MicroBatchRequest, SequenceSource


class Answer(NamedTuple):
    """Answer of a model to a prompt.

    Attributes:
        prompt_number: Number of the prompt.
        sample_number: Number of this answer among those to the same prompt.
        ids: Token ids of the prompt and the answer.
        length: Number of tokens of the answer.
        text: Text of the answer.
        finish_reason: Reason why it ended, as in `Continuation`.
    """

    prompt_number: int
    sample_number: int
    ids: tuple[int, ...]
    length: int
    text: str
    finish_reason: str

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.ids) - self.length


class AnswerRows(SequenceSource):
    """Sequences of `length` tokens: each has a prompt with its answer, then padding.

    Targets are the tokens of the answers.
    """

    def __init__(self, answers: Sequence[Answer], length: int) -> None:
        self.length, self.count = length, len(answers)
        self.tokens = torch.zeros(self.count, length, dtype=torch.int64)
        self.targets = torch.full_like(self.tokens, MASKED)
        self.lengths = [len(answer.ids) for answer in answers]
        for row, answer in enumerate(answers):
            ids = torch.tensor(answer.ids)
            assert len(ids) <= length, (len(ids), length)
            self.tokens[row, : len(ids)] = ids
            first = answer.prompt_length
            self.targets[row, first - 1 : len(ids) - 1] = ids[first:]

    @property
    def answer_mask(self) -> Tensor:
        """Tensor [n, s] that is True at the positions which predict a token of an answer."""
        return self.targets >= 0

    @override
    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.targets[index]

    @override
    def real_tokens(self, index: int) -> int:
        return self.lengths[index]


@dataclass(frozen=True)
class Rollout:
    """Answers of one rollout, with their rewards.

    Attributes:
        answers: The answers.
        rows: Tokens and targets of the answers.
        scores: Weighted sum of the rewards of each answer, [n].
        fields: Further fields of the micro-batches by name, fp32 [n, s] each.
        metrics: Metrics of the rollout by name.
        rewards: Values of each reward by its name.
    """

    answers: Sequence[Answer]
    rows: AnswerRows
    scores: Tensor
    fields: Mapping[str, Tensor]
    metrics: Mapping[str, float]
    rewards: Mapping[str, Sequence[float]] = field(default_factory=dict)


class RolloutSource:
    """Source of samples that are the answers of the current rollout. All rollouts have `count` answers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rollout: Rollout | None = None

    def micro_batches(
        self, requests: Iterable[MicroBatchRequest], upcoming: Iterable[MicroBatchRequest]
    ) -> Iterator[MicroBatch]:
        """Yield the requested micro-batches with the fields of the current rollout."""
        assert self.rollout is not None
        batch_requests = list(requests)
        micro_batches = self.rollout.rows.micro_batches(batch_requests, upcoming)
        for request, micro in zip(batch_requests, micro_batches, strict=True):
            indices = torch.from_numpy(request.indices)
            fields: dict[str, Tensor] = {}
            for name, values in self.rollout.fields.items():
                fields[name] = torch.zeros(request.micro_size, values.shape[1])
                fields[name][: len(indices)] = values[indices]
            yield replace(micro, fields={**micro.fields, **fields})
