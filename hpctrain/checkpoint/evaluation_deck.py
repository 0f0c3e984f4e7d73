"""Deck for the evaluation of a checkpoint on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.same_model import require_same_model
from hpctrain.checkpoint.stored_deck import require_trusted, stored_deck
from hpctrain.deck.check import check_world, world_problems
from hpctrain.deck.code import trust_of
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.objective import REFERENCE_KINDS, SCORE_KINDS
from hpctrain.errors import HpctrainError


def evaluation_deck(
    state: Mapping[str, Any],
    path: Path,
    overrides: Sequence[str],
    ranks: int,
    pairs: bool = False,
) -> Deck:
    """Return the checkpoint's deck for an evaluation on `ranks` ranks.

    The layout is that of the run if it fits the number of ranks; otherwise all of them are data ranks. The
    objective is the next token, unless the model's head gives scores, or `pairs` is True and the run learned
    from pairs of answers by comparing with a reference model.

    Raises:
        UntrustedCodeError: The deck names code that may not be called.
        HpctrainError: The deck is not valid, or `overrides` change the model of the checkpoint.
    """
    trust = trust_of(overrides)
    deck = stored_deck(state, path, overrides, trust)
    if overrides:
        require_same_model(deck, stored_deck(state, path), path)
    if deck.data.dataset is not None:
        raise HpctrainError(f"{path}: was trained on data.dataset, for which token files are unsupported")
    allowed = (*SCORE_KINDS, *REFERENCE_KINDS) if pairs else SCORE_KINDS
    # One micro-batch on every rank: the batch of the run does not matter here.
    batch = {"global_size": deck.batch.micro_size * ranks, "ramp_from": 0, "ramp_steps": 0}
    deck = deck.with_keys(
        batch=batch,
        layout={"data": None, "local_steps": None, "auto": False},
        memory={"optimizer": "device", "parameters": "device", "activations": "keep"},
        communication={"server": None, "compress": "none"},
        run={"noise_scale_steps": 0},
        objective={} if deck.objective.kind in allowed else {"kind": "next-token"},
        machine={"compile": False},
        stability={"corruption": "off", "check_parameters": False},
    )
    require_trusted(deck, path, trust)
    sets_layout = any(argument.strip().startswith("layout.") for argument in overrides)
    if world_problems(deck, ranks) and not sets_layout:
        deck = on_one_rank(deck)
    check_world(deck, ranks)
    return deck
