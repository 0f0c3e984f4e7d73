"""Tensor-parallel plans of modules: from patterns of names to the rule for each submodule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from hpctrain.model.modules.tensor_parallel.parallel_layers import LinearSizes, expert_count
from hpctrain.text import either, nearest

LINEAR = ("column", "row", "gathered column", "row of whole input")
"""Styles of linear layers."""

ROW_STYLES = ("row", "row of whole input")
"""Styles of linear layers that are split by input features."""

STYLES = (*LINEAR, "vocabulary", "partial", "sequence", "gather", "cut", "join", "divided", "expert")

_OPTIONS: Mapping[str, tuple[str, ...]] = {"column": ("parts", "unit"), "divided": ("units",)}
"""Options of a rule besides its style."""

_MOST_NAMES = 6


@dataclass(frozen=True)
class SplitRule:
    """Rule for one submodule, parameter or attribute of a module.

    Attributes:
        style: One of STYLES.
        parts: For "column": sizes of the matrices that are packed into one weight, or the number of equal
            ones.
        unit: For "column": ranks get multiples of so many rows, such as the size of an attention head.
        units: For "divided": how many units the attribute counts. It is divided by the number of ranks that
            share one unit; None divides by the number of all ranks.
    """

    style: str
    parts: int | tuple[int, ...] = 1
    unit: int | None = None
    units: int | None = None


@dataclass(frozen=True)
class SplitPlan:
    """Tensor-parallel plan of a module.

    Attributes:
        rules: Rule of each part by its first name.
        problems: Sentences that say what is wrong with the plan.
    """

    rules: Mapping[str, SplitRule]
    problems: tuple[str, ...] = ()

    def names_with_style(self, *styles: str) -> list[str]:
        """Return the names whose rule has one of these styles."""
        return [name for name, rule in self.rules.items() if rule.style in styles]


def matches_pattern(pattern: str, name: str) -> bool:
    """Return True if each part of a name between dots matches that of a pattern (`fnmatch`).

    Name and pattern have equally many parts, so `*` never matches a dot.
    """
    patterns, parts = pattern.split("."), name.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def make_plan(module: nn.Module, table: Mapping[str, Any], ranks: int, sequence_parallel: bool) -> SplitPlan:
    """Return the plan that a table of the deck describes.

    Args:
        module: The module as its own code builds it, possibly on "meta".
        table: Styles or tables of options, by pattern.
        ranks: Number of tensor ranks.
        sequence_parallel: True if ranks have slices of sequences between split layers.
    """
    rules: dict[str, SplitRule] = {}
    patterns: dict[str, str] = {}
    problems: list[str] = []
    parts = _NamedParts(module)
    for pattern, value in table.items():
        rule = _parse_rule(value)
        if isinstance(rule, str):
            problems.append(f'"{pattern}": {rule}')
            continue
        names = parts.matching(pattern, rule.style)
        if not names:
            problems.append(f'"{pattern}": {parts.no_match_message(pattern, rule.style)}')
        for name in names:
            if name in rules:
                problems.append(f'{name} matches both "{patterns[name]}" and "{pattern}"')
            rules[name], patterns[name] = rule, pattern
    return check_plan(module, rules, ranks, sequence_parallel, problems)


def check_plan(
    module: nn.Module,
    rules: Mapping[str, SplitRule],
    ranks: int,
    sequence_parallel: bool,
    problems: Sequence[str],
) -> SplitPlan:
    """Check rules against a module and against each other, and return the plan with all problems.

    Args:
        module: The module as its own code builds it.
        rules: Rule of each part by its first name.
        ranks: Number of tensor ranks.
        sequence_parallel: True if ranks have slices of sequences between split layers.
        problems: Problems that were found when the rules were read.
    """
    problems, parts = [*problems], _NamedParts(module)
    for name, rule in rules.items():
        problems += _rule_problems(parts, name, rule, ranks)
    plan = SplitPlan(dict(rules))
    problems += [
        *_overlap_problems(parts, plan),
        *_tied_problems(parts, plan),
        *_nested_gather_problems(plan),
    ]
    heads = [name for name in plan.names_with_style("vocabulary") if LinearSizes.of(parts.modules[name])]
    if len(heads) > 1:
        problems.append(
            f'{" and ".join(heads)} both have the style "vocabulary", but only one layer computes the logits'
        )
    if sequence_parallel and (experts := plan.names_with_style("expert")):
        problems.append(f'{experts[0]} has the style "expert", which conflicts with layout.sequence_parallel')
    embeds = set(plan.names_with_style("vocabulary")) - set(heads)
    if sequence_parallel and not embeds and not plan.names_with_style("cut"):
        problems.append(
            'must split sequences with layout.sequence_parallel (use "vocabulary" for an embedding, or '
            '"cut" for the first block)'
        )
    return SplitPlan(plan.rules, tuple(dict.fromkeys(problems)))


class AttributePlace(NamedTuple):
    """Place of an integer attribute, such as a number of heads.

    Attributes:
        module: Submodule that has the attribute, or an object with the attribute, such as a config.
        object_name: Name of that object in the submodule; "" if the submodule has the attribute itself.
        attribute: Name of the attribute.
        owner: The submodule or the object.
        value: Value of the attribute.
    """

    module: nn.Module
    object_name: str
    attribute: str
    owner: object
    value: int


def find_attribute(module: nn.Module, name: str) -> AttributePlace | None:
    """Return the place of an integer attribute, or None if there is none.

    Args:
        module: The user's module.
        name: Name of the attribute with dots, such as "blocks.0.attention.heads" or "blocks.0.config.heads".
    """
    home, _, attribute = name.rpartition(".")
    outer, _, object_name = home.rpartition(".")
    for path, inner in ((home, ""), (outer, object_name)):
        try:
            submodule = module.get_submodule(path)
        except AttributeError:
            continue
        owner = getattr(submodule, inner, None) if inner else submodule
        value = getattr(owner, attribute, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return AttributePlace(submodule, inner, attribute, owner, value)
    return None


def attribute_divisor(rule: SplitRule, ranks: int) -> int | None:
    """Return the number that an attribute, such as a number of heads, is divided by on each tensor rank.

    Args:
        rule: Rule of the style "divided".
        ranks: Number of tensor ranks.

    Returns:
        The divisor; None if ranks cannot share the attribute's units evenly.
    """
    if rule.units is None:
        return ranks
    if rule.units % ranks == 0:
        return 1
    return ranks // rule.units if ranks % rule.units == 0 else None


def part_sizes(outputs: int, parts: int | tuple[int, ...]) -> list[int] | None:
    """Return the sizes of the matrices that are packed into so many outputs, or None if they do not fit."""
    if isinstance(parts, tuple):
        return list(parts) if sum(parts) == outputs else None
    return None if outputs % parts else [outputs // parts] * parts


class _NamedParts:
    """Submodules and parameters of a module by all their names. Rules use the first name of each."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = {name: each for name, each in module.named_modules(remove_duplicate=False) if name}
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.first: dict[int, str] = {}
        for name, each in (*self.modules.items(), *self.parameters.items()):
            self.first.setdefault(id(each), name)

    def matching(self, pattern: str, style: str) -> list[str]:
        """Return the first names of all parts that match a pattern and that a style may apply to."""
        if style == "divided":
            return self._find_attributes(pattern)
        every = {**self.modules, **self.parameters}
        return list(
            dict.fromkeys(self.first[id(each)] for n, each in every.items() if matches_pattern(pattern, n))
        )

    def owner(self, name: str) -> str:
        """Return the first name of the module that has a parameter of this name."""
        home = name.rpartition(".")[0]
        return self.first[id(self.modules[home])] if home else ""

    def no_match_message(self, pattern: str, style: str) -> str:
        """Return the message that nothing matches a pattern, with a suggestion."""
        if style == "divided":
            return "matches no integer attribute of a submodule"
        plain = dict.fromkeys(re.sub(r"\d+(?=\.|$)", "*", n) for n in (*self.modules, *self.parameters))
        near = nearest(pattern, [*plain, *self.modules])
        some = [name for name, each in self.modules.items() if not any(True for _ in each.children())]
        short = list(dict.fromkeys(re.sub(r"\d+(?=\.|$)", "*", name) for name in some))
        known = f"did you mean {near}?" if near else f"the module has {', '.join(short[:_MOST_NAMES])}"
        return f"matches no submodule or parameter ({known})"

    def _find_attributes(self, pattern: str) -> list[str]:
        *_, last = pattern.split(".")
        if pattern == last:
            return [last] if find_attribute(self.module, last) else []
        home, within = pattern.rpartition(".")[0], pattern.split(".")[-2]
        names = [f"{name}.{last}" for name in self.modules if matches_pattern(home, name)]
        if "." in home:
            outer = home.rpartition(".")[0]
            names += [f"{name}.{within}.{last}" for name in self.modules if matches_pattern(outer, name)]
        return [name for name in dict.fromkeys(names) if find_attribute(self.module, name)]


