"""`hpctrain evaluate --task`: how many questions a checkpoint's model answers right, on any layout.

Of choices the one counts that is likeliest behind the prompt, as a whole, or by the byte of its text; answers
that are to be written are generated, token by token the likeliest, up to the end of the line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
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
from hpctrain.text import escaped, fitted
from hpctrain.train.evaluate import known_tokenizer
from hpctrain.train.inference_engine import shown_engine
from hpctrain.train.scored import log_probabilities_of
from hpctrain.train.step import Step
from hpctrain.watch.newest import find_checkpoint

ANSWER_TOKENS = 64
"""Of an answer that is written, at the most, unless the longest that is right has more."""


class ChoiceRows(SequenceSource):
    """A sequence for each choice of each row, behind its prompt, of which the choice is to be predicted.

    What is longer than `length` loses the beginning of its prompt; HpctrainError where a choice alone is.
    """

    def __init__(self, rows: Sequence[Choice], tokenizer: Tokenizer, length: int, where: str) -> None:
        self.length, self.cut = length, 0
        self._rows: list[tuple[list[int], int]] = []
        for number, row in enumerate(rows, start=1):
            before = tokenizer.encode(row.prompt) or [tokenizer.end_of_document]
            for choice in row.choices:
                whole = [*before, *tokenizer.encode(choice)]
                if row.prompt:  # where a word goes on over the border, tokens are those of the whole
                    whole = tokenizer.encode(row.prompt + choice)
                asked = len(whole) - min(len(before), len(whole) - 1)
                if asked > length:
                    seen = f"a choice has {asked} tokens, but the model supports at most {length}"
                    raise HpctrainError(f"{where}, row {number}: {seen}")
                self.cut += len(whole) - 1 > length
                self._rows.append((whole[-(length + 1) :], asked))
        self.count = len(self._rows)

    @override
    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        ids, asked = self._rows[index]
        tokens = torch.zeros(self.length, dtype=torch.int64)
        targets = torch.full_like(tokens, MASKED)
        tokens[: len(ids) - 1] = torch.tensor(ids[:-1])
        targets[len(ids) - 1 - asked : len(ids) - 1] = torch.tensor(ids[-asked:])
        return tokens, targets

    def real_tokens(self, index: int) -> int:
        """Return the number of tokens of a sequence in front of its padding."""
        ids, _ = self._rows[index]
        return len(ids) - 1


@dataclass(frozen=True)
class Accuracy:
    """So many of so many are right."""

    right: int
    rows: int

    @property
    def share(self) -> float:
        """Of all rows."""
        return self.right / self.rows

    @property
    def error(self) -> float:
        """Its standard error, were the rows drawn of many like them; 0 of one row."""
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
    """Try a checkpoint, or the newest good one of a run's folder, on tasks, and `show` a table, or JSON, from
    rank 0. Collective. HpctrainError or InputOutputError, on all ranks, before anything is computed, where a
    file, the checkpoint or the layout will not do.
    """
    with world.agreement():
        if len(set(files)) < len(files):
            raise HpctrainError("--task: a file is named twice")
        tasks = [read_rows(file) for file in files]
    of_choices = {number: rows for number, rows in enumerate(tasks) if is_choice(rows)}
    of_written = {number: rows for number, rows in enumerate(tasks) if not is_choice(rows)}
    path = find_checkpoint(world, target)
    state = read_state(path, world.everyone)
    with world.agreement():
        deck = evaluation_deck(state, path, overrides, world.size)
        tokenizer = known_tokenizer(state, path)
        require_token_model(deck, path)
        if deck.model.module == CAUSAL_MODEL and of_choices:
            raise HpctrainError(f"{path}: tasks with choices are unsupported for modules of transformers")
        if deck.model.module not in {None, CAUSAL_MODEL}:
            raise HpctrainError(f"{path}: tasks are unsupported for model.module")
        length = deck.batch.sequence
        sources = {
            number: ChoiceRows(rows, tokenizer, length, f"--task {files[number]}")
            for number, rows in of_choices.items()
        }
    world.use_device(deck.run.device, deck.machine.deterministic)
    torch.set_num_threads(deck.run.threads)
    world.hang.set_limit(deck.stability.hang_seconds)
    found, layout = dict[int, dict[str, Any]](), ""
    if sources:
        engine = shown_engine(path, deck, world)
        layout = f", on {sizes_text(engine.mesh.sizes)}"
        for number, source in sources.items():
            step = Step(engine, batches := Batches(source, 0), deck.batch.micro_size, 0.0, deck.run.seed)
            scores = [each.double().sum(1) for each in log_probabilities_of(step, batches)]
            found[number] = _of_choices(of_choices[number], torch.cat(scores).numpy())
            if source.cut and world.rank == 0:
                say(f"{files[number]}: {source.cut} prompts are too long and lose their beginnings")
        engine.close()
    if of_written:
        texts = max(map(len, of_written.values()))
        writer = TextModel(world, path, *load_model(world, path, None, texts))
        found |= {number: _of_written(writer, rows) for number, rows in of_written.items()}
    if world.rank == 0:
        told = [{"task": str(file), **found[number]} for number, file in enumerate(files)]
        if as_json:
            show(strict_json({"checkpoint": str(path), "step": state.get("step"), "tasks": told}, indent=1))
            return
        show("\n".join([*_table(told), "", f"{path}, step {state.get('step')}{layout}"]))


def _of_choices(rows: Sequence[Choice], scores: Any) -> dict[str, Any]:
    """Figures of choices whose log-probabilities are `scores` [choices of all rows]."""
    right = by_byte = first = 0
    for row in rows:
        own = scores[first : first + len(row.choices)]
        sizes = np.array([len(choice.encode()) for choice in row.choices])
        right += int(own.argmax()) == row.answer
        by_byte += int((own / sizes).argmax()) == row.answer
        first += len(row.choices)
    whole, normalized = Accuracy(right, len(rows)), Accuracy(by_byte, len(rows))
    return {
        "rows": len(rows),
        "accuracy": whole.share,
        "accuracy_error": whole.error,
        "accuracy_by_byte": normalized.share,
        "accuracy_by_byte_error": normalized.error,
    }


def _of_written(writer: TextModel, rows: Sequence[WrittenAnswer]) -> dict[str, Any]:
    """Figures of answers that the model writes. Collective."""
    longest = max(len(writer.tokenizer.encode(answer)) for row in rows for answer in row.answers)
    sampling = Sampling(max(ANSWER_TOKENS, longest + 1), 0.0, seed=0, stops=("\n",))
    prompts = [Prompt(row.prompt, {"number": number}) for number, row in enumerate(rows)]

    def judged(prompt: Prompt, _: int, sample: Any) -> str:
        right = is_exact_match(sample.text, rows[prompt.other_keys["number"]].answers)
        return "right" if right else "wrong"

    share = Accuracy([*writer.format_samples(prompts, sampling, judged)].count("right"), len(rows))
    return {"rows": len(rows), "exact_match": share.share, "exact_match_error": share.error}


def _table(told: Sequence[dict[str, Any]]) -> list[str]:
    cells: list[tuple[str, ...]] = [("task", "rows", "accuracy", "by byte", "exact match")]
    for row in told:
        figures = [
            f"{100 * row[name]:.1f}% +- {100 * row[name + '_error']:.1f}" if name in row else ""
            for name in ("accuracy", "accuracy_by_byte", "exact_match")
        ]
        cells.append((escaped(row["task"]), str(row["rows"]), *figures))
    return fitted(cells, (0,), columns())
