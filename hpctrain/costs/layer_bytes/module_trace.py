"""Trace of what a user's module saves and computes, by a pass on torch's device "meta"."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from math import prod
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import META, planned_group
from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, SavedStorage
from hpctrain.costs.layer_bytes.meta_device import HostDeviceMode, MetaMode, meta_kernels
from hpctrain.errors import HpctrainError
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.module_layers import ModuleLayer
from hpctrain.model.modules.module_part import ModulePart
from hpctrain.model.modules.nested_tensors import storage_key, tensors_of
from hpctrain.model.part import LayerRange
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter

_MESSAGE_LENGTH = 200  # largest number of characters of an error message

Call = tuple[int, int]
"""Index of a layer, and number of the call."""


@dataclass(frozen=True)
class LayerTrace:
    """Result of the trace for one layer.

    Attributes:
        saved: Storages that autograd saves, each once.
        saved_recomputed: Storages that remain saved if blocks are recomputed.
        recompute_bytes: Further bytes that exist while the layer is recomputed.
        matrix_elements: Elements of parameters that a token is multiplied with.
        core_flops: FLOPs of other products in the forward pass of a token.
        rows: Largest number of rows that each matrix was multiplied with, by name of the parameter.
    """

    saved: tuple[SavedStorage, ...]
    saved_recomputed: tuple[SavedStorage, ...]
    recompute_bytes: int
    matrix_elements: int
    core_flops: int
    rows: Mapping[str, int]


@dataclass(frozen=True)
class PartTrace:
    """Traces of the layers of a part, or the `problem` that its code does not run on "meta"."""

    layers: tuple[LayerTrace, ...]
    problem: str | None = None


def trace_module(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    run: Callable[[], Any],
    loss: Callable[[Any], Any] | None,
    tokens: int,
    storage: torch.dtype,
    gpu: bool,
) -> PartTrace:
    """Run a module on "meta" and return what its layers save and compute. The module is useless afterwards.

    Args:
        module: Module on "meta".
        blocks: Its blocks; all else is a layer before or after them.
        run: Function that calls the module.
        loss: Function that computes the loss from the result of `run`; None if this part has no loss.
        tokens: Number of tokens of the call.
        storage: dtype that parameters are converted to.
        gpu: True to use the kernels of a GPU.
    """
    for _, each in groupby(module.parameters(), _shared_name):
        packed = list(each)  # parts of one packed weight are adjacent in memory
        sizes = [parameter.numel() for parameter in packed]
        flat = torch.empty(sum(sizes), dtype=storage, device="meta")
        for parameter, part in zip(packed, flat.split(sizes), strict=True):
            parameter.data = part.view(parameter.shape)
    tracer = _Tracer(module, blocks)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            meta_kernels(gpu),
            HostDeviceMode(),
            MetaMode(tracer.on_operation),
            saved_tensors_hooks(tracer.pack, _PackedTensor.unpack),
        ):
            outputs = run()
            tracer.current_call = tracer.last_layer, 0
            losses = None if loss is None else loss(outputs)
    except Exception as error:  # noqa: BLE001  (whatever a user's code does where there are no values)
        message = (
            error.problems[0] if isinstance(error, HpctrainError) else f"{type(error).__name__}: {error}"
        )
        return PartTrace((), shorten(message.strip().splitlines()[0], _MESSAGE_LENGTH, placeholder=" ..."))
    trace = PartTrace(tuple(tracer.layer_traces(tokens)))
    del outputs, losses  # they keep the counted tensors alive
    return trace


def _shared_name(parameter: nn.Parameter) -> object:
    """Return the name of the tensor that a parameter is part of, or the parameter's identity."""
    return parameter.shard.name if isinstance(parameter, Parameter) else id(parameter)


