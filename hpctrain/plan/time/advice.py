"""What limits a step, and which single change of its deck would make it faster and still fit.

What limits it is told by what is faster: of each part of the machine, how much shorter a step would be if
that part took half its time. All of these are plans, not shares of one.
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
    Collective,
    FormatRates,
    Host,
    LinkRates,
    MachineRates,
)
from hpctrain.plan.time.step_plan import StepPlan

LEAST_GAIN = 0.005  # of a step; less is no advice
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2")
"""Those that are tried: made at once for any number of stages, and not searched for."""


@dataclass(frozen=True)
class Gain:
    """A change of the deck, such as "layout.tensor=4", the share of a step that it spares, and how many bytes
    more (or less, below 0) the rank that holds most would hold. `fits` is None where nothing says what there
    is.
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
    """By what could take half its time, how much shorter a step would be, as a share of it, the most first;
    and the change of the deck that would help most, None where none would.
    """

    limits: Mapping[str, float]
    gain: Gain | None

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        best = None if self.gain is None else self.gain.row()
        return {"halved": dict(self.limits), "best": best}


def advise(
    deck: Deck,
    ranks: int,
    step: StepPlan,
    machine: MachineRates,
    changed: Callable[[str], Deck],
    timed: Callable[[Deck, MachineRates], StepPlan],
    held: Callable[[Deck], tuple[int, bool | None]],
    bytes_now: int,
) -> Advice:
    """What of a deck whose `step` is planned on a machine limits it, and would help most.

    `changed` gives the deck with a change such as "layout.zero=3", `timed` its step, `held` the bytes of the
    rank that then holds most and whether they fit: that is asked of the fastest alone, until one does.
    """
    gains = []
    for change in changes(deck):
        try:
            other = changed(change)
            seconds = estimate(other, ranks, machine, timed)
        except HpctrainError:
            continue  # what this deck cannot have is no advice
        if step.seconds - seconds > LEAST_GAIN * step.seconds:
            gains.append((seconds, change, other))
    best = None
    for _, change, other in sorted(gains, key=lambda gain: gain[0]):
        try:
            size, fits = held(other)
            if fits is False:
                continue
            seconds = timed(other, machine).seconds
        except HpctrainError:
            continue
        best = Gain(change, 1 - seconds / step.seconds, seconds, size - bytes_now, fits)
        break
    now = estimate(deck, ranks, machine, timed)
    shares = {part: 1 - estimate(deck, ranks, faster(machine, part), timed) / now for part in PARTS}
    shares["waiting"] = step.seconds_by_cause["bubble"] / 2 / step.seconds
    return Advice(dict(sorted(shares.items(), key=lambda each: -each[1])), best)


def estimate(
    deck: Deck, ranks: int, machine: MachineRates, timed: Callable[[Deck, MachineRates], StepPlan]
) -> float:
    """Seconds of a step, of which no more micro-batches are simulated than fill the pipeline twice: the stage
    that has most to do waits for no others.
    """
    data = axis_sizes(deck, ranks)["data"]
    passes, enough = micro_batches(deck, data), 2 * deck.layout.pipeline
    moved = (deck.memory.parameters, deck.memory.activations) != ("device", "keep")
    each_time = deck.layout.zero == 3 or moved  # what is gathered or fetched for each micro-batch
    if passes <= enough or each_time or deck.batch.ramp_from or deck.layout.schedule not in SCHEDULE_NAMES:
        return timed(deck, machine).seconds
    fewer = deck.with_keys(batch={"global_size": enough * data * deck.batch.micro_size})
    causes = timed(fewer, machine).seconds_by_cause
    return sum(
        seconds if cause in OF_A_STEP else seconds * passes / enough for cause, seconds in causes.items()
    )


OF_A_STEP = frozenset({"bubble", "gradients", "parameters", "offload", "optimizer", "fixed"})
"""Causes that do not grow with the micro-batches of a step."""

PARTS = ("computing", "memory", "inside", "between", "away", "fixed")
"""Products and attention at their rates, the bandwidth of memory, links inside nodes and between them, ways
to hosts and disks, and what operations and steps take at least.
"""


def faster(machine: MachineRates, part: str) -> MachineRates:
    """The machine with one of its `PARTS` twice as fast, of all its kinds of node."""
    if machine.others:
        first, *others = (faster(kind.model_copy(update={"others": ()}), part) for kind in machine.kinds)
        return first.model_copy(update={"others": tuple(others)})
    if part == "computing":
        products = {
            form: rates.model_copy(update={"peak": 2 * rates.peak})
            for form, rates in machine.products.items()
        }
        formats = {
            form: each.model_copy(update={"attention": each.attention and _quicker(each.attention)})
            for form, each in machine.formats.items()
        }
        attention = _quicker(machine.attention)
        return machine.model_copy(update={"products": products, "attention": attention, "formats": formats})
    if part == "memory":
        formats = {form: each.model_copy(update=_passed(each)) for form, each in machine.formats.items()}
        update = {"memory_bandwidth": 2 * machine.memory_bandwidth, "formats": formats}
        return machine.model_copy(update=update | _passed(machine))
    if part == "inside":
        measured = {name: _halved(each) for name, each in machine.collectives.items()}
        return machine.model_copy(update={"inside": _faster(machine.inside), "collectives": measured})
    if part == "between":
        crossing = {name: tuple(map(_halved, several)) for name, several in machine.crossing.items()}
        return machine.model_copy(update={"between": _faster(machine.between), "crossing": crossing})
    if part == "away":
        host, disk = machine.host, machine.disk
        fast = (
            None
            if host is None
            else Host(bandwidth=2 * host.bandwidth, memory_bandwidth=2 * host.memory_bandwidth)
        )
        return machine.model_copy(update={"host": fast, "disk": None if disk is None else 2 * disk})
    return machine.model_copy(update={"launch": machine.launch / 2, "fixed": machine.fixed / 2})


def _faster(link: LinkRates | None) -> LinkRates | None:
    return None if link is None else LinkRates(bandwidth=2 * link.bandwidth, latency=link.latency / 2)


def _quicker(attention: AttentionRates) -> AttentionRates:
    rates = {"forward": attention.forward, "backward": attention.backward}
    return attention.model_copy(update={name: 2 * rate for name, rate in rates.items() if rate is not None})


def _passed(of: MachineRates | FormatRates) -> dict[str, object]:
    """What goes by memory's bandwidth, in half its time."""
    elements = {kind: (forward / 2, backward / 2) for kind, (forward, backward) in of.elementwise.items()}
    return {"elementwise": elements, "optimizer": None if of.optimizer is None else 2 * of.optimizer}


def _halved(measured: Collective) -> Collective:
    return measured.model_copy(update={"seconds": tuple(seconds / 2 for seconds in measured.seconds)})


def changes(deck: Deck) -> Iterator[str]:
    """Single changes by which the same step could be done in another time, whether or not the deck can have
    them: none of what is learned.
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
