"""Cache of the results of operations on meta tensors: ranks repeat the same operations on the same shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.comm.planned import META

ResultSpec = int | tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a new result; or the index of the argument that an operation returns."""


class MetaOpCache:
    """Results of operations on meta tensors by operation and arguments.

    A repeated operation is not run: new tensors of the recorded shapes are its result, and arguments that it
    writes to are returned. Views are always run.
    """

    def __init__(self) -> None:
        self._known: dict[object, list[ResultSpec] | None] = {}
        self._views: dict[Any, bool] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operation."""
        if func not in self._views:
            self._views[func] = _views(func)
        if self._views[func]:
            return func(*args, **kwargs)
        inputs = [*args, *kwargs.values()]
        key = func, *kwargs, *map(_key, inputs)
        specs = self._known.get(key)
        if specs:
            results = [inputs[each] if isinstance(each, int) else _empty(*each) for each in specs]
            return results[0] if len(results) == 1 else tuple(results)
        result = func(*args, **kwargs)
        if key not in self._known:
            # An operation that changes the shape of an argument is not cached.
            unchanged = key == (func, *kwargs, *map(_key, inputs))
            self._known[key] = _result_specs(result, inputs) if unchanged else None
        return result


class CachedMetaOps(TorchDispatchMode):
    """Context in which operations on meta tensors alone take their results from a `MetaOpCache`."""

    def __init__(self, cache: MetaOpCache) -> None:
        super().__init__()
        self.cache = cache

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, or return its cached result."""
        kwargs = kwargs or {}
        tensors = tensors_of((*args, *kwargs.values()))
        if tensors and all(each.is_meta for each in tensors):
            return self.cache.run(func, args, kwargs)
        return func(*args, **kwargs)


def tensors_of(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among arguments, including those in lists."""
    flat = [part for each in values for part in (each if isinstance(each, list | tuple) else (each,))]
    return [each for each in flat if isinstance(each, Tensor)]


def _views(func: Any) -> bool:
    """Return True if results may share memory with arguments other than those that are written to."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.returns:
        return True
    return any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)


def _key(value: Any) -> Any:
    """Return a key that is equal for arguments of the same shapes and values."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value


def _result_specs(result: Any, inputs: Sequence[Any]) -> list[ResultSpec] | None:
    specs: list[ResultSpec] = []
    for each in result if isinstance(result, tuple) else (result,):
        if not isinstance(each, Tensor) or not each.is_meta:
            return None
        places = [place for place, other in enumerate(inputs) if other is each]
        specs.append(places[0] if places else (tuple(each.shape), each.stride(), each.dtype))
    return specs


def _empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    empty: Tensor = torch.ops.aten.empty_strided.default(shape, strides, dtype=dtype, device=META)
    return empty
