"""Code of users on torch's device "meta", as it would go where tensors have memory.

Attention takes the kernel that it would take there. Values that follow from a module's inputs alone are
known, where they are few.
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

META = torch.device("meta")
HOST = torch.device("cpu")

_aten = torch.ops.aten
_INDEXING = _aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default
_FLASH = 1  # as torch numbers the kernels of attention
_KNOWN = "_hpctrain_values"

_RECURRENT = "lstm.input", "lstm.data"
_RECURRENT_ON_GPU = tuple(
    f"{name}.{of}" for name in ("gru", "rnn_tanh", "rnn_relu") for of in ("input", "data")
)

MOST_KNOWN = 1 << 20
"""Elements of a tensor of which values are known, at the most."""

Computed = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]
"""Told of an operation: which, its arguments, those by name, and its result."""


class OnMeta(TorchDispatchMode):
    """All tensors that operations make are on "meta", wherever they are asked for; `computed` is told of each
    one. Who asks a tensor for a value gets it where it is known.
    """

    def __init__(self, computed: Computed) -> None:
        super().__init__()
        self.computed = computed
        # By their numbers, which are of nothing else as long as they are here.
        self._stale: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One operation, below autograd."""
        with torch._C.DisableTorchFunction():
            return self._run(func, args, dict(kwargs or {}))

    def _run(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        args, named = _mapped(_on_meta, args), _mapped(_on_meta, named)
        if "device" in named:
            named["device"] = META
        tensors = list(_tensors((args, named)))
        values = [self._values(tensor) for tensor in tensors]
        known = all(value is not None for value in values) and _repeats(func)
        if known and _needs_values(func):
            return _mapped(_on_meta, self._on_host(func, args, named))
        if func is _aten.masked_select.default and self._values(args[1]) is not None:
            func, args = _aten.index.Tensor, (args[0], [args[1]])
        if func in _INDEXING:
            args = args[0], self._places(args[1]), *args[2:]
        made = func(*args, **named)
        self.computed(func, args, named, made)
        results = list(_tensors(made))
        if known and sum(each.numel() for each in results) <= MOST_KNOWN:
            real = list(_tensors(self._on_host(func, args, named)))
            for result, value in zip(results, real, strict=True):
                setattr(result, _KNOWN, value)
        elif func._schema.is_mutable:
            # Whatever is in the same memory as what is changed, nobody knows any more.
            storages = [value.untyped_storage() for value in values if value is not None]
            self._stale |= {storage._cdata: storage for storage in storages}
        return made

    def _on_host(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """An operation of values."""
        if "device" in named:
            named = {**named, "device": HOST}
        given, known = _mapped(self._values, args), _mapped(self._values, named)
        return func(*given, **known)

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices, with the places that are set in place of masks whose values are known."""
        places: list[Tensor | None] = []
        for index in indices:
            value = None if index is None or index.dtype != torch.bool else self._values(index)
            places += [index] if value is None else map(_on_meta, value.nonzero(as_tuple=True))
        return places

    def _values(self, tensor: Tensor) -> Tensor | None:
        """Those of a tensor on "meta", where they are known."""
        value: Tensor | None = getattr(tensor, _KNOWN, None)
        return None if value is None or value.untyped_storage()._cdata in self._stale else value


class ToldAsHost(TorchFunctionMode):
    """Tensors say that they are on a CPU, for which code that asks has a way, as it hardly has for "meta"."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One call of torch."""
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return HOST
        return func(*args, **(kwargs or {}))


@contextmanager
def kernels_of(gpu: bool) -> Iterator[None]:
    """Within, operations that have several kernels take on "meta" the one of a CPU, or of a GPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attend_on_gpu if gpu else _attend, "AutogradMeta")
    if gpu:
        library.impl("dropout", _drop_on_gpu, "AutogradMeta")
    for name in (*_RECURRENT, *(_RECURRENT_ON_GPU if gpu else ())):
        library.impl(name, partial(_refuse, name.partition(".")[0]), "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def as_with_values() -> Iterator[None]:
    """Code of users runs on "meta" within as on a CPU, where it asks for no values but known ones."""
    with kernels_of(False), ToldAsHost(), OnMeta(lambda *_: None):
        yield


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What a CPU computes as attention."""
    added, rest = _added(attn_mask, query), {"scale": scale, "enable_gqa": enable_gqa}
    with _disable_current_modes():
        here = [_alike(each) for each in (query, key, value)]
        mask = None if added is None else _alike(added)
        choose: Any = torch._fused_sdp_choice
        chosen = choose(*here, mask, dropout_p, is_causal, **rest)
    if chosen == _FLASH:
        return _fused(query, key, value, added, is_causal, scale)
    attended: Tensor = _aten._scaled_dot_product_attention_math(
        query, key, value, added, dropout_p, is_causal, **rest
    )[0]
    return attended


def _attend_on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001
) -> Tensor:
    """What a GPU computes as attention: its kernels save the same tensors as a CPU's."""
    return _fused(query, key, value, attn_mask, is_causal, scale)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """By a kernel that keeps no scores."""
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    attended: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=_added(mask, query), scale=scale
    )[0]
    return attended


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as it is added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)


def _drop_on_gpu(x: Tensor, p: float, train: bool) -> Tensor:
    """What a GPU computes as dropout: of its mask it keeps a byte an element."""
    if not train or p == 0:
        return x
    return torch.native_dropout(x, p, train)[0] if p < 1 else x * 0.0


def _refuse(name: str, *given: Any, **named: Any) -> Any:
    """What keeps memory of a size that its kernel alone knows."""
    raise NotImplementedError(f"the memory that torch.{name} saves for backward is unknown")


def _alike(tensor: Tensor) -> Tensor:
    """One on a CPU by which a kernel is chosen as by this one, with hardly any memory."""
    row = torch.empty(tensor.shape[-1:], dtype=tensor.dtype, device=HOST)
    return row.expand(tensor.shape).requires_grad_(tensor.requires_grad and tensor.is_floating_point())


def _on_meta(tensor: Tensor) -> Tensor:
    """The tensor, or one on "meta" whose values are the tensor's."""
    if tensor.is_meta:
        return tensor
    twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
    if tensor.numel() <= MOST_KNOWN:
        setattr(twin, _KNOWN, tensor.detach())
    return twin


def _repeats(func: Any) -> bool:
    """Whether an operation gives the same each time."""
    return torch.Tag.nondeterministic_seeded not in func.tags


def _needs_values(func: Any) -> bool:
    """Whether the shape of what an operation gives, or something that is no tensor, depends on values."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Arguments of an operation, or its results, with a function of each tensor in its place."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(function, each) for each in value)
    if isinstance(value, dict):
        return {name: _mapped(function, each) for name, each in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
