"""FaultRecovery: what a run does about silent faults that its guard has found."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

from hpctrain.audit.detected_fault import DetectedFault, SilentFaultError, describe_fault
from hpctrain.comm.error_messages import name_ranks
from hpctrain.errors import failing_as
from hpctrain.files import add_lines, strict_json
from hpctrain.report.marks import FAULTS_FILE
from hpctrain.text import counted
from hpctrain.train.control import StepDecision
from hpctrain.train.rollback import Rollback
from hpctrain.watch.status import MOST_OF_A_RANK, now_text

MOST = 20
"""Faults of a job that no single rank is known to have."""

TOLD, WRITTEN = 10, 1000
"""Of what is found at once, at most: in the log, and in the file."""


class FaultRecovery:
    """Has what was found wrong be right again: the step is made again, by the state that it began from, or by
    the newest good one before that. What was found goes into the log, the status, and a file of the run.
    """

    def __init__(self, way: Rollback, folder: Path) -> None:
        self.way, self.path = way, folder / FAULTS_FILE
        self.found = 0
        self._of_rank: Counter[int] = Counter()
        world = way.trainer.world
        self._nodes: list[str] = world.everyone.all_gather_object(world.hostname)

    def heal(self, found: SilentFaultError) -> StepDecision | None:
        """What the run is to do; None for going on. Collective."""
        log = logging.getLogger("hpctrain")
        trainer, way, step = self.way.trainer, self.way, found.step
        self._note(found)
        if not found.state_unchanged:
            way.checkpoints.abandon(trainer.state.step)
            source = way.newest(trainer.state.step)
            if source is None:
                why = f"step {step}: no valid state to restore, in memory or on disk"
                return StepDecision(stop=True, why=f"{describe_fault(found.faults[0])}; {why}")
            before = way.take(source)
            log.warning("step %d: restored the state after step %d", step, before.step)
        else:
            log.warning("step %d: repeated from the state before it", step)
        if why := self._why_to_stop():
            way.save()
            return StepDecision(checkpoint=True, stop=True, why=why)
        return None

    def _note(self, found: SilentFaultError) -> None:
        """Tell of it, and count."""
        log, reporter = logging.getLogger("hpctrain"), self.way.reporter
        self.found += 1  # what is wrong at once has one cause
        single = {fault.ranks[0] for fault in found.faults if len(fault.ranks) == 1}
        self._of_rank.update(single)  # what one rank has at a time is one fault of it
        for fault in found.faults[:TOLD]:
            log.warning("step %d: %s", found.step, describe_fault(fault))
        if len(found.faults) > TOLD:
            log.warning(
                "step %d: %d more silent faults are listed in %s",
                found.step,
                len(found.faults) - TOLD,
                self.path,
            )
        rows = [self._row(found.step, fault) for fault in found.faults[:WRITTEN]]
        with self.way.trainer.world.agreement():
            if self.way.trainer.world.rank == 0:
                with failing_as(f"{self.path}: cannot be written"), self.path.open("a+b") as file:
                    add_lines(file.fileno(), map(strict_json, rows))
        faulty = [
            {"rank": rank, "node": self._nodes[rank], "faults": count}
            for rank, count in self._of_rank.items()
        ]
        reporter.status.note(silent_faults=self.found, faulty=faulty)

    def _row(self, step: int, fault: DetectedFault) -> dict[str, Any]:
        nodes = list(dict.fromkeys(self._nodes[rank] for rank in fault.ranks))
        return {"time": now_text(), "step": step, **fault.row, "nodes": nodes}

    def _why_to_stop(self) -> str:
        """Why the run is not to go on here; empty where it is."""
        often = sorted(rank for rank, count in self._of_rank.items() if count >= MOST_OF_A_RANK)
        if often:
            nodes = ", ".join(dict.fromkeys(self._nodes[rank] for rank in often))
            return f"{MOST_OF_A_RANK} silent faults on {name_ranks(often)}: test or exclude {nodes}"
        if self.found >= MOST:
            return f"{counted(self.found, 'silent fault')} without a known rank: test the nodes"
        return ""
