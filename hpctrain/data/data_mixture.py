"""Training and held-out sequences of a deck: of one corpus, or of a mixture of several by their shares."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import override

from hpctrain.data.batches import Batches, SequenceSource, SplitSequences
from hpctrain.data.conversations import ConversationSource, PreferenceSource, PromptSequences
from hpctrain.data.data_checks import masks_documents
from hpctrain.data.file_contents import CHAT, PREFERENCES, PROMPTS
from hpctrain.data.interleave import Interleaving
from hpctrain.data.order import Integers, PairedOrder, SampleOrder
from hpctrain.data.token_files import Tokens, common_fingerprint, paths_of, title_of
from hpctrain.data.tokens import TokenFile
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.mixture import DatasetEntry, dataset_entries
from hpctrain.deck.sections.policy import max_sample_tokens, sequences_per_sample
from hpctrain.text import counted
from hpctrain.units import format_count

_SEED_STEP = 0xD1B54A32D192ED03
"""Difference between the seeds of entries, so that entries of the same size have different orders."""


class MixtureOrder:
    """Order of the samples of a mixture, which are numbered one entry after the other.

    An `Interleaving` decides by the shares which entry comes next. The samples of an entry have the order
    that they would have alone.
    """

    def __init__(self, entries: Sequence[DatasetEntry], counts: Sequence[int], seed: int) -> None:
        self.interleaving = Interleaving([entry.share for entry in entries], seed)
        self.orders = [SampleOrder(count, seed + number * _SEED_STEP) for number, count in enumerate(counts)]
        self.names, self.counts = [entry.name for entry in entries], list(counts)
        self.begins = list(accumulate(counts, initial=0))

    def at(self, positions: Integers) -> Integers:
        """Return the numbers of the samples at the positions [n]."""
        sources, nth = self.interleaving.at(positions)
        for number, order in enumerate(self.orders):
            here = sources == number
            nth[here] = self.begins[number] + order.at(nth[here])
        return nth

    def epochs(self, positions: Integers) -> Integers:
        """Return the epochs of the entries that the samples come from."""
        sources, nth = self.interleaving.at(positions)
        return nth // np.diff(self.begins)[sources]

    def epochs_by_entry(self, samples: int) -> dict[str, float]:
        """Return, by name, the number of epochs of each entry in the first `samples` samples."""
        rows = zip(self.names, self.interleaving.counts(samples), self.counts, strict=True)
        return {name: used / count for name, used, count in rows}


class JoinedSources(SequenceSource):
    """Source of the sequences of several sources, one source after the other."""

    def __init__(self, sources: Sequence[SequenceSource]) -> None:
        self.sources, self.length = tuple(sources), sources[0].length
        self.end_of_document = sources[0].end_of_document
        self._begins = list(accumulate((source.count for source in sources), initial=0))
        self.count = self._begins[-1]

    @override
    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        number, within = self.source_of(index)
        return self.sources[number].sequence(within)

    @property
    @override
    def has_documents(self) -> bool:
        return any(source.has_documents for source in self.sources)

    def real_tokens(self, index: int) -> int:
        """Return the number of tokens of a sequence in front of its padding."""
        number, within = self.source_of(index)
        return self.sources[number].real_tokens(within)

    @override
    def row(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        number, within = self.source_of(index)
        return self.sources[number].row(within)

    def source_of(self, index: int) -> tuple[int, int]:
        """Return the number of the source that a sequence belongs to, and the sequence's number in it."""
        assert 0 <= index < self.count, (index, self.count)
        number = bisect_right(self._begins, index) - 1
        return number, index - self._begins[number]


class HeldOutMixture(JoinedSources):
    """Held-out sequences of several sources, interleaved by the shares of training.

    After the last sequence of one source, the other sources continue.
    """

    def __init__(self, sources: Sequence[SequenceSource], entries: Sequence[DatasetEntry]) -> None:
        super().__init__(sources)
        self.shares = [float(entry.share) for entry in entries]

    @override
    def source_of(self, index: int) -> tuple[int, int]:
        return super().source_of(int(self._order[index]))

    @cached_property
    def _order(self) -> Integers:
        due = [
            (np.arange(source.count) + 0.5) / share
            for source, share in zip(self.sources, self.shares, strict=True)
        ]
        return np.argsort(np.concatenate(due), kind="stable")


@dataclass(frozen=True)
class SequenceLocation:
    """Place of a sequence: name of its entry, file in which it begins, and number in its source."""

    entry: str
    file: str
    index: int


