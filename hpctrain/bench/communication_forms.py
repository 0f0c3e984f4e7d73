"""`hpctrain bench communication`: bytes sent and validation loss of a deck with each form of communication.

Forms are, for example, compressed gradients or local steps. Each of them trains the deck from the start on
the same corpus, and is evaluated on the same held-out sequences. Bytes are the payload of rank 0 per step,
averaged over all steps with those of a warm-up.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from typing_extensions import override

from hpctrain.bench.measurement import publish
from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.comm.world import World
from hpctrain.data.corpus import Corpus, open_corpus, resolve_vocabulary
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.plan.form_alternatives import other_forms
from hpctrain.text import either, table
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.server.server_trainer import new_trainer
from hpctrain.units import format_bytes, format_count


@dataclass(frozen=True)
class FormResult:
    """Results of one form of communication.

    Attributes:
        name: Name of the form.
        changes: Overrides of the deck, as KEY=VALUE.
        payload: Payload of rank 0 per step in bytes.
        validation: Loss on the held-out sequences.
        tokens_per_s: Tokens/s of all ranks together.
    """

    name: str
    changes: tuple[str, ...]
    payload: float
    validation: float
    tokens_per_s: float


class _PayloadCounter(Hook):
    """Hook that adds up the payload and the tokens of steps."""

    def __init__(self) -> None:
        self.bytes = self.tokens = 0

    @override
    def after_step(self, done: StepDone) -> None:
        self.bytes += done.payload
        self.tokens += done.result.tokens

    after_step_alone = after_step


def bench_communication(
    world: World,
    path: Path,
    overrides: Sequence[str],
    only: Sequence[str],
    variants: Sequence[str],
    output: Path | None,
) -> None:
    """Train a deck with each form of communication, and print a table. Collective.

    Args:
        world: All ranks.
        path: File of the deck.
        overrides: Deck keys to change, as KEY=VALUE.
        only: Names of the forms to measure; empty for all.
        variants: Further forms to measure, each as `KEY=VALUE` separated by spaces.
        output: File for the results; None for no file.
    """
    with world.agreement():
        deck = read_deck(path, overrides, world.size, read_source_keys)
        forms = dict(other_forms(deck, world.size)) | {each: tuple(each.split()) for each in variants}
        unknown = [name for name in only if name not in forms]
        if unknown:
            raise HpctrainError(f"--only {unknown[0]}: must be {either(forms)}")
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    corpus = open_corpus(deck, world)
    if corpus.validation is None:
        raise HpctrainError(deck.problem("data.validation", "must be above 0 for the evaluation (use 0.01)"))
    results: list[FormResult] = []
    for name, changes in forms.items():
        if only and name not in {*only, *variants}:
            continue
        try:
            with world.agreement():
                changed = read_deck(path, [*overrides, *changes], world.size, read_source_keys)
        except HpctrainError as error:
            if world.rank == 0:
                print(f"{name}: skipped: {error.problems[0]}", flush=True)
            continue
        results.append(_train(world, resolve_vocabulary(changed, corpus), corpus, name, changes))
        if world.rank == 0:
            print(f"{name}: validation loss {results[-1].validation:.4f}", flush=True)
    if not results:
        raise HpctrainError(f"{path}: supports none of the selected forms of communication")
    publish(world, table(rows(results)), [asdict(each) for each in results], output)


def _train(world: World, deck: Deck, corpus: Corpus, name: str, changes: tuple[str, ...]) -> FormResult:
    """Train a deck and evaluate it once."""
    trainer, counter = new_trainer(world, deck, corpus.train), _PayloadCounter()
    trainer.hooks.append(counter)
    start = time.perf_counter()
    while trainer.state.step < deck.run.steps:
        trainer.advance(lambda step: step == deck.run.steps, lambda: False)
    seconds = time.perf_counter() - start
    assert corpus.validation is not None
    loss = trainer.evaluate(corpus.validation, deck.run.evaluate_sequences)["loss"]
    trainer.engine.close()
    del trainer
    gc.collect()
    return FormResult(name, changes, counter.bytes / deck.run.steps, loss, counter.tokens / seconds)


def rows(results: Sequence[FormResult]) -> list[list[str]]:
    """Return the rows of the table; differences are those to the first form, in percent of its loss."""
    lines = [["form", "payload per step", "of the first", "validation loss", "difference", "tokens/s"]]
    first = results[0] if results else None
    for each in results:
        assert first is not None
        share = f"{100 * each.payload / first.payload:.3g}%" if first.payload else ""
        difference = f"{100 * (each.validation / first.validation - 1):+.2f}%" if each is not first else ""
        loss, rate = f"{each.validation:.4f}", format_count(each.tokens_per_s)
        lines.append([each.name, format_bytes(each.payload), share, loss, difference, rate])
    return lines
