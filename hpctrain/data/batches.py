"""The micro-batches of a data rank, and token files as sequences.

The tokens are one stream, documents packed end to end. Sequence i reads tokens i*sequence to
(i+1)*sequence, one more than it has inputs: inputs are all but the last, targets all but the first.
The trailing sequences are held out for validation. Nothing here has state: the position in the order
of samples is the trainer's, and is in its checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hpctrain.data.documents import Documents
from hpctrain.data.fit import needed_tokens, split_sizes
from hpctrain.data.order import Integers, SampleOrder
from hpctrain.data.row_lengths import RowLengths
from hpctrain.data.shards import Tokens
from hpctrain.errors import HpctrainError
from hpctrain.words import counted

MASKED = -1
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch of one data rank.

    Attributes:
        fields: Tensors by name, each with a row for every sample: [b, ...].
        samples: Number of rows that are samples; the other rows follow them. None if all rows are samples.
        sequences: True if all fields are [b, s], of which each context rank has a piece.
        documents: Documents in the sequences, which do not see each other. None if each sequence is one.
        lengths: Numbers of real tokens of the rows. None if the rows of all samples are full.
    """

    fields: Mapping[str, Tensor]
    samples: int | None = None
    sequences: bool = False
    documents: Documents | None = None
    lengths: RowLengths | None = None

    @staticmethod
    def of_tokens(
        tokens: Tensor,
        targets: Tensor,
        samples: int | None = None,
        documents: Documents | None = None,
        lengths: RowLengths | None = None,
    ) -> MicroBatch:
        """Return the micro-batch of these `tokens` and `targets`, both int64 [b, s].

        A target is -1 where nothing is to be predicted, as in rows that are no samples.
        """
        return MicroBatch({"tokens": tokens, "targets": targets}, samples, True, documents, lengths)

    @property
    def row_lengths(self) -> RowLengths | None:
        """Numbers of real tokens of all rows; None if all tokens are real, or if fields are no sequences."""
        if self.lengths is not None or not self.sequences or self.present == self.rows:
            return self.lengths
        return RowLengths.of_full_rows(self.present, *next(iter(self.fields.values())).shape)

    @property
    def real_tokens(self) -> int:
        """Number of tokens that are not padding; of samples if fields are no sequences."""
        if not self.sequences:
            return self.present
        lengths = self.row_lengths
        return next(iter(self.fields.values())).numel() if lengths is None else lengths.total

    @property
    def tokens(self) -> Tensor:
        """Those of a token file."""
        return self.fields["tokens"]

    @property
    def targets(self) -> Tensor:
        """Those of a token file."""
        return self.fields["targets"]

    @property
    def rows(self) -> int:
        """All of them, whether they are samples or not."""
        return len(next(iter(self.fields.values())))

    @property
    def present(self) -> int:
        """Those that are samples."""
        return self.rows if self.samples is None else self.samples


class Wanted(NamedTuple):
    """A micro-batch to be read: of the samples `indices`, at most `micro_size`, each in an epoch of `epochs`.

    `last` is the last sample, and its epoch, of all that are read together.
    """

    indices: Integers
    epochs: Integers
    micro_size: int
    last: tuple[int, int]


class Samples(Protocol):
    """What Batches reads: `count` samples."""

    count: int

    def micro_batches(self, wanted: Iterable[Wanted], later: Iterable[Wanted]) -> Iterator[MicroBatch]:
        """Those that are wanted now; `later` ones, which are likely to be wanted next, may be got ready."""


class Sequences(ABC):
    """Samples that are sequences of `length` tokens, each with its targets (see `MicroBatch.of_tokens`).

    Where an `end_of_document` is given, documents do not see each other: none of them predicts the next one.
    """

    length: int
    count: int
    end_of_document: int | None = None

    @property
    def apart(self) -> bool:
        """Whether micro-batches tell of documents, which do not see each other."""
        return self.end_of_document is not None

    @abstractmethod
    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one sequence, each int64 [length]."""

    def real_tokens(self, index: int) -> int:  # noqa: ARG002
        """Return the number of tokens at the beginning of a sequence that are not padding."""
        return self.length

    def row(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same, without targets of ends of documents; and places in these (None: it is one)."""
        tokens, targets = self.sequence(index)
        end = self.end_of_document
        if end is None:
            return tokens, targets, None
        places = Documents.of(tokens.unsqueeze(0), end).places[0]
        return tokens, targets.masked_fill(tokens == end, MASKED), places

    def micro_batches(self, wanted: Iterable[Wanted], later: Iterable[Wanted]) -> Iterator[MicroBatch]:  # noqa: ARG002
        """Yield the micro-batches, each filled up to its size with rows of zeros whose targets are masked."""
        for each in wanted:
            tokens = torch.zeros(each.micro_size, self.length, dtype=torch.int64)
            targets = torch.full_like(tokens, MASKED)
            places = torch.arange(self.length).expand_as(tokens).clone()
            lengths = torch.zeros(each.micro_size, dtype=torch.int64)
            for row, index in enumerate(each.indices.tolist()):
                tokens[row], targets[row], own = self.row(index)
                if own is not None:
                    places[row] = own
                lengths[row] = self.real_tokens(index)
            documents = Documents(places) if self.apart else None
            samples, padded = len(each.indices), bool((lengths[: len(each.indices)] < self.length).any())
            known = RowLengths(lengths) if padded else None
            yield MicroBatch.of_tokens(tokens, targets, samples, documents, known)


