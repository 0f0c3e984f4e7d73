"""Translation of the tensor-parallel plan that a model of `transformers` has itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from hpctrain.model.modules.tensor_parallel.parallel_layers import LinearSizes
from hpctrain.model.modules.tensor_parallel.split_plan import (
    SplitPlan,
    SplitRule,
    check_plan,
    matches_pattern,
)

MODEL_PLAN = "its own"
"""Value of `model.plan` for the plan that a model has itself."""

_STYLES: Mapping[str, str] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gathered column",
    "colwise_rep": "gathered column",
    "rowwise_split_input": "row of whole input",
    "rowwise_rep": "row of whole input",
    "embedding_rowwise": "vocabulary",
    "packed_colwise": "column",
    "replicated_with_grad_allreduce": "partial",
    "moe_tp_experts": "expert",
}
_REPLICATED = frozenset({"replicate", "replicated"})

_HEAD_SIZES = ("head_dim", "head_size")
_HEAD_GROUPS = "num_key_value_groups"


def transformers_plan(module: nn.Module, ranks: int, sequence_parallel: bool) -> SplitPlan:
    """Return the plan that a model of `transformers` has itself.

    Args:
        module: The model as its own code builds it.
        ranks: Number of tensor ranks.
        sequence_parallel: True if ranks have slices of sequences; such plans do not support that.
    """
    kind = type(module).__name__
    model_plan = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    if not model_plan:
        return SplitPlan({}, (f"{kind} has no plan (use a table of patterns)",))
    if sequence_parallel:
        reason = (
            "conflicts with layout.sequence_parallel (use layout.sequence_parallel = false, or a "
            "table of patterns)"
        )
        return SplitPlan({}, (f"the plan of {kind} {reason}",))
    modules = {name: each for name, each in module.named_modules() if name}
    parameters = dict(module.named_parameters())
    rules: dict[str, SplitRule] = {}
    problems: list[str] = []
    experts = [pattern for pattern, style in model_plan.items() if _STYLES.get(style) == "expert"]
    for pattern, style in model_plan.items():
        if pattern.rpartition(".")[0] in experts:
            continue  # such plans split each expert; here each expert is on one rank
        # Patterns for other configurations of the same class match nothing here.
        names = [name for name in (*modules, *parameters) if matches_pattern(pattern, name)]
        if not names or style in _REPLICATED:
            continue
        if style not in _STYLES:
            problems.append(f'{kind} has the unsupported style "{style}" for {pattern} in its plan')
            continue
        for name in names:
            rules[name] = _make_rule(module, modules, name, _STYLES[style], style.startswith("packed"))
    if not problems:
        rules |= dict(_shared_head_rules(rules, modules, ranks))
        rules |= dict(_tied_embedding_rules(rules, modules))
        rules |= dict(_activation_rules(rules, modules))
    return check_plan(module, rules, ranks, sequence_parallel, problems)


def _make_rule(
    module: nn.Module, modules: Mapping[str, nn.Module], name: str, style: str, packed: bool
) -> SplitRule:
    """Return the rule for one part. Logits stay split, and attention heads are not divided."""
    part = modules.get(name)
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if style == "gathered column" and part is head:
        return SplitRule("vocabulary")
    if style != "column" or part is None or (linear := LinearSizes.of(part)) is None:
        return SplitRule(style)
    parent, _, last = name.rpartition(".")
    sizes = (getattr(modules.get(parent), each, None) for each in _HEAD_SIZES)
    size = next((each for each in sizes if isinstance(each, int)), None)
    if size is not None and "query_key_value" in last:
        size *= 3  # query, key and value of a head are adjacent
    unit = size if size is not None and linear.outputs % size == 0 else None
    return SplitRule(style, parts=2 if packed else 1, unit=unit)


def _shared_head_rules(
    rules: Mapping[str, SplitRule], modules: Mapping[str, nn.Module], ranks: int
) -> Iterator[tuple[str, SplitRule]]:
    """Yield rules for the number of query heads of each key head, if ranks share key heads."""
    for name, rule in rules.items():
        parent, _, last = name.rpartition(".")
        if (
            last != "k_proj"
            or rule.unit is None
            or not isinstance(getattr(modules[parent], _HEAD_GROUPS, None), int)
        ):
            continue
        linear = LinearSizes.of(modules[name])
        assert linear is not None
        units = linear.outputs // rule.unit
        if units < ranks:
            yield f"{parent}.{_HEAD_GROUPS}", SplitRule("divided", units=units)


def _tied_embedding_rules(
    rules: Mapping[str, SplitRule], modules: Mapping[str, nn.Module]
) -> Iterator[tuple[str, SplitRule]]:
    """Yield rules for embeddings that share the matrix of a split head."""
    split = {name for name, rule in rules.items() if rule.style == "vocabulary"}
    tables = [getattr(modules[name], "weight", None) for name in split]
    for name, each in modules.items():
        weight = getattr(each, "weight", None)
        if name not in rules and weight is not None and any(weight is table for table in tables):
            yield name, SplitRule("vocabulary")


def _activation_rules(
    rules: Mapping[str, SplitRule], modules: Mapping[str, nn.Module]
) -> Iterator[tuple[str, SplitRule]]:
    """Yield rules for activations with parameters before split layers, which plans do not name.

    Their gradients are those of a rank's part of the features.
    """
    for name, rule in rules.items():
        activation = f"{name.rpartition('.')[0]}.act_fn"
        each = modules.get(activation)
        if rule.style == "row" and activation not in rules and each is not None and [*each.parameters()]:
            yield activation, SplitRule("partial")
