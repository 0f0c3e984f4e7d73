"""Traffic of a deck's form of communication, compared with exact sums, and its step time over a link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path

from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.server import server_ranks
from hpctrain.errors import HpctrainError
from hpctrain.plan.server_plan import plan_served_traffic
from hpctrain.plan.slow_link import LinkedStep, break_even, linked_step, measured_step
from hpctrain.plan.traffic_plan import TrafficPlan, plan_traffic
from hpctrain.units import Link, UnitError, parse_link, parse_seconds


@dataclass(frozen=True)
class PlannedLink:
    """Link for which a step is planned, and the step time without it.

    Attributes:
        link: The link.
        seconds: Seconds of a step without the link; None if unknown.
        like: Folder of a run whose measured step time is used; None without one.
    """

    link: Link
    seconds: float | None = None
    like: Path | None = None


def parse_planned_link(link: str | None, seconds: str | None, like: Path | None) -> PlannedLink | None:
    """Return the link that the options of `hpctrain plan` describe; None without `--link`.

    Args:
        link: Value of `--link`.
        seconds: Value of `--step-seconds`.
        like: Value of `--like`.

    Raises:
        HpctrainError: A value cannot be parsed, or options conflict.
    """
    if link is None:
        if seconds is not None or like is not None:
            raise HpctrainError("--step-seconds and --like require --link")
        return None
    if seconds is not None and like is not None:
        raise HpctrainError("--step-seconds conflicts with --like")
    try:
        parsed = parse_link(link)
    except UnitError as error:
        raise HpctrainError(f"--link: {error}") from None
    try:
        return PlannedLink(parsed, None if seconds is None else parse_seconds(seconds), like)
    except UnitError as error:
        raise HpctrainError(f"--step-seconds: {error}") from None


@dataclass(frozen=True)
class LinkPlan:
    """Step over a link.

    Attributes:
        link: The link.
        step: Step with the deck's form of communication.
        exact_step: Step with exact sums; None if these are the deck's form.
        form_seconds: Seconds in which a step compresses gradients and weights; None if unknown.
        break_even: Bytes per second of the link below which `exact_step` is slower, as `break_even()`
            returns it.
    """

    link: Link
    step: LinkedStep
    exact_step: LinkedStep | None
    form_seconds: float | None
    break_even: float | None

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        row: dict[str, object] = {
            "bytes_per_second": self.link.bytes_per_second,
            "latency": self.link.latency,
            "computing_seconds": self.step.computing,
            "moving_seconds": self.step.moving,
            "seconds": self.step.seconds,
        }
        if self.exact_step is not None:
            row |= {"exact_seconds": self.exact_step.seconds, "exact_moving_seconds": self.exact_step.moving}
            pays = "never" if self.break_even is None else "always" if self.break_even == inf else "below"
            even = self.break_even if pays == "below" else None
            row |= {"cost_seconds": self.form_seconds, "pays": pays, "break_even_bytes_per_second": even}
        return row


@dataclass(frozen=True)
class FormPlan:
    """Traffic of a form of communication.

    Attributes:
        form_traffic: Traffic of the form.
        exact_traffic: Traffic with exact sums; None if these are the form.
        over_link: Step over a link; None without a link.
    """

    form_traffic: TrafficPlan
    exact_traffic: TrafficPlan | None
    over_link: LinkPlan | None

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        row: dict[str, object] = {"step": self.form_traffic.row()}
        row |= {"exact": self.exact_traffic.row()} if self.exact_traffic is not None else {}
        return row | ({"link": self.over_link.row()} if self.over_link is not None else {})


@dataclass(frozen=True)
class OtherForm:
    """Form of communication that the deck could use instead of its own.

    Attributes:
        name: Name of the form.
        changes: Changes of the deck that select it.
        plan: Its traffic.
    """

    name: str
    changes: tuple[str, ...]
    plan: FormPlan

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        return {"form": self.name, "changes": list(self.changes)} | self.plan.row()


def exact_form(deck: Deck) -> Deck:
    """Return the deck with exact sums in every step."""
    exact = {"compress": "none", "warmup": 0, "server": None}
    return deck.with_keys(communication=exact, layout={"local_steps": None})


@dataclass(frozen=True)
class FormPlanner:
    """Planner of forms of communication on the same ranks.

    Args:
        ranks: Number of ranks.
        vocabulary: Number of token ids of the model.
        ranks_per_node: Number of ranks per node.
        link: Link over which steps are planned; None for traffic only.
        cost_of: Function that measures the seconds per step that a deck's form computes; it returns None if
            unknown.
    """

    ranks: int
    vocabulary: int
    ranks_per_node: int
    link: PlannedLink | None
    cost_of: Callable[[Deck], float | None]

    def plan(self, deck: Deck, reference: FormPlan | None = None) -> FormPlan:
        """Return the plan of the deck's form and of exact sums.

        Without a measured step, nothing overlaps, and only the time of messages is known.

        Args:
            deck: The deck.
            reference: Form for which the step time of the link was measured. By default it is the deck's.

        Raises:
            HpctrainError: A run would fail with this error, or the measured step time cannot be read.
        """
        exact_deck = exact_form(deck)
        servers = server_ranks(deck)
        own = self._traffic(deck, servers)
        exact = self._traffic(exact_deck, servers) if exact_deck != deck else None
        if self.link is None:
            return FormPlan(own, exact, None)
        cost = self.cost_of(deck) if exact is not None else None
        seconds = self.link.seconds or 0.0
        if seconds and reference is not None and reference.over_link is not None:
            seconds = max(0.0, seconds - (reference.over_link.form_seconds or 0.0)) + (cost or 0.0)
        if self.link.like is not None:
            like, measured = measured_step(self.link.like)
            # The measured step includes the cost of the form of that run.
            like_cost = self.cost_of(like) if exact_form(like) != like else None
            seconds = max(0.0, measured - (like_cost or 0.0)) + (cost or 0.0)
        link, exact_seconds = self.link.link, max(0.0, seconds - (cost or 0.0))
        linked = linked_step(own, link, seconds)
        if exact is None:
            return FormPlan(own, None, LinkPlan(link, linked, None, None, None))
        even = break_even(exact, own, link.latency, (exact_seconds, seconds))
        return FormPlan(
            own, exact, LinkPlan(link, linked, linked_step(exact, link, exact_seconds), cost, even)
        )

    def _traffic(self, deck: Deck, servers: int) -> TrafficPlan:
        if deck.communication.server is not None:
            return plan_served_traffic(deck, self.ranks, self.vocabulary, self.ranks_per_node)
        # The exact form of a deck with servers has no servers, and as many ranks compute.
        return plan_traffic(deck, self.ranks - servers, self.vocabulary, self.ranks_per_node)
