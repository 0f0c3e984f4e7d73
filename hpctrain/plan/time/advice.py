"""Limits of the step time, and the single change of a deck that would reduce it most and still fit.

A limit is found by a plan on a faster machine: how much shorter a step would be if one part of the machine
took half its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hpctrain.deck.schedules import SCHEDULE_NAMES, TWO_CHUNKS
from hpctrain.deck.schema import Deck
from hpctrain.engine.mesh_sizes import axis_sizes, micro_batches
from hpctrain.errors import HpctrainError
from hpctrain.plan.time.machine_rates import (
    AttentionRates,
    CollectiveRates,
    FormatRates,
    HostRates,
    LinkRates,
    MachineRates,
)
from hpctrain.plan.time.step_plan import StepPlan

LEAST_GAIN = 0.005
"""Smallest share of a step that a change must save."""
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2")
"""Schedules that are compared. They are generated quickly for any number of stages."""


@dataclass(frozen=True)
class Gain:
    """Change of the deck that makes a step faster.

    Attributes:
        change: The change, such as "layout.tensor=4".
        share: Share of the step time that it saves.
        seconds: Seconds of a step with it.
        more_bytes: Further bytes of the rank with most memory; negative if it needs fewer.
        fits: True if the ranks of a node fit into its memory; None if the limit is unknown.
    """

    change: str
    share: float
    seconds: float
    more_bytes: int
    fits: bool | None

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        return {
            "set": self.change,
            "seconds": self.seconds,
            "faster": self.share,
            "more_bytes": self.more_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Advice:
    """Limits of the step time, and the best change.

    Attributes:
        limits: Share of the step time that would be saved if a limit took half its time, the largest first.
        gain: Change that saves most; None if none saves time and fits.
    """

    limits: Mapping[str, float]
    gain: Gain | None

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        best = None if self.gain is None else self.gain.row()
        return {"halved": dict(self.limits), "best": best}


@dataclass(frozen=True)
class Planners:
    """Functions that plan changes of a deck.

    Attributes:
        changed: Function that returns the deck after a change such as "layout.zero=3".
        step: Function that returns the step of a deck on a machine.
        memory: Function that returns the bytes of the rank with most memory, and whether a deck fits.
    """

    changed: Callable[[str], Deck]
    step: Callable[[Deck, MachineRates], StepPlan]
    memory: Callable[[Deck], tuple[int, bool | None]]


def advise(
    deck: Deck, ranks: int, step: StepPlan, machine: MachineRates, planners: Planners, total_bytes: int
) -> Advice:
    """Return the limits of the step time of a deck, and the change that would reduce it most.

    Memory is planned only for the fastest changes, until one fits.

    Args:
        deck: The deck.
        ranks: Number of ranks.
        step: Predicted step of the deck.
        machine: Rates of the machine.
        planners: Functions that plan changes.
        total_bytes: Bytes of the rank with most memory.
    """
    gains = []
    for change in changes(deck):
        try:
            other = planners.changed(change)
            seconds = estimate(other, ranks, machine, planners.step)
        except HpctrainError:
            continue  # the deck does not support this change
        if step.seconds - seconds > LEAST_GAIN * step.seconds:
            gains.append((seconds, change, other))
    best = None
    for _, change, other in sorted(gains, key=lambda gain: gain[0]):
        try:
            size, fits = planners.memory(other)
            if fits is False:
                continue
            seconds = planners.step(other, machine).seconds
        except HpctrainError:
            continue
        best = Gain(change, 1 - seconds / step.seconds, seconds, size - total_bytes, fits)
        break
    now = estimate(deck, ranks, machine, planners.step)
    shares = {part: 1 - estimate(deck, ranks, faster(machine, part), planners.step) / now for part in PARTS}
    shares["waiting"] = step.seconds_by_cause["bubble"] / 2 / step.seconds
    return Advice(dict(sorted(shares.items(), key=lambda each: -each[1])), best)


def estimate(
    deck: Deck, ranks: int, machine: MachineRates, timed: Callable[[Deck, MachineRates], StepPlan]
) -> float:
    """Return the seconds of a step, simulated with only as many micro-batches as fill the pipeline twice.

    With more of them, the stage with most work does not wait for other stages.
    """
    data = axis_sizes(deck, ranks)["data"]
    passes, enough = micro_batches(deck, data), 2 * deck.layout.pipeline
    offloads = (deck.memory.parameters, deck.memory.activations) != ("device", "keep")
    each_time = deck.layout.zero == 3 or offloads  # gathered or fetched for each micro-batch
    if passes <= enough or each_time or deck.batch.ramp_from or deck.layout.schedule not in SCHEDULE_NAMES:
        return timed(deck, machine).seconds
    fewer = deck.with_keys(batch={"global_size": enough * data * deck.batch.micro_size})
    causes = timed(fewer, machine).seconds_by_cause
    return sum(
        seconds if cause in STEP_CAUSES else seconds * passes / enough for cause, seconds in causes.items()
    )


STEP_CAUSES = frozenset({"bubble", "gradients", "parameters", "offload", "optimizer", "fixed"})
"""Causes that do not grow with the number of micro-batches."""

PARTS = ("computing", "memory", "inside", "between", "away", "fixed")
"""Parts of a machine.

