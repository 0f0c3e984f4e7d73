"""Rehearsal of a step of a deck, which matches the programmes of all ranks and compares memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from hpctrain.deck.sections.rank_partition import require_no_dedicated_ranks
from hpctrain.errors import EXIT_DONE, EXIT_INTERNAL, EXIT_USER, HpctrainError
from hpctrain.host.device import device_kind, on_host
from hpctrain.plan.deck_plan import DeckPlan
from hpctrain.plan.rehearse.checks.matching import MatchResult, match_programmes
from hpctrain.plan.rehearse.fault import RehearsalFault
from hpctrain.plan.rehearse.memory_peaks import MemoryPeak, find_peaks, memory_faults
from hpctrain.plan.rehearse.rank_programmes import RankProgrammes
from hpctrain.report.terminal import columns, fit
from hpctrain.text import counted
from hpctrain.units import format_bytes, format_seconds

FAULTS_SHOWN = 10


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal.

    Attributes:
        matched: Result of matching the programmes.
        peak: Memory peak of the stage that needs most.
        over_memory: Faults of stages that do not fit into memory.
        known_room: True if the memory limit is known.
        seconds: Duration of the rehearsal.
        on_streams: True if the rules of NCCL were used, otherwise those of MPI.
    """

    matched: MatchResult
    peak: MemoryPeak
    over_memory: tuple[RehearsalFault, ...]
    known_room: bool
    seconds: float
    on_streams: bool = False

    @property
    def faults(self) -> tuple[RehearsalFault, ...]:
        """Faults of all checks."""
        return (*self.matched.faults, *self.over_memory)

    @property
    def exit_code(self) -> int:
        """Exit code: 70 if programmes do not match, an internal error; 2 if memory is too small."""
        return EXIT_INTERNAL if self.matched.faults else EXIT_USER if self.over_memory else EXIT_DONE

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        matched = self.matched
        return {
            "ranks": matched.ranks,
            "classes": matched.classes,
            "events": matched.events,
            "messages": matched.messages,
            "bytes": matched.bytes,
            "peak": {
                "stage": self.peak.stage,
                "action": str(self.peak.action),
                "total_bytes": self.peak.total,
            },
            "faults": [fault.row() for fault in self.faults],
            "seconds": self.seconds,
        }


def rehearse_deck(
    plan: DeckPlan, ranks_per_node: int | None = None, progress: Callable[[str], None] = lambda _: None
) -> Rehearsal:
    """Rehearse a step of the deck of a plan. Local.

    Args:
        plan: Plan of the deck.
        ranks_per_node: Number of ranks of a node, as in `plan_deck`.
        progress: Function that is called with a sentence about the progress.

    Raises:
        HpctrainError: The deck has parameter servers, whose ranks make no common steps, or models on
            dedicated ranks.
    """
    began, deck = perf_counter(), plan.deck
    if deck.communication.server is not None:
        sentence = 'is unsupported in a rehearsal (use "none")'
        raise HpctrainError(deck.problem("communication.server.mode", sentence))
    require_no_dedicated_ranks(deck, "is unsupported in a rehearsal")
    requested = ranks_per_node or deck.communication.ranks_per_node
    per_node = requested or deck.machine.known_ranks_per_node or plan.ranks
    assert deck.model.vocabulary is not None
    programmes = RankProgrammes(deck, plan.ranks, deck.model.vocabulary, per_node)
    job = programmes.job(progress)
    progress("matching")
    on_streams = not on_host(device_kind(deck.run.device))
    matched = match_programmes(job, on_streams)
    peaks = find_peaks(programmes, plan.memory)
    peak = max(peaks, key=lambda each: each.total)
    over_memory = tuple(memory_faults(plan.memory, plan.demand, peaks))
    return Rehearsal(matched, peak, over_memory, plan.demand is not None, perf_counter() - began, on_streams)


def rehearsal_text(rehearsal: Rehearsal) -> str:
    """Return the result of a rehearsal as text for a terminal."""
    matched, peak = rehearsal.matched, rehearsal.peak
    kinds = counted(matched.classes, "kind")
    lines = [
        f"Rehearsed a step of {counted(matched.ranks, 'rank')} ({kinds}) in "
        f"{format_seconds(rehearsal.seconds)}: {counted(matched.events, 'event')}, "
        f"{counted(matched.messages, 'message')}, {format_bytes(matched.bytes)} of payload."
    ]
    if matched.faults:
        lines.append(f"{counted(len(matched.faults), 'fault')} in messages and calls:")
        lines += _fault_lines(matched.faults)
    else:
        rules = ", by the rules of NCCL" if rehearsal.on_streams else ""
        lines.append(
            f"All sends and receives match, all collective calls match, and there is no cyclic wait{rules}."
        )
    most = f"the peak is {format_bytes(peak.total)} per rank of stage {peak.stage}, at {peak.action}"
    if rehearsal.over_memory:
        lines += [
            f"Does not fit into memory on {counted(len(rehearsal.over_memory), 'stage')}:",
            *_fault_lines(rehearsal.over_memory),
        ]
    elif rehearsal.known_room:
        lines.append(f"Fits into memory: {most}.")
    else:
        lines.append(f"The memory limit is unknown; {most}.")
    return "\n".join(line for each in lines for line in fit(each, columns())) + "\n"


def _fault_lines(faults: tuple[RehearsalFault, ...]) -> list[str]:
    more = len(faults) - FAULTS_SHOWN
    return [*(f"  {fault}" for fault in faults[:FAULTS_SHOWN]), *([f"  and {more} more"] if more > 0 else [])]
