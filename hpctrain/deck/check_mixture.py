"""Checks of mixtures of experts: their keys against each other, the layout, and the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from hpctrain.deck.presets import MIXTURE_KEYS
from hpctrain.deck.problem import DeckProblem, divisors, must_divide, nearest_numbers
from hpctrain.deck.schema import Deck, Model
from hpctrain.units import format_bytes, format_count
from hpctrain.words import counted, either

_OF_MIXTURES = (
    *(name for name in MIXTURE_KEYS if name not in {"experts", "expert_mlp"}),
    "router_dtype",
    "router_z_loss",
    "balance",
    "balance_over",
    "balance_rate",
    "capacity",
    "record_routing",
)


RECORDED_BYTES = 1 << 30
"""Of the choices that a run writes down."""


def mixture_problems(deck: Deck) -> list[DeckProblem]:
    """Everything that is wrong with the mixtures that a deck asks for, or asks for in vain."""
    if not deck.model.experts:
        return list(_in_vain(deck))
    return [
        *_blocks(deck),
        *_choice(deck),
        *_router_groups(deck),
        *_balance(deck),
        *_capacity(deck),
        *_recorded(deck),
    ]


def expert_layout_problems(deck: Deck) -> list[DeckProblem]:
    """Everything that keeps experts from being spread and split as the deck says, whatever the ranks."""
    model, layout = deck.model, deck.layout
    problems = []
    for axis, does in (("expert", "spreads experts over ranks"), ("expert_tensor", "splits experts")):
        if getattr(layout, axis) > 1 and not model.experts:
            sentence = f"{does}, but model.experts = 0: the model has none (leave the key out)"
            problems.append(DeckProblem(f"layout.{axis}", sentence, ("model.experts",)))
    if not model.experts:
        return problems
    if model.experts % layout.expert:
        sentence = must_divide("model.experts", model.experts, layout.expert)
        problems.append(DeckProblem("layout.expert", sentence, ("model.experts",)))
    if model.expert_mlp % layout.expert_tensor:
        sentence = must_divide("model.expert_mlp", model.expert_mlp, layout.expert_tensor)
        problems.append(DeckProblem("layout.expert_tensor", sentence, ("model.expert_mlp",)))
    shared = model.shared_experts * model.expert_mlp
    if shared % layout.tensor:
        made = f"model.shared_experts x model.expert_mlp = {model.shared_experts} x {model.expert_mlp}"
        fitting = nearest_numbers(layout.tensor, divisors(gcd(shared, model.heads)))
        sentence = f"must divide {made} = {shared} ({either(fitting)} would)"
        others = ("model.shared_experts", "model.expert_mlp", "model.heads")
        problems.append(DeckProblem("layout.tensor", sentence, others))
    return problems


def expert_world_problems(deck: Deck, of_stage: int) -> Iterator[DeckProblem]:
    """Everything that keeps the experts from lying on the `of_stage` ranks of a pipeline stage."""
    model, layout = deck.model, deck.layout
    if not model.experts:
        return
    expert, split = layout.expert, layout.expert_tensor
    among = f"the {counted(of_stage, 'rank')} of a pipeline stage"
    axes = ("layout.data", "layout.tensor", "layout.context", "layout.pipeline")
    if of_stage % (expert * split):
        if of_stage % split:
            would = nearest_numbers(split, divisors(gcd(of_stage, model.expert_mlp)))
            sentence = f"must divide {among} ({either(would)} would)"
            yield DeckProblem("layout.expert_tensor", sentence, ("model.expert_mlp", *axes))
            return
        would = nearest_numbers(expert, divisors(gcd(of_stage // split, model.experts)))
        over = f" / layout.expert_tensor = {of_stage} / {split} = {of_stage // split}" if split > 1 else ""
        sentence = f"must divide {among}{over} ({either(would)} would)"
        yield DeckProblem("layout.expert", sentence, ("layout.expert_tensor", "model.experts", *axes))
        return
    copies, group = of_stage // (expert * split), layout.zero_group
    if layout.zero and isinstance(group, int) and group > 0 and copies % group:
        these = either(nearest_numbers(group, divisors(gcd(copies, of_stage // layout.tensor))))
        holders = f"the {counted(copies, 'rank')} that hold the same experts"
        sentence = f"must divide {holders}, over which it cuts these ({these} would)"
        yield DeckProblem("layout.zero_group", sentence, ("layout.expert", "layout.expert_tensor", *axes))


def dense_blocks(deck: Deck) -> bool:
    """Whether any block of the model is no mixture."""
    model = deck.model
    return not model.experts or model.dense_first > 0 or model.expert_every > 1


def _in_vain(deck: Deck) -> Iterator[DeckProblem]:
    """Keys that say how experts are, where there are none."""
    model = deck.model
    usual = {name: Model.model_fields[name].default for name in _OF_MIXTURES}
    usual |= {"expert_mlp": model.mlp, "balance_loss": 0.01 if model.balance == "loss" else 0.0}
    for name, value in usual.items():
        if getattr(model, name) != value:
            sentence = "has no effect with model.experts = 0: no block is a mixture (leave it out)"
            yield DeckProblem(f"model.{name}", sentence, ("model.experts",), no_effect=True)


def _blocks(deck: Deck) -> Iterator[DeckProblem]:
    model = deck.model
    if model.family != "llama":
        sentence = f'needs model.family = "llama", not "{model.family}": experts have no biases'
        yield DeckProblem("model.experts", sentence, ("model.family",))
    last = model.layers // model.expert_every * model.expert_every - 1
    if last < 0:
        sentence = f"leaves no block that is a mixture: must be from 1 to model.layers = {model.layers}"
        yield DeckProblem("model.expert_every", sentence, ("model.layers", "model.experts"))
    elif model.dense_first > last:
        sentence = f"leaves no block that is a mixture: must be from 0 to {last}"
        others = ("model.layers", "model.expert_every", "model.experts")
        yield DeckProblem("model.dense_first", sentence, others)


def _choice(deck: Deck) -> Iterator[DeckProblem]:
    model = deck.model
    if model.experts_per_token > model.experts:
        sentence = f"must be from 1 to model.experts = {model.experts}"
        yield DeckProblem("model.experts_per_token", sentence, ("model.experts",))
    elif model.experts_per_token == 1 and model.router_normalize:
        sentence = (
            "makes the weight of a token's only expert 1, so that the router "
            "learns nothing from the loss (false would do)"
        )
        yield DeckProblem(
            "model.router_normalize", sentence, ("model.experts_per_token",), for_new_decks=True
        )


def _router_groups(deck: Deck) -> Iterator[DeckProblem]:
    model = deck.model
    groups, chosen = model.router_groups, model.router_groups_per_token
    if model.experts % groups:
        sentence = must_divide("model.experts", model.experts, groups)
        yield DeckProblem("model.router_groups", sentence, ("model.experts",))
    elif chosen > groups:
        sentence = f"must be from 1 to model.router_groups = {groups}"
        yield DeckProblem("model.router_groups_per_token", sentence, ("model.router_groups",))
    elif model.experts >= model.experts_per_token > chosen * (model.experts // groups):
        size = model.experts // groups
        least = -(-model.experts_per_token // size)
        sentence = (
            f"leaves {chosen * size} of {model.experts} experts to choose from, but a token goes to "
            f"model.experts_per_token = {model.experts_per_token} (from {least} to {groups} would do)"
        )
        others = ("model.router_groups", "model.experts", "model.experts_per_token")
        yield DeckProblem("model.router_groups_per_token", sentence, others)


def _balance(deck: Deck) -> Iterator[DeckProblem]:
    model = deck.model
    given = f'model.balance = "{model.balance}"'
    if model.balance == "none" and model.balance_loss:
        sentence = f'contradicts {given} (leave it out, or balance = "loss" or "bias" would do)'
        yield DeckProblem("model.balance_loss", sentence, ("model.balance",))
    elif not model.balance_loss and model.balance_over != Model.model_fields["balance_over"].default:
        sentence = "has no effect with model.balance_loss = 0 (leave it out, or give a weight above 0)"
        yield DeckProblem(
            "model.balance_over", sentence, ("model.balance", "model.balance_loss"), no_effect=True
        )
    if model.balance != "bias" and model.balance_rate != Model.model_fields["balance_rate"].default:
        sentence = f'has no effect with {given}: it is that of balance = "bias" (leave it out)'
        yield DeckProblem("model.balance_rate", sentence, ("model.balance",), no_effect=True)


def _capacity(deck: Deck) -> Iterator[DeckProblem]:
    """A micro-batch's even share of an expert, times the factor, must be one token or more."""
    model, batch = deck.model, deck.batch
    if model.capacity is None:
        return
    tokens = batch.micro_size * batch.sequence
    share = tokens * model.experts_per_token / model.experts
    if model.capacity * share < 1:
        sentence = (
            f"lets an expert take {model.capacity * share:.2g} of the {format_count(tokens)} tokens of a "
            f"micro-batch, less than one token needs (at least {_at_least(1 / share)} would do)"
        )
        others = ("model.experts", "model.experts_per_token", "batch.micro_size", "batch.sequence")
        yield DeckProblem("model.capacity", sentence, others)


def _recorded(deck: Deck) -> Iterator[DeckProblem]:
    """Choices that are written down must fit into the memory of a rank, and into their file."""
    model, sequence = deck.model, deck.batch.sequence
    mixtures = sum(
        block % model.expert_every == 0 for block in range(model.dense_first + 1, model.layers + 1)
    )
    of_sample = 4 * max(1, mixtures) * sequence * model.experts_per_token
    if model.record_routing * of_sample > RECORDED_BYTES:
        sentence = (
            f"would take {format_bytes(model.record_routing * of_sample)} on rank 0, more than the "
            f"{format_bytes(RECORDED_BYTES)} that such a file may have "
            f"({RECORDED_BYTES // of_sample} samples would do)"
        )
        others = ("model.layers", "model.experts_per_token", "batch.sequence")
        yield DeckProblem("model.record_routing", sentence, others)


def _at_least(number: float) -> str:
    """A number that is short to write, and not smaller."""
    digits = next(digits for digits in range(2, 18) if float(f"{number:.{digits}g}") >= number)
    return f"{number:.{digits}g}"
