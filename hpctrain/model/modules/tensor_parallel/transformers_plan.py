"""Translation of the tensor-parallel plan that a model of `transformers` has itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from hpctrain.model.modules.tensor_parallel.module_names import matches_pattern
from hpctrain.model.modules.tensor_parallel.parallel_layers import LinearSizes
from hpctrain.model.modules.tensor_parallel.split_plan import SplitPlan, check_plan
from hpctrain.model.modules.tensor_parallel.split_styles import (
    Column,
    DividedAttribute,
    GatheredColumn,
    PartialGradient,
    Row,
    RowOfAllFeatures,
    SplitExperts,
    SplitStyle,
    Vocabulary,
)

MODEL_PLAN = "its own"
"""Value of `model.plan` for the plan that a model has itself."""

_STYLES: Mapping[str, type[SplitStyle]] = {
    "colwise": Column,
    "rowwise": Row,
    "colwise_gather_output": GatheredColumn,
    "colwise_rep": GatheredColumn,
    "rowwise_split_input": RowOfAllFeatures,
    "rowwise_rep": RowOfAllFeatures,
    "embedding_rowwise": Vocabulary,
    "packed_colwise": Column,
    "replicated_with_grad_allreduce": PartialGradient,
    "moe_tp_experts": SplitExperts,
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
    styles: dict[str, SplitStyle] = {}
    problems: list[str] = []
    experts = [pattern for pattern, style in model_plan.items() if _STYLES.get(style) is SplitExperts]
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
            styles[name] = _make_style(module, modules, name, _STYLES[style], style.startswith("packed"))
    if not problems:
        styles |= dict(_implied_styles(styles, modules, ranks))
    return check_plan(module, styles, ranks, sequence_parallel, problems)


def _make_style(
    module: nn.Module, modules: Mapping[str, nn.Module], name: str, style: type[SplitStyle], packed: bool
) -> SplitStyle:
    """Return the style of one part. Logits stay split, and attention heads are not divided."""
    part = modules.get(name)
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if style is GatheredColumn and part is head:
        return Vocabulary()
    if style is not Column or part is None or (linear := LinearSizes.of(part)) is None:
        return style()
    parent, _, last = name.rpartition(".")
    sizes = (getattr(modules.get(parent), each, None) for each in _HEAD_SIZES)
    size = next((each for each in sizes if isinstance(each, int)), None)
    if size is not None and "query_key_value" in last:
        size *= 3  # query, key and value of a head are adjacent
    unit = size if size is not None and linear.outputs % size == 0 else None
    return Column(parts=2 if packed else 1, unit=unit)


def _implied_styles(
    styles: Mapping[str, SplitStyle], modules: Mapping[str, nn.Module], ranks: int
) -> Iterator[tuple[str, SplitStyle]]:
    """Yield styles of parts that plans of `transformers` do not name, but that follow from other parts.

    These are embeddings that share the matrix of a split head; the number of query heads of each key head, if
    ranks share key heads; and activations with parameters before split layers, whose gradients are those of a
    rank's part of the features.
    """
    heads = (name for name, style in styles.items() if isinstance(style, Vocabulary))
    tables = [getattr(modules[name], "weight", None) for name in heads]
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        if name not in styles and weight is not None and any(weight is table for table in tables):
            yield name, Vocabulary()
    for name, style in styles.items():
        parent, _, last = name.rpartition(".")
        if last == "k_proj" and isinstance(style, Column) and style.unit is not None:
            linear = LinearSizes.of(modules[name])
            assert linear is not None
            units = linear.outputs // style.unit
            if units < ranks and isinstance(getattr(modules[parent], _HEAD_GROUPS, None), int):
                yield f"{parent}.{_HEAD_GROUPS}", DividedAttribute(units=units)
        activation = f"{parent}.act_fn"
        parameters = [*modules[activation].parameters()] if activation in modules else []
        if type(style) is Row and parameters and activation not in styles:
            yield activation, PartialGradient()
