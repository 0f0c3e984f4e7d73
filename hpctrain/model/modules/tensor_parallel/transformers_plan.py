"""Translation of the tensor-parallel plan that a model of `transformers` has itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from hpctrain.model.modules.tensor_parallel.expert_styles import (
    SplitExperts,
    SplitExpertsWithIdentities,
    SplitSortedExperts,
    SummedResult,
)
from hpctrain.model.modules.tensor_parallel.module_names import matches_pattern
from hpctrain.model.modules.tensor_parallel.parallel_layers import LinearSizes
from hpctrain.model.modules.tensor_parallel.split_plan import SplitPlan, check_plan
from hpctrain.model.modules.tensor_parallel.split_styles import (
    Column,
    DividedAttribute,
    GatheredColumn,
    PartialFeatures,
    PartialGradient,
    Row,
    RowOfAllFeatures,
    RowWithSplitOutput,
    SplitParameter,
    Vocabulary,
)
from hpctrain.model.modules.tensor_parallel.style_base import SplitStyle

MODEL_PLAN = "its own"
"""Value of `model.plan` for the plan that a model has itself."""

_LAYER_STYLES: Mapping[str, type[SplitStyle]] = {
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
    "mla_kv_a_proj": PartialFeatures,
    "all_reduce": SummedResult,
}
"""Style of a submodule, by its style in `transformers`."""

_EXPERT_STYLES = (SplitExperts, SplitSortedExperts, SplitExpertsWithIdentities)
"""Styles of experts in tensors with an expert in each row, by the form of their calls."""

_SPLIT_DIMS: Mapping[str, int] = {"colwise": -2, "rowwise": -1}
"""Dim of a parameter without a layer that ranks split, by its style in `transformers`."""

_UNSPLIT = frozenset({"replicate", "replicated", "local_params"})
"""Styles in `transformers` of parts that each rank has completely, or that have only other parts split."""

_CORRECTIONS: Mapping[str, Mapping[str, SplitStyle]] = {
    "DogeForCausalLM": {
        "model.layers.*.self_attn.A": SplitParameter(),
        "model.layers.*.self_attn.dt_proj": RowWithSplitOutput(),
        "model.layers.*.self_attn.[qk]_norm": PartialGradient(),
    },
}
"""Styles that plans of `transformers` lack, or in whose place they have wrong ones, by class and pattern."""

_ROTARY_SIZE = "qk_rope_head_dim"
"""Attribute of latent attention: number of features of keys with positions, which all heads share."""

_HEAD_SIZES = ("head_dim", "head_size")
_VALUE_SIZE = "v_head_dim"
_HEAD_GROUPS = "num_key_value_groups"


def transformers_plan(module: nn.Module, ranks: int, sequence_parallel: bool) -> SplitPlan:
    """Return the plan that a model of `transformers` has itself.

    Args:
        module: The model as its own code builds it.
        ranks: Number of tensor ranks.
        sequence_parallel: True if ranks have slices of sequences. Then the result has only a problem,
            because plans of `transformers` do not support that.
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
    for name, pattern, style in _matching_parts(model_plan, modules, parameters):
        if name in parameters:
            split_style = _parameter_style(parameters[name], style)
        else:
            split_style = _module_style(module, modules, name, style)
        if split_style is None:
            problems.append(f'{kind} has the unsupported style "{style}" for {pattern} in its plan')
        else:
            styles[name] = split_style
    for pattern, correction in _CORRECTIONS.get(kind, {}).items():
        styles |= {n: correction for n in (*modules, *parameters) if matches_pattern(pattern, n)}
    if not problems:
        styles |= dict(_implied_styles(styles, modules, ranks))
        problems += _latent_problems(styles, modules, ranks)
    return check_plan(module, styles, ranks, sequence_parallel, problems)


def _matching_parts(
    model_plan: Mapping[str, str], modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, str, str]]:
    """Yield the name, pattern and style of each submodule or parameter that a plan of `transformers` splits.

    A pattern may match nothing, because a plan covers all configurations of its class. Submodules without
    parameters are omitted.
    """
    parts = [name for name, each in modules.items() if any(True for _ in each.parameters())]
    experts = [pattern for pattern, style in model_plan.items() if _LAYER_STYLES.get(style) is SplitExperts]
    for pattern, style in model_plan.items():
        # Skip patterns inside experts: plans of `transformers` split every expert over the ranks, but here
        # each rank has complete experts.
        if style not in _UNSPLIT and pattern.rpartition(".")[0] not in experts:
            for name in (*parts, *parameters):
                if matches_pattern(pattern, name):
                    yield name, pattern, style


