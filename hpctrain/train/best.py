"""The lowest loss of evaluations so far: which checkpoint stays for it, and whether the run still learns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpctrain.checkpoint.names import BEST
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.evaluation import monitored_set
from hpctrain.text import counted

RECORD = BEST
"""Under which key a checkpoint's state holds it."""

_KEPT = ("step", "loss", "waited", "kept", "kept_loss")


class BestSoFar:
    """What evaluations of one set, `of`, have come to; the same on all ranks, since their losses are.

    `loss` is the lowest, after `step`, `waited` the evaluations since then. `kept` is the step of the
    checkpoint that stays (0: none), of the loss `kept_loss`: the same, but where a run goes on without that
    file.
    """

    def __init__(self, deck: Deck) -> None:
        self.of, self.patience = monitored_set(deck), deck.run.patience
        self.keeps = deck.checkpoint.keep_best is not None
        self.begin()

    def begin(self) -> None:
        """Nothing was evaluated yet."""
        self.step, self.loss, self.waited = 0, math.inf, 0
        self.lose()

    def lose(self) -> None:
        """The checkpoint that was to stay is not there: the next evaluation makes one."""
        self.kept, self.kept_loss = 0, math.inf

    def heed(self, step: int, evaluated: Mapping[str, Mapping[str, float]]) -> None:
        """Take note of an evaluation after that step."""
        loss = evaluated[self.of]["loss"]
        if loss < self.loss:
            self.step, self.loss, self.waited = step, loss, 0
        else:  # what is no number is no lower one
            self.waited += 1
        if self.keeps and loss < self.kept_loss:
            self.kept, self.kept_loss = step, loss

    def wants(self, step: int) -> bool:
        """Whether the checkpoint of that step is the one that stays."""
        return self.keeps and 0 < step == self.kept

    @property
    def impatience(self) -> str:
        """Why the run is to end; "" where it is not."""
        if not 0 < self.patience <= self.waited:
            return ""
        lowest = f"lowest {self.loss:.4f} after step {self.step}" if self.step else "none was finite"
        waited = counted(self.waited, "evaluation")
        return f"{waited} without a lower {self.of} loss; {lowest} (run.patience = {self.patience})"

    def record(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        found = {name: getattr(self, name) for name in ("of", *_KEPT)}
        return {name: None if value == math.inf else value for name, value in found.items()}

    def resume(self, record: object) -> None:
        """Go on from what a checkpoint holds; where it knows of no evaluation of this set, begin anew."""
        self.begin()
        if not isinstance(record, dict) or record.get("of") != self.of:
            return
        known = {name: record[name] for name in _KEPT if name in record}
        if not all(value is None or type(value) in (int, float) for value in known.values()):
            return
        for name, value in known.items():
            setattr(self, name, math.inf if value is None else value)
        if not self.keeps:
            self.lose()
