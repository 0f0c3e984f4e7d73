"""`hpctrain evaluate --task`: accuracy of a checkpoint's model on tasks, on any layout.

If a task has choices, the model chooses the one with the highest log-probability after the prompt, in total
or per byte of its text. If the model has to write answers, it generates them greedily up to the line's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.checkpoint.evaluation_deck import evaluation_deck
from hpctrain.checkpoint.load import read_state
from hpctrain.comm.mesh import sizes_text
from hpctrain.comm.world import World
from hpctrain.data.batches import MASKED, Batches, SequenceSource
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.deck.code import CAUSAL_MODEL
from hpctrain.errors import HpctrainError
from hpctrain.files import strict_json
from hpctrain.generate.model_loading import load_model, require_token_model
from hpctrain.generate.prompts import Prompt
from hpctrain.generate.sampling import Sampling
from hpctrain.generate.text_model import TextModel
from hpctrain.post.rewards.reward_interface import is_exact_match
from hpctrain.post.task_rows import Choice, WrittenAnswer, is_choice, read_rows
from hpctrain.report.terminal import columns
from hpctrain.text import counted, escaped, fitted
from hpctrain.train.evaluate import known_tokenizer, step_clause
from hpctrain.train.inference_engine import load_inference_engine
from hpctrain.train.startup import configure_rank
from hpctrain.train.step import Step
from hpctrain.train.token_scores import log_probabilities_of
from hpctrain.watch.checkpoint_target import find_checkpoint

MAX_ANSWER_TOKENS = 64
"""Largest number of tokens of a written answer, unless a right answer is longer."""


class ChoiceRows(SequenceSource):
    """Sequences of a prompt with one of its choices, whose tokens are the targets.

    A sequence with more than `length` tokens loses the beginning of its prompt.

    Attributes:
        truncated: Number of sequences that lost the beginning of their prompt.

    Raises:
        HpctrainError: A choice alone has more than `length` tokens.
    """

    def __init__(self, rows: Sequence[Choice], tokenizer: Tokenizer, length: int, where: str) -> None:
        self.length, self.truncated = length, 0
        self._rows: list[tuple[list[int], int]] = []
        for number, row in enumerate(rows, start=1):
            prompt = tokenizer.encode(row.prompt) or [tokenizer.end_of_document]
            for choice in row.choices:
                ids = [*prompt, *tokenizer.encode(choice)]
                if row.prompt:  # the end of the prompt and the beginning of the choice may be one token
                    ids = tokenizer.encode(row.prompt + choice)
                target_count = len(ids) - min(len(prompt), len(ids) - 1)
                if target_count > length:
                    problem = f"a choice has {target_count} tokens, but the model supports at most {length}"
                    raise HpctrainError(f"{where}, row {number}: {problem}")
                self.truncated += len(ids) - 1 > length
                self._rows.append((ids[-(length + 1) :], target_count))
        self.count = len(self._rows)

    @override
    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        ids, target_count = self._rows[index]
        tokens = torch.zeros(self.length, dtype=torch.int64)
        targets = torch.full_like(tokens, MASKED)
        tokens[: len(ids) - 1] = torch.tensor(ids[:-1])
        targets[len(ids) - 1 - target_count : len(ids) - 1] = torch.tensor(ids[-target_count:])
        return tokens, targets

    @override
    def real_tokens(self, index: int) -> int:
        ids, _ = self._rows[index]
        return len(ids) - 1


@dataclass(frozen=True)
class Accuracy:
    """Number of right answers.

    Attributes:
        right: Number of rows that are answered right.
        rows: Number of rows.
    """

    right: int
    rows: int

    @property
    def share(self) -> float:
        """Fraction of rows that are answered right."""
        return self.right / self.rows

    @property
    def error(self) -> float:
        """Standard error of `share` as an estimate for similar rows; 0 for a single row."""
        return sqrt(self.share * (1 - self.share) / (self.rows - 1)) if self.rows > 1 else 0.0


def evaluate_task(
    world: World,
    target: Path,
    files: Sequence[Path],
    overrides: Sequence[str],
    as_json: bool,
    show: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Evaluate a checkpoint on tasks, and show a table or JSON on rank 0. Collective.

    Args:
        world: All ranks.
        target: A checkpoint, or the folder of a run, whose newest valid checkpoint is used.
        files: Task files.
        overrides: Changes of the stored deck.
        as_json: True to show JSON.
        show: Prints the result.
        say: Prints a remark.

    Raises:
        HpctrainError: On all ranks if a file, the checkpoint or the layout is unsuitable.
        InputOutputError: On all ranks if a file or the checkpoint cannot be read.
    """
    with world.agreement():
        if len(set(files)) < len(files):
            raise HpctrainError("--task: a file is named twice")
        tasks = [read_rows(file) for file in files]
    choice_tasks = {number: rows for number, rows in enumerate(tasks) if is_choice(rows)}
    written_tasks = {number: rows for number, rows in enumerate(tasks) if not is_choice(rows)}
    path = find_checkpoint(world, target)
    state = read_state(path, world.everyone)
    with world.agreement():
        deck = evaluation_deck(state, path, overrides, world.size)
        tokenizer = known_tokenizer(state, path)
        require_token_model(deck, path)
        if deck.model.module == CAUSAL_MODEL and choice_tasks:
            raise HpctrainError(f"{path}: tasks with choices are unsupported for modules of transformers")
        if deck.model.module not in {None, CAUSAL_MODEL}:
            raise HpctrainError(f"{path}: tasks are unsupported for model.module")
        length = deck.batch.sequence
        sources = {
            number: ChoiceRows(rows, tokenizer, length, f"--task {files[number]}")
            for number, rows in choice_tasks.items()
        }
    configure_rank(world, deck)
    metrics, layout = dict[int, dict[str, Any]](), ""
    if sources:
        engine = load_inference_engine(path, deck, world)
        layout = f", on {sizes_text(engine.mesh.sizes)}"
        for number, source in sources.items():
            step = Step(engine, batches := Batches(source, 0), deck.batch.micro_size, 0.0, deck.run.seed)
            scores = [each.double().sum(1) for each in log_probabilities_of(step, batches)]
            metrics[number] = _choice_metrics(choice_tasks[number], torch.cat(scores).numpy())
            if source.truncated and world.rank == 0:
                count = counted(source.truncated, "prompt")
                say(f"{files[number]}: the beginning of {count} is cut off, since the text is too long")
        engine.close()
    if written_tasks:
        texts = max(map(len, written_tasks.values()))
        writer = TextModel(world, path, *load_model(world, path, None, texts))
        metrics |= {number: _written_metrics(writer, rows) for number, rows in written_tasks.items()}
    if world.rank == 0:
        results = [{"task": str(file), **metrics[number]} for number, file in enumerate(files)]
        if as_json:
            show(
                strict_json({"checkpoint": str(path), "step": state.get("step"), "tasks": results}, indent=1)
            )
            return
        show("\n".join([*_table(results), "", f"{path}{step_clause(state)}{layout}"]))


