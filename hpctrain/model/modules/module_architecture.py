"""Facts about a user's module before it has memory, found by building it on torch's device "meta"."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from hpctrain.comm.planned import META
from hpctrain.data.dataset import dataset_of
from hpctrain.data.items import FieldSpec
from hpctrain.deck.code import CAUSAL_MODEL, NamedCode
from hpctrain.deck.schema import Deck
from hpctrain.deck.user_code import import_function
from hpctrain.errors import HpctrainError
from hpctrain.model.architecture import Architecture
from hpctrain.model.modules.causal_model import model_title, module_notes
from hpctrain.model.modules.instantiate import build_module
from hpctrain.model.modules.module_call import ModuleCall, make_call
from hpctrain.model.modules.tensor_parallel.module_names import matches_pattern
from hpctrain.model.modules.tensor_parallel.split_plan import SplitPlan, make_plan
from hpctrain.model.modules.tensor_parallel.transformers_plan import MODEL_PLAN, transformers_plan
from hpctrain.model.precision import Precision
from hpctrain.text import counted, nearest

_MOST_TIED = 3
"""Largest number of notes about tied parameters, with one for all others."""


@dataclass(frozen=True)
class ModuleArchitecture(Architecture):
    """Architecture of a user's module. Equal ones build equal modules.

    Attributes:
        code: Function or class that builds the module.
        arguments: Its arguments, as JSON.
        pattern: Pattern of the names of the module's blocks; None if it has none.
        sequence: Tokens of a sample.
        buffers: How data ranks agree on persistent buffers after a step: the first one's values, or the mean.
        storage: dtype of parameters and of persistent floating-point buffers.
        fields: Shape and dtype of each field of a sample, by name.
        inputs: Fields that the module is called with; None lets `make_call` choose.
        block_count: Number of blocks.
        notes: Notes for the start of a run.
        plan: Tensor-parallel plan of the deck, as JSON.
        gather_logits: True if a user's own loss needs the logits of the whole vocabulary.
        micro_size: Samples of a micro-batch.
        has_stages: True if a pipeline divides the module between blocks.
        initial: Function that changes the initial values; None if there is none.
        loaded: True if all parameters of a run are read from files, so that no rank builds the whole module.
    """

    code: NamedCode
    arguments: str
    pattern: str | None
    sequence: int
    buffers: Literal["first", "average"] | None
    storage: torch.dtype
    fields: tuple[tuple[str, FieldSpec], ...] = ()
    inputs: tuple[str, ...] | None = None
    block_count: int = 0
    notes: tuple[str, ...] = ()
    plan: str = "null"
    gather_logits: bool = False
    micro_size: int = 1
    has_stages: bool = False
    initial: NamedCode | None = None
    loaded: bool = False

    @staticmethod
    def of(deck: Deck) -> ModuleArchitecture:
        """Return the architecture that a deck asks for.

        Raises:
            HpctrainError: The module cannot be trained as the deck says. The error has all reasons.
        """
        keys = deck.model
        assert keys.module is not None
        missing = [deck.problem(key, sentence) for key, sentence in _function_problems(deck)]
        try:
            fields = _field_specs(deck)
        except HpctrainError as error:
            raise HpctrainError([*error.problems, *missing]) from error.__cause__
        is_causal_model = keys.module == CAUSAL_MODEL
        architecture = ModuleArchitecture(
            deck.code(keys.module),
            json.dumps(keys.arguments or {}, default=str),
            keys.blocks,
            deck.batch.sequence,
            keys.buffers,
            Precision.of(deck).storage,
            fields,
            deck.data.inputs,
            plan=json.dumps(keys.plan),
            gather_logits=keys.loss is not None,
            micro_size=deck.batch.micro_size,
            has_stages=deck.layout.pipeline > 1,
            initial=None if keys.initial is None else deck.code(keys.initial),
            loaded=is_causal_model and keys.source is not None,
        )
        try:
            module = architecture.shared_on_meta()
        except HpctrainError as error:
            first, *frames = error.problems
            raise HpctrainError([deck.problem("model.module", first), *frames, *missing]) from error.__cause__
        problems = [deck.problem(key, sentence) for key, sentence in _training_problems(deck, module)]
        try:
            architecture.call(module)
        except HpctrainError as error:
            problems.append(deck.problem("data.inputs", error.problems[0]))
        if problems or missing:
            raise HpctrainError([*problems, *missing])
        notes = (*(module_notes(module) if is_causal_model else ()), *_notes(deck, module))
        return replace(architecture, block_count=len(find_blocks(module, keys.blocks)), notes=notes)

    @property
    @override
    def title(self) -> str:
        if self.code.target == CAUSAL_MODEL:
            return model_title(json.loads(self.arguments))
        return self.code.title

    @property
    def uses_random_numbers(self) -> bool:
        """True, because only the module's own code knows whether it draws random numbers."""
        return True

    @property
    def begins_with_block(self) -> bool:
        """True, because a stage ends where its last block ends."""
        return True

    def shared_on_meta(self) -> nn.Module:
        """Return a module on "meta" that is shared by all callers, who must not change it."""
        return _cached_on_meta(self.code, self.arguments, self.storage)

    def copy_on_meta(self) -> nn.Module:
        """Return a new module on "meta", to plan with.

        It is a copy if possible, because building takes time and may print warnings.
        """
        try:
            return deepcopy(self.shared_on_meta())
        except Exception:  # noqa: BLE001  (whatever a module holds that has no copy)
            return self.build(META)

    def example(self, micro_size: int) -> dict[str, torch.Tensor]:
        """Return the fields of a micro-batch of `micro_size` samples, on "meta"."""
        return {
            name: torch.empty(micro_size, *form.shape, dtype=form.dtype, device=META)
            for name, form in self.fields
        }

    def example_values(self, micro_size: int) -> dict[str, torch.Tensor]:
        """Return the fields of a micro-batch of ones, since zeros may mean something special."""
        specs = self.example(micro_size).items()
        return {name: torch.ones(field.shape, dtype=field.dtype) for name, field in specs}

    def call(self, module: nn.Module) -> ModuleCall:
        """Return how the module is called; see `make_call` for the errors."""
        return make_call(module, dict(self.fields), self.inputs)

    def build(self, device: torch.device) -> nn.Module:
        """Build a new module on a device; see `build_module` for the errors."""
        return _build_on(device, self.code, self.arguments, self.storage)


