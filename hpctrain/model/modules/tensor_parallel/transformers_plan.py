"""The plan that a module of transformers has by itself, in the words of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from hpctrain.model.modules.tensor_parallel.parallel_layers import Linear
from hpctrain.model.modules.tensor_parallel.split_plan import SplitPlan, SplitRule, checked, matches

OWN = "its own"
"""What stands for that plan in a deck."""

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
_WHOLE = frozenset({"replicate", "replicated"})

_HEAD_SIZES = ("head_dim", "head_size")
_GROUPS = "num_key_value_groups"


def own_plan(module: nn.Module, ranks: int, pieces: bool) -> SplitPlan:
    """The plan of a module that was built, for so many tensor ranks."""
    kind = type(module).__name__
    theirs = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    if not theirs:
        return SplitPlan({}, (f"{kind} has no plan (use a table of patterns)",))
    if pieces:
        told = (
            "conflicts with layout.sequence_parallel (use layout.sequence_parallel = false, or a "
            "table of patterns)"
        )
        return SplitPlan({}, (f"the plan of {kind} {told}",))
    modules = {name: each for name, each in module.named_modules() if name}
    parameters = dict(module.named_parameters())
    wishes: dict[str, SplitRule] = {}
    problems: list[str] = []
    experts = [pattern for pattern, style in theirs.items() if _STYLES.get(style) == "expert"]
    for pattern, style in theirs.items():
        if pattern.rpartition(".")[0] in experts:
            continue  # they split each expert, which is whole on one rank here
        # Patterns of what another configuration of the same class has are of nothing here.
        names = [name for name in (*modules, *parameters) if matches(pattern, name)]
        if not names or style in _WHOLE:
            continue
        if style not in _STYLES:
            problems.append(f'{kind} has the unsupported style "{style}" for {pattern} in its plan')
            continue
        for name in names:
            wishes[name] = _wish(module, modules, name, _STYLES[style], style.startswith("packed"))
    if not problems:
        wishes |= dict(_shared(wishes, modules, ranks))
        wishes |= dict(_tied(wishes, modules))
    return checked(module, wishes, ranks, pieces, problems)


def _wish(
    module: nn.Module, modules: Mapping[str, nn.Module], name: str, style: str, packed: bool
) -> SplitRule:
    """What becomes of one part: logits stay split, and heads whole."""
    part = modules.get(name)
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if style == "gathered column" and part is head:
        return SplitRule("vocabulary")
    if style != "column" or part is None or (linear := Linear.of(part)) is None:
        return SplitRule(style)
    home, _, last = name.rpartition(".")
    sizes = (getattr(modules.get(home), each, None) for each in _HEAD_SIZES)
    size = next((each for each in sizes if isinstance(each, int)), None)
    if size is not None and "query_key_value" in last:
        size *= 3  # of each head these follow each other
    unit = size if size is not None and linear.outputs % size == 0 else None
    return SplitRule(style, parts=2 if packed else 1, unit=unit)


def _shared(
    wishes: Mapping[str, SplitRule], modules: Mapping[str, nn.Module], ranks: int
) -> Iterator[tuple[str, SplitRule]]:
    """How many heads of queries a head of keys has, where ranks share that."""
    for name, wish in wishes.items():
        home, _, last = name.rpartition(".")
        if (
            last != "k_proj"
            or wish.unit is None
            or not isinstance(getattr(modules[home], _GROUPS, None), int)
        ):
            continue
        linear = Linear.of(modules[name])
        assert linear is not None
        units = linear.outputs // wish.unit
        if units < ranks:
            yield f"{home}.{_GROUPS}", SplitRule("divided", units=units)


def _tied(
    wishes: Mapping[str, SplitRule], modules: Mapping[str, nn.Module]
) -> Iterator[tuple[str, SplitRule]]:
    """Embeddings whose matrix is that of a head which is split."""
    split = {name for name, wish in wishes.items() if wish.style == "vocabulary"}
    tables = [getattr(modules[name], "weight", None) for name in split]
    for name, each in modules.items():
        weight = getattr(each, "weight", None)
        if name not in wishes and weight is not None and any(weight is table for table in tables):
            yield name, SplitRule("vocabulary")