@dataclass(frozen=True)
class SplitDatasets:
    """Opened token files of a deck, and the batches of both splits.

    Attributes:
        entries: Entries of the mixture; one if the deck has no mixture.
        tokens: Token files of each entry.
        train: Batches of training sequences.
        validation: Batches of held-out sequences.
        counts: Number of training sequences of each entry.
        length: Number of tokens of a sequence.
        notes: Lines for the log about conversations, preferences and prompts.
        pack: True if a sequence may have several conversations.
        left_out: Number of conversations in which no token is learned within `length` tokens.
    """

    entries: tuple[DatasetEntry, ...]
    tokens: tuple[Tokens, ...]
    train: Batches
    validation: Batches
    counts: tuple[int, ...]
    length: int
    notes: tuple[str, ...] = ()
    pack: bool = True
    left_out: int = 0

    @staticmethod
    def of(deck: Deck, tokens: Sequence[Tokens]) -> SplitDatasets:
        """Return the splits of the entries of a deck."""
        entries = dataset_entries(deck)
        length, fraction, seed = max_sample_tokens(deck), deck.data.validation, deck.run.seed
        mask, pack = masks_documents(deck, tokens), deck.data.pack
        margins = deck.objective.kind == "reward"
        train, held_out = (
            [sequences_of(each, length, fraction, split, mask, pack, margins) for each in tokens]
            for split in ("train", "validation")
        )
        notes = tuple(
            source.summary(title_of(entry.tokens))
            for entry, source in zip(entries, train, strict=True)
            if isinstance(source, ConversationSource | PreferenceSource | PromptSequences)
        )
        counts = tuple(source.count for source in train)
        if deck.data.mixture is None:
            repeats = sequences_per_sample(deck)
            of_train, of_validation = batches_of(train[0], seed, repeats), Batches(held_out[0], seed)
        else:
            of_train = Batches(JoinedSources(train), seed, MixtureOrder(entries, counts, seed))
            of_validation = Batches(HeldOutMixture(held_out, entries), seed)
        left_out = sum(each.packing.left_out for each in train if isinstance(each, ConversationSource))
        return SplitDatasets(
            entries, tuple(tokens), of_train, of_validation, counts, length, notes, pack, left_out
        )

    def description(self) -> dict[str, Any]:
        """Return the description for checkpoints. It has the shares, since they determine the order."""
        # Without packing, or if some are left out, the sequences of the same conversations differ.
        form = "" if self.pack or not any(each.kind == CHAT for each in self.tokens) else " apart"
        form += f" without {self.left_out}" * (self.left_out > 0)
        if len(self.tokens) == 1:
            known = self.tokens[0].fingerprint
            known = zlib.crc32(form.encode(), known) if form else known
            return {"tokens": self.tokens[0].tokens, "fingerprint": known}
        shares = " ".join(str(entry.share) for entry in self.entries) + form
        return {
            "tokens": sum(each.tokens for each in self.tokens),
            "fingerprint": zlib.crc32(shares.encode(), common_fingerprint(self.tokens)),
        }

    def locate(self, index: int) -> SequenceLocation:
        """Return the origin of a training sequence, by its number in `train`."""
        number, source = 0, self.train.source
        if isinstance(source, JoinedSources):
            number, index = source.source_of(index)
            source = source.sources[number]
        first = index * self.length
        if isinstance(source, ConversationSource | PreferenceSource | PromptSequences):
            first = source.first_token(index)
        tokens = self.tokens[number]
        file = tokens if isinstance(tokens, TokenFile) else tokens.file_at(first)
        return SequenceLocation(self.entries[number].name, str(file.path), index)

    def epochs(self, samples: int) -> dict[str, float]:
        """Return the number of epochs of each entry after so many samples, by name."""
        assert self.train.order is not None
        return self.train.order.epochs_by_entry(samples) or {self.entries[0].name: self.train.epoch(samples)}


def sequences_of(
    file: Tokens,
    length: int,
    fraction: float,
    split: str,
    document_mask: bool,
    pack: bool,
    margins: bool = False,
) -> SequenceSource:
    """Return the source of the sequences of a token file, by the kind of its contents.

    Args:
        file: The token file.
        length: Number of tokens of a sequence.
        fraction: Share of the sequences that is held out.
        split: "train" or "validation".
        document_mask: True if attention does not cross the documents of a text.
        pack: True if a sequence may have several conversations.
        margins: True if micro-batches of preferences have the margins.
    """
    if file.kind == CHAT:
        return ConversationSource(file, length, fraction, split, pack)
    if file.kind == PREFERENCES:
        return PreferenceSource(file, length, fraction, split, margins)
    if file.kind == PROMPTS:
        return PromptSequences(file, length, fraction, split)
    return SplitSequences(file, length, fraction, split, document_mask)


def batches_of(source: SequenceSource, seed: int, repeats: int = 1) -> Batches:
    """Return batches in a seeded order that keeps pairs together; `repeats` as for `Batches`."""
    paired = isinstance(source, PreferenceSource)
    return Batches(source, seed, PairedOrder(source.count // 2, seed) if paired else None, repeats)


def describe_training_data(trained: SplitDatasets) -> str:
    """Return a short description of the training data."""
    tokens, entries = trained.tokens, trained.entries
    total = format_count(sum(each.tokens for each in tokens))
    if len(tokens) > 1:
        return f"a mixture of {len(tokens)} entries: {total} tokens"
    files = len(paths_of(tokens[0]))
    return f"{title_of(entries[0].tokens)}: {total} tokens" + f" in {files} files" * (files > 1)


def mixture_lines(trained: SplitDatasets, samples: int) -> list[str]:
    """Return a line about each entry: its share, its size, and its epochs in a run of so many samples."""
    lines = []
    for entry, tokens, count in zip(trained.entries, trained.tokens, trained.counts, strict=True):
        epochs = trained.epochs(samples)[entry.name]
        has = f"{counted(count, 'sequence')} ({format_count(tokens.tokens)} tokens)"
        share = f"{float(entry.share):.4g} of all samples"
        lines.append(f"  {entry.name}: {share}; {has}, {epochs:.3g} epochs")
    return lines
