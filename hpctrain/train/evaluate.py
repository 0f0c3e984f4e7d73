"""Evaluation of a checkpoint on token files (`hpctrain evaluate`), by the same code as during training.

Models that learned from preferences (dpo, reward) are evaluated by their own loss on files of preferences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.evaluation_deck import evaluation_deck
from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.stored_tokenizer import tokenizer_of_state
from hpctrain.comm.mesh import sizes_text
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.corpus import require_same_tokens
from hpctrain.data.file_contents import PREFERENCES
from hpctrain.data.held_out import HeldOut, evaluation_batches, unfit_reasons, with_token_counts
from hpctrain.data.sample_window import SampleWindow
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokens import TokenFile
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.objective import PREFERENCE_KINDS, REFERENCE_KINDS
from hpctrain.engine.built_engine import Engine
from hpctrain.errors import HpctrainError
from hpctrain.files import strict_json
from hpctrain.report.terminal import columns
from hpctrain.text import escaped, fitted
from hpctrain.train.inference_engine import initial_engine, load_inference_engine
from hpctrain.train.reference_scores import with_reference_of
from hpctrain.train.startup import configure_rank
from hpctrain.train.step import Step
from hpctrain.units import format_count
from hpctrain.watch.checkpoint_target import find_checkpoint

MICRO_BATCHES = 64
"""Number of micro-batches of a rank that are read together."""

SECONDS_PER_LINE = 10.0


@dataclass(frozen=True)
class EvaluationData:
    """Token files of an evaluation.

    Attributes:
        files: Paths of the files.
        sequences: Largest number of sequences to evaluate from each file; None for all.
    """

    files: Sequence[Path]
    sequences: int | None = None


def evaluate(
    world: World,
    target: Path,
    data: EvaluationData,
    overrides: Sequence[str],
    as_json: bool,
    show: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Evaluate a checkpoint on token files, and show the results on rank 0. Collective.

    Args:
        world: All ranks.
        target: The checkpoint, or a run's folder for its newest valid one.
        data: The token files.
        overrides: `--set` arguments, for keys of the stored deck.
        as_json: True to show JSON, False for a table.
        show: Prints the results.
        say: Prints the progress.

    Raises:
        HpctrainError: A file, the checkpoint or the layout is unsuitable. It is raised on all ranks, before
            the evaluation starts.
        InputOutputError: A file cannot be read. Raised likewise.
    """
    with world.agreement():
        if data.sequences is not None and data.sequences < 1:
            raise HpctrainError(f"--sequences {data.sequences}: must be at least 1")
        if len(set(data.files)) < len(data.files):
            raise HpctrainError("--tokens: a file is named twice")
    path = find_checkpoint(world, target)
    state = read_state(path, world.everyone)
    world.ledger.activity = "opening the token files"
    with world.agreement():
        token_files = [TokenFile(path, "--tokens") for path in data.files]
        deck = _evaluation_deck(state, path, token_files, overrides, world.size)
        tokenizer = known_tokenizer(state, path)
        if deck.objective.kind in PREFERENCE_KINDS and data.sequences is not None and data.sequences % 2:
            raise HpctrainError(
                f"--sequences {data.sequences}: must be even, as a pair of answers is two sequences"
            )
        sets = _sets(deck, token_files, data.sequences, tokenizer.text)
    require_same_tokens(world, token_files)
    configure_rank(world, deck)
    sets = [with_token_counts(deck, world, each, tokenizer) for each in sets]
    reference: Step | None = None
    if deck.objective.kind in REFERENCE_KINDS:
        reference = _forward_step(initial_engine(path, state, deck, world), sets[0].batches, deck)
    step = _forward_step(load_inference_engine(path, deck, world), sets[0].batches, deck)
    world.ledger.activity = "evaluating"
    rows: list[dict[str, Any]] = []
    for file, held_out in zip(data.files, sets, strict=True):
        report = partial(_report_progress, say if world.rank == 0 else lambda _: None, file)
        # A module's own loss may count nothing in a part.
        metrics = mean_metrics(step, held_out, deck.model.loss is None, report, reference)
        row = {"tokens": str(file), "sequences": held_out.sequences}
        row |= {} if deck.objective.kind in PREFERENCE_KINDS else {"predicted": held_out.tokens}
        rows.append(row | held_out.metrics(**metrics))
    if world.rank == 0:
        mesh_sizes = step.engine.mesh.sizes
        facts = {
            "checkpoint": str(path),
            "step": state.get("step"),
            "ranks": world.size,
            "layout": {**mesh_sizes, "zero": deck.layout.zero},
            "evaluations": rows,
        }
        where = f"{path}{step_clause(state)}, on {sizes_text(mesh_sizes)}"
        if reference is not None:
            facts["reference"] = deck.model.source or f"run.seed = {deck.run.seed}"
            where += f", against the model of {facts['reference']}"
        show(strict_json(facts, indent=1) if as_json else "\n".join([*_table(rows), "", escaped(where)]))


