"""The rates of the machine that a deck names."""

from __future__ import annotations

from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.plan.time.machine_rates import MachineRates, read_machine


def deck_rates(deck: Deck) -> MachineRates | None:
    """Those of `machine.rates`; None where a deck names none.

    HpctrainError, in terms of the deck, where they cannot be read, are wrong, or lack products of its format.
    """
    name = deck.machine.rates
    if name is None:
        return None
    try:
        machine = read_machine(name)
        machine.products_of(deck.precision.compute)
    except HpctrainError as error:
        said = (problem.removeprefix(f"{name}: ") for problem in error.problems)
        raise HpctrainError([deck.problem("machine.rates", each) for each in said]) from None
    return machine
