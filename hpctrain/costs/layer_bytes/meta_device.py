"""Execution of a user's code on torch's device "meta", as if its tensors had memory.

Attention chooses the kernel that it would choose on a CPU or GPU. Small tensors that depend on the inputs of
the module alone have known values, so that code which asks for them can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hpctrain.comm.planned import META
from hpctrain.model.modules.nested_tensors import map_leaves, tensors_of
from hpctrain.model.modules.pipeline.meta_products import add_grouped_products

HOST = torch.device("cpu")

_aten = torch.ops.aten
_INDEXING = _aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default
_FLASH = 1  # torch's number for this attention kernel
_VALUE_ATTRIBUTE = "_hpctrain_values"

_RECURRENT = "lstm.input", "lstm.data"
_RECURRENT_ON_GPU = tuple(
    f"{name}.{of}" for name in ("gru", "rnn_tanh", "rnn_relu") for of in ("input", "data")
)

MOST_VALUES = 1 << 20
"""Largest number of elements of a tensor with known values."""

OperationListener = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]
"""Function that receives an operation, its arguments, its keyword arguments, and its result."""


class MetaMode(TorchDispatchMode):
    """Dispatch mode that puts all results on "meta", whatever device is asked for.

    So no result takes memory, but only small ones have known values. The pass that finds the order of calls
    (`model/modules/pipeline/call_order.py`) has a mode of its own. In that one, tensors that depend on no
    parameter stay in host memory, so that code may use their values whatever their size.

    Args:
        on_operation: Function that is called with each operation, its arguments, and its result.
    """

    def __init__(self, on_operation: OperationListener) -> None:
        super().__init__()
        self.on_operation = on_operation
        # Values here keep storages alive, so that no other storage gets the same key.
        self._modified: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation, below autograd."""
        with torch._C.DisableTorchFunction():
            return self._run(func, args, dict(kwargs or {}))

    def _run(self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        args, keywords = map_leaves(args, _to_meta), map_leaves(keywords, _to_meta)
        if "device" in keywords:
            keywords["device"] = META
        tensors = list(tensors_of((args, keywords)))
        values = [self._known_values(tensor) for tensor in tensors]
        known = all(value is not None for value in values) and _is_deterministic(func)
        if known and _needs_values(func):
            return map_leaves(self._run_on_host(func, args, keywords), _to_meta)
        if func is _aten.masked_select.default and self._known_values(args[1]) is not None:
            func, args = _aten.index.Tensor, (args[0], [args[1]])
        if func in _INDEXING:
            args = args[0], self._positions(args[1]), *args[2:]
        result = func(*args, **keywords)
        self.on_operation(func, args, keywords, result)
        results = list(tensors_of(result))
        if known and sum(each.numel() for each in results) <= MOST_VALUES:
            host_results = list(tensors_of(self._run_on_host(func, args, keywords)))
            for meta_result, value in zip(results, host_results, strict=True):
                setattr(meta_result, _VALUE_ATTRIBUTE, value)
        elif func._schema.is_mutable:
            # The values of all tensors in the changed memory are unknown from now on.
            storages = [value.untyped_storage() for value in values if value is not None]
            self._modified |= {storage._cdata: storage for storage in storages}
        return result

    def _run_on_host(self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run an operation on the known values of its arguments."""
        if "device" in keywords:
            keywords = {**keywords, "device": HOST}
        args, keywords = (map_leaves(each, self._known_values) for each in (args, keywords))
        return func(*args, **keywords)

    def _positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return indices in which masks with known values are replaced by the positions of True entries."""
        places: list[Tensor | None] = []
        for index in indices:
            value = None if index is None or index.dtype != torch.bool else self._known_values(index)
            places += [index] if value is None else map(_to_meta, value.nonzero(as_tuple=True))
        return places

    def _known_values(self, tensor: Tensor) -> Tensor | None:
        """Return the known values of a tensor on "meta", or None."""
        value: Tensor | None = getattr(tensor, _VALUE_ATTRIBUTE, None)
        return None if value is None or value.untyped_storage()._cdata in self._modified else value


class HostDeviceMode(TorchFunctionMode):
    """Function mode in which the device of all tensors reads as a CPU.

    Users' code often has a branch for CPUs and hardly ever one for "meta".
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one call of torch."""
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return HOST
        return func(*args, **(kwargs or {}))


@contextmanager
def meta_kernels(gpu: bool) -> Iterator[None]:
    """Let operations that have several kernels use on "meta" the one of a CPU, or of a GPU."""
    library = torch.library.Library("aten", "IMPL")
    add_grouped_products(library)
    library.impl("scaled_dot_product_attention", _gpu_attention if gpu else _meta_attention, "AutogradMeta")
    if gpu:
        library.impl("dropout", _gpu_dropout, "AutogradMeta")
    for name in (*_RECURRENT, *(_RECURRENT_ON_GPU if gpu else ())):
        library.impl(name, partial(_refuse_operation, name.partition(".")[0]), "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def simulated_host() -> Iterator[None]:
    """Run users' code on "meta" as on a CPU, as long as it only asks for known values."""
    with meta_kernels(False), HostDeviceMode(), MetaMode(lambda *_: None):
        yield


def _meta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Compute attention on "meta" as a CPU does.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        attn_mask: Mask, or None.
        dropout_p: Probability of dropout.
        is_causal: True for the causal mask.
        options: `scale` and `enable_gqa`, as of `scaled_dot_product_attention`.
    """
    mask, scale = _additive_mask(attn_mask, query), options.get("scale")
    options = {"scale": scale, "enable_gqa": options.get("enable_gqa", False)}
    with _disable_current_modes():
        host_tensors = [_host_stand_in(each) for each in (query, key, value)]
        host_mask = None if mask is None else _host_stand_in(mask)
        choose: Any = torch._fused_sdp_choice
        kernel = choose(*host_tensors, host_mask, dropout_p, is_causal, **options)
    if kernel == _FLASH:
        return _fused_attention(query, key, value, mask, is_causal, scale)
    attended: Tensor = _aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, **options
    )[0]
    return attended


def _gpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Compute attention on "meta" as a GPU does, whose kernels save the same tensors as a CPU's fused one."""
    return _fused_attention(query, key, value, attn_mask, is_causal, options.get("scale"))


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """Compute attention with a kernel that does not save the scores."""
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    attended: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=_additive_mask(mask, query), scale=scale
    )[0]
    return attended


def _additive_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return a mask as it is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)


def _gpu_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Compute dropout on "meta" as a GPU does: its mask has one byte for each element."""
    if not train or p == 0:
        return x
    return torch.native_dropout(x, p, train)[0] if p < 1 else x * 0.0


def _refuse_operation(name: str, *arguments: Any, **keywords: Any) -> Any:
    """Raise NotImplementedError for an operation whose kernel alone knows how much memory it saves."""
    raise NotImplementedError(f"the memory that torch.{name} saves for backward is unknown")


def _host_stand_in(tensor: Tensor) -> Tensor:
    """Return a CPU tensor of the same form that has hardly any memory, to choose a kernel by."""
    row = torch.empty(tensor.shape[-1:], dtype=tensor.dtype, device=HOST)
    return row.expand(tensor.shape).requires_grad_(tensor.requires_grad and tensor.is_floating_point())


def _to_meta(tensor: Tensor) -> Tensor:
    """Return the tensor if it is on "meta", else one on "meta" with its values as known values."""
    if tensor.is_meta:
        return tensor
    meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
    if tensor.numel() <= MOST_VALUES:
        setattr(meta, _VALUE_ATTRIBUTE, tensor.detach())
    return meta


def _is_deterministic(func: Any) -> bool:
    """Return True if an operation returns the same result for the same arguments."""
    return torch.Tag.nondeterministic_seeded not in func.tags


def _needs_values(func: Any) -> bool:
    """Return True if the shape of a result, or a result that is no tensor, depends on values."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
