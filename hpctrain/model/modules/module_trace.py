"""What a module that users bring saves and computes, found by running it where tensors have no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from math import prod
from textwrap import shorten
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.errors import HpctrainError
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.modules.meta_device import OnMeta, ToldAsHost, kernels_of
from hpctrain.model.modules.module_architecture import META, ModuleArchitecture
from hpctrain.model.modules.nested_tensors import tensors_of
from hpctrain.model.part import Computed, LayerRange
from hpctrain.parallel.activation_sizes import ActivationSizes, SavedStorage
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter

_LONGEST = 200  # characters of what an error says

Call = tuple[int, int]
"""Of which layer, and which call of it."""


@dataclass(frozen=True)
class LayerTrace:
    """What was found of a layer.

    `saved`: what autograd saves of it, `kept`: what is kept of it where blocks are computed again, each
    storage once; `again`: bytes that are there besides while it is computed again. `products`: elements of
    parameters that a token is multiplied with; `core`: FLOPs of a token's forward pass in other products.
    `rows` are those that matrices were multiplied with, of the most of them, by the parameters' names.
    """

    saved: tuple[SavedStorage, ...]
    kept: tuple[SavedStorage, ...]
    again: int
    products: int
    core: int
    rows: Mapping[str, int]


@dataclass(frozen=True)
class PartTrace:
    """What was found of each layer of a part; nothing where its code does not run on "meta", and `why`."""

    layers: tuple[LayerTrace, ...]
    why: str | None = None


def trace(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    run: Callable[[], Any],
    loss: Callable[[Any], Any] | None,
    tokens: int,
    storage: torch.dtype,
    gpu: bool,
) -> PartTrace:
    """Of `run`, which calls a module on "meta" for so many tokens, with these of its submodules as blocks,
    and of a `loss` of what that gives; parameters become of the format `storage`. The module is worth nothing
    afterwards.
    """
    for _, each in groupby(module.parameters(), _name_of):
        together = list(each)  # the parts of a packed weight, which are used as one
        sizes = [parameter.numel() for parameter in together]
        flat = torch.empty(sum(sizes), dtype=storage, device="meta")
        for parameter, part in zip(together, flat.split(sizes), strict=True):
            parameter.data = part.view(parameter.shape)
    tracer = _Tracer(module, blocks)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            kernels_of(gpu),
            ToldAsHost(),
            OnMeta(tracer.computed),
            saved_tensors_hooks(tracer.pack, _PackedTensor.unpack),
        ):
            outputs = run()
            tracer.present = tracer.last, 0
            losses = None if loss is None else loss(outputs)
    except Exception as error:  # noqa: BLE001  (whatever a user's code does where there are no values)
        said = error.problems[0] if isinstance(error, HpctrainError) else f"{type(error).__name__}: {error}"
        return PartTrace((), shorten(said.strip().splitlines()[0], _LONGEST, placeholder=" ..."))
    found = PartTrace(tuple(tracer.found(tokens)))
    del outputs, losses  # which keep what is counted
    return found


def _name_of(parameter: nn.Parameter) -> object:
    """The name that parts of one tensor have in common; of any other parameter it itself."""
    return parameter.shard.name if isinstance(parameter, Parameter) else id(parameter)


class _PackedTensor:
    """A tensor that autograd has saved, for as long as it has."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor.is_leaf else tensor.detach()

    def unpack(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True)
class _Event:
    """A tensor was saved, or, where `given` is set, a block was called with it."""

    call: Call | None
    kept: weakref.ref[_PackedTensor] | None
    given: Tensor | None = None

    @property
    def tensor(self) -> Tensor | None:
        """It, if it is still there."""
        kept = None if self.kept is None else self.kept()
        return self.given if kept is None else kept.tensor


