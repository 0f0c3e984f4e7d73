"""The section [optimizer]: its keys, the table of each update rule, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, cast

from hpctrain.deck.key import Section, key, table
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.relations import GIVEN, Above, Conflicts, OtherThan, Relations, Requires
from hpctrain.text import either

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

MATRIX_OPTIMIZERS = "muon", "adafactor", "adam-mini"
"""The optimizers that update parameters by whole matrices or rows, not element by element."""


class _AdamKeys(Section):
    """Decay of both moments, and epsilon."""

    beta1: float = key("Decay of the running mean of gradients.", 0.9, ge=0, lt=1)
    beta2: float = key("Decay of the running mean of squared gradients.", 0.95, ge=0, lt=1)
    epsilon: float = key("Number that is added to the root of the mean square.", 1e-8, gt=0)


class AdamWTable(_AdamKeys):
    """AdamW (arXiv 1711.05101)."""


class AdamMiniTable(_AdamKeys):
    """Adam-mini (arXiv 2406.16793): one mean square for each row or head."""


class SgdTable(Section):
    """Stochastic gradient descent."""

    momentum: float = key(
        "Decay of the momentum, a running sum of gradients; 0: no momentum.", 0.0, ge=0, lt=1
    )
    nesterov: bool = key("Use Nesterov's momentum, which looks one step ahead.", False)


class LionTable(Section):
    """Lion (arXiv 2302.06675). It needs a peak rate 3 to 10 times below AdamW's, and more weight decay."""

    beta1: float = key(
        "Weight of the running mean in an update; the gradient has the weight 1 - beta1.", 0.9, ge=0, lt=1
    )
    beta2: float = key("Decay of the running mean of gradients.", 0.99, ge=0, lt=1)


class ScheduleFreeTable(Section):
    """Schedule-free AdamW (arXiv 2405.15682), whose model is an average of the weights."""

    beta1: float = key(
        "Weight of the averaged weights in the point at which gradients are computed.", 0.9, ge=0, lt=1
    )
    beta2: float = key("Decay of the running mean of squared gradients.", 0.999, ge=0, lt=1)
    epsilon: float = key("Number that is added to the root of the mean square.", 1e-8, gt=0)


class AdafactorTable(Section):
    """Adafactor (arXiv 1804.04235): factors of the mean square of each matrix."""

    beta1: float = key("Decay of the running mean of updates; 0: none is kept.", 0.0, ge=0, lt=1)


class MuonTable(_AdamKeys):
    """Muon for matrices, and AdamW, with these betas and epsilon, for all other parameters."""

    momentum: float = key("Decay of the running mean of gradients of matrices.", 0.95, ge=0, lt=1)
    nesterov: bool = key(
        "Use Nesterov's momentum, which looks one step ahead.", derived="true if momentum is above 0"
    )
    matrices: tuple[str, ...] = key(
        "Name patterns of parameters; Muon updates the matrices among them.", ("blocks.*",), strict=False
    )
    match: Literal["original", "adamw-rms"] = key(
        "Size of updates of n x m matrices: 0.2 sqrt(max(n, m)), as AdamW; original: sqrt(max(1, n / m)).",
        "adamw-rms",
    )
    newton_schulz: Literal["bf16", "fp32"] = key("Format of the Newton-Schulz iteration.", "bf16")
    newton_schulz_steps: int = key("Number of steps of that iteration.", 5, ge=1, le=99)
    others_rate: float = key(
        "Learning rate of the parameters that AdamW updates, as a multiple of the rate that Muon uses.",
        1.0,
        gt=0,
        le=1000,
    )


OptimizerTable = (
    AdamWTable | SgdTable | LionTable | ScheduleFreeTable | MuonTable | AdafactorTable | AdamMiniTable
)


class OptimizerSection(Section):
    """Rule that updates the parameters."""

    name: Literal["adamw", "sgd", "lion", "schedule-free", "muon", "adafactor", "adam-mini"] = key(
        "Update rule; its own keys are in the table of its name, such as [optimizer.adamw].", "adamw"
    )
    weight_decay: float = key(
        "Decoupled weight decay times the rate of a step; not for norms and biases; "
        "with mup independent of the width.",
        0.1,
        ge=0,
        le=1000,
    )
    clip: float = key(
        "Global gradient norm above which gradients are scaled down to it; 0: never.", 1.0, ge=0
    )
    restart: bool = key(
        "Initialize the optimizer state if the checkpoint has none for this optimizer.", False
    )
    adamw: AdamWTable | None = table("Keys of AdamW.", selected_by="name")
    sgd: SgdTable | None = table("Keys of SGD.", selected_by="name")
    lion: LionTable | None = table("Keys of Lion.", selected_by="name")
    schedule_free: ScheduleFreeTable | None = table(
        "Keys of schedule-free AdamW.", selected_by="name", alias="schedule-free"
    )
    muon: MuonTable | None = table("Keys of Muon.", selected_by="name")
    adafactor: AdafactorTable | None = table("Keys of Adafactor.", selected_by="name")
    adam_mini: AdamMiniTable | None = table("Keys of Adam-mini.", selected_by="name", alias="adam-mini")

    @property
    def rule(self) -> OptimizerTable:
        """The table of the chosen update rule, such as [optimizer.adamw], which a deck always has."""
        return cast("OptimizerTable", self.selected_table("name"))


_NAME, _SERVER, _COMPRESS = "optimizer.name", "communication.server.mode", "communication.compress"

RELATIONS: Relations = (
    Conflicts(
        _NAME,
        _SERVER,
        MATRIX_OPTIMIZERS,
        GIVEN,
        because="servers split matrices, and it updates whole matrices",
    ),
    Conflicts(
        _NAME,
        "communication.server",
        ("schedule-free",),
        GIVEN,
        because="workers cannot evaluate the average of the weights",
    ),
    Conflicts(
        _NAME, _COMPRESS, OtherThan("adamw"), ("onebit",), because="it communicates the momentum of Adam"
    ),
    Requires("optimizer.sgd.nesterov", "optimizer.sgd.momentum", Above(0)),
    Requires("optimizer.muon.nesterov", "optimizer.muon.momentum", Above(0)),
    Conflicts(
        "optimizer.sgd.nesterov",
        _COMPRESS,
        None,
        ("topk",),
        because="it requires the same momentum on all ranks, but each rank accumulates a different one",
    ),
)


def optimizer_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of an optimizer that local steps or the plan of a module do not allow.

    A muon.matrices that names nothing is another one. Relations in RELATIONS are checked elsewhere.
    """
    name, rule, local_steps = deck.optimizer.name, deck.optimizer.rule, deck.layout.local_steps
    if isinstance(rule, MuonTable) and not rule.matrices:
        sentence = 'must name the matrices that Muon updates (use ["blocks.*"])'
        yield DeckProblem("optimizer.muon.matrices", sentence)
    if name == "schedule-free" and local_steps is not None and local_steps.has_outer_model:
        sentence = (
            'conflicts with [layout.local_steps]: each replica would have its own average (use "adamw")'
        )
        yield DeckProblem(_NAME, sentence, ("layout.local_steps",))
    if name in MATRIX_OPTIMIZERS and deck.layout.tensor > 1 and deck.model.module is not None:
        would = either([f'"{each}"' for each in ("adamw", "sgd", "lion", "schedule-free")])
        sentence = (
            f"conflicts with layout.tensor above 1 and model.module: it updates whole matrices (use {would})"
        )
        yield DeckProblem(_NAME, sentence, ("layout.tensor", "model.module"))
