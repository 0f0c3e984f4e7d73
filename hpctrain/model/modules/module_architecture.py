"""A module that users bring, before there is any of it: built on torch's device "meta", and looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from hpctrain.data.dataset import dataset_of
from hpctrain.data.items import FieldSpec
from hpctrain.deck.code import NamedCode
from hpctrain.deck.schema import Deck
from hpctrain.deck.user_code import import_function
from hpctrain.errors import HpctrainError
from hpctrain.model.architecture import Architecture
from hpctrain.model.modules.instantiate import build_module
from hpctrain.model.modules.module_call import ModuleCall, call_of
from hpctrain.model.modules.tensor_parallel.split_plan import SplitPlan, make_plan
from hpctrain.model.modules.tensor_parallel.transformers_plan import OWN, own_plan
from hpctrain.model.precision import Precision
from hpctrain.text import counted, nearest

META = torch.device("meta")

_MOST_TOLD = 3


@dataclass(frozen=True)
class ModuleArchitecture(Architecture):
    """What `code` builds of `arguments`, which are JSON; its blocks are the submodules of the names that
    `pattern` has, `number` of them.

    `buffers` says whose buffers ranks have after a step; those that are kept and are fractions are in the
    format `storage`, as its parameters are. `rows` are the forms of what a sample has, by name, and `inputs`
    which of these it is called with (None: see `call_of`). `told` are the notes.
    Tensor ranks split it by `plan`, which is JSON; a loss of a user's own has `whole_logits`. A
    micro-batch has `micro_size` samples; `cut` says that a pipeline cuts it between blocks.
    `initial` names what changes its initial values.
    """

    code: NamedCode
    arguments: str
    pattern: str | None
    number: int
    sequence: int
    buffers: Literal["first", "average"] | None
    storage: torch.dtype
    rows: tuple[tuple[str, FieldSpec], ...] = ()
    inputs: tuple[str, ...] | None = None
    told: tuple[str, ...] = ()
    plan: str = "null"
    whole_logits: bool = False
    micro_size: int = 1
    cut: bool = False
    initial: NamedCode | None = None

    @staticmethod
    def of(deck: Deck) -> ModuleArchitecture:
        """The one that a deck asks for. HpctrainError with all that keeps it from being trained."""
        keys = deck.model
        assert keys.module is not None
        arguments = json.dumps(keys.arguments or {}, default=str)
        missing = [deck.problem(key, sentence) for key, sentence in _function_problems(deck)]
        try:
            read = _rows(deck), deck.data.inputs
        except HpctrainError as error:
            raise HpctrainError([*error.problems, *missing]) from error.__cause__
        rest = deck.batch.sequence, keys.buffers, Precision.of(deck).storage, *read
        code = deck.code(keys.module)
        bare = ModuleArchitecture(code, arguments, keys.blocks, 0, *rest)
        try:
            module = _on_meta(bare)
        except HpctrainError as error:
            first, *frames = error.problems
            told = [deck.problem("model.module", first), *frames, *missing]
            raise HpctrainError(told) from error.__cause__
        found = [*_problems(deck, module), *bare.call_problems(module)]
        problems = [*(deck.problem(key, sentence) for key, sentence in found), *missing]
        if problems:
            raise HpctrainError(problems)
        number, notes = len(blocks_in(module, keys.blocks)), _notes(deck, module)
        made = ModuleArchitecture(code, arguments, keys.blocks, number, *rest, notes)
        made = replace(made, micro_size=deck.batch.micro_size, cut=deck.layout.pipeline > 1)
        made = replace(made, initial=None if keys.initial is None else deck.code(keys.initial))
        return replace(made, plan=json.dumps(keys.plan), whole_logits=keys.loss is not None)

    @property
    @override
    def title(self) -> str:
        return self.code.title

    @property
    @override
    def notes(self) -> tuple[str, ...]:
        return self.told

    @property
    def draws(self) -> bool:
        """See Architecture: whether it does, only its own code knows."""
        return True

    @property
    @override
    def block_count(self) -> int:
        return self.number

    @property
    def begins_with_block(self) -> bool:
        """See Architecture: the first part is left where its last block ends."""
        return True

    def sketch(self) -> nn.Module:
        """A new one on "meta", to plan with: a copy where it has any, as building takes time and may warn."""
        try:
            return deepcopy(_on_meta(replace(self, number=0, told=())))
        except Exception:  # noqa: BLE001  (whatever a module holds that has no copy)
            return self.build(META)

    def example(self, micro_size: int) -> dict[str, torch.Tensor]:
        """The fields of a micro-batch, without values."""
        return {
            name: torch.empty(micro_size, *form.shape, dtype=form.dtype, device=META)
            for name, form in self.rows
        }

    def call_problems(self, module: nn.Module) -> Iterator[tuple[str, str]]:
        """What keeps its module from being called."""
        try:
            self.call(module)
        except HpctrainError as error:
            yield "data.inputs", error.problems[0]

    def call(self, module: nn.Module) -> ModuleCall:
        """How its module is called; errors as in `call_of`."""
        return call_of(module, dict(self.rows), self.inputs)

    def build(self, device: torch.device) -> nn.Module:
        """A new one, on a device. Errors as in `build_module`."""
        try:
            with device:
                built = build_module(self.code, json.loads(self.arguments))
            return _to_compare(built) if self.storage == torch.float64 else built
        except HpctrainError as error:
            if device != META or not isinstance(error.__cause__, NotImplementedError | RuntimeError):
                raise
            first, *frames = error.problems
            told = (
                f'{first} (a module is first built on the device "meta" of torch, whose tensors '
                "have no values)"
            )
            raise HpctrainError([told, *frames]) from error.__cause__


@lru_cache(maxsize=8)
def _on_meta(architecture: ModuleArchitecture) -> nn.Module:
    """One on "meta", to look at."""
    return architecture.build(META)


def _rows(deck: Deck) -> tuple[tuple[str, FieldSpec], ...]:
    """The forms of what a sample has. HpctrainError where there is no dataset as the deck says."""
    if deck.data.dataset is not None:
        return tuple(dataset_of(deck).forms.items())
    of_tokens = FieldSpec(torch.int64, (deck.batch.sequence,))
    return ("tokens", of_tokens), ("targets", of_tokens)


def plan_of(module: nn.Module, given: Mapping[str, Any] | str | None, ranks: int, pieces: bool) -> SplitPlan:
    """The plan that a deck gives for a module, as it was built, and so many tensor ranks; see `make_plan`."""
    if isinstance(given, Mapping):
        return make_plan(module, given, ranks, pieces)
    return own_plan(module, ranks, pieces) if given == OWN else SplitPlan({})


def blocks_in(module: nn.Module, pattern: str | None) -> dict[str, nn.Module]:
    """The submodules whose names have a pattern, by name: `*` is within one name between dots."""
    if pattern is None:
        return {}
    wanted = pattern.split(".")

    def has(name: str) -> bool:
        parts = name.split(".")
        return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))

    return {name: each for name, each in module.named_modules() if name and has(name)}


def _to_compare(module: nn.Module) -> nn.Module:
    """The same module as comparisons in double precision have it: it drops nothing, as other layouts draw
    other masks, and experts of transformers are computed one by one, as grouped products are in fp32 at most.
    """
    for each in module.modules():
        config: Any = getattr(each, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"
        if isinstance(each, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout):
            each.p = 0.0
        for name, value in vars(each).items():
            if isinstance(value, float) and "drop" in name:
                setattr(each, name, 0.0)
    return module


def kept_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to a module's state, by name."""
    known = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in known}