def _choice_metrics(rows: Sequence[Choice], scores: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return the metrics of a task, by the log-probabilities of the choices of all rows."""
    right = right_by_byte = first = 0
    for row in rows:
        row_scores = scores[first : first + len(row.choices)]
        sizes = np.array([len(choice.encode()) for choice in row.choices])
        right += int(row_scores.argmax()) == row.answer
        right_by_byte += int((row_scores / sizes).argmax()) == row.answer
        first += len(row.choices)
    total, by_byte = Accuracy(right, len(rows)), Accuracy(right_by_byte, len(rows))
    return {
        "rows": len(rows),
        "accuracy": total.share,
        "accuracy_error": total.error,
        "accuracy_by_byte": by_byte.share,
        "accuracy_by_byte_error": by_byte.error,
    }


def _written_metrics(writer: TextModel, rows: Sequence[WrittenAnswer]) -> dict[str, Any]:
    """Return the metrics of a task whose answers the model writes. Collective."""
    longest = max(len(writer.tokenizer.encode(answer)) for row in rows for answer in row.answers)
    sampling = Sampling(max(MAX_ANSWER_TOKENS, longest + 1), 0.0, seed=0, stops=("\n",))
    prompts = [Prompt(row.prompt, {"number": number}) for number, row in enumerate(rows)]

    def verdict(prompt: Prompt, _: int, sample: Any) -> str:
        right = is_exact_match(sample.text, rows[prompt.other_keys["number"]].answers)
        return "right" if right else "wrong"

    verdicts = list(writer.format_samples(prompts, sampling, verdict))
    accuracy = Accuracy(verdicts.count("right"), len(rows))
    return {"rows": len(rows), "exact_match": accuracy.share, "exact_match_error": accuracy.error}


def _table(results: Sequence[dict[str, Any]]) -> list[str]:
    cells: list[tuple[str, ...]] = [("task", "rows", "accuracy", "by byte", "exact match")]
    for row in results:
        percentages = [
            f"{100 * row[name]:.1f}% +- {100 * row[name + '_error']:.1f}" if name in row else ""
            for name in ("accuracy", "accuracy_by_byte", "exact_match")
        ]
        cells.append((escaped(row["task"]), str(row["rows"]), *percentages))
    return fitted(cells, (0,), columns())