They are computation (products and attention), bandwidth of memory, links inside nodes, links between nodes,
transfers to hosts and disks, and fixed times of operations and steps.
"""


def faster(machine: MachineRates, part: str) -> MachineRates:
    """Return a machine with one of its `PARTS` twice as fast, for all kinds of node."""
    if machine.others:
        first, *others = (faster(kind.model_copy(update={"others": ()}), part) for kind in machine.kinds)
        return first.model_copy(update={"others": tuple(others)})
    if part == "computing":
        products = {
            form: rates.model_copy(update={"peak": 2 * rates.peak})
            for form, rates in machine.products.items()
        }
        formats = {
            form: each.model_copy(update={"attention": each.attention and _faster_attention(each.attention)})
            for form, each in machine.formats.items()
        }
        attention = _faster_attention(machine.attention)
        return machine.model_copy(update={"products": products, "attention": attention, "formats": formats})
    if part == "memory":
        formats = {
            form: each.model_copy(update=_elementwise_halved(each)) for form, each in machine.formats.items()
        }
        update = {"memory_bandwidth": 2 * machine.memory_bandwidth, "formats": formats}
        return machine.model_copy(update=update | _elementwise_halved(machine))
    if part == "inside":
        measured = {name: _halve(each) for name, each in machine.collectives.items()}
        return machine.model_copy(update={"inside": _faster_link(machine.inside), "collectives": measured})
    if part == "between":
        crossing = {name: tuple(map(_halve, several)) for name, several in machine.crossing.items()}
        return machine.model_copy(update={"between": _faster_link(machine.between), "crossing": crossing})
    if part == "away":
        host, disk = machine.host, machine.disk
        faster_host = (
            None
            if host is None
            else HostRates(bandwidth=2 * host.bandwidth, memory_bandwidth=2 * host.memory_bandwidth)
        )
        return machine.model_copy(update={"host": faster_host, "disk": None if disk is None else 2 * disk})
    return machine.model_copy(update={"launch": machine.launch / 2, "fixed": machine.fixed / 2})


def _faster_link(link: LinkRates | None) -> LinkRates | None:
    return None if link is None else LinkRates(bandwidth=2 * link.bandwidth, latency=link.latency / 2)


def _faster_attention(attention: AttentionRates) -> AttentionRates:
    rates = {"forward": attention.forward, "backward": attention.backward}
    return attention.model_copy(update={name: 2 * rate for name, rate in rates.items() if rate is not None})


def _elementwise_halved(of: MachineRates | FormatRates) -> dict[str, object]:
    """Return the rates that depend on the bandwidth of memory, twice as fast."""
    elements = {kind: (forward / 2, backward / 2) for kind, (forward, backward) in of.elementwise.items()}
    return {"elementwise": elements, "optimizer": None if of.optimizer is None else 2 * of.optimizer}


def _halve(measured: CollectiveRates) -> CollectiveRates:
    return measured.model_copy(update={"seconds": tuple(seconds / 2 for seconds in measured.seconds)})


def changes(deck: Deck) -> Iterator[str]:
    """Yield single changes that may make a step faster and do not change what the model learns.

    The deck may not support all of them.
    """
    layout, memory = deck.layout, deck.memory
    for axis in ("tensor", "context", "pipeline", "expert"):
        yield from _twice_and_half(f"layout.{axis}", getattr(layout, axis))
    yield from _twice_and_half("batch.micro_size", deck.batch.micro_size)
    if layout.schedule == "interleaved":
        yield from (each for each in _twice_and_half("layout.chunks", layout.chunks) if each[-2:] != "=1")
    if layout.pipeline > 1:
        for name in SCHEDULES:
            if name != layout.schedule and (layout.chunks == 1 or name in TWO_CHUNKS):
                yield f"layout.schedule={name}"
    yield from (f"layout.zero={zero}" for zero in range(4) if zero != layout.zero)
    yield from (
        f"memory.recompute={form}" for form in ("none", "selective", "full") if form != memory.recompute
    )
    if layout.tensor > 1:
        yield f"layout.sequence_parallel={'false' if layout.sequence_parallel else 'true'}"


def _twice_and_half(key: str, value: int) -> Iterator[str]:
    yield f"{key}={2 * value}"
    if value % 2 == 0:
        yield f"{key}={value // 2}"