def _problems(deck: Deck, module: nn.Module) -> Iterator[tuple[str, str]]:
    """What keeps a module from being trained so: of each the key, and the rest of a sentence."""
    pattern, kept = deck.model.blocks, kept_buffers(module)
    if pattern is not None and not blocks_in(module, pattern):
        names = [name for name, _ in module.named_modules() if name]
        lists = [f"{name}.*" for name, each in module.named_modules() if name and _is_row(each)]
        near = nearest(pattern, [*lists, *names])
        shown = ", ".join(lists or names[:8]) or "none"
        known = f"did you mean {near}?" if near else f"the module has {shown}"
        yield "model.blocks", f"matches no submodule ({known})"
    yield from _parts_problems(deck, len(blocks_in(module, pattern)))
    parameters = list(module.named_parameters())
    if not any(each.requires_grad for _, each in parameters):
        yield "model.module", "has no trainable parameter"
    for name, each in parameters:
        if isinstance(each, nn.UninitializedParameter):
            yield "model.module", f"has a parameter {name} whose shape is unknown before the first call"
        elif not each.is_floating_point():
            kind = str(each.dtype).removeprefix("torch.")
            yield "model.module", f"has a parameter {name} of unsupported type {kind}"
    layout = deck.layout
    plan = plan_of(module, deck.model.plan, layout.tensor, layout.sequence_parallel)
    yield from (("model.plan", sentence) for sentence in plan.problems)
    if kept and deck.model.buffers is None:
        some = ", ".join(list(kept)[:3]) + ", ..." * (len(kept) > 3)
        yield (
            "model.buffers",
            f"is required for a module with {counted(len(kept), 'persistent buffer')} ({some}): "
            '"first" keeps '
            'those of the first data rank after each step, "average" the mean over data ranks',
        )


def _function_problems(deck: Deck) -> Iterator[tuple[str, str]]:
    """What keeps a deck's functions besides the module's from being found; see `_problems`."""
    for key, target in (("model.loss", deck.model.loss), ("model.initial", deck.model.initial)):
        if target is not None:
            try:
                import_function(deck.code(target))
            except HpctrainError as error:
                yield key, error.problems[0]


def _parts_problems(deck: Deck, number: int) -> Iterator[tuple[str, str]]:
    """What keeps so many blocks from making the parts of a pipeline."""
    layout, blocks = deck.layout, f"model.blocks names {counted(number, 'block')}"
    parts = layout.pipeline * layout.chunks
    if layout.pipeline == 1 or not number:
        return
    if number < parts - 1:
        made = f"layout.pipeline x layout.chunks = {layout.pipeline} x {layout.chunks}"
        yield "layout.pipeline", f"{made} requires {parts - 1} blocks or more, but {blocks}"
    elif isinstance(layout.split, tuple) and sum(layout.split) != number:
        yield "layout.split", f"must add up to the number of blocks, not {sum(layout.split)}: {blocks}"


def _notes(deck: Deck, module: nn.Module) -> tuple[str, ...]:
    """What becomes of a module's parameters that is not plain: other formats, and several names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    tied = [f"{' and '.join(each)} are one parameter" for each in names.values() if len(each) > 1]
    if len(tied) > _MOST_TOLD:
        tied[_MOST_TOLD:] = [f"and {counted(len(tied) - _MOST_TOLD, 'other')} with several names"]
    storage = Precision.of(deck).storage
    others = sorted({str(p.dtype).removeprefix("torch.") for p in names} - {"float32"})
    if not others:
        return tuple(tied)
    made, here = " and ".join(others), str(storage).removeprefix("torch.")
    told = f"parameters that the module creates in {made} are stored in {here} and updated in float32"
    return (*tied, told)


def _is_row(module: nn.Module) -> bool:
    """Whether its parts are numbered."""
    names = [name for name, _ in module.named_children()]
    return bool(names) and all(name.isdigit() for name in names)
