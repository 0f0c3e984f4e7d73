"""How a module is split over tensor ranks: from patterns of names to what becomes of which of its parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hpctrain.model.modules.tensor_parallel.parallel_layers import Linear, experts_in
from hpctrain.text import either, nearest

LINEAR = ("column", "row", "gathered column", "row of whole input")
"""Styles of linear layers."""

STYLES = (*LINEAR, "vocabulary", "partial", "sequence", "gather", "cut", "join", "divided", "expert")

_KEYS: Mapping[str, tuple[str, ...]] = {"column": ("parts", "unit"), "divided": ("units",)}
"""What a wish may say besides its style."""

_NAMES_TOLD = 6


@dataclass(frozen=True)
class SplitRule:
    """What is to become of a part of a module.

    Of a column, `parts` are the sizes of what is packed into one weight, or how many equal ones there are;
    rows of each go to ranks in units of `unit`. An integer that is divided counts what of each of so many
    `units` there is: then it is divided by the ranks that share one, else by all.
    """

    style: str
    parts: int | tuple[int, ...] = 1
    unit: int | None = None
    units: int | None = None


@dataclass(frozen=True)
class SplitPlan:
    """What becomes of each planned part, by its first name; and, a sentence each, what is wrong with that."""

    wishes: Mapping[str, SplitRule]
    problems: tuple[str, ...] = ()

    def of_style(self, *styles: str) -> list[str]:
        """The names of what has one of these styles."""
        return [name for name, wish in self.wishes.items() if wish.style in styles]


def matches(pattern: str, name: str) -> bool:
    """Whether a name has a pattern, where `*` is within one name between dots."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def make_plan(module: nn.Module, given: Mapping[str, Any], ranks: int, pieces: bool) -> SplitPlan:
    """The plan of a table, for so many tensor ranks, which have pieces of sequences where there are `pieces`.

    The module may be without memory; it is as it was built.
    """
    wishes: dict[str, SplitRule] = {}
    by: dict[str, str] = {}
    problems: list[str] = []
    parts = _Parts(module)
    for pattern, value in given.items():
        wish = _wish(value)
        if isinstance(wish, str):
            problems.append(f'"{pattern}": {wish}')
            continue
        names = parts.named(pattern, wish.style)
        if not names:
            problems.append(f'"{pattern}": {parts.unknown(pattern, wish.style)}')
        for name in names:
            if name in wishes:
                problems.append(f'{name} matches both "{by[name]}" and "{pattern}"')
            wishes[name], by[name] = wish, pattern
    return checked(module, wishes, ranks, pieces, problems)


def checked(
    module: nn.Module, wishes: Mapping[str, SplitRule], ranks: int, pieces: bool, before: list[str]
) -> SplitPlan:
    """The plan of these wishes, with all that is wrong with it: what was `before`, and what is found."""
    problems, parts = [*before], _Parts(module)
    for name, wish in wishes.items():
        problems += _problems_of(parts, name, wish, ranks)
    plan = SplitPlan(dict(wishes))
    problems += [*_planned_twice(parts, plan), *_tied(parts, plan), *_regions(plan)]
    heads = [name for name in plan.of_style("vocabulary") if Linear.of(parts.modules[name])]
    if len(heads) > 1:
        problems.append(
            f'{" and ".join(heads)} both have the style "vocabulary", but only one layer computes the logits'
        )
    if pieces and (experts := plan.of_style("expert")):
        problems.append(f'{experts[0]} has the style "expert", which conflicts with layout.sequence_parallel')
    embeds = set(plan.of_style("vocabulary")) - set(heads)
    if pieces and not embeds and not plan.of_style("cut"):
        problems.append(
            'must split sequences with layout.sequence_parallel (use "vocabulary" for an embedding, or '
            '"cut" for the first block)'
        )
    return SplitPlan(plan.wishes, tuple(dict.fromkeys(problems)))


