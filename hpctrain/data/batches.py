"""Micro-batches of a data rank, and sequences of token files.

The documents of a token file are packed end to end into one stream of tokens. Sequence i reads the tokens
i*sequence to (i+1)*sequence, one more than it has inputs. The inputs are all of them but the last, and the
targets all but the first. The trailing sequences are held out for validation. The classes of this module have
no state: the trainer keeps the position in the order of samples and stores it in checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hpctrain.data.data_checks import needed_tokens, split_sizes
from hpctrain.data.documents import Documents
from hpctrain.data.order import Integers, SampleOrder
from hpctrain.data.row_lengths import RowLengths
from hpctrain.data.token_files import Tokens
from hpctrain.errors import HpctrainError
from hpctrain.text import counted

MASKED = -1
"""Target at positions where nothing is predicted."""

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

        A target is MASKED where nothing is predicted, as in rows without a sample.
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
        """Token ids of a token file, int64 [b, s]."""
        return self.fields["tokens"]

    @property
    def targets(self) -> Tensor:
        """Targets of a token file, int64 [b, s]; MASKED where nothing is predicted."""
        return self.fields["targets"]

    @property
    def rows(self) -> int:
        """Number of all rows, with or without a sample."""
        return len(next(iter(self.fields.values())))

    @property
    def present(self) -> int:
        """Number of rows that are samples."""
        return self.rows if self.samples is None else self.samples


class MicroBatchRequest(NamedTuple):
    """Request to read one micro-batch.

    Attributes:
        indices: Numbers of the samples, int64 [n] with n <= micro_size.
        epochs: Epoch of each sample, int64 [n].
        micro_size: Number of rows of the micro-batch.
        last: Number and epoch of the last sample of the step or evaluation that the micro-batch belongs to.
    """

    indices: Integers
    epochs: Integers
    micro_size: int
    last: tuple[int, int]


class SampleSource(Protocol):
    """Source of `count` samples, which `Batches` reads."""

    count: int

    def micro_batches(
        self, requests: Iterable[MicroBatchRequest], upcoming: Iterable[MicroBatchRequest]
    ) -> Iterator[MicroBatch]:
        """Yield the requested micro-batches.

        Args:
            requests: The requests, in the order of the result.
            upcoming: Requests that the next call will probably make. The source may load them ahead.
        """


class SequenceSource(ABC):
    """Source of samples that are sequences of tokens with targets.

    Attributes:
        length: Number of tokens of a sequence.
        count: Number of sequences.
        end_of_document: Token that ends a document. If it is given, attention does not cross documents, and
            no document predicts the first token of the next one. None if a sequence is one document.
    """

    length: int
    count: int
    end_of_document: int | None = None

    @property
    def has_documents(self) -> bool:
        """True if micro-batches have `documents`, so that attention does not cross documents."""
        return self.end_of_document is not None

    @abstractmethod
    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and the targets of one sequence, each int64 [length]."""

    def real_tokens(self, index: int) -> int:  # noqa: ARG002
        """Return the number of tokens at the beginning of a sequence that are not padding."""
        return self.length

    def row(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the inputs and targets of one sequence, and the position of each token in its document.

        The last token of a document has no target. The positions are None if the sequence is one document.
        """
        tokens, targets = self.sequence(index)
        end = self.end_of_document
        if end is None:
            return tokens, targets, None
        places = Documents.of(tokens.unsqueeze(0), end).places[0]
        return tokens, targets.masked_fill(tokens == end, MASKED), places

    def micro_batches(
        self,
        requests: Iterable[MicroBatchRequest],
        upcoming: Iterable[MicroBatchRequest],  # noqa: ARG002
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches, each filled up to its size with rows of zeros whose targets are masked."""
        for each in requests:
            tokens = torch.zeros(each.micro_size, self.length, dtype=torch.int64)
            targets = torch.full_like(tokens, MASKED)
            places = torch.arange(self.length).expand_as(tokens).clone()
            lengths = torch.zeros(each.micro_size, dtype=torch.int64)
            for row, index in enumerate(each.indices.tolist()):
                tokens[row], targets[row], own = self.row(index)
                if own is not None:
                    places[row] = own
                lengths[row] = self.real_tokens(index)
            documents = Documents(places) if self.has_documents else None
            samples, padded = len(each.indices), bool((lengths[: len(each.indices)] < self.length).any())
            known = RowLengths(lengths) if padded else None
            yield MicroBatch.of_tokens(tokens, targets, samples, documents, known)


class SplitSequences(SequenceSource):
    """Source of the sequences of one split of a token file.

    The split "validation" has the trailing `fraction` of the sequences, and "train" the others. Validation
    has no sequence if `fraction` is zero, and at least one otherwise.

    Raises:
        HpctrainError: The file is too short to give both splits one sequence.
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
        """Return the inputs and targets of sequence `index` of this split, each int64 [sequence]."""
        assert 0 <= index < self.count, (index, self.count)
        window = self.file.read((self._first + index) * self.length, self.length + 1)
        return window[:-1], window[1:]


class OrderProtocol(Protocol):
    """Order of the samples, counted over all epochs."""

    def at(self, positions: Integers, /) -> Integers:
        """Return the numbers of the samples at the positions [n], which are >= 0."""

    def epochs(self, positions: Integers, /) -> Integers:
        """Return the epochs (from 0) of the samples at the positions [n]."""

    def epochs_by_entry(self, samples: int, /) -> dict[str, float]:
        """Return, by name, the number of epochs of each entry of a mixture in the first `samples` samples."""


class Batches:
    """Micro-batches of every step.

    Micro-batch k of data rank r contains `micro_size` samples of the step, beginning with sample
    (k*data_ranks + r)*micro_size. All data ranks have the same number of micro-batches. If the samples do not
    fill all of them, some micro-batches have fewer samples or none.
    """

    def __init__(
        self, source: SampleSource, seed: int, order: OrderProtocol | None = None, repeats: float = 1.0
    ) -> None:
        """Read the samples of a source in an order.

        Args:
            source: The samples.
            seed: Seed of the shuffled order that is used if `order` is None.
            order: Order of the samples, or None.
            repeats: Number of times that an epoch contains each sample.
        """
        self.source, self.repeats = source, repeats
        self.order = SampleOrder(source.count, seed) if order is None and source.count else order

    def step(
        self, first_sample: int, global_size: int, data_rank: int, data_ranks: int, micro_size: int
    ) -> Iterator[MicroBatch]:
        """Yield the ceil(global_size / (data_ranks*micro_size)) micro-batches of a data rank in one step.

        The step has the samples at the positions first_sample to first_sample + global_size - 1 of the order,
        counted over all epochs.
        """
        share = global_size, data_rank, data_ranks, micro_size
        upcoming = self._of_step(first_sample + global_size, *share)
        yield from self.source.micro_batches(self._of_step(first_sample, *share), upcoming)

    def with_source(self, source: SampleSource) -> Batches:
        """Return batches of another source, in the same order. Its samples are the same with more fields."""
        return Batches(source, 0, self.order if source.count else None)

    def epoch(self, samples: int) -> float:
        """Return the number of epochs (a fraction) after so many samples."""
        return samples / (self.source.count * self.repeats)

    def evaluation(
        self, samples: int, data_rank: int, data_ranks: int, micro_size: int
    ) -> Iterator[MicroBatch]:
        """Yield a data rank's micro-batches of the first `samples` samples, or of all if there are fewer."""
        size = min(samples, self.source.count)
        requests = (
            MicroBatchRequest(indices, np.zeros_like(indices), micro_size, (size - 1, 0))
            for indices in _positions(size, data_rank, data_ranks, micro_size)
        )
        yield from self.source.micro_batches(requests, ())

    def _of_step(
        self, first_sample: int, size: int, rank: int, ranks: int, micro_size: int
    ) -> Iterator[MicroBatchRequest]:
        assert self.order is not None
        end = np.array([first_sample + size - 1])
        last = int(self.order.at(end)[0]), int(self.order.epochs(end)[0])
        for indices in _positions(size, rank, ranks, micro_size):
            positions = first_sample + indices
            yield MicroBatchRequest(self.order.at(positions), self.order.epochs(positions), micro_size, last)


def _positions(size: int, rank: int, ranks: int, micro_size: int) -> Iterator[Integers]:
    """Yield, for each micro-batch of a data rank, its positions among the `size` samples of a step."""
    for start in range(rank * micro_size, size + rank * micro_size, ranks * micro_size):
        yield np.arange(start, max(start, min(start + micro_size, size)), dtype=np.int64)
