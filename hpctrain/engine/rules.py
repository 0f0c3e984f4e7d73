"""The rule by which a deck's optimizer updates parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch

from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError
from hpctrain.model.build import bare_model
from hpctrain.model.shape import ModelShape
from hpctrain.optim.adafactor import Adafactor
from hpctrain.optim.adam_mini import AdamMini
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.block_rule import BlockRules
from hpctrain.optim.lion import Lion
from hpctrain.optim.muon import Muon
from hpctrain.optim.optimizer import UpdateRule
from hpctrain.optim.schedule_free import ScheduleFree
from hpctrain.optim.sgd import SGD
from hpctrain.sharding.compression.warmed import momentum_given_after


def _adamw(deck: Deck) -> UpdateRule:
    keys = deck.optimizer
    return AdamW((keys.beta1, keys.beta2), keys.epsilon, keys.weight_decay, momentum_given_after(deck))


def _sgd(deck: Deck) -> UpdateRule:
    keys = deck.optimizer
    return SGD(keys.momentum, keys.nesterov, keys.weight_decay, momentum_given_after(deck))


def _lion(deck: Deck) -> UpdateRule:
    keys = deck.optimizer
    return Lion((keys.beta1, keys.beta2), keys.weight_decay)


def _schedule_free(deck: Deck) -> UpdateRule:
    keys = deck.optimizer
    return ScheduleFree((keys.beta1, keys.beta2), keys.epsilon, keys.weight_decay)


def _muon(deck: Deck) -> BlockRules:
    keys = deck.optimizer
    dtype = torch.bfloat16 if keys.newton_schulz == "bf16" else torch.float32
    rule = Muon(keys.momentum, keys.nesterov, keys.weight_decay, keys.newton_schulz_steps, dtype, keys.match)
    return BlockRules(rule, keys.matrices, _adamw(deck), keys.others_rate)


def _adafactor(deck: Deck) -> BlockRules:
    keys = deck.optimizer
    return BlockRules(Adafactor(keys.beta1, keys.weight_decay))


def _adam_mini(deck: Deck) -> BlockRules:
    keys = deck.optimizer
    return BlockRules(AdamMini((keys.beta1, keys.beta2), keys.epsilon, keys.weight_decay))


RULES: Mapping[str, Callable[[Deck], UpdateRule | BlockRules]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "lion": _lion,
    "schedule-free": _schedule_free,
    "muon": _muon,
    "adafactor": _adafactor,
    "adam-mini": _adam_mini,
}
"""What makes each optimizer of a deck, by its name."""


def check_matrices(deck: Deck, shape: ModelShape) -> None:
    """Raise HpctrainError with all `matrix_problems`."""
    if problems := matrix_problems(deck, shape):
        raise HpctrainError([deck.problem("optimizer.matrices", each) for each in problems])


def matrix_problems(deck: Deck, shape: ModelShape) -> list[str]:
    """Where optimizer.matrices names what is not there, or one of several weights that are one matrix in
    memory without the others: ends of sentences.
    """
    rule, problems = RULES[deck.optimizer.name](deck), list[str]()
    if not isinstance(rule, BlockRules):
        return problems
    used: set[str] = set()
    found = False
    for leaf in (leaf for unit in bare_model(shape).units() for leaf in unit):
        named = {p.shard: [each for each in rule.patterns if fnmatchcase(p.shard.name, each)] for p in leaf}
        used.update(pattern for patterns in named.values() for pattern in patterns)
        matrices = [shard for shard in named if rule.blocks.block(shard) is not None]
        ours = [shard.name for shard in matrices if named[shard]]
        others = [shard.name for shard in matrices if not named[shard]]
        found = found or bool(ours)
        if ours and others:
            problems.append(f"names {ours[0]}, but not {others[0]}, which lies with it in memory")
    problems += [f"no parameter is called {toml_value(each)}" for each in rule.patterns if each not in used]
    if not found and not problems:
        problems.append("names no matrix")
    return list(dict.fromkeys(problems))
