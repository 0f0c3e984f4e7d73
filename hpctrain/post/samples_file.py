"""What a policy wrote, for people to read: some answers of every rollout and evaluation, in samples.jsonl."""

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
    """The file in a run's folder, of which `writes` this rank alone; lines of steps after `step`, which a run
    that goes on makes anew, are forgotten, and those of steps that it went behind. In another folder than a
    run's nothing is written.
    """

    def __init__(self, folder: Path, step: int, shown: int, writes: bool) -> None:
        self.path, self.step, self.shown, self.writes = folder / SAMPLES_FILE, step, shown, writes
        self._last: tuple[int, bool] | None = None

    def write(
        self,
        step: int,
        of: str,
        answers: Sequence[Answer],
        rewards: Mapping[str, Sequence[float]],
        tokenizer: Tokenizer,
    ) -> None:
        """Add the first answers. InputOutputError where that cannot be."""
        if not self.writes or not self.shown or not self.path.parent.is_dir():
            return
        lines = []
        for index, answer in enumerate(answers[: self.shown]):
            prompt = tokenizer.decode(answer.ids[: len(answer.ids) - answer.written])
            row = {
                "step": step,
                "of": of,
                "prompt": prompt,
                "text": answer.text,
                "rewards": {name: scores[index] for name, scores in rewards.items()},
                "tokens": answer.written,
                "ended": answer.why,
            }
            lines.append(json.dumps(row) + "\n")
        with failing_as(f"{self.path}: cannot be written"):
            place = step, of == "evaluation"  # which comes behind the step's rollout
            kept = self.step if self._last is None else None
            if self._last is not None and (place < self._last or place == self._last == (step, False)):
                kept = step - 1
            if kept is not None and self.path.exists():
                cut_rows(self.path, kept)
            self._last = place
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
