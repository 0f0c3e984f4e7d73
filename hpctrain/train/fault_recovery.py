"""Recovery of a run from silent faults that its guard has found."""

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
from hpctrain.watch.status import MAX_FAULTS_OF_RANK, now_text

MAX_FAULTS = 20
"""Number of silent faults after which a run stops, even if no single rank has most of them."""

MAX_LOGGED, MAX_WRITTEN = 10, 1000
"""Number of faults of one step that are logged, and that are written to the file, at most."""


class FaultRecovery:
    """Restores a valid state after silent faults, and reports the faults in the log, the status and a file.

    The step is repeated from the state before it, or from the newest valid state if that has changed.
    """

    def __init__(self, rollback: Rollback, folder: Path) -> None:
        self.rollback, self.path = rollback, folder / FAULTS_FILE
        self.fault_count = 0
        self._faults_of_rank: Counter[int] = Counter()
        world = rollback.trainer.world
        self._nodes: list[str] = world.everyone.all_gather_object(world.hostname)

    def recover(self, error: SilentFaultError) -> StepDecision | None:
        """Restore a valid state. Return a decision to stop, or None to continue. Collective."""
        log = logging.getLogger("hpctrain")
        trainer, rollback, step = self.rollback.trainer, self.rollback, error.step
        self._report(error)
        if not error.state_unchanged:
            rollback.checkpoints.abandon(trainer.state.step)
            source = rollback.newest(trainer.state.step)
            if source is None:
                why = f"step {step}: no valid state to restore, in memory or on disk"
                return StepDecision(stop=True, reason=f"{describe_fault(error.faults[0])}; {why}")
            restored = rollback.restore(source)
            log.warning("step %d: restored the state after step %d", step, restored.step)
        else:
            log.warning("step %d: repeated from the state before it", step)
        if why := self._reason_to_stop():
            rollback.save()
            return StepDecision(checkpoint=True, stop=True, reason=why)
        return None

    def _report(self, error: SilentFaultError) -> None:
        """Count and report the faults of a step."""
        log, reporter = logging.getLogger("hpctrain"), self.rollback.reporter
        self.fault_count += 1  # faults of the same step have one cause
        single = {fault.ranks[0] for fault in error.faults if len(fault.ranks) == 1}
        self._faults_of_rank.update(single)  # several faults of a rank in one step count once
        for fault in error.faults[:MAX_LOGGED]:
            log.warning("step %d: %s", error.step, describe_fault(fault))
        if len(error.faults) > MAX_LOGGED:
            log.warning(
                "step %d: %d more silent faults are listed in %s",
                error.step,
                len(error.faults) - MAX_LOGGED,
                self.path,
            )
        rows = [self._row(error.step, fault) for fault in error.faults[:MAX_WRITTEN]]
        with self.rollback.trainer.world.agreement():
            if self.rollback.trainer.world.rank == 0:
                with failing_as(f"{self.path}: cannot be written"), self.path.open("a+b") as file:
                    add_lines(file.fileno(), map(strict_json, rows))
        faulty = [
            {"rank": rank, "node": self._nodes[rank], "faults": count}
            for rank, count in self._faults_of_rank.items()
        ]
        reporter.status.note(silent_faults=self.fault_count, faulty=faulty)

    def _row(self, step: int, fault: DetectedFault) -> dict[str, Any]:
        nodes = list(dict.fromkeys(self._nodes[rank] for rank in fault.ranks))
        return {"time": now_text(), "step": step, **fault.row, "nodes": nodes}

    def _reason_to_stop(self) -> str:
        """Return why the run must not continue on these nodes; "" if it may."""
        often = sorted(rank for rank, count in self._faults_of_rank.items() if count >= MAX_FAULTS_OF_RANK)
        if often:
            nodes = ", ".join(dict.fromkeys(self._nodes[rank] for rank in often))
            return f"{MAX_FAULTS_OF_RANK} silent faults on {name_ranks(often)}: test or exclude {nodes}"
        if self.fault_count >= MAX_FAULTS:
            return f"{counted(self.fault_count, 'silent fault')} without a known rank: test the nodes"
        return ""
