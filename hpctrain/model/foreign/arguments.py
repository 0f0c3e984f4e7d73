"""Tensors within whatever a module takes and gives, and the way in which it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any

from torch import Tensor, nn


def tensors_of(value: object) -> Iterator[Tensor]:
    """All tensors in nested sequences, tables and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for each in value:
            yield from tensors_of(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


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


def call_of(module: nn.Module) -> Callable[[Tensor], Any]:
    """The module as a function of tokens [b, s]: of `input_ids`, where it takes these, else of what it takes
    first. What is kept for generating text is not asked for.
    """
    taken = signature(module.forward).parameters
    named: dict[str, Any] = {"use_cache": False} if "use_cache" in taken else {}
    if "input_ids" in taken:
        return lambda tokens: module(input_ids=tokens, **named)
    return lambda tokens: module(tokens, **named)
