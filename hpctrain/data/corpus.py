"""Training and held-out samples of a run, from token files or a user's dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.data_checks import masks_documents, token_problems
from hpctrain.data.data_mixture import SplitDatasets
from hpctrain.data.dataset import DatasetSpec, UserDataset, dataset_of
from hpctrain.data.deck_tokens import open_entries
from hpctrain.data.loader import DatasetSource
from hpctrain.data.token_files import Tokens
from hpctrain.data.worker_pool import WorkerPool
from hpctrain.deck.check import data_ranks
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.batch import batch_size_problems
from hpctrain.errors import HpctrainError


@dataclass(frozen=True)
class Corpus:
    """Samples of a run.

    Attributes:
        file: Token file, or that of the first entry of a mixture; None for a user's dataset.
        train: Training samples.
        validation: Held-out samples, or None.
        dataset: The user's dataset, or None.
        workers: Processes that load items of the dataset, or None.
        trained: Splits of the token files by entry; None for a user's dataset.
    """

    file: Tokens | None
    train: Batches
    validation: Batches | None
    dataset: UserDataset | None = None
    workers: WorkerPool | None = None
    trained: SplitDatasets | None = None

    def close(self) -> None:
        """End the processes that load items. Local."""
        if self.workers is not None:
            self.workers.close()


def open_corpus(deck: Deck, world: World) -> Corpus:
    """Open the data of the deck and split it. Collective.

    Raises:
        HpctrainError: On all ranks if the data of one rank is missing, invalid or different.
    """
    world.ledger.activity = "opening the training data"
    if deck.data.dataset is not None:
        return _open_dataset(deck, world)
    with world.agreement():
        tokens = open_entries(deck)
        problems = [deck.problem(each.key, each.sentence) for each in token_problems(deck, tokens)]
        if problems:
            raise HpctrainError(problems)
        trained = SplitDatasets.of(deck, tokens)
    require_same_tokens(world, tokens)
    validation = trained.validation if deck.data.validation else None
    return Corpus(tokens[0], trained.train, validation, trained=trained)


def require_same_tokens(world: World, tokens: Sequence[Tokens]) -> None:
    """Raise HpctrainError on all ranks if some of them read different tokens from a path. Collective."""
    with world.agreement():
        contents = [(each.tokens, each.fingerprint) for each in tokens]
    of_ranks = world.everyone.all_gather_object(contents)
    with world.agreement():
        problems = [
            f"{each.where}: not all ranks read the same tokens from this path (use one file for all nodes)"
            for number, each in enumerate(tokens)
            if any(other[number] != contents[number] for other in of_ranks)
        ]
        if problems:
            raise HpctrainError(problems)


def resolve_vocabulary(deck: Deck, corpus: Corpus) -> Deck:
    """Return the deck with its vocabulary: that of the deck, or else of the token file. Local.

    The result also stores the size of the file's tokenizer, and masks documents if the data has
    conversations.
    """
    if corpus.file is not None:
        deck = deck.with_runtime_choices(
            replace(deck.runtime_choices, tokenizer_tokens=corpus.file.vocabulary)
        )
    if corpus.trained is not None and masks_documents(deck, corpus.trained.tokens):
        deck = deck.with_keys(data={"document_mask": True})
    if deck.model.vocabulary is not None:
        return deck
    assert corpus.file is not None
    return deck.with_keys(model={"vocabulary": corpus.file.vocabulary})


def _open_dataset(deck: Deck, world: World) -> Corpus:
    with world.agreement():
        dataset = dataset_of(deck)
    counts = world.everyone.all_gather_object(dataset.count)
    deviating = [rank for rank, count in enumerate(counts) if count != counts[0]]
    with world.agreement():
        if deviating:
            sentence = f"has {counts[0]} samples on rank 0, but {counts[deviating[0]]} on rank {deviating[0]}"
            raise HpctrainError(
                deck.problem("data.dataset", f"{sentence}; all ranks must have the same number")
            )
        fraction, seed = deck.data.validation, deck.run.seed
        workers = WorkerPool(DatasetSpec.of(deck), deck.data.workers) if deck.data.workers else None
        train = Batches(DatasetSource(dataset, fraction, "train", workers), seed)
        validation = DatasetSource(dataset, fraction, "validation", workers)
        if fraction and deck.layout.pipeline > 1:
            # Tensors between pipeline stages have one shape, so all micro-batches need the same size.
            taken = min(deck.run.evaluate_sequences, validation.count)
            sizes = {"run.evaluate_sequences": taken}
            problems = batch_size_problems(deck, data_ranks(deck, world.size), sizes)
            raised = [
                deck.problem(
                    each.key, f"with {validation.count} held-out samples is {taken}, but {each.sentence}"
                )
                for each in problems
            ]
            if raised:
                raise HpctrainError(raised)
    return Corpus(None, train, Batches(validation, seed) if fraction else None, dataset, workers)