class _Tracer:
    """Notes what happens, and in which layer: blocks count from 1, outside is 0, or after them `last`."""

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.last = len(blocks) + 1
        self.present: Call | None = None
        self._calls = 0
        self._events: list[_Event] = []
        self._after = 0 if blocks else None
        self._parameters = {_key(parameter): _name_of(parameter) for parameter in module.parameters()}
        self._there = {*self._parameters} | {_key(buffer) for buffer in module.buffers()}
        for each in module.modules():
            self._there |= {_key(value) for value in vars(each).values() if isinstance(value, Tensor)}
        self._flops: list[tuple[int, Call | None, bool, int]] = []
        self._rows: list[tuple[int, Call | None, str, int]] = []
        for number, block in enumerate(blocks, 1):
            vars(block)["forward"] = partial(self._within, number, block.forward)

    def _within(self, number: int, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """A block is called."""
        self._calls += 1
        before, self.present = self.present, (number, self._calls)
        self._events += [_Event(self.present, None, tensor.detach()) for tensor in tensors_of((given, named))]
        try:
            return forward(*given, **named)
        finally:  # where a part ends with it, the pass is left here
            self.present = before
            self._after = len(self._events)

    def pack(self, tensor: Tensor) -> _PackedTensor:
        """Autograd saves a tensor."""
        kept = _PackedTensor(tensor)
        self._events.append(_Event(self.present, weakref.ref(kept)))
        return kept

    def computed(self, func: Any, args: tuple[Any, ...], named: Any, made: Any) -> None:
        """Record an operation and its result. `OnMeta` calls this for each operation."""
        packet = func._overloadpacket
        if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            query, key, value = args[:3]
            flops = 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        elif packet in flop_registry:
            flops = int(flop_registry[packet](*args, **named, out_val=made))
        else:
            return
        at, with_parameter = (len(self._events), self.present), False
        for tensor in tensors_of(args):
            name = self._parameters.get(_key(tensor))
            with_parameter |= name is not None
            if isinstance(name, str) and tensor.dim() > 1:
                self._rows.append((*at, name, flops // (2 * tensor.numel())))
        self._flops.append((*at, with_parameter, flops))

    def found(self, tokens: int) -> Iterator[LayerTrace]:
        """Of each layer, of so many tokens."""
        saving = {event.call for event in self._events if event.given is None and event.tensor is not None}
        alive = [
            (at, event, tensor)
            for at, event in enumerate(self._events)
            if (tensor := event.tensor) is not None
            and _key(tensor) not in self._there
            and event.call in saving  # what saves nothing is not computed again, and needs no inputs
        ]
        saved: list[dict[int, SavedStorage]] = [{} for _ in range(self.last + 1)]
        kept: list[dict[int, SavedStorage]] = [{} for _ in range(self.last + 1)]
        of_calls: dict[Call, dict[int, SavedStorage]] = {}
        met: set[int] = set()
        met_again: set[int] = set()
        for at, event, tensor in alive:
            key, layer = _key(tensor), self._layer(at, event.call)
            storage = SavedStorage(tensor.untyped_storage().nbytes(), tensor.element_size(), features=False)
            if event.given is None and key not in met:
                met.add(key)
                saved[layer][key] = storage
            if event.given is None and event.call is not None and layer != self.last:
                of_calls.setdefault(event.call, {})[key] = storage
            elif key not in met_again:
                met_again.add(key)
                kept[layer][key] = storage
        again = [0] * (self.last + 1)
        for (layer, _), storages in of_calls.items():
            size = sum(storage.bytes for key, storage in storages.items() if key not in met_again)
            again[layer] = max(again[layer], size)
        products, core = [0] * (self.last + 1), [0] * (self.last + 1)
        for at, call, with_parameter, flops in self._flops:
            (products if with_parameter else core)[self._layer(at, call)] += flops
        rows: list[dict[str, int]] = [{} for _ in range(self.last + 1)]
        for at, call, name, number in self._rows:
            of_layer = rows[self._layer(at, call)]
            of_layer[name] = max(of_layer.get(name, 0), number)
        for layer in range(self.last + 1):
            yield LayerTrace(
                tuple(saved[layer].values()),
                tuple(kept[layer].values()),
                again[layer],
                products[layer] // (2 * tokens),
                core[layer] // tokens,
                rows[layer],
            )

    def _layer(self, at: int, call: Call | None) -> int:
        """In which layer something happened, which so many events came before."""
        if call is not None:
            return call[0]
        return 0 if self._after is None or at < self._after else self.last


def _key(tensor: Tensor) -> int:
    """What tensors in the same memory have in common."""
    key: int = tensor.untyped_storage()._cdata
    return key


class Traced(Protocol):
    """A part of a module, which is made of an architecture, groups and a span."""

    architecture: ModuleArchitecture
    groups: LayerContext
    span: LayerRange
    module: nn.Module

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The submodules that follow each other."""

    @property
    def names(self) -> Mapping[Parameter, list[str]]:
        """All parameters."""

    def __call__(self, inputs: ModelInputs, hidden: Tensor | None = None) -> Any:
        """Return the hidden states [s or s/t, b, h] after this part."""

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        """Return the shape of the tensors that are sent between parts."""

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensors that are sent between parts."""

    def predict(self, last: Any, compute: Callable[..., Computed]) -> Computed:
        """Return the result of `compute` for the output of the last part, with its parameters gathered."""


def traced(part: Traced, number: int, at: ActivationSizes | None) -> LayerTrace | str:
    """What is found of a layer of a part, by its number, for a micro-batch; None: of one sample, with all
    that tensor ranks compute. Where nothing is found, why.
    """
    size = part.architecture.storage.itemsize
    frozen = frozenset(parameter.shard.name for parameter in part.names if not parameter.requires_grad)
    if at is None:
        sequence = part.architecture.sequence
        seen, rank = ActivationSizes(sequence, sequence, 1, size, size), (0, 1, False)
    else:
        tensor = part.groups.tensor
        seen = replace(at, selective=False, again=False)
        rank = tensor.rank, tensor.size, part.groups.sequence_parallel
    found = _trace_of(type(part), part.architecture, part.span, frozen, rank, seen)
    return found.layers[number] if found.why is None else found.why


@lru_cache(maxsize=64)
def _trace_of(
    kind: Callable[[ModuleArchitecture, LayerContext, LayerRange], Traced],
    architecture: ModuleArchitecture,
    span: LayerRange,
    frozen: frozenset[str],
    rank: tuple[int, int, bool],
    at: ActivationSizes,
) -> PartTrace:
    """The trace of such a part as a tensor rank (its number, of so many, by sequence or not) holds it."""
    place, size, by_sequence = rank
    tensor, context = (
        planned_group((axis,), *of, Ledger()) for axis, of in (("tensor", (place, size)), ("context", (0, 1)))
    )
    with META:
        groups = LayerContext(tensor, context, by_sequence, product_format=architecture.storage)
        part = kind(architecture, groups, span)
    for parameter in part.names:
        parameter.requires_grad_(parameter.requires_grad and parameter.shard.name not in frozen)
    inputs = example_of(architecture, at.micro_size)

    def loss(outputs: Any) -> Any:
        return part.predict(outputs, at.objective.losses(inputs, torch.ones(())))

    hidden = None
    if not span.embeds:
        hidden = torch.empty(part.hidden_shape(at.micro_size), dtype=part.dtype, device=META)
        hidden.requires_grad_()
    of_loss = loss if at.objective is not None and span.predicts else None
    run = partial(part, inputs, hidden)
    return trace(part.module, part.blocks, run, of_loss, at.tokens, architecture.storage, at.gpu)


def example_of(architecture: ModuleArchitecture, micro_size: int) -> ModelInputs:
    """A micro-batch of values that mean nothing special, as a zero may."""
    fields = {
        name: torch.ones(field.shape, dtype=field.dtype)
        for name, field in architecture.example(micro_size).items()
    }
    return ModelInputs(fields, torch.arange(architecture.sequence))