class _PackedTensor:
    """A tensor that autograd has saved, which lives as long as autograd needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor.is_leaf else tensor.detach()

    def unpack(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True)
class _Event:
    """A tensor was saved, or, if `block_input` is set, a block was called with this tensor."""

    call: Call | None
    packed: weakref.ref[_PackedTensor] | None
    block_input: Tensor | None = None

    @property
    def tensor(self) -> Tensor | None:
        """The tensor, or None if it no longer exists."""
        packed = None if self.packed is None else self.packed()
        return self.block_input if packed is None else packed.tensor


class _Tracer:
    """Recorder of events by layer: 0 before the blocks, which count from 1, and `last_layer` after them."""

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.last_layer = len(blocks) + 1
        self.current_call: Call | None = None
        self._calls = 0
        self._events: list[_Event] = []
        self._events_of_blocks = 0 if blocks else None
        self._parameters = {
            storage_key(parameter): _shared_name(parameter) for parameter in module.parameters()
        }
        self._resident = {*self._parameters} | {storage_key(buffer) for buffer in module.buffers()}
        for each in module.modules():
            self._resident |= {
                storage_key(value) for value in vars(each).values() if isinstance(value, Tensor)
            }
        self._flops: list[tuple[int, Call | None, bool, int]] = []
        self._rows: list[tuple[int, Call | None, str, int]] = []
        for number, block in enumerate(blocks, 1):
            vars(block)["forward"] = partial(self._call_block, number, block.forward)

    def _call_block(self, number: int, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a block, and record its inputs."""
        self._calls += 1
        before, self.current_call = self.current_call, (number, self._calls)
        self._events += [
            _Event(self.current_call, None, tensor.detach()) for tensor in tensors_of((arguments, keywords))
        ]
        try:
            return forward(*arguments, **keywords)
        finally:  # the pass of a pipeline stage ends with an exception
            self.current_call = before
            self._events_of_blocks = len(self._events)

    def pack(self, tensor: Tensor) -> _PackedTensor:
        """Record that autograd saves a tensor."""
        packed = _PackedTensor(tensor)
        self._events.append(_Event(self.current_call, weakref.ref(packed)))
        return packed

    def on_operation(self, func: Any, args: tuple[Any, ...], keywords: Any, result: Any) -> None:
        """Record the FLOPs of an operation. MetaMode calls this for each operation."""
        packet = func._overloadpacket
        if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            query, key, value = args[:3]
            flops = 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        elif packet in flop_registry:
            flops = int(flop_registry[packet](*args, **keywords, out_val=result))
        else:
            return
        position, with_parameter = (len(self._events), self.current_call), False
        for tensor in tensors_of(args):
            name = self._parameters.get(storage_key(tensor))
            with_parameter |= name is not None
            if isinstance(name, str) and tensor.dim() > 1:
                self._rows.append((*position, name, flops // (2 * tensor.numel())))
        self._flops.append((*position, with_parameter, flops))

    def layer_traces(self, tokens: int) -> Iterator[LayerTrace]:
        """Yield the trace of each layer, for a call with so many tokens."""
        saving_calls = {
            event.call for event in self._events if event.block_input is None and event.tensor is not None
        }
        alive = [
            (event_count, event, tensor)
            for event_count, event in enumerate(self._events)
            if (tensor := event.tensor) is not None
            and storage_key(tensor) not in self._resident
            and event.call in saving_calls  # a call that saves nothing is not recomputed and needs no inputs
        ]
        saved: list[dict[int, SavedStorage]] = [{} for _ in range(self.last_layer + 1)]
        saved_recomputed: list[dict[int, SavedStorage]] = [{} for _ in range(self.last_layer + 1)]
        saved_by_call: dict[Call, dict[int, SavedStorage]] = {}
        counted: set[int] = set()
        counted_recomputed: set[int] = set()
        for event_count, event, tensor in alive:
            key, layer = storage_key(tensor), self._layer(event_count, event.call)
            storage = SavedStorage(tensor.untyped_storage().nbytes(), tensor.element_size(), features=False)
            if event.block_input is None and key not in counted:
                counted.add(key)
                saved[layer][key] = storage
            if event.block_input is None and event.call is not None and layer != self.last_layer:
                saved_by_call.setdefault(event.call, {})[key] = storage
            elif key not in counted_recomputed:
                counted_recomputed.add(key)
                saved_recomputed[layer][key] = storage
        recompute_bytes = [0] * (self.last_layer + 1)
        for (layer, _), storages in saved_by_call.items():
            size = sum(storage.bytes for key, storage in storages.items() if key not in counted_recomputed)
            recompute_bytes[layer] = max(recompute_bytes[layer], size)
        matrix_elements, core_flops = [0] * (self.last_layer + 1), [0] * (self.last_layer + 1)
        for event_count, call, with_parameter, flops in self._flops:
            (matrix_elements if with_parameter else core_flops)[self._layer(event_count, call)] += flops
        rows: list[dict[str, int]] = [{} for _ in range(self.last_layer + 1)]
        for event_count, call, name, number in self._rows:
            of_layer = rows[self._layer(event_count, call)]
            of_layer[name] = max(of_layer.get(name, 0), number)
        for layer in range(self.last_layer + 1):
            yield LayerTrace(
                tuple(saved[layer].values()),
                tuple(saved_recomputed[layer].values()),
                recompute_bytes[layer],
                matrix_elements[layer] // (2 * tokens),
                core_flops[layer] // tokens,
                rows[layer],
            )

    def _layer(self, event_count: int, call: Call | None) -> int:
        """Return the layer of something that happened after `event_count` events."""
        if call is not None:
            return call[0]
        return (
            0 if self._events_of_blocks is None or event_count < self._events_of_blocks else self.last_layer
        )


def trace_layer(layer: ModuleLayer, sizes: ActivationSizes | None) -> LayerTrace | str:
    """Return the trace of a layer, or the reason why there is none.

    Args:
        layer: The layer.
        sizes: Sizes of a micro-batch; None for one sample with all that tensor ranks compute together.
    """
    part, number = layer.owner
    size = part.architecture.storage.itemsize
    frozen = frozenset(parameter.shard.name for parameter in part.names if not parameter.requires_grad)
    if sizes is None:
        sequence = part.architecture.sequence
        part_sizes, rank = ActivationSizes(sequence, sequence, 1, size, size), (0, 1, False)
    else:
        tensor = part.layer_context.tensor
        part_sizes = replace(sizes, recomputes_core=False, recomputes_blocks=False)
        rank = tensor.rank, tensor.size, part.layer_context.sequence_parallel
    trace = _trace_part(part.architecture, part.span, frozen, rank, part_sizes)
    return trace.layers[number] if trace.problem is None else trace.problem


@lru_cache(maxsize=64)
def _trace_part(
    architecture: ModuleArchitecture,
    span: LayerRange,
    frozen: frozenset[str],
    rank: tuple[int, int, bool],
    sizes: ActivationSizes,
) -> PartTrace:
    """Trace a part as a tensor rank holds it: `rank` is its index, the group's size, sequence parallelism."""
    rank_index, size, by_sequence = rank
    tensor = planned_group(("tensor",), rank_index, size, Ledger())
    context = planned_group(("context",), 0, 1, Ledger())
    with META:
        layer_context = LayerContext(tensor, context, by_sequence)
        part = ModulePart(architecture, layer_context, span)
    for parameter in part.names:
        parameter.requires_grad_(parameter.requires_grad and parameter.shard.name not in frozen)
    inputs = example_inputs(architecture, sizes.micro_size)

    def loss(outputs: Any) -> Any:
        return part.predict(outputs, sizes.objective.loss_function(inputs, torch.ones(())))

    hidden = None
    if not span.has_embedding:
        hidden = torch.empty(part.hidden_shape(sizes.micro_size), dtype=part.dtype, device=META)
        hidden.requires_grad_()
    of_loss = loss if sizes.objective is not None and span.has_head else None
    run = partial(part, inputs, hidden)
    return trace_module(part.module, part.blocks, run, of_loss, sizes.tokens, architecture.storage, sizes.gpu)


def example_inputs(architecture: ModuleArchitecture, micro_size: int) -> ModelInputs:
    """Return a micro-batch of ones."""
    return ModelInputs(architecture.example_values(micro_size), torch.arange(architecture.sequence))
