"""Calls by which the host would wait for a GPU, found on CPUs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import hpctrain

_ROOT = Path(hpctrain.__file__).parent
_READING = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "nonzero",
    "masked_select",
    "unique",
    "equal",
}


class HostWaits(TorchFunctionMode):
    """Counts, within, calls that would wait if their tensors were a GPU's, by file and function of hpctrain.

    These read values, have results whose size depends on values, or copy a number of the host with its
    `device` named. `torch.bincount` is not among them: `count_numbers` calls it on CPUs alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count a call, and carry it out."""
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            self.calls[_caller()] += 1
        return func(*args, **kwargs)


def _waits(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in _READING:
        return True
    if name in {"__getitem__", "__setitem__", "index_put_"}:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in index)
    if name == "repeat_interleave":
        return any(isinstance(each, Tensor) for each in args[1:]) and kwargs.get("output_size") is None
    return name in {"tensor", "as_tensor"} and kwargs.get("device") is not None


def _caller() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT):
            return f"{path.relative_to(_ROOT)} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
