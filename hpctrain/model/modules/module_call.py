"""Calls of a user's module: the fields of a micro-batch that become its arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import HpctrainError


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let calls of a module run another function. Its class, its parameters and its hooks stay."""
    vars(module)["forward"] = forward  # an attribute of the instance hides the method of the class


def find_logits(outputs: Any) -> Tensor | None:
    """Return the logits in the result of a module, or None if it has none.

    They are the result itself if it is a tensor, its entry or attribute `logits`, or its first element.
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    elif hasattr(outputs, "logits"):
        logits = outputs.logits
    else:
        logits = outputs[0] if isinstance(outputs, Sequence) and outputs else None
    return logits if isinstance(logits, Tensor) else None


TARGET_FIELDS = ("targets", "labels")
"""Fields with the values to predict. A module gets them only if the deck asks for that."""


@dataclass(frozen=True)
class ModuleCall:
    """A module as a function of the fields [b, ...] of a micro-batch.

    Attributes:
        module: The module.
        positional: Fields that are passed by position, in this order.
        keywords: Fields that are passed by keyword, by the name of the module's parameter.
        constants: Further keyword arguments of each call.
    """

    module: nn.Module
    positional: tuple[str, ...]
    keywords: Mapping[str, str]
    constants: Mapping[str, Any]

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of all fields that the module is called with."""
        return *self.positional, *self.keywords.values()

    def __call__(self, fields: Mapping[str, Tensor]) -> Any:
        """Call the module and return its result."""
        values = self.convert({name: fields[name] for name in self.field_names})
        keywords = {name: values[field] for name, field in self.keywords.items()}
        return self.module(*(values[name] for name in self.positional), **keywords, **self.constants)

    def convert(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return fields as the module takes them: contiguous, and if floating-point in its own dtype."""
        kinds = (parameter.dtype for parameter in self.module.parameters())
        dtype = next((kind for kind in kinds if kind.is_floating_point), torch.float32)
        return {
            name: (field.to(dtype) if field.is_floating_point() else field).contiguous()
            for name, field in fields.items()
        }


def make_call(
    module: nn.Module, available: Collection[str], requested: Sequence[str] | None = None
) -> ModuleCall:
    """Return the way to call a module with fields of a micro-batch.

    Without `requested`, the module gets all fields that it accepts by keyword, except targets. A module with
    the parameter `input_ids` gets the tokens there, any other one gets a single field by position. A cache
    for generation is switched off.

    Args:
        module: The module.
        available: Names of the fields of a micro-batch.
        requested: Names that the deck asks for; None if it leaves the choice to this function.

    Raises:
        HpctrainError: A requested field is missing, or it is unclear which fields the module takes.
    """
    parameters = signature(module.forward).parameters
    constants: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    entries_text = f"the entries of a batch are {', '.join(available)}"
    if requested is not None:
        if not requested:
            raise HpctrainError(f"must name at least one batch entry ({entries_text})")
        if missing := [name for name in requested if name not in available]:
            raise HpctrainError(f"contains {missing[0]}, but {entries_text}")
        keywords = {name: name for name in requested if _accepts_keyword(parameters, name)}
        return ModuleCall(
            module, tuple(name for name in requested if name not in keywords), keywords, constants
        )
    asked = [name for name in available if name not in TARGET_FIELDS]
    if asked == ["tokens"] and "input_ids" in parameters:
        return ModuleCall(module, (), {"input_ids": "tokens"}, constants)
    keywords = {name: name for name in asked if _accepts_keyword(parameters, name)}
    if keywords or len(asked) == 1:
        return ModuleCall(module, () if keywords else tuple(asked), keywords, constants)
    takes = ", ".join(name for name, each in parameters.items() if each.kind not in _VARIADIC) or "nothing"
    raise HpctrainError(
        f"is required: it names the batch entries for the arguments of the module, {takes} ({entries_text})"
    )


_VARIADIC = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
"""Kinds of parameters that accept arguments of any number or name."""


def _accepts_keyword(parameters: Mapping[str, Parameter], name: str) -> bool:
    """Return True if a function accepts an argument by this name."""
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return name in parameters and parameters[name].kind in kinds
