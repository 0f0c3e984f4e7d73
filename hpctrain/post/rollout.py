"""A rollout: answers that were written by one policy, and what was found out about them, as samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.data.batches import MASKED, MicroBatch, MicroBatchRequest, SequenceSource


class Answer(NamedTuple):
    """What a model wrote behind a prompt: the prompt's `number` and which `sample` of it this is, all token
    ids of both, how many of them are the answer's, its text, and why it ended, see Continuation.
    """

    number: int
    sample: int
    ids: tuple[int, ...]
    written: int
    text: str
    why: str


class AnswerRows(SequenceSource):
    """Answers as sequences of `length` tokens: each with its prompt from the first place on; targets are the
    answer's tokens.
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
            first = len(ids) - answer.written
            self.targets[row, first - 1 : len(ids) - 1] = ids[first:]

    @property
    def answered(self) -> Tensor:
        """Which places predict a token of an answer, [n, s]."""
        return self.targets >= 0

    @override
    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.targets[index]

    def real_tokens(self, index: int) -> int:
        """Return the number of tokens of a sequence in front of its padding."""
        return self.lengths[index]


@dataclass(frozen=True)
class Rollout:
    """Answers of one rollout, with their rewards.

    Attributes:
        answers: The answers.
        rows: Tokens and targets of the answers.
        scores: Weighted sum of the rewards of each answer, [n].
        fields: Further fields of the micro-batches by name, fp32 [n, s] each.
        figures: Metrics of the rollout by name.
        rewards: Values of each reward by its name.
    """

    answers: Sequence[Answer]
    rows: AnswerRows
    scores: Tensor
    fields: Mapping[str, Tensor]
    figures: Mapping[str, float]
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
        for each, micro in zip(
            batch_requests, self.rollout.rows.micro_batches(batch_requests, upcoming), strict=True
        ):
            own = torch.from_numpy(each.indices)
            more: dict[str, Tensor] = {}
            for name, values in self.rollout.fields.items():
                more[name] = torch.zeros(each.micro_size, values.shape[1])
                more[name][: len(own)] = values[own]
            yield replace(micro, fields={**micro.fields, **more})
