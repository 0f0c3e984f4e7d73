"""Tensor-parallel plans of modules: from patterns of names to the style of each submodule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hpctrain.model.modules.tensor_parallel.expert_styles import SummedResult
from hpctrain.model.modules.tensor_parallel.module_names import ModuleNames
from hpctrain.model.modules.tensor_parallel.parallel_layers import LinearSizes
from hpctrain.model.modules.tensor_parallel.split_styles import (
    STYLES,
    GatheredInput,
    PartialGradient,
    SlicedSequence,
    SplitParameter,
    Vocabulary,
)
from hpctrain.model.modules.tensor_parallel.style_base import SplitStyle
from hpctrain.text import either, nearest


@dataclass(frozen=True)
class SplitPlan:
    """Tensor-parallel plan of a module.

    Attributes:
        styles: Style of each submodule, parameter or attribute, by its first name.
        problems: Sentences that say what is wrong with the plan.
    """

    styles: Mapping[str, SplitStyle]
    problems: tuple[str, ...] = ()

    def names_with_style(self, style: type[SplitStyle]) -> list[str]:
        """Return the names of all parts whose style has exactly this class, not a subclass of it."""
        return [name for name, each in self.styles.items() if type(each) is style]


def make_plan(module: nn.Module, table: Mapping[str, Any], ranks: int, sequence_parallel: bool) -> SplitPlan:
    """Return the plan that a table of the deck describes.

    Args:
        module: The module as its own code builds it, possibly on "meta".
        table: Styles or tables of options, by pattern.
        ranks: Number of tensor ranks.
        sequence_parallel: True if ranks have slices of sequences between split layers.
    """
    styles: dict[str, SplitStyle] = {}
    patterns: dict[str, str] = {}
    problems: list[str] = []
    names = ModuleNames(module)
    for pattern, value in table.items():
        style = _parse_style(value)
        if isinstance(style, str):
            problems.append(f'"{pattern}": {style}')
            continue
        matching = style.matching(names, pattern)
        if not matching:
            problems.append(f'"{pattern}": {style.no_match_message(names, pattern)}')
        for name in matching:
            if name in styles:
                problems.append(f'{name} matches both "{patterns[name]}" and "{pattern}"')
            styles[name], patterns[name] = style, pattern
    return check_plan(module, styles, ranks, sequence_parallel, problems)


def check_plan(
    module: nn.Module,
    styles: Mapping[str, SplitStyle],
    ranks: int,
    sequence_parallel: bool,
    problems: Sequence[str],
) -> SplitPlan:
    """Check styles against a module and against each other, and return the plan with all problems.

    Args:
        module: The module as its own code builds it.
        styles: Style of each part by its first name.
        ranks: Number of tensor ranks.
        sequence_parallel: True if ranks have slices of sequences between split layers.
        problems: Problems that were found when the styles were read.
    """
    plan, names = SplitPlan(dict(styles)), ModuleNames(module)
    problems = [
        *problems,
        *(problem for name, style in styles.items() for problem in style.problems(names, name, ranks)),
        *_overlap_problems(names, plan),
        *_tied_problems(names, plan),
        *_nested_gather_problems(plan),
        *_summed_problems(names, plan),
    ]
    heads = [name for name in plan.names_with_style(Vocabulary) if LinearSizes.of(names.modules[name])]
    if len(heads) > 1:
        problems.append(
            f'{" and ".join(heads)} both have the style "vocabulary", but only one layer computes the logits'
        )
    if sequence_parallel:
        conflicts = {style.name: name for name, style in styles.items() if style.needs_whole_sequences}
        problems += [
            f'{name} has the style "{style}", which conflicts with layout.sequence_parallel'
            for style, name in conflicts.items()
        ]
    embeds = set(plan.names_with_style(Vocabulary)) - set(heads)
    if sequence_parallel and not embeds and not plan.names_with_style(SlicedSequence):
        problems.append(
            'must split sequences with layout.sequence_parallel (use "vocabulary" for an embedding, or '
            '"cut" for the first block)'
        )
    return SplitPlan(plan.styles, tuple(dict.fromkeys(problems)))


def _parse_style(value: object) -> SplitStyle | str:
    """Return the style that a table gives for a pattern, or what is wrong with it."""
    table = {"split": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or not isinstance(table.get("split"), str):
        return 'must be a style in quotes, or a table such as {split = "column", parts = 3}'
    name = table["split"]
    style = STYLES.get(name)
    if style is None:
        near = nearest(name, tuple(STYLES))
        meant = f"did you mean {near}?" if near else "use " + either([f'"{each}"' for each in STYLES])
        return f'unknown style "{name}" ({meant})'
    options = {option: each for option, each in table.items() if option != "split"}
    if other := [option for option in options if option not in style.options]:
        takes = f"it has {' and '.join(style.options)}" if style.options else "it has none"
        return f'unknown option {other[0]} of the style "{name}" ({takes})'
    for option, each in options.items():
        numbers = each if option == "parts" and isinstance(each, list) else [each]
        if not numbers or not all(type(number) is int and number > 0 for number in numbers):
            return f"{option} must be a whole number above 0" + (", or a list" if option == "parts" else "")
        options[option] = tuple(each) if isinstance(each, list) else each
    return style(**options)


def _overlap_problems(names: ModuleNames, plan: SplitPlan) -> Iterator[str]:
    """Yield parameters that two styles apply to."""
    by: dict[int, str] = {}
    for name in (each for each, style in plan.styles.items() if style.covers_parameters):
        part = names.modules.get(name)
        parameters = [names.parameters[name]] if part is None else list(part.parameters())
        for parameter in parameters:
            other = by.setdefault(id(parameter), name)
            alike = {type(plan.styles[other]), type(plan.styles[name])} == {Vocabulary}
            if other != name and not alike:
                yield f"{names.first[id(parameter)]} belongs to both {other} and {name} of the plan"


def _tied_problems(names: ModuleNames, plan: SplitPlan) -> Iterator[str]:
    """Yield parameters of several modules of which only some are split."""
    owners: dict[int, dict[str, None]] = {}
    for name, each in names.parameters.items():
        owners.setdefault(id(each), {})[names.owner(name)] = None
    for parameter, modules in owners.items():
        if len(modules) < 2:
            continue
        styles = {each: plan.styles[each] for each in modules if each in plan.styles}
        candidates = [each for each in modules if not _wraps_head(names, styles, each, parameter)]
        as_vocabulary = {each for each, style in styles.items() if isinstance(style, Vocabulary)}
        is_split = any(style.splits_parameters for style in styles.values())
        if not is_split or len(as_vocabulary) == len(styles) == len(candidates):
            continue
        tied = " and ".join(name for name, each in names.parameters.items() if id(each) == parameter)
        missing = [each for each in candidates if each not in as_vocabulary]
        yield f'{tied} are one parameter: {" and ".join(missing)} must have the style "vocabulary", too'


def _wraps_head(names: ModuleNames, styles: Mapping[str, SplitStyle], outer: str, bias: int) -> bool:
    """Return True if a module around a head has the head's bias as its own parameter, too.

    Masked language models of `transformers` do. The module gets a rank's rows together with the head.
    """
    return any(
        isinstance(style, Vocabulary) and head.startswith(f"{outer}." if outer else "") and head != outer
        for head, style in styles.items()
        if id(getattr(names.modules[head], "bias", None)) == bias
    )


def _nested_gather_problems(plan: SplitPlan) -> Iterator[str]:
    """Yield parts inside of others with the style "gather" whose own style does not allow that."""
    gathered = plan.names_with_style(GatheredInput)
    for name, style in plan.styles.items():
        for outer in gathered:
            if name.startswith(f"{outer}.") and not style.may_be_gathered:
                yield f"{name} is inside {outer}, which is already gathered"


def _summed_problems(names: ModuleNames, plan: SplitPlan) -> Iterator[str]:
    """Yield parameters and submodules inside of others with the style "sum" that would be summed twice."""
    for outer in plan.names_with_style(SummedResult):
        parameters = (names.first[id(each)] for each in names.modules[outer].parameters())
        parts = (name for name in plan.styles if name.startswith(f"{outer}."))
        for name in dict.fromkeys((*parameters, *parts)):
            if not isinstance(plan.styles.get(name), SplitParameter | PartialGradient):
                inside = f'{name} is inside {outer}, which has the style "sum"'
                yield f'{inside}, and must have the style "split parameter" or "partial"'