def _parameter_style(parameter: nn.Parameter, style: str) -> SplitStyle | None:
    """Return the style of a parameter that no layer has, or None if it is unsupported."""
    if _LAYER_STYLES.get(style) is PartialGradient:
        return PartialGradient()
    dim = _SPLIT_DIMS.get(style)
    return None if dim is None else SplitParameter(max(parameter.dim() + dim, 0))


def _module_style(
    module: nn.Module, modules: Mapping[str, nn.Module], name: str, style: str
) -> SplitStyle | None:
    """Return the style of a submodule, or None if it is unsupported.

    The layer of the logits gets the style "vocabulary", so that logits stay split. The unit of a column style
    is an attention head where its size is known, so that no head is divided.
    """
    kind, part = _LAYER_STYLES.get(style), modules[name]
    parent, _, last = name.rpartition(".")
    if kind is PartialFeatures:
        rotary_size = getattr(modules.get(parent), _ROTARY_SIZE, None)
        return None if rotary_size is None else PartialFeatures(rotary_size)
    if kind is SplitExperts:
        suitable = (each for each in _EXPERT_STYLES if each.expert_count(part) is not None)
        return next(suitable, SplitExperts)()
    if kind is GatheredColumn and part is getattr(module, "get_output_embeddings", lambda: None)():
        return Vocabulary()
    if kind is not Column or (linear := LinearSizes.of(part)) is None:
        return None if kind is None else kind()
    attributes = (_VALUE_SIZE, *_HEAD_SIZES) if last == "v_proj" else _HEAD_SIZES
    sizes = (getattr(modules.get(parent), each, None) for each in attributes)
    size = next((each for each in sizes if isinstance(each, int)), None)
    if size is not None and "query_key_value" in last:
        size *= 3  # query, key and value of a head are adjacent
    unit = size if size is not None and linear.outputs % size == 0 else None
    return Column(parts=2 if style == "packed_colwise" else 1, unit=unit)


def _implied_styles(
    styles: Mapping[str, SplitStyle], modules: Mapping[str, nn.Module], ranks: int
) -> Iterator[tuple[str, SplitStyle]]:
    """Yield styles of parts that plans of `transformers` do not name, but that follow from other parts.

    These are embeddings that share the matrix of a split head; the number of query heads of each key head, if
    ranks share key heads; queries of latent attention that are not compressed; and activation functions with
    parameters before a row-split layer. Each rank has only its features' part of the gradient of these
    parameters.
    """
    heads = (name for name, style in styles.items() if isinstance(style, Vocabulary))
    tables = [getattr(modules[name], "weight", None) for name in heads]
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        if name not in styles and weight is not None and any(weight is table for table in tables):
            yield name, Vocabulary()
    for name, style in styles.items():
        parent, _, last = name.rpartition(".")
        groups = getattr(modules.get(parent), _HEAD_GROUPS, None)
        # Attention without key heads of its own uses those of another block.
        source = "k_proj" if f"{parent}.k_proj" in modules else "q_proj"
        if last == source and isinstance(style, Column) and style.unit and isinstance(groups, int):
            linear = LinearSizes.of(modules[name])
            assert linear is not None
            units = linear.outputs // style.unit // (1 if source == "k_proj" else groups)
            if units < ranks:
                yield f"{parent}.{_HEAD_GROUPS}", DividedAttribute(units=units)
        queries = f"{parent}.q_proj"
        if isinstance(style, PartialFeatures) and queries in modules and queries not in styles:
            yield queries, Column()
        activation = f"{parent}.act_fn"
        parameters = [*modules[activation].parameters()] if activation in modules else []
        if type(style) is Row and parameters and activation not in styles:
            yield activation, PartialGradient()


def _latent_problems(
    styles: Mapping[str, SplitStyle], modules: Mapping[str, nn.Module], ranks: int
) -> Iterator[str]:
    """Yield a problem for each latent attention whose number of heads is not a multiple of the ranks."""
    for parent in (name.rpartition(".")[0] for name in styles if isinstance(styles[name], PartialFeatures)):
        heads = getattr(modules.get(parent), "num_heads", None)
        if isinstance(heads, int) and heads % ranks:
            yield f"{parent} has {heads} heads, which must be a multiple of layout.tensor = {ranks}"
