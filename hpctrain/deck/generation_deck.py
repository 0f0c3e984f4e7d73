"""Deck of a model that only generates text."""

from __future__ import annotations

from math import gcd

from hpctrain.deck.check import check_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.text import counted


def generation_deck(deck: Deck, tensor: int, pipeline: int = 1, of: str = "the model") -> Deck:
    """Return the deck with a layout for generation, in which all other ranks are data ranks.

    Args:
        deck: Deck of the model.
        tensor: Number of tensor ranks.
        pipeline: Number of pipeline stages.
        of: Name of the model, for messages.

    Raises:
        HpctrainError: The model cannot be split over these ranks. The error names all problems.
    """
    layout: dict[str, object] = {"data": None, "context": 1, "tensor": tensor, "sequence_parallel": False}
    # The expert axis has the largest number of ranks that divides both.
    layout |= {
        "expert": gcd(tensor, deck.model.experts.count) if deck.model.experts else 1,
        "expert_tensor": 1,
    }
    layout |= {"pipeline": pipeline, "chunks": 1, "schedule": "1f1b", "split": None}
    # In 8 bits a row would be slower, and its text would depend on the other rows of the batch.
    compute = "bf16" if deck.precision.compute == "fp8" else deck.precision.compute
    memory = {"optimizer": "device", "parameters": "device"}
    changes: dict[str, dict[str, object]] = {"run": {"noise_scale_steps": 0}, "memory": {**memory}}
    split = deck.with_keys(layout=layout, precision={"compute": compute}, **changes)
    problems = [problem for problem in check_deck(split) if not (problem.for_new_decks or problem.no_effect)]
    if problems:
        if pipeline > 1:
            prefix = f"{of}, over {pipeline} stages of {counted(tensor, 'rank')}:"
            raise HpctrainError([f"{prefix} {problem.key} {problem.sentence}" for problem in problems])
        prefix = f"{tensor} ranks: {of} is split over all of them, and their number"
        raise HpctrainError([f"{prefix} {problem.sentence}" for problem in problems])
    return split