def _evaluation_deck(
    state: Mapping[str, Any], path: Path, files: Sequence[TokenFile], overrides: Sequence[str], ranks: int
) -> Deck:
    """Return the deck of a checkpoint for these files; raise HpctrainError if they have different losses."""
    pairs = [file for file in files if file.kind == PREFERENCES]
    deck = evaluation_deck(state, path, overrides, ranks, pairs=bool(pairs))
    if deck.objective.kind in REFERENCE_KINDS and len(pairs) < len(files):
        raise HpctrainError(
            f"{pairs[0].where}: holds preferences, whose loss cannot be compared with that of other "
            "files (evaluate them separately)"
        )
    return deck


def _forward_step(engine: Engine, batches: Batches, deck: Deck) -> Step:
    """Return a step that only evaluates a model."""
    return Step(engine, batches, deck.batch.micro_size, 0.0, deck.run.seed)


def step_clause(state: Mapping[str, Any]) -> str:
    """Return ", step N" for the state of a run's checkpoint; "" for an imported model, which has no step."""
    return f", step {state['step']}" if "step" in state else ""


def mean_metrics(
    step: Step,
    held_out: HeldOut,
    in_parts: bool,
    say: Callable[[int, int], None] = lambda *_: None,
    reference: Step | None = None,
) -> dict[str, float]:
    """Return the objective's metrics, means over tokens or pairs. Collective.

    Args:
        step: Step that evaluates the model.
        held_out: Samples for the evaluation.
        in_parts: True to evaluate only as many sequences at a time as ranks have memory for.
        say: Called every few seconds with the numbers of evaluated sequences and of all sequences.
        reference: Step of the reference model, for an objective that has one.
    """
    batches, last_report = held_out.batches, time.monotonic()
    most = MICRO_BATCHES * step.micro_size * step.engine.mesh.size("data")
    if not in_parts:
        most = held_out.sequences
    totals, metrics, denominator = dict[str, float](), dict[str, float](), 0.0
    for first in range(0, held_out.sequences, most):
        size = min(most, held_out.sequences - first)
        part = Batches(SampleWindow(batches.source, first, size), 0)
        if reference is not None:
            part = with_reference_of(reference, part)
        metrics, _, items = step.evaluate_with_counts(part, size)
        if items:
            totals = {name: totals.get(name, 0.0) + value * items for name, value in metrics.items()}
        denominator += items
        if time.monotonic() - last_report > SECONDS_PER_LINE:
            last_report = time.monotonic()
            say(first + size, held_out.sequences)
    means = {name: total / denominator for name, total in totals.items()} if denominator else metrics
    return {name: mean for name, mean in means.items() if name not in step.engine.auxiliary_loss_names}


def _report_progress(say: Callable[[str], None], file: Path, done: int, total: int) -> None:
    say(f"{escaped(str(file))}: {done} of {total} sequences")


def known_tokenizer(state: Mapping[str, Any], path: Path) -> Tokenizer:
    """Return the tokenizer in the state of a checkpoint; raise HpctrainError if it has none."""
    tokenizer = tokenizer_of_state(state, path)
    if tokenizer is None:
        sentence = "holds no tokenizer, so it is not known on which tokens it was trained"
        raise HpctrainError(f"{path}: {sentence} (`hpctrain export` and `import` keep it)")
    return tokenizer


def _sets(deck: Deck, files: Sequence[TokenFile], sequences: int | None, tokenizer: str) -> list[HeldOut]:
    """Return the sets to evaluate; raise HpctrainError for all files that do not fit the model."""
    sets, problems = [], []
    for file in files:
        wrong = [f"{file.where}: {sentence}" for sentence in unfit_reasons(deck, file, tokenizer)]
        problems += wrong
        if not wrong:
            batches = evaluation_batches(deck, file)
            count = batches.source.count
            sets.append(
                HeldOut(file.path.stem, batches, count if sequences is None else min(sequences, count))
            )
    if problems:
        raise HpctrainError(problems)
    return sets


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    titles = _TEXT_COLUMNS if "predicted" in rows[0] else _PAIR_COLUMNS
    cells: list[tuple[str, ...]] = [("token file", "sequences", *titles.values())]
    for row in rows:
        values = (_cell(name, row.get(name)) for name in titles)
        cells.append((escaped(row["tokens"]), str(row["sequences"]), *values))
    return fitted(cells, (0,), columns())


_TEXT_COLUMNS = {
    "predicted": "target tokens",
    "loss": "loss",
    "perplexity": "perplexity",
    "bits_per_byte": "bits/byte",
}
_PAIR_COLUMNS = {name: name for name in ("loss", "accuracy", "margin", "chosen", "rejected")}


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name == "predicted":
        return format_count(int(value))
    return f"{value:.6f}" if name == "loss" else f"{value:.4f}"
