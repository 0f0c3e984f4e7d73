"""The lowest evaluation loss of a run, which decides on the best checkpoint and on early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpctrain.checkpoint.names import BEST
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.evaluation import monitored_set
from hpctrain.text import counted

RECORD = BEST
"""Key of a checkpoint's state under which the attributes of a BestSoFar are stored."""

_STORED = {
    "step": "step",
    "loss": "loss",
    "waited": "waited",
    "kept": "checkpoint_step",
    "kept_loss": "checkpoint_loss",
}
"""Stored keys, and the names of their attributes."""


class BestSoFar:
    """Lowest loss of the evaluations of one set so far, which is the same on all ranks.

    Attributes:
        set_name: Name of the set.
        patience: Number of evaluations without a lower loss after which the run ends; 0 for no limit.
        keeps: True if the run keeps its best checkpoint.
        step: Step of the lowest loss; 0 if there is none.
        loss: The lowest loss.
        waited: Number of evaluations since then.
        checkpoint_step: Step of the best checkpoint; 0 if there is none.
        checkpoint_loss: Loss at that step. It is above `loss` if a resumed run lacks the best checkpoint.
    """

    def __init__(self, deck: Deck) -> None:
        self.set_name, self.patience = monitored_set(deck), deck.run.patience
        self.keeps = deck.checkpoint.keep_best is not None
        self.reset()

    def reset(self) -> None:
        """Forget all evaluations."""
        self.step, self.loss, self.waited = 0, math.inf, 0
        self.forget_checkpoint()

    def forget_checkpoint(self) -> None:
        """Forget the best checkpoint, because it is missing. The next evaluation sets a new one."""
        self.checkpoint_step, self.checkpoint_loss = 0, math.inf

    def add_evaluation(self, step: int, evaluated: Mapping[str, Mapping[str, float]]) -> None:
        """Record the metrics of an evaluation after a step, by set and metric."""
        loss = evaluated[self.set_name]["loss"]
        if loss < self.loss:
            self.step, self.loss, self.waited = step, loss, 0
        else:  # also if the loss is NaN
            self.waited += 1
        if self.keeps and loss < self.checkpoint_loss:
            self.checkpoint_step, self.checkpoint_loss = step, loss

    def is_best_checkpoint(self, step: int) -> bool:
        """Return True if the run keeps the checkpoint after a step as its best one."""
        return self.keeps and 0 < step == self.checkpoint_step

    @property
    def reason_to_stop(self) -> str:
        """Reason why the run must end early; "" if it continues."""
        if not 0 < self.patience <= self.waited:
            return ""
        lowest = f"lowest {self.loss:.4f} after step {self.step}" if self.step else "none was finite"
        waited = counted(self.waited, "evaluation")
        return f"{waited} without a lower {self.set_name} loss; {lowest} (run.patience = {self.patience})"

    def stored(self) -> dict[str, Any]:
        """Return what a checkpoint stores: the set and the attributes, with None for infinity."""
        values = {"of": self.set_name} | {key: getattr(self, name) for key, name in _STORED.items()}
        return {key: None if value == math.inf else value for key, value in values.items()}

    def resume(self, stored: object) -> None:
        """Continue with the values of a checkpoint; start anew if they are invalid or of another set."""
        self.reset()
        if not isinstance(stored, dict) or stored.get("of") != self.set_name:
            return
        values = {name: stored[key] for key, name in _STORED.items() if key in stored}
        if not all(value is None or type(value) in (int, float) for value in values.values()):
            return
        for name, value in values.items():
            setattr(self, name, math.inf if value is None else value)
        if not self.keeps:
            self.forget_checkpoint()