def attribute_of(module: nn.Module, name: str) -> tuple[object, str, str] | None:
    """Where a module has an integer of a name: who has it, under which name; and, where that is no module,
    the name under which a module has who has it.
    """
    home, _, last = name.rpartition(".")
    for within in ("", home.rpartition(".")[2]):
        path = home.removesuffix(within).removesuffix(".") if within else home
        try:
            holder: object = module.get_submodule(path)
        except AttributeError:
            continue
        holder = getattr(holder, within, None) if within else holder
        value = getattr(holder, last, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return holder, last, within
    return None


def divisor(wish: SplitRule, ranks: int) -> int | None:
    """By what an integer is divided; None where ranks do not share units evenly."""
    if wish.units is None:
        return ranks
    if wish.units % ranks == 0:
        return 1
    return ranks // wish.units if ranks % wish.units == 0 else None


def part_sizes(outputs: int, parts: int | tuple[int, ...]) -> list[int] | None:
    """The sizes of what is packed into so many outputs; None where they do not add up to these."""
    if isinstance(parts, tuple):
        return list(parts) if sum(parts) == outputs else None
    return None if outputs % parts else [outputs // parts] * parts


class _Parts:
    """A module's parts by name; of what has several names the first one counts."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = {name: each for name, each in module.named_modules(remove_duplicate=False) if name}
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.first: dict[int, str] = {}
        for name, each in (*self.modules.items(), *self.parameters.items()):
            self.first.setdefault(id(each), name)

    def named(self, pattern: str, style: str) -> list[str]:
        """The first names of all that have a pattern, and may be meant with a style."""
        if style == "divided":
            return self._attributes(pattern)
        every = {**self.modules, **self.parameters}
        return list(dict.fromkeys(self.first[id(each)] for n, each in every.items() if matches(pattern, n)))

    def owner(self, name: str) -> str:
        """The first name of the module that has a parameter of a name."""
        home = name.rpartition(".")[0]
        return self.first[id(self.modules[home])] if home else ""

    def unknown(self, pattern: str, style: str) -> str:
        """That nothing has a pattern, and what was probably meant."""
        if style == "divided":
            return "matches no integer attribute of a submodule"
        plain = dict.fromkeys(re.sub(r"\d+(?=\.|$)", "*", n) for n in (*self.modules, *self.parameters))
        near = nearest(pattern, [*plain, *self.modules])
        some = [name for name, each in self.modules.items() if not any(True for _ in each.children())]
        short = list(dict.fromkeys(re.sub(r"\d+(?=\.|$)", "*", name) for name in some))
        known = f"did you mean {near}?" if near else f"the module has {', '.join(short[:_NAMES_TOLD])}"
        return f"matches no submodule or parameter ({known})"

    def _attributes(self, pattern: str) -> list[str]:
        *_, last = pattern.split(".")
        if pattern == last:
            return [last] if attribute_of(self.module, last) else []
        home, within = pattern.rpartition(".")[0], pattern.split(".")[-2]
        names = [f"{name}.{last}" for name in self.modules if matches(home, name)]
        if "." in home:
            outer = home.rpartition(".")[0]
            names += [f"{name}.{within}.{last}" for name in self.modules if matches(outer, name)]
        return [name for name in dict.fromkeys(names) if attribute_of(self.module, name)]


def _wish(value: object) -> SplitRule | str:
    """What a table has for a pattern, or what is wrong with it."""
    table = {"split": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or not isinstance(table.get("split"), str):
        return 'must be a style in quotes, or a table such as {split = "column", parts = 3}'
    style = table["split"]
    if style not in STYLES:
        near = nearest(style, STYLES)
        meant = f"did you mean {near}?" if near else "use " + either([f'"{each}"' for each in STYLES])
        return f'unknown style "{style}" ({meant})'
    more = {name: each for name, each in table.items() if name != "split"}
    allowed = _KEYS.get(style, ())
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


def _problems_of(parts: _Parts, name: str, wish: SplitRule, ranks: int) -> Iterator[str]:
    """What is wrong with one wish by itself."""
    if wish.style == "divided":
        yield from _not_divided(parts.module, name, wish, ranks)
        return
    found = parts.modules.get(name)
    if found is None:
        if wish.style not in {"partial", "sequence"}:
            yield f'{name} is a parameter, for which only "partial" and "sequence" are supported'
    elif wish.style in LINEAR:
        yield from _uneven(found, name, wish, ranks)
    elif wish.style == "expert":
        count, kind = experts_in(found), type(found).__name__
        if count is None:
            yield (
                f'{name} has the class {kind}, for which "expert" is unsupported (it supports experts of '
                '`transformers` in one tensor; use "column" and "row" for experts that are separate layers)'
            )
        elif count % ranks:
            yield f"{name} has {count} experts, which must be a multiple of layout.tensor = {ranks}"
    elif wish.style == "vocabulary":
        if Linear.of(found) is None and (why := lookup_problem(found)):
            yield f'{name} does not support "vocabulary": {why}'
        elif (linear := Linear.of(found)) is not None and linear.transposed:
            yield f'{name} is a Conv1D, which does not support "vocabulary" (nn.Linear and nn.Embedding do)'
    elif wish.style in {"partial", "sequence"} and not any(True for _ in found.parameters()):
        yield f'{name} has no parameters, which "{wish.style}" requires'


def _uneven(module: nn.Module, name: str, wish: SplitRule, ranks: int) -> Iterator[str]:
    """Whether a module is no linear layer, or has sizes that are not to be split so."""
    linear, kind = Linear.of(module), type(module).__name__
    if linear is None:
        yield (
            f'{name} has the class {kind}, which does not support "{wish.style}" (nn.Linear and Conv1D of '
            "`transformers` do)"
        )
        return
    if wish.style in {"row", "row of whole input"}:
        if linear.inputs % ranks:
            yield f"{name} has {linear.inputs} inputs, which must be a multiple of layout.tensor = {ranks}"
        return
    sizes = part_sizes(linear.outputs, wish.parts)
    if sizes is None:
        if isinstance(wish.parts, tuple):
            total = f"but parts = {list(wish.parts)} add up to {sum(wish.parts)}"
        else:
            total = f"which do not divide into {wish.parts} equal parts"
        yield f"{name} has {linear.outputs} outputs, {total}"
        return
    for size in sizes:
        unit = wish.unit or 1
        count = size // unit
        of = f"{name} has {size} outputs" + (" in a part" if len(sizes) > 1 else "")
        if size % unit:
            yield f"{of}, which must be a multiple of unit = {unit}"
        elif count % ranks and (wish.unit is None or ranks % count):
            units = f" in {count} units of {unit}" if wish.unit is not None else ""
            rule = "a multiple or a divisor of" if units else "a multiple of"
            yield f"{of}{units}, which must be {rule} layout.tensor = {ranks}"


def _not_divided(module: nn.Module, name: str, wish: SplitRule, ranks: int) -> Iterator[str]:
    found, by = attribute_of(module, name), divisor(wish, ranks)
    assert found is not None
    value = getattr(found[0], found[1])
    if by is None:
        yield f"{name}: units = {wish.units} must be a multiple or a divisor of layout.tensor = {ranks}"
    elif value % by:
        yield f"{name} = {value} must be a multiple of {by}"


def lookup_problem(module: nn.Module) -> str:
    """Why a module is no embedding that can be split by rows; "" where it is one.

    A class made of nn.Embedding may do what it likes with what that gives.
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


def _planned_twice(parts: _Parts, plan: SplitPlan) -> Iterator[str]:
    """Parameters that two parts of a plan have."""
    by: dict[int, str] = {}
    for name in plan.of_style(*LINEAR, "vocabulary", "expert", "partial", "sequence"):
        part = parts.modules.get(name)
        own = [parts.parameters[name]] if part is None else list(part.parameters())
        for parameter in own:
            other = by.setdefault(id(parameter), name)
            alike = {plan.wishes[other].style, plan.wishes[name].style} == {"vocabulary"}
            if other != name and not alike:
                yield f"{parts.first[id(parameter)]} belongs to both {other} and {name} of the plan"


def _tied(parts: _Parts, plan: SplitPlan) -> Iterator[str]:
    """Parameters of several modules, of which some are split."""
    owners: dict[int, dict[str, None]] = {}
    for name, each in parts.parameters.items():
        owners.setdefault(id(each), {})[parts.owner(name)] = None
    for parameter, found in owners.items():
        if len(found) < 2:
            continue
        styles = {each: plan.wishes[each].style for each in found if each in plan.wishes}
        every = [each for each in found if not _around_head(parts, styles, each, parameter)]
        cut = {each for each, style in styles.items() if style in {*LINEAR, "vocabulary", "expert"}}
        if not cut or ({*styles.values()} == {"vocabulary"} and len(styles) == len(every)):
            continue
        names = " and ".join(name for name, each in parts.parameters.items() if id(each) == parameter)
        others = [each for each in every if styles.get(each) != "vocabulary"]
        yield f'{names} are one parameter: {" and ".join(others)} must have the style "vocabulary", too'


def _around_head(parts: _Parts, styles: Mapping[str, str], outer: str, bias: int) -> bool:
    """Whether a module has the bias of a head in it as its own, too, as masked language models of
    transformers do: it gets a rank's rows with the head.
    """
    return any(
        style == "vocabulary" and head.startswith(f"{outer}." if outer else "") and head != outer
        for head, style in styles.items()
        if id(getattr(parts.modules[head], "bias", None)) == bias
    )


def _regions(plan: SplitPlan) -> Iterator[str]:
    """Parts that are gathered within others that are."""
    gathered = plan.of_style("gather")
    for name in gathered:
        for outer in gathered:
            if name.startswith(f"{outer}."):
                yield f"{name} is inside {outer}, which is already gathered"
