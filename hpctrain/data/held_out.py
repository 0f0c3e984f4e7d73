"""Data on which a run is evaluated: the held-out share of its training data, and further sets."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hpctrain.comm.world import World
from hpctrain.data.batches import MASKED, Batches
from hpctrain.data.corpus import Corpus, require_same_tokens
from hpctrain.data.data_checks import kind_problem
from hpctrain.data.data_mixture import sequences_of
from hpctrain.data.file_contents import TEXT_KIND
from hpctrain.data.text_bytes import token_bytes
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokenizer_difference import tokenizer_difference
from hpctrain.data.tokens import TokenFile
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.rows import row_message
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.evaluation import VALIDATION, EvaluationSet
from hpctrain.deck.sections.objective import LANGUAGE_KINDS
from hpctrain.errors import HpctrainError
from hpctrain.text import counted

_SETS = "evaluation.sets"


@dataclass(frozen=True)
class HeldOut:
    """Sequences of one evaluation.

    Attributes:
        name: Name of the evaluation set.
        batches: Batches of the set.
        sequences: Number of sequences to evaluate, from the start of the batches.
        tokens: Number of target tokens, if it was counted.
        text_bytes: Bytes of text of the target tokens; None if unknown.
        in_nats: True if the loss is that of next-token prediction.
    """

    name: str
    batches: Batches
    sequences: int
    tokens: int = 0
    text_bytes: int | None = None
    in_nats: bool = False

    def metrics(self, loss: float, **further: float) -> dict[str, float]:
        """Return the metrics of a mean loss: for next-token prediction also perplexity and bits per byte.

        Args:
            loss: Mean loss.
            **further: Further metrics of the objective, which are returned as they are.
        """
        metrics = {"loss": loss, **further}
        if self.in_nats:
            metrics["perplexity"] = math.inf if loss >= _LARGEST else math.exp(loss)
            if self.text_bytes:
                metrics["bits_per_byte"] = loss * self.tokens / (math.log(2) * self.text_bytes)
        return metrics


_LARGEST = 709.0
"""Largest number whose exponential is finite."""


def open_held_out(deck: Deck, world: World, corpus: Corpus) -> tuple[HeldOut, ...]:
    """Open all data on which a deck is evaluated, the held-out share first. Collective.

    Raises:
        HpctrainError: On all ranks if the file of a set is too short or has another tokenizer.
    """
    evaluations: list[HeldOut] = []
    if corpus.validation is not None:
        evaluations.append(HeldOut(VALIDATION, corpus.validation, deck.run.evaluate_sequences))
    files: list[TokenFile] = []
    with world.agreement():
        problems: list[str] = []
        for number, each in enumerate(deck.evaluation.sets):
            file = open_evaluation_set(each)
            reasons = list(
                unfit_reasons(deck, file, "" if corpus.file is None else corpus.file.tokenizer_text)
            )
            problems += [row_message(deck, _SETS, number, "tokens", sentence) for sentence in reasons]
            if not reasons:
                sequences = each.sequences or deck.run.evaluate_sequences
                evaluations.append(HeldOut(each.name, evaluation_batches(deck, file), sequences))
                files.append(file)
        if problems:
            raise HpctrainError(problems)
    require_same_tokens(world, files)
    if corpus.file is None:
        return tuple(evaluations)
    return tuple(with_token_counts(deck, world, each, corpus.file.tokenizer) for each in evaluations)


def open_evaluation_set(evaluation_set: EvaluationSet) -> TokenFile:
    """Open the token file of an evaluation set. Local; raises InputOutputError if it is invalid."""
    return TokenFile(evaluation_set.tokens, f"evaluation.tokens of {evaluation_set.name}")


def set_problems(deck: Deck, tokenizer: str | None) -> Iterator[DeckProblem]:
    """Yield the problems of the files of evaluation sets. Missing files are skipped. Local.

    Args:
        deck: The deck.
        tokenizer: Text of the tokenizer of the training data; None if it is unknown.
    """
    for number, each in enumerate(deck.evaluation.sets):
        if not os.path.lexists(each.tokens):
            continue
        try:
            reasons = list(unfit_reasons(deck, open_evaluation_set(each), tokenizer))
        except HpctrainError as error:
            prefix = f"evaluation.tokens of {each.name} = {each.tokens}: "
            reasons = [problem.removeprefix(prefix) for problem in error.problems]
        yield from (DeckProblem(_SETS, sentence, row=(number, "tokens")) for sentence in reasons)


def unfit_reasons(deck: Deck, file: TokenFile, tokenizer: str | None) -> Iterator[str]:
    """Yield the reasons why a model cannot be evaluated on a token file.

    Args:
        deck: Deck of the model.
        file: The token file.
        tokenizer: Text of the model's tokenizer; None if it is unknown.
    """
    sequence = deck.batch.sequence
    if reason := kind_problem(deck, file):
        yield reason
    elif file.kind == TEXT_KIND and file.tokens <= sequence:
        yield (
            f"has {counted(file.tokens, 'token')}, but requires at least {sequence + 1}, one more than "
            f"batch.sequence = {sequence} (use a larger file)"
        )
    if tokenizer is None:
        return
    difference = tokenizer_difference(file.tokenizer_text, tokenizer, file.where, "the model's tokenizer")
    if difference:
        yield (
            f"its tokenizer differs from that of the training data: {difference} (prepare it with "
            "`hpctrain prepare --tokenizer`)"
        )


def evaluation_batches(deck: Deck, file: TokenFile) -> Batches:
    """Return batches of all sequences of a token file."""
    mask, pack = deck.data.document_mask, deck.data.pack
    margins = deck.objective.kind == "reward"
    source = sequences_of(file, deck.batch.sequence, 0.0, "train", mask, pack, margins)
    return Batches(source, deck.run.seed)


def with_token_counts(deck: Deck, world: World, held_out: HeldOut, tokenizer: Tokenizer) -> HeldOut:
    """Return an evaluation with the number of its target tokens and their bytes. Collective.

    Each rank counts a part of the sequences.

    Raises:
        HpctrainError: On all ranks if there is no target token.
    """
    if deck.model.loss is not None or deck.objective.kind not in LANGUAGE_KINDS:
        return held_out
    sizes, counts = token_bytes(tokenizer), torch.zeros(2, dtype=torch.int64)
    with world.agreement():
        for batch in held_out.batches.evaluation(held_out.sequences, world.rank, world.size, 1):
            predicted = batch.targets[batch.targets != MASKED]
            counts[0] += predicted.numel()
            counts[1] += 0 if sizes is None else int(sizes[predicted].sum())
    tokens, text = map(int, world.everyone.all_reduce(counts).tolist())
    with world.agreement():
        if not tokens:
            size = counted(held_out.sequences, "sequence")
            raise HpctrainError(
                f"evaluation set {held_out.name}: its {size} contain no target tokens, so it has no loss "
                "(use more sequences, or another file)"
            )
    batches, sequences = held_out.batches, held_out.sequences
    return HeldOut(held_out.name, batches, sequences, tokens, None if sizes is None else text, in_nats=True)