class SequenceSource(Sequences):
    """The sequences of one split: "train" the leading ones, "validation" the trailing `fraction`.

    Validation has at least one sequence where `fraction` is above zero, and none where it is zero.
    HpctrainError when the file is too short to give both splits one sequence.
    """

    def __init__(
        self, file: Tokens, sequence: int, fraction: float, split: str, document_mask: bool = False
    ) -> None:
        assert split in SPLITS and 0 <= fraction < 1 and sequence > 0, (split, fraction, sequence)
        self.file = file
        self.end_of_document = file.end_of_document if document_mask else None
        self.length = sequence
        trained, held_out = split_sizes(file.tokens, sequence, fraction)
        if not trained:
            raise HpctrainError(
                f"{file.where}: has {counted(file.tokens, 'token')}, but batch.sequence = {sequence} with "
                f"data.validation = {fraction:g} needs at least {needed_tokens(sequence, fraction)}"
            )
        self._first = 0 if split == "train" else trained
        self.count = trained if split == "train" else held_out

    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of sequence `index` of this split, each int64 [sequence]."""
        assert 0 <= index < self.count, (index, self.count)
        window = self.file.read((self._first + index) * self.length, self.length + 1)
        return window[:-1], window[1:]


class Order(Protocol):
    """Which sample comes where, counted over all epochs."""

    def at(self, places: Integers, /) -> Integers:
        """The samples at places >= 0 [n]."""

    def epochs(self, places: Integers, /) -> Integers:
        """The epochs of these samples, from 0."""

    def by_entry(self, samples: int, /) -> dict[str, float]:
        """Of a mixture, how often each entry was taken in so many samples, by name."""


class Batches:
    """The micro-batches of every step.

    The samples of a step are laid out the same for every layout: micro-batch k of data rank r holds
    samples (k*data_ranks + r)*micro_size and the following of the step. Where the samples do not fill
    all micro-batches, some have fewer or none, so that all ranks have equally many.
    """

    def __init__(self, source: Samples, seed: int, order: Order | None = None, repeats: float = 1.0) -> None:
        """In the `order` given, else as the seed shuffles them. In an epoch each is taken so often
        (`repeats`).
        """
        self.source, self.repeats = source, repeats
        self.order = SampleOrder(source.count, seed) if order is None and source.count else order

    def step(
        self, first_sample: int, global_size: int, data_rank: int, data_ranks: int, micro_size: int
    ) -> Iterator[MicroBatch]:
        """This rank's ceil(global_size / (data_ranks*micro_size)) micro-batches of one step.

        The step's samples are the positions first_sample .. first_sample + global_size - 1 of the
        order, counted over all epochs.
        """
        share = global_size, data_rank, data_ranks, micro_size
        later = self._of_step(first_sample + global_size, *share)
        yield from self.source.micro_batches(self._of_step(first_sample, *share), later)

    def of(self, source: Samples) -> Batches:
        """In this order, of another source, whose samples are these with more fields."""
        return Batches(source, 0, self.order if source.count else None)

    def epoch(self, samples: int) -> float:
        """How often as many samples were taken as there are in an epoch."""
        return samples / (self.source.count * self.repeats)

    def evaluation(
        self, samples: int, data_rank: int, data_ranks: int, micro_size: int
    ) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the first `samples` samples (or all there are), in order."""
        size = min(samples, self.source.count)
        wanted = (
            Wanted(indices, np.zeros_like(indices), micro_size, (size - 1, 0))
            for indices in _positions(size, data_rank, data_ranks, micro_size)
        )
        yield from self.source.micro_batches(wanted, ())

    def _of_step(
        self, first_sample: int, size: int, rank: int, ranks: int, micro_size: int
    ) -> Iterator[Wanted]:
        assert self.order is not None
        end = np.array([first_sample + size - 1])
        last = int(self.order.at(end)[0]), int(self.order.epochs(end)[0])
        for positions in _positions(size, rank, ranks, micro_size):
            places = first_sample + positions
            yield Wanted(self.order.at(places), self.order.epochs(places), micro_size, last)


def _positions(size: int, rank: int, ranks: int, micro_size: int) -> Iterator[Integers]:
    """For each of the rank's micro-batches its positions among the `size` samples of a step."""
    for start in range(rank * micro_size, size + rank * micro_size, ranks * micro_size):
        yield np.arange(start, max(start, min(start + micro_size, size)), dtype=np.int64)
