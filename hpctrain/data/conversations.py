"""Samples of token files of conversations, preferences and prompts.

A sample depends only on the file, the length of a sequence and the number of the sample. It is the same in
every layout, and after a run is resumed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.data.batches import MASKED, SPLITS, MicroBatch, MicroBatchRequest, SequenceSource
from hpctrain.data.data_checks import split_samples
from hpctrain.data.file_contents import CHAT, NOUNS, PREFERENCES, PROMPTS
from hpctrain.data.packing import Array, Packing
from hpctrain.data.token_files import Tokens
from hpctrain.data.tokens import TokenFile
from hpctrain.deck.sources import clipped, toml_value
from hpctrain.errors import HpctrainError
from hpctrain.text import counted

Booleans = npt.NDArray[np.bool_]

MARGIN = "margin"
"""Key of a row of preferences, and field of micro-batches: by how much the chosen answer is better."""

_LARGEST_MARGIN = 1e4


class ConversationSource(SequenceSource):
    """Source of sequences of complete conversations, from one split of a file.

    A sequence has several conversations, or one if `pack` is False. Each is a document. Tokens that are not
    learned have no target. The rest of a sequence is padding, which is a document of zeros without targets.
    """

    def __init__(self, file: Tokens, length: int, fraction: float, split: str, pack: bool = True) -> None:
        assert split in SPLITS and file.kind == CHAT, (split, file.kind)
        self.file, self.length = file, length
        self.packing = Packing.of(file, length, pack)
        trained, held_out = split_samples(self.packing.rows, fraction)
        self._first = 0 if split == "train" else trained
        self.count = trained if split == "train" else held_out

    @property
    @override
    def has_documents(self) -> bool:
        return True

    @override
    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, targets, _ = self.row(index)
        return tokens, targets

    @override
    def row(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        assert 0 <= index < self.count, (index, self.count)
        tokens = torch.zeros(self.length, dtype=torch.int64)
        targets, places = torch.full_like(tokens, MASKED), torch.arange(self.length)
        at = 0
        for document in self.packing.documents(self._first + index):
            begin, count = int(self.packing.begins[document]), int(self.packing.places[document])
            window, learned = self.file.read(begin, count + 1), self.file.learned(begin + 1, count)
            here = slice(at, at + count)
            tokens[here], places[here] = window[:-1], torch.arange(count)
            targets[here] = window[1:].masked_fill(~learned, MASKED)
            at += count
        places[at:] = torch.arange(self.length - at)
        return tokens, targets, places

    def real_tokens(self, index: int) -> int:
        """Return the number of tokens of a sequence in front of its padding."""
        documents = self.packing.documents(self._first + index)
        return int(self.packing.places[documents.start : documents.stop].sum())

    def first_token(self, index: int) -> int:
        """Return the position in the file of the first token of a sequence."""
        return int(self.packing.begins[self.packing.documents(self._first + index)[0]])

    def summary(self, title: str) -> str:
        """Return a line about the sequences, which begins with `title`."""
        packing, length = self.packing, self.length
        filled = packing.places.sum() / max(1, packing.rows * length)
        sequences = counted(packing.rows, "sequence")
        conversations = counted(len(packing.places), "conversation")
        line = f"{title}: {conversations} in {sequences}, {100 * filled:.0f}% filled"
        if packing.cut:
            share = packing.lost / (packing.lost + packing.places.sum())
            line += (
                f"; {packing.cut} longer than batch.sequence = {length} truncated by {packing.lost} tokens "
                f"in total ({100 * share:.2g}% of all)"
            )
        if packing.left_out:
            line += f"; {packing.left_out} left out, whose answers begin beyond batch.sequence = {length}"
        return line


class _RowSource(ABC):
    """Rows of one split of a file. Rows that do not fit into `length` tokens are left out."""

    def __init__(self, file: Tokens, kind: str, length: int, fraction: float, split: str) -> None:
        assert split in SPLITS
        if file.kind != kind:
            raise HpctrainError(f"{file.where}: holds {file.kind}, expected {kind} (see `hpctrain prepare`)")
        self.file, self.length, self.kind = file, length, kind
        self._ends = file.document_ends()
        self._begins = np.concatenate((np.zeros(1, np.int64), self._ends[:-1]))
        fits = self._fit()
        self.left_out = int((~fits).sum())
        self._rows = np.flatnonzero(fits)
        trained, held_out = split_samples(len(self._rows), fraction)
        if not trained:
            sentence = f"{file.where}: {len(self._rows)} of its {counted(len(fits), NOUNS[kind])} fit into"
            raise HpctrainError(
                f"{sentence} {length} tokens, and data.validation = {fraction:g} holds out {held_out}, so "
                "none is left to train on"
            )
        begin = 0 if split == "train" else trained
        self._rows = self._rows[begin : begin + (trained if split == "train" else held_out)]
        self.count = len(self._rows)

    def number(self, index: int) -> int:
        """Return the number of a row in the file."""
        assert 0 <= index < len(self._rows), (index, len(self._rows))
        return int(self._rows[index])

    def _document(self, index: int) -> int:
        """Return the number in the file of the document of a sequence."""
        return self.number(index)

    def real_tokens(self, index: int) -> int:
        """Return the number of tokens of a sequence in front of its padding."""
        document = self._document(index)
        return min(int(self._ends[document] - self._begins[document]), self.length)

    def first_token(self, index: int) -> int:
        """Return the position in the file of the first token of a sequence."""
        return int(self._begins[self._document(index)])

    def other_keys(self, index: int) -> dict[str, Any]:
        """Return the further fields of a row."""
        return self.file.other_keys(self.number(index))

    def summary(self, title: str) -> str:
        """Return a line about the rows, which begins with `title`."""
        line = f"{title}: {counted(len(self._rows), NOUNS[self.kind])}"
        if self.left_out:
            line += f"; {self.left_out} left out, {self._left_out_reason}"
        return line

    @property
    def _left_out_reason(self) -> str:
        return f"whose answers begin beyond {self.length} tokens"

    @abstractmethod
    def _fit(self) -> Booleans:
        """Return a mask of the rows that fit, bool [rows]."""


class PreferenceSource(_RowSource, SequenceSource):
    """Source of pairs of answers. Sequence 2i is the preferred answer of pair i, and 2i + 1 the other one.

    A sequence has the prompt and the answer, from its first position on. Only the answer has targets. The end
    of a sequence longer than `length` is cut off. A pair is left out if nothing of an answer remains.

    With `margins`, and if the file has any, micro-batches have the field MARGIN, fp32 [b, s], with the margin
    of the pair at every position of both rows. A margin that is not a number raises an HpctrainError.
    """

    def __init__(self, file: Tokens, length: int, fraction: float, split: str, margins: bool = False) -> None:
        super().__init__(file, PREFERENCES, length, fraction, split)
        self.count = 2 * len(self._rows)
        self.margins = self._margins() if margins else None

    @override
    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        assert 0 <= index < self.count, (index, self.count)
        return self.document(self._document(index))

    @override
    def micro_batches(
        self, requests: Iterable[MicroBatchRequest], upcoming: Iterable[MicroBatchRequest]
    ) -> Iterator[MicroBatch]:
        batch_requests = list(requests)
        for each, micro in zip(batch_requests, super().micro_batches(batch_requests, upcoming), strict=True):
            if self.margins is None:
                yield micro
                continue
            field = torch.zeros(micro.targets.shape)
            field[: len(each.indices)] = self.margins[each.indices // 2].unsqueeze(1)
            yield replace(micro, fields={**micro.fields, MARGIN: field})

    def _margins(self) -> Tensor | None:
        """Return the margins of all pairs, fp32, with 0 for pairs without one; None if no pair has one."""
        if isinstance(self.file, TokenFile) and self.file.contents.others <= 2 * self.file.contents.rows:
            return None  # all are {}
        margins = [self.other_keys(index).get(MARGIN) for index in range(len(self._rows))]
        for number, margin in zip(self._rows.tolist(), margins, strict=True):
            is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
            if margin is not None and not (is_number and abs(margin) <= _LARGEST_MARGIN):
                pair = f"pair {number + 1} has {MARGIN} = {clipped(toml_value(margin))}"
                bounds = f"a number from -{_LARGEST_MARGIN:g} to {_LARGEST_MARGIN:g}"
                raise HpctrainError(
                    f'{self.file.where}: {pair}: must be {bounds} for objective.kind = "reward"'
                )
        return torch.tensor([margin or 0.0 for margin in margins]) if any(margins) else None

    @override
    def summary(self, title: str) -> str:
        count = 0 if self.margins is None else int((self.margins != 0).sum())
        return super().summary(title) + (f"; {count} with a margin" if count else "")

    @override
    def _document(self, index: int) -> int:
        return 2 * self.number(index // 2) + index % 2

    def document(self, document: int) -> tuple[Tensor, Tensor]:
        """Return the tokens and targets of an answer with its prompt, each int64 [length]."""
        tokens = torch.zeros(self.length, dtype=torch.int64)
        targets = torch.full_like(tokens, MASKED)
        begin, end = int(self._begins[document]), int(self._ends[document])
        window = self.file.read(begin, min(end - begin, self.length + 1))
        tokens[: len(window)] = window[: self.length]
        learned = self.file.learned(begin + 1, len(window) - 1)
        targets[: len(window) - 1] = window[1:].masked_fill(~learned, MASKED)
        return tokens, targets

    def _fit(self) -> Booleans:
        fits = np.ones(len(self._ends), np.bool_)
        for document in np.flatnonzero(self._ends - self._begins > self.length + 1).tolist():
            fits[document] = bool(self.file.learned(int(self._begins[document]) + 1, self.length).any())
        return fits[::2] & fits[1::2]


class PromptSequences(_RowSource, SequenceSource):
    """Source of prompts of at most `length` tokens, as sequences without targets."""

    def __init__(self, file: Tokens, length: int, fraction: float, split: str) -> None:
        super().__init__(file, PROMPTS, length, fraction, split)

    def prompt(self, index: int) -> tuple[list[int], dict[str, Any]]:
        """Return the token ids of a prompt, and the other keys of its row."""
        document = self.number(index)
        begin, end = int(self._begins[document]), int(self._ends[document])
        return self.file.read(begin, end - begin).tolist(), self.other_keys(index)

    @override
    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(self.length, dtype=torch.int64)
        ids, _ = self.prompt(index)
        tokens[: len(ids)] = torch.tensor(ids)
        return tokens, torch.full_like(tokens, MASKED)

    @property
    def _left_out_reason(self) -> str:
        return f"longer than {self.length} tokens"

    def _fit(self) -> Booleans:
        lengths: Array = self._ends - self._begins
        return lengths <= self.length
