"""What a deck's form of communication moves beside exact sums, and what that is worth over a link."""

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
class LinkWish:
    """A link to plan for, and how long a step takes without it: `seconds`, or as in the run `like`."""

    link: Link
    seconds: float | None = None
    like: Path | None = None


def wished_link(link: str | None, seconds: str | None, like: Path | None) -> LinkWish | None:
    """The wish of a command's options; HpctrainError for what is no link, and what is given in vain."""
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
        return LinkWish(parsed, None if seconds is None else parse_seconds(seconds), like)
    except UnitError as error:
        raise HpctrainError(f"--step-seconds: {error}") from None


@dataclass(frozen=True)
class OverLink:
    """A step over a link. `cost` are the seconds of it in which less traffic is made of gradients and
    weights, (None where it is not known), `exact` the step without that, and `even` the speed of links below
    which it is slower; see `break_even`.
    """

    link: Link
    own: LinkedStep
    exact: LinkedStep | None
    cost: float | None
    even: float | None

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        row: dict[str, object] = {
            "bytes_per_second": self.link.bytes_per_second,
            "latency": self.link.latency,
            "computing_seconds": self.own.computing,
            "moving_seconds": self.own.moving,
            "seconds": self.own.seconds,
        }
        if self.exact is not None:
            row |= {"exact_seconds": self.exact.seconds, "exact_moving_seconds": self.exact.moving}
            pays = "never" if self.even is None else "always" if self.even == inf else "below"
            even = self.even if pays == "below" else None
            row |= {"cost_seconds": self.cost, "pays": pays, "break_even_bytes_per_second": even}
        return row


@dataclass(frozen=True)
class FormPlan:
    """What a deck moves, what it would by exact sums (None: that is its form), and over a link."""

    own: TrafficPlan
    exact: TrafficPlan | None
    over: OverLink | None

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        row: dict[str, object] = {"step": self.own.row()}
        row |= {"exact": self.exact.row()} if self.exact is not None else {}
        return row | ({"link": self.over.row()} if self.over is not None else {})


@dataclass(frozen=True)
class OtherForm:
    """A form that the deck could have instead, by its name, and the changes that make it."""

    name: str
    changes: tuple[str, ...]
    plan: FormPlan

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        return {"form": self.name, "changes": list(self.changes)} | self.plan.row()


def exact_form(deck: Deck) -> Deck:
    """The deck with exact sums in every step."""
    exact = {"compress": "none", "warmup": 0, "server": None}
    return deck.with_keys(communication=exact, layout={"local_steps": None})


def plan_form(
    deck: Deck,
    ranks: int,
    vocabulary: int,
    ranks_per_node: int,
    wish: LinkWish | None,
    cost_of: Callable[[Deck], float | None],
    beside: FormPlan | None = None,
) -> FormPlan:
    """Plan the deck's form and the exact one; `cost_of` measures what a form computes, in seconds a step.

    The seconds of the wish are those of the form `beside`, where one is given, and else of this one. Without
    a measured step only what moves is known, and nothing overlaps. HpctrainError as a run would raise, and as
    in `measured_step`.
    """
    computing = ranks - server_ranks(deck)  # as many ranks compute without servers

    def planned(form: Deck) -> TrafficPlan:
        if form.communication.server is not None:
            return plan_served_traffic(form, ranks, vocabulary, ranks_per_node)
        return plan_traffic(form, computing, vocabulary, ranks_per_node)

    plain = exact_form(deck)
    own, exact = planned(deck), planned(plain) if plain != deck else None
    if wish is None:
        return FormPlan(own, exact, None)
    cost = cost_of(deck) if exact is not None else None
    seconds = wish.seconds or 0.0
    if seconds and beside is not None and beside.over is not None:
        seconds = max(0.0, seconds - (beside.over.cost or 0.0)) + (cost or 0.0)
    if wish.like is not None:
        like, measured = measured_step(wish.like)
        # What a run measured has the cost of its own form in it.
        paid = cost_of(like) if exact_form(like) != like else None
        seconds = max(0.0, measured - (paid or 0.0)) + (cost or 0.0)
    without = max(0.0, seconds - (cost or 0.0))
    linked = linked_step(own, wish.link, seconds)
    if exact is None:
        return FormPlan(own, None, OverLink(wish.link, linked, None, None, None))
    even = break_even(exact, own, wish.link.latency, (without, seconds))
    return FormPlan(
        own, exact, OverLink(wish.link, linked, linked_step(exact, wish.link, without), cost, even)
    )