def _build_on(device: torch.device, code: NamedCode, arguments: str, storage: torch.dtype) -> nn.Module:
    """Build a module on a device, in the form for comparisons if its parameters are stored in fp64."""
    try:
        with device:
            built = build_module(code, json.loads(arguments))
    except HpctrainError as error:
        if device != META or not isinstance(error.__cause__, NotImplementedError | RuntimeError):
            raise
        first, *frames = error.problems
        reason = 'a module is first built on the device "meta" of torch, whose tensors have no values'
        raise HpctrainError([f"{first} ({reason})", *frames]) from error.__cause__
    return _prepare_comparison(built) if storage == torch.float64 else built


_cached_on_meta = lru_cache(maxsize=8)(partial(_build_on, META))


def _field_specs(deck: Deck) -> tuple[tuple[str, FieldSpec], ...]:
    """Return shape and dtype of each field of a sample. HpctrainError if there is no such dataset."""
    if deck.data.dataset is not None:
        return tuple(dataset_of(deck).field_specs.items())
    of_tokens = FieldSpec(torch.int64, (deck.batch.sequence,))
    return ("tokens", of_tokens), ("targets", of_tokens)


def plan_of(
    module: nn.Module, plan: Mapping[str, Any] | str | None, ranks: int, sequence_parallel: bool
) -> SplitPlan:
    """Return the tensor-parallel plan of a module.

    Args:
        module: The module as its own code builds it.
        plan: Table of `model.plan`, or MODEL_PLAN for the plan that the module has itself; None for no plan.
        ranks: Number of tensor ranks.
        sequence_parallel: True if ranks have slices of sequences between split layers.
    """
    if isinstance(plan, Mapping):
        return make_plan(module, plan, ranks, sequence_parallel)
    return transformers_plan(module, ranks, sequence_parallel) if plan == MODEL_PLAN else SplitPlan({})


