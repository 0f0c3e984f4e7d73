"""Patterns of parameter names in a deck: what they match in its model, and their problems.

Some parameters are fused into one matrix or vector in memory. A pattern has to match all or none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import Tensor

from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.adapters import Adapters, matches_pattern
from hpctrain.deck.sections.optimizer import MuonTable
from hpctrain.deck.sources import toml_value
from hpctrain.engine.stages.update_rules import RULES
from hpctrain.errors import HpctrainError
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import bare_model
from hpctrain.model.parameters.pattern_check import PatternCheck
from hpctrain.model.part import ModelPart, parameter_list
from hpctrain.model.precision import Precision
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.parallel.fp8.recipes import matches_parameter
from hpctrain.parallel.tensor import SplitLinear
from hpctrain.text import either

_NEVER_IN_8_BITS = ("head.weight", "score.weight", "embedding.tokens.weight", "embedding.positions.weight")
"""Names that precision.fp8_exclude may contain although these layers never compute in 8 bits."""


def check_patterns(deck: Deck, architecture: Architecture) -> None:
    """Raise HpctrainError if a deck has `pattern_problems`. Local; all ranks have the same result."""
    if problems := [deck.problem(each.key, each.sentence) for each in pattern_problems(deck, architecture)]:
        raise HpctrainError(problems)


def pattern_problems(deck: Deck, architecture: Architecture) -> Iterator[DeckProblem]:
    """Yield the problems of patterns of frozen parameters, adapters, Muon's matrices and layers without fp8.

    A pattern must match something, and all or none of the parameters that are fused. Frozen parameters may
    not be all parameters, and layers without fp8 may not be all layers. The result does not depend on the
    layout.
    """
    updates, how = deck.optimizer.rule, Precision.of(deck).fp8
    if deck.model.frozen:
        frozen = _frozen_problems(bare_model(architecture), deck.model.frozen)
        yield from (DeckProblem("model.frozen", each) for each in frozen)
    if deck.model.adapters is not None:
        adapted = _adapter_problems(bare_model(architecture), deck.model.adapters)
        yield from (DeckProblem("model.adapters", each) for each in adapted)
    if isinstance(updates, MuonTable) and updates.matrices:
        rule = RULES["muon"](deck)
        assert isinstance(rule, MatrixRules)
        yield from (
            DeckProblem("optimizer.muon.matrices", each)
            for each in _muon_problems(bare_model(architecture), rule)
        )
    if how is not None and how.excluded_patterns:
        problems = _fp8_problems(bare_model(architecture), how.excluded_patterns)
        yield from (DeckProblem("precision.fp8_exclude", each) for each in problems)


def _frozen_problems(model: ModelPart, patterns: Sequence[str]) -> list[str]:
    layers = (layer for unit in model.units() for layer in unit)
    fused = (list(each) for layer in layers for _, each in groupby(sorted(layer, key=Tensor.dim), Tensor.dim))
    example = parameter_list(model)[0].shard.name
    return PatternCheck.compare(patterns, fused).problems(
        "freezes {}, but not {}, which is fused with it (name both or neither)",
        f"no parameter matches {{}} (an example of a name is {example})",
        all_match="leaves nothing to train (leave out a pattern)",
    )


def _adapter_problems(model: ModelPart, adapters: Adapters) -> Iterator[str]:
    weights = [weight.shard for layer in _linear_layers(model) for weight in layer.weights]
    shapes = {shard.name.removesuffix(".weight"): shard.shape for shard in weights}
    for pattern in adapters.targets:
        if not any(matches_pattern(pattern, name) for name in shapes):
            kinds = either(list(dict.fromkeys(name.rpartition(".")[2] for name in shapes)))
            yield f"targets: no matrix of a block matches {toml_value(pattern)} (expected {kinds})"
    small = [name for name, shape in shapes.items() if adapters.adapts(name) and adapters.rank > min(shape)]
    if small:
        size = " x ".join(map(str, shapes[small[0]]))
        yield f"rank = {adapters.rank}: exceeds the size of {small[0]}, {size}"


def _linear_layers(model: ModelPart) -> list[SplitLinear]:
    modules = (module for layer in model.layers for module in layer.modules())
    return [module for module in modules if isinstance(module, SplitLinear)]


def _muon_problems(model: ModelPart, rule: MatrixRules) -> list[str]:
    layers = (layer for unit in model.units() for layer in unit)
    matrices = [[p for p in layer if rule.matrix_rule.update_block(p.shard) is not None] for layer in layers]
    names = [parameter.shard.name for layer in matrices for parameter in layer]
    example = f" (an example of a matrix is {names[len(names) // 2]})" if names else ""
    further = (parameter.shard.name for parameter in parameter_list(model))
    return PatternCheck.compare(rule.patterns, matrices, further).problems(
        "names {}, but not {}, which is stored with it (name both or neither)",
        f"no parameter matches {{}}{example}",
        none="names no matrix",
    )


def _fp8_problems(model: ModelPart, patterns: Sequence[str]) -> list[str]:
    fused = [layer.weights for layer in _linear_layers(model)]
    return PatternCheck.compare(patterns, fused, _NEVER_IN_8_BITS, matches_parameter).problems(
        "excludes {}, but not {}, which is fused with it (name both or neither)",
        f"no linear layer matches {{}} (an example of a name is {fused[0][0].shard.name})",
        all_match='excludes all layers (precision.compute = "bf16" is equivalent)',
    )
