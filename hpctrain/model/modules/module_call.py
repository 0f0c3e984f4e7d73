"""Tensors within whatever a module takes and gives, and the way in which it is called."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import HpctrainError


def logits_of(outputs: Any) -> Tensor | None:
    """The logits among what a module gives: itself, the first of several, or what is called so."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    elif hasattr(outputs, "logits"):
        found = outputs.logits
    else:
        found = outputs[0] if isinstance(outputs, Sequence) and outputs else None
    return found if isinstance(found, Tensor) else None


ANSWERS = ("targets", "labels")
"""Names in a batch of what is to be predicted, which a module is not called with unless that is asked for."""


@dataclass(frozen=True)
class ModuleCall:
    """A module as a function of fields [b, ...]: of those `placed`, in their order, of those `named`, by its
    own names, and of what is `fixed`. It gets fractions in the format of its parameters.
    """

    module: nn.Module
    placed: tuple[str, ...]
    named: Mapping[str, str]
    fixed: Mapping[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """All fields that it is called with."""
        return *self.placed, *self.named.values()

    def __call__(self, fields: Mapping[str, Tensor]) -> Any:
        """What the module gives for these."""
        taken = self.taken({name: fields[name] for name in self.names})
        named = {name: taken[field] for name, field in self.named.items()}
        return self.module(*(taken[name] for name in self.placed), **named, **self.fixed)

    def taken(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These in the formats in which the module takes them."""
        kinds = (parameter.dtype for parameter in self.module.parameters())
        own = next((kind for kind in kinds if kind.is_floating_point), torch.float32)
        return {
            name: (field.to(own) if field.is_floating_point() else field).contiguous()
            for name, field in fields.items()
        }


def call_of(module: nn.Module, there: Collection[str], wanted: Sequence[str] | None = None) -> ModuleCall:
    """The way to call a module with some of the fields that are `there`: those `wanted`, or all that it takes
    by name. What is kept for generating text is not asked for.

    Tokens are its `input_ids`, where it takes these, else what it takes first. HpctrainError where a field is
    not there, or nobody knows which one is meant.
    """
    taken = signature(module.forward).parameters
    fixed: dict[str, Any] = {"use_cache": False} if "use_cache" in taken else {}
    told = f"the entries of a batch are {', '.join(there)}"
    if wanted is not None:
        if not wanted:
            raise HpctrainError(f"must name at least one batch entry ({told})")
        if missing := [name for name in wanted if name not in there]:
            raise HpctrainError(f"contains {missing[0]}, but {told}")
        named = {name: name for name in wanted if _by_name(taken, name)}
        return ModuleCall(module, tuple(name for name in wanted if name not in named), named, fixed)
    asked = [name for name in there if name not in ANSWERS]
    if asked == ["tokens"] and "input_ids" in taken:
        return ModuleCall(module, (), {"input_ids": "tokens"}, fixed)
    named = {name: name for name in asked if _by_name(taken, name)}
    if named or len(asked) == 1:
        return ModuleCall(module, () if named else tuple(asked), named, fixed)
    takes = ", ".join(name for name, each in taken.items() if each.kind not in _ANY) or "nothing"
    raise HpctrainError(
        f"is required: it names the batch entries for the arguments of the module, {takes} ({told})"
    )


_ANY = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
"""Kinds of what functions take besides, under any name."""


def _by_name(taken: Mapping[str, Parameter], name: str) -> bool:
    """Whether a function takes something by this name."""
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return name in taken and taken[name].kind in kinds