def _parse_rule(value: object) -> SplitRule | str:
    """Return the rule that a table gives for a pattern, or what is wrong with it."""
    table = {"split": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or not isinstance(table.get("split"), str):
        return 'must be a style in quotes, or a table such as {split = "column", parts = 3}'
    style = table["split"]
    if style not in STYLES:
        near = nearest(style, STYLES)
        meant = f"did you mean {near}?" if near else "use " + either([f'"{each}"' for each in STYLES])
        return f'unknown style "{style}" ({meant})'
    more = {name: each for name, each in table.items() if name != "split"}
    allowed = _OPTIONS.get(style, ())
    if other := [name for name in more if name not in allowed]:
        takes = f"it has {' and '.join(allowed)}" if allowed else "it has none"
        return f'unknown option {other[0]} of the style "{style}" ({takes})'
    for name, each in more.items():
        numbers = each if name == "parts" and isinstance(each, list) else [each]
        if not numbers or not all(type(number) is int and number > 0 for number in numbers):
            return f"{name} must be a whole number above 0" + (", or a list" if name == "parts" else "")
    if isinstance(more.get("parts"), list):
        more["parts"] = tuple(more["parts"])
    return SplitRule(style, **more)


def _rule_problems(parts: _NamedParts, name: str, rule: SplitRule, ranks: int) -> Iterator[str]:
    """Yield what is wrong with one rule by itself."""
    if rule.style == "divided":
        yield from _attribute_problems(parts.module, name, rule, ranks)
        return
    part = parts.modules.get(name)
    if part is None:
        if rule.style not in {"partial", "sequence"}:
            yield f'{name} is a parameter, for which only "partial" and "sequence" are supported'
    elif rule.style in LINEAR:
        yield from _linear_problems(part, name, rule, ranks)
    elif rule.style == "expert":
        count, kind = expert_count(part), type(part).__name__
        if count is None:
            yield (
                f'{name} has the class {kind}, for which "expert" is unsupported (it supports experts of '
                '`transformers` in one tensor; use "column" and "row" for experts that are separate layers)'
            )
        elif count % ranks:
            yield f"{name} has {count} experts, which must be a multiple of layout.tensor = {ranks}"
    elif rule.style == "vocabulary":
        if LinearSizes.of(part) is None and (why := lookup_problem(part)):
            yield f'{name} does not support "vocabulary": {why}'
        elif (linear := LinearSizes.of(part)) is not None and linear.transposed:
            yield f'{name} is a Conv1D, which does not support "vocabulary" (nn.Linear and nn.Embedding do)'
    elif rule.style in {"partial", "sequence"} and not any(True for _ in part.parameters()):
        yield f'{name} has no parameters, which "{rule.style}" requires'


def _linear_problems(module: nn.Module, name: str, rule: SplitRule, ranks: int) -> Iterator[str]:
    """Yield the reasons why a module cannot be split as a linear layer."""
    linear, kind = LinearSizes.of(module), type(module).__name__
    if linear is None:
        yield (
            f'{name} has the class {kind}, which does not support "{rule.style}" (nn.Linear and Conv1D of '
            "`transformers` do)"
        )
        return
    if rule.style in ROW_STYLES:
        if linear.inputs % ranks:
            yield f"{name} has {linear.inputs} inputs, which must be a multiple of layout.tensor = {ranks}"
        return
    sizes = part_sizes(linear.outputs, rule.parts)
    if sizes is None:
        if isinstance(rule.parts, tuple):
            total = f"but parts = {list(rule.parts)} add up to {sum(rule.parts)}"
        else:
            total = f"which do not divide into {rule.parts} equal parts"
        yield f"{name} has {linear.outputs} outputs, {total}"
        return
    for size in sizes:
        unit = rule.unit or 1
        count = size // unit
        of = f"{name} has {size} outputs" + (" in a part" if len(sizes) > 1 else "")
        if size % unit:
            yield f"{of}, which must be a multiple of unit = {unit}"
        elif count % ranks and (rule.unit is None or ranks % count):
            units = f" in {count} units of {unit}" if rule.unit is not None else ""
            relation = "a multiple or a divisor of" if units else "a multiple of"
            yield f"{of}{units}, which must be {relation} layout.tensor = {ranks}"


def _attribute_problems(module: nn.Module, name: str, rule: SplitRule, ranks: int) -> Iterator[str]:
    place, by = find_attribute(module, name), attribute_divisor(rule, ranks)
    assert place is not None
    if by is None:
        yield f"{name}: units = {rule.units} must be a multiple or a divisor of layout.tensor = {ranks}"
    elif place.value % by:
        yield f"{name} = {place.value} must be a multiple of {by}"


def lookup_problem(module: nn.Module) -> str:
    """Return why a module cannot be split as an embedding, or "" if it can.

    A subclass of nn.Embedding may do anything with the rows, but must get them from nn.Embedding's forward.
    """
    if not isinstance(module, nn.Embedding):
        return f"it has the class {type(module).__name__} (nn.Embedding and nn.Linear are supported)"
    for name in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, name):
            return f"it has {name}"
    for kind in type(module).__mro__[: type(module).__mro__.index(nn.Embedding)]:
        code = getattr(vars(kind).get("forward"), "__code__", None)
        if "forward" in vars(kind) and (code is None or "super" not in code.co_names):
            return f"its class {kind.__name__} does not use the forward method of nn.Embedding"
    return ""


