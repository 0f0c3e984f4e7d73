"""Every key of a deck's optimizer reaches the rule that has it."""

from __future__ import annotations

import pytest
import torch

from hpctrain.engine.stages.update_rules import RULES
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.lion import Lion
from hpctrain.optim.matrix.adafactor import Adafactor
from hpctrain.optim.matrix.adam_mini import AdamMini
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.optim.matrix.muon import Muon
from hpctrain.optim.optimizer import UpdateRule
from hpctrain.optim.schedule_free import ScheduleFree
from hpctrain.optim.sgd import SGD
from tests.engines import small_deck

BETAS = ("beta1=0.7", "beta2=0.8")
ADAM = (*BETAS, "epsilon=1e-5")
MOMENTUM = "momentum=0.6"
MUON = (
    *("match=original", "newton_schulz=fp32", "newton_schulz_steps=3"),
    *('matrices=["blocks.1.*"]', "others_rate=0.5", *ADAM, MOMENTUM, "nesterov=false"),
)
ADAMW = AdamW((0.7, 0.8), 1e-5, 0.25)

CASES: dict[str, tuple[tuple[str, ...], UpdateRule | MatrixRules]] = {
    "adamw": (ADAM, ADAMW),
    "sgd": ((MOMENTUM, "nesterov=true"), SGD(0.6, True, 0.25)),
    "lion": (BETAS, Lion((0.7, 0.8), 0.25)),
    "schedule-free": (ADAM, ScheduleFree((0.7, 0.8), 1e-5, 0.25)),
    "muon": (
        MUON,
        MatrixRules(Muon(0.6, False, 0.25, 3, torch.float32, "original"), ("blocks.1.*",), ADAMW, 0.5),
    ),
    "adafactor": (BETAS[:1], MatrixRules(Adafactor(0.7, 0.25))),
    "adam-mini": (ADAM, MatrixRules(AdamMini((0.7, 0.8), 1e-5, 0.25))),
}
"""Keys of [optimizer] that are no optimizer's own values, and the rule that they make."""


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_what_the_deck_says(name: str) -> None:
    keys, rule = CASES[name]
    given = (f"name={name}", "weight_decay=0.25", *keys)
    assert RULES[name](small_deck(*(f"optimizer.{key}" for key in given))) == rule
