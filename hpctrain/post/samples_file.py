"""`samples.jsonl`: some answers of each rollout and evaluation, for people to read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.data.tokenizer import Tokenizer
from hpctrain.errors import failing_as
from hpctrain.post.rollout import Answer
from hpctrain.report.samples import SAMPLES_FILE
from hpctrain.watch.metrics import cut_rows


class SamplesFile:
    """Appends answers to the samples file in the folder of a run. Nothing is written if there is no folder.

    A run that resumes, or goes back after a spike, removes the rows of the steps that it repeats.

    Attributes:
        path: The file.
        resume_step: Number of steps that were done when the run started. The first call of `write` removes
            rows of later steps.
        count: Number of answers of each rollout or evaluation that are written.
        writes: True on the one rank that writes.
    """

    def __init__(self, folder: Path, resume_step: int, count: int, writes: bool) -> None:
        self.path, self.resume_step, self.count, self.writes = (
            folder / SAMPLES_FILE,
            resume_step,
            count,
            writes,
        )
        self._last_written: tuple[int, bool] | None = None

    def write(
        self,
        step: int,
        of: str,
        answers: Sequence[Answer],
        rewards: Mapping[str, Sequence[float]],
        tokenizer: Tokenizer,
    ) -> None:
        """Append the first answers of a rollout or an evaluation. Local.

        Args:
            step: Step that learns from the rollout, or after which the policy is evaluated.
            of: "rollout" or "evaluation".
            answers: The answers.
            rewards: Rewards of the answers, by name of the reward.
            tokenizer: Tokenizer that decodes the prompts.

        Raises:
            InputOutputError: The file cannot be written.
        """
        if not self.writes or not self.count or not self.path.parent.is_dir():
            return
        lines = []
        for index, answer in enumerate(answers[: self.count]):
            row = {
                "step": step,
                "of": of,
                "prompt": tokenizer.decode(answer.ids[: answer.prompt_length]),
                "text": answer.text,
                "rewards": {name: scores[index] for name, scores in rewards.items()},
                "tokens": answer.length,
                "ended": answer.finish_reason,
            }
            lines.append(json.dumps(row) + "\n")
        with failing_as(f"{self.path}: cannot be written"):
            place = step, of == "evaluation"  # an evaluation comes after the rollout of its step
            last, last_valid_step = self._last_written, None
            if last is None:
                last_valid_step = self.resume_step
            elif place < last or place == last == (step, False):
                last_valid_step = step - 1
            if last_valid_step is not None and self.path.exists():
                cut_rows(self.path, last_valid_step)
            self._last_written = place
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