def find_blocks(module: nn.Module, pattern: str | None) -> dict[str, nn.Module]:
    """Return the submodules whose names match a pattern, by name. `*` stands for one name between dots."""
    if pattern is None:
        return {}
    return {name: each for name, each in module.named_modules() if name and matches_pattern(pattern, name)}


def _prepare_comparison(module: nn.Module) -> nn.Module:
    """Return a module changed for comparisons in double precision.

    Dropout is off, because other layouts draw other masks. Experts of `transformers` are computed one by one,
    because grouped products have fp32 at most.
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


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to a module's state, by name."""
    known = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in known}


def _training_problems(deck: Deck, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the key and the message of each problem that prevents training."""
    pattern, persistent = deck.model.blocks, persistent_buffers(module)
    if pattern is not None and not find_blocks(module, pattern):
        names = [name for name, _ in module.named_modules() if name]
        lists = [f"{name}.*" for name, each in module.named_modules() if name and _is_module_list(each)]
        near = nearest(pattern, [*lists, *names])
        choices = ", ".join(lists or names[:8]) or "none"
        known = f"did you mean {near}?" if near else f"the module has {choices}"
        yield "model.blocks", f"matches no submodule ({known})"
    yield from _stage_problems(deck, len(find_blocks(module, pattern)))
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
    # The plan of a CAUSAL_MODEL comes from the model itself.
    if layout.tensor > 1 or deck.model.module != CAUSAL_MODEL:
        plan = plan_of(module, deck.model.plan, layout.tensor, layout.sequence_parallel)
        yield from (("model.plan", sentence) for sentence in plan.problems)
    if persistent and deck.model.buffers is None:
        first_names = ", ".join(list(persistent)[:3]) + ", ..." * (len(persistent) > 3)
        yield (
            "model.buffers",
            f"is required for a module with {counted(len(persistent), 'persistent buffer')} ({first_names}): "
            '"first" keeps '
            'those of the first data rank after each step, "average" the mean over data ranks',
        )


def _function_problems(deck: Deck) -> Iterator[tuple[str, str]]:
    """Yield the key and the message of each user's function, besides the module, that cannot be imported."""
    for key, target in (("model.loss", deck.model.loss), ("model.initial", deck.model.initial)):
        if target is not None:
            try:
                import_function(deck.code(target))
            except HpctrainError as error:
                yield key, error.problems[0]


def _stage_problems(deck: Deck, block_number: int) -> Iterator[tuple[str, str]]:
    """Yield the key and the message of each problem with dividing so many blocks into pipeline stages."""
    layout, blocks = deck.layout, f"model.blocks names {counted(block_number, 'block')}"
    parts = layout.pipeline * layout.chunks
    if layout.pipeline == 1 or not block_number:
        return
    if block_number < parts - 1:
        product = f"layout.pipeline x layout.chunks = {layout.pipeline} x {layout.chunks}"
        yield "layout.pipeline", f"{product} requires {parts - 1} blocks or more, but {blocks}"
    elif isinstance(layout.split, tuple) and sum(layout.split) != block_number:
        yield "layout.split", f"must add up to the number of blocks, not {sum(layout.split)}: {blocks}"


def _notes(deck: Deck, module: nn.Module) -> tuple[str, ...]:
    """Return notes on parameters with several names and on dtypes that change."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    tied = [f"{' and '.join(each)} are one parameter" for each in names.values() if len(each) > 1]
    if len(tied) > _MOST_TIED:
        tied[_MOST_TIED:] = [f"and {counted(len(tied) - _MOST_TIED, 'other')} with several names"]
    storage = Precision.of(deck).storage
    others = sorted({str(p.dtype).removeprefix("torch.") for p in names} - {"float32"})
    if not others:
        return tuple(tied)
    dtypes, stored = " and ".join(others), str(storage).removeprefix("torch.")
    note = f"parameters that the module creates in {dtypes} are stored in {stored} and updated in float32"
    return (*tied, note)


def _is_module_list(module: nn.Module) -> bool:
    """Return True if the children of a module are numbered."""
    names = [name for name, _ in module.named_children()]
    return bool(names) and all(name.isdigit() for name in names)
