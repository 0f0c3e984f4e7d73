"""Samples that a run skipped because of spikes, with their files and texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hpctrain.checkpoint.checkpoint_index import CheckpointIndex
from hpctrain.checkpoint.stored_deck import require_trusted, stored_deck
from hpctrain.data.batches import OrderProtocol, SequenceSource
from hpctrain.data.data_checks import split_samples
from hpctrain.data.data_mixture import SplitDatasets
from hpctrain.data.dataset import dataset_of
from hpctrain.data.deck_tokens import open_entries
from hpctrain.data.order import Integers, SampleOrder
from hpctrain.deck.code import CodeTrust
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.errors import HpctrainError
from hpctrain.fault_checks.spikes import Spike, recorded_spikes
from hpctrain.report.terminal import fit
from hpctrain.text import counted, escaped

CHARACTERS = 500
"""Largest number of characters of a sample's text."""
SHOWN = 20
"""Largest number of samples of a spike that a terminal shows."""


def bad_samples(structure: CheckpointIndex, trust: CodeTrust) -> list[dict[str, Any]]:
    """Return the spikes of the run of a checkpoint, each with its samples as `left_out`.

    A sample has its number in the order of training, and its index in the data set or in the token files of
    an entry of the mixture. Samples of token files also have their text, and the file in which they begin.
    Samples of a policy are its prompts.

    Args:
        structure: The checkpoint.
        trust: Decision whether the data set that the deck names may be called.

    Raises:
        HpctrainError: The token files have changed; otherwise as in TokenFile and `dataset_of`.
    """
    spikes = recorded_spikes(structure.state)
    if not spikes:
        return []
    deck = stored_deck(structure.state, structure.path, trust=trust)
    if deck.data.dataset is not None:
        require_trusted(deck, structure.path, trust)
    samples = _Samples(deck, structure)
    return [asdict(spike) | {"left_out": list(samples.of(spike))} for spike in spikes]


class _Samples:
    """Samples of a deck in the order of training."""

    def __init__(self, deck: Deck, structure: CheckpointIndex) -> None:
        self.source: SequenceSource | None = None
        self.order: OrderProtocol
        if deck.data.dataset is None:
            self.trained = trained = SplitDatasets.of(deck, open_entries(deck))
            self.mixture = deck.data.mixture is not None
            before, now = structure.state.get("corpus"), trained.description()
            if isinstance(before, Mapping) and any(before.get(name) != now[name] for name in now):
                key = "data.mixture" if self.mixture else "data.tokens"
                changed = f"the token files have changed since {structure.path} was trained"
                raise HpctrainError(f"{key}: {changed}, so the skipped samples are unknown")
            self.tokenizer, batches = trained.tokens[0].tokenizer, trained.train
            assert isinstance(batches.source, SequenceSource) and batches.order is not None
            self.source, self.order = batches.source, batches.order
            if deck.objective.kind in POLICY_KINDS:
                self.order = _PromptOrder.of(deck, batches.source.count)
        else:
            count, _ = split_samples(dataset_of(deck).count, deck.data.validation)
            self.order = SampleOrder(count, deck.run.seed)

    def of(self, spike: Spike) -> Iterator[dict[str, Any]]:
        places = np.arange(spike.first_sample, spike.first_sample + spike.samples, dtype=np.int64)
        for place, index in zip(places.tolist(), self.order.at(places).tolist(), strict=True):
            row: dict[str, Any] = {"sample": place, "index": index}
            if self.source is not None:
                origin, (tokens, _) = self.trained.locate(index), self.source.sequence(index)
                row |= {"index": origin.index, "file": origin.file}
                row |= {"entry": origin.entry} if self.mixture else {}
                row["text"] = self.tokenizer.decode(tokens.tolist())[:CHARACTERS]
            yield row


@dataclass(frozen=True)
class _PromptOrder(SampleOrder):
    """Order of the prompts of a policy's answers.

    Attributes:
        answers: Order of the answers of a rollout, which is shuffled for each epoch.
        samples: Number of answers to a prompt.
        epochs_per_rollout: Number of epochs of each rollout.
    """

    answers: SampleOrder
    samples: int
    epochs_per_rollout: int

    @staticmethod
    def of(deck: Deck, prompts: int) -> _PromptOrder:
        """Return the order for a policy's deck."""
        keys = deck.policy
        answers = SampleOrder(keys.rollout or deck.batch.global_size, deck.run.seed)
        return _PromptOrder(prompts, deck.run.seed, answers, keys.samples or 1, keys.epochs)

    def at(self, indices: Integers) -> Integers:
        """Return the prompts, in range(count), of the answers at positions >= 0 [n]."""
        first = indices // (self.answers.count * self.epochs_per_rollout) * self.answers.count
        return super().at((first + self.answers.at(indices)) // self.samples)


def bad_samples_text(spikes: list[dict[str, Any]], width: int | None) -> list[str]:
    """Return the result of `bad_samples` as lines of text.

    Args:
        spikes: Result of `bad_samples`.
        width: Width of the terminal in characters; None for lines of any length.
    """
    if not spikes:
        return ["No sample was skipped because of a spike."]
    lines = []
    for spike in spikes:
        back = spike["back_to"]
        done = "update skipped" if back is None else f"returned to step {back}"
        without = f"without {counted(spike['samples'], 'sample')}"
        lines += [*fit(f"step {spike['step']}: {spike['why']}; {done}, {without}", width)]
        for row in spike["left_out"][:SHOWN]:
            text = escaped(f"{row['file']}  {row['text']}") if "text" in row else ""
            line = f"  {row['sample']:>10}  {row['index']:>10}  {text}".rstrip()
            lines.append(line if width is None else line[:width])
        more = len(spike["left_out"]) - SHOWN
        lines += [f"  and {counted(more, 'other')} (see --json)"] if more > 0 else []
    head = f"  {'sample':>10}  {'index':>10}"
    return [f"{head}  file and text" if "text" in spikes[0]["left_out"][0] else head, *lines]