def _overlap_problems(parts: _NamedParts, plan: SplitPlan) -> Iterator[str]:
    """Yield parameters that two rules apply to."""
    by: dict[int, str] = {}
    for name in plan.names_with_style(*LINEAR, "vocabulary", "expert", "partial", "sequence"):
        part = parts.modules.get(name)
        own = [parts.parameters[name]] if part is None else list(part.parameters())
        for parameter in own:
            other = by.setdefault(id(parameter), name)
            alike = {plan.rules[other].style, plan.rules[name].style} == {"vocabulary"}
            if other != name and not alike:
                yield f"{parts.first[id(parameter)]} belongs to both {other} and {name} of the plan"


def _tied_problems(parts: _NamedParts, plan: SplitPlan) -> Iterator[str]:
    """Yield parameters of several modules of which only some are split."""
    owners: dict[int, dict[str, None]] = {}
    for name, each in parts.parameters.items():
        owners.setdefault(id(each), {})[parts.owner(name)] = None
    for parameter, modules in owners.items():
        if len(modules) < 2:
            continue
        styles = {each: plan.rules[each].style for each in modules if each in plan.rules}
        every = [each for each in modules if not _wraps_head(parts, styles, each, parameter)]
        split = {each for each, style in styles.items() if style in {*LINEAR, "vocabulary", "expert"}}
        if not split or ({*styles.values()} == {"vocabulary"} and len(styles) == len(every)):
            continue
        names = " and ".join(name for name, each in parts.parameters.items() if id(each) == parameter)
        others = [each for each in every if styles.get(each) != "vocabulary"]
        yield f'{names} are one parameter: {" and ".join(others)} must have the style "vocabulary", too'


def _wraps_head(parts: _NamedParts, styles: Mapping[str, str], outer: str, bias: int) -> bool:
    """Return True if a module around a head has the head's bias as its own parameter, too.

    Masked language models of `transformers` do. The module gets a rank's rows together with the head.
    """
    return any(
        style == "vocabulary" and head.startswith(f"{outer}." if outer else "") and head != outer
        for head, style in styles.items()
        if id(getattr(parts.modules[head], "bias", None)) == bias
    )


def _nested_gather_problems(plan: SplitPlan) -> Iterator[str]:
    """Yield parts with the style "gather" inside others."""
    gathered = plan.names_with_style("gather")
    for name in gathered:
        for outer in gathered:
            if name.startswith(f"{outer}."):
                yield f"{name} is inside {outer}, which is already gathered"
