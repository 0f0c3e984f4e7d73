"""Order in which a module calls its blocks, what each call returns, and where parameters are used.

One pass on torch's device "meta" finds them. It observes each operation, and records from which parameters
and results of calls each tensor was computed. Tensors that depend on neither are computed by every pipeline
stage, and have values in this pass, so that the module's code may depend on them. Results that a later stage
uses are sent between stages.

Positions count through a pass: block number i is at position 2 i + 1, and what runs before it at 2 i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from hpctrain.comm.planned import META
from hpctrain.deck.user_code import run_user_code
from hpctrain.errors import HpctrainError
from hpctrain.model.modules.module_architecture import (
    ModuleArchitecture,
    find_blocks,
    persistent_buffers,
)
from hpctrain.model.modules.module_call import set_forward
from hpctrain.model.modules.nested_tensors import (
    TensorPlaceholder,
    map_leaves,
    require_known_structure,
    storage_key,
    tensors_of,
)
from hpctrain.model.modules.pipeline.meta_products import grouped_products


class CallResult(NamedTuple):
    """A tensor in the result of a call.

    Attributes:
        call: Index of the call in a pass.
        leaf: Index of the tensor among the tensors of the result.
    """

    call: int
    leaf: int


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a new tensor that a call returns.

    Attributes:
        shape: Shape of the tensor.
        dtype: Its dtype.
        requires_gradient: True if a gradient flows back through it.
        modified: True if it is changed in place after the call.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_gradient: bool
    modified: bool = False

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """Return the spec of a tensor that has not been changed in place."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def elements(self) -> int:
        """Number of elements of the tensor."""
        return prod(self.shape)

    @property
    def sendable(self) -> bool:
        """True if the tensor can be sent in a buffer of floating-point values."""
        return self.dtype.is_floating_point

    def matches(self, tensor: Tensor) -> bool:
        """Return True if a tensor has this shape and dtype."""
        return tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class BlockCall:
    """A call of a block, or of a module outside of blocks.

    Attributes:
        name: Name of the module.
        position: Position in the pass.
        structure: Result of the call, with TensorPlaceholders in place of tensors.
        specs: Specs of the new tensors in the result.
    """

    name: str
    position: int
    structure: Any = None
    specs: tuple[TensorSpec, ...] = ()

    @property
    def is_block(self) -> bool:
        """True for a block, False for a module outside of blocks."""
        return self.position % 2 == 1


@dataclass(frozen=True)
class CallOrder:
    """Calls of one pass through a module, and where their results are used.

    Attributes:
        blocks: Names of the blocks, in their order.
        calls: All calls, in their order.
        last_uses: Last position that uses a tensor of a call's result.
        last_side_uses: Last position that uses another tensor that a call has made, by index of the call.
        parameters: Positions that use each parameter. An unused one has the position of its block.
        buffers: Positions that use each buffer.
        written: Names of parameters and buffers that a pass changes.
    """

    blocks: tuple[str, ...]
    calls: tuple[BlockCall, ...]
    last_uses: Mapping[CallResult, int]
    last_side_uses: Mapping[int, int]
    parameters: Mapping[str, frozenset[int]]
    buffers: Mapping[str, frozenset[int]]
    written: frozenset[str]

    @property
    def end_position(self) -> int:
        """Position after the last block."""
        return 2 * len(self.blocks)

    def block_position(self, name: str) -> int:
        """Return the position of a block, given its name."""
        return 2 * self.blocks.index(name) + 1

    def spec(self, source: CallResult) -> TensorSpec:
        """Return the spec of a tensor in a call's result."""
        return self.calls[source.call].specs[source.leaf]

    def describe_position(self, position: int) -> str:
        """Return a position in words, for messages."""
        if position % 2:
            return f"block {self.blocks[position // 2]}"
        if position in {0, self.end_position}:
            return "the part before the blocks" if not position else "the part after the blocks"
        return f"the part before block {self.blocks[position // 2]}"


@lru_cache(maxsize=32)
def find_call_order(architecture: ModuleArchitecture) -> CallOrder:
    """Return the order of calls in a pass of one micro-batch, which is run on "meta". Results are cached.

    Args:
        architecture: Architecture of the module.

    Raises:
        HpctrainError: The module does not run on "meta", or its calls cannot be divided into stages.
    """
    module = architecture.build(META)
    persistent = persistent_buffers(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and (name in persistent or isinstance(tensor, nn.Parameter)):
            tensor.data = tensor.data.to(architecture.storage)
    for parameter in module.parameters():
        # Gradients also flow through parameters that are frozen, now or later.
        parameter.requires_grad_(True)
    call = partial(architecture.call(module), architecture.example_values(architecture.micro_size))
    activity = 'its forward pass on the device "meta" of torch, whose tensors have no values, fails'
    with grouped_products(), run_user_code(activity):
        return trace_call_order(module, call, find_blocks(module, architecture.pattern))


def trace_call_order(
    module: nn.Module, call: Callable[[], Any], blocks: Mapping[str, nn.Module]
) -> CallOrder:
    """Return the order of calls in a pass of a module on "meta"; see `find_call_order` for the errors.

    Args:
        module: The module, whose forward methods are replaced, so that it cannot be used afterwards.
        call: Function that calls the module.
        blocks: Its blocks by name.
    """
    trace = _OrderTracer(module.train(), tuple(blocks))
    for name, each in watched_modules(module, blocks).items():
        set_forward(each, partial(trace.call_module, name, each.forward))
    with trace:
        outputs = call()
    return trace.order(outputs)


def watched_modules(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules whose calls are observed, by name: blocks, and the largest others with parameters.

    A stage that does not compute such a module replaces its result.
    """
    names = {each: name for name, each in blocks.items()}
    enclosed = set(names)

    def visit(prefix: str, each: nn.Module) -> None:
        inner = set(each.modules())
        callable_module = each is not module and type(each).forward is not nn.Module.forward
        if each in enclosed or (
            callable_module and not inner & enclosed and any(True for _ in each.parameters())
        ):
            names.setdefault(each, prefix)
            return
        for name, child in each.named_children():
            visit(f"{prefix}.{name}" if prefix else name, child)

    visit("", module)
    return {name: each for each, name in names.items()}


HOST = torch.device("cpu")

_SIDE_EFFECT = -1
"""Index that stands for tensors that a call makes besides its result."""

_GUESSES: Mapping[Any, Callable[[Tensor], Any]] = {
    torch.ops.aten._local_scalar_dense.default: lambda tensor: torch.zeros((), dtype=tensor.dtype).item(),
    torch.ops.aten.nonzero.default: lambda tensor: torch.empty(
        (tensor.numel(), tensor.dim()), dtype=torch.int64, device=META
    ),
}
"""Results of operations that depend on values, used inside of watched modules, such as in loops over experts.

Each pass compares the shapes of what is sent with those of the pass on "meta".
"""

Origin = CallResult | str
"""What a tensor is computed from: a call's result, or a parameter or buffer by its name."""


class _OrderTracer(TorchDispatchMode):
    """Dispatch mode that observes all operations of a pass, and records the calls of watched modules.

    Args:
        module: The user's module, on "meta".
        blocks: Names of its blocks.
    """

    def __init__(self, module: nn.Module, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks = blocks
        self.calls: list[BlockCall] = []
        self.last_uses: dict[CallResult, int] = {}
        self.positions_by_name: dict[str, set[int]] = {}
        self.written: set[str] = set()
        self.blocks_done = 0
        self.current_call: int | None = None
        self._new_tensors: dict[CallResult, tuple[Tensor, int]] = {}
        self._origins: dict[int, set[Origin]] = {}
        self._alive: list[object] = []
        self._buffers: dict[int, str] = {}
        self._block_positions = {f"{name}.": 2 * number + 1 for number, name in enumerate(blocks)}
        self._parameters = [name for name, _ in module.named_parameters()]
        for name, parameter in module.named_parameters():
            self._add(parameter, {name})
        for name, buffer in module.named_buffers():
            self._add(buffer, {name})
            self._buffers[storage_key(buffer)] = name

    @property
    def position(self) -> int:
        """Position that the pass has reached."""
        if self.current_call is None:
            return 2 * self.blocks_done
        return self.calls[self.current_call].position

    def call_module(self, name: str, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Run a watched module and record the call with its result. It is the module's forward method.

        Calls of watched modules inside of other ones are not recorded.

        Args:
            name: Name of the module.
            forward: The module's own forward method.
            arguments: Arguments of the call.
            keywords: Keyword arguments of the call.
        """
        if self.current_call is not None:
            return forward(*arguments, **keywords)
        inputs = list(tensors_of((arguments, keywords)))
        versions = [tensor._version for tensor in inputs]
        self.current_call = number = len(self.calls)
        self.calls.append(BlockCall(name, 2 * self.blocks_done + (name in self.blocks)))
        result = forward(*arguments, **keywords)
        self.current_call = None
        require_known_structure(name, result)
        specs: list[TensorSpec] = []

        def placeholder(tensor: Tensor) -> TensorPlaceholder:
            for index, each in enumerate(inputs):
                if each is tensor and each._version == versions[index]:
                    return TensorPlaceholder(index, is_argument=True)
                if each is tensor:
                    raise HpctrainError(
                        f"{name}: changes its input in place and returns it (return a new "
                        "tensor for pipeline stages)"
                    )
            source = CallResult(number, len(specs))
            specs.append(TensorSpec.of(tensor))
            self._new_tensors[source] = tensor, tensor._version
            self._add(tensor, (self._origins_of(tensor) - {CallResult(number, _SIDE_EFFECT)}) | {source})
            return TensorPlaceholder(source.leaf, is_argument=False)

        structure = map_leaves(result, placeholder)
        self.calls[number] = replace(self.calls[number], structure=structure, specs=tuple(specs))
        self.blocks_done += name in self.blocks
        return result

    @override
    def __torch_dispatch__(self, operation: Any, _: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        guess = _GUESSES.get(operation) if self.current_call is not None else None
        if guess is not None and arguments[0].is_meta:
            return guess(arguments[0])
        changed = {storage_key(tensor): tensor for tensor in _written_tensors(operation, arguments, keywords)}
        result = _run_operation(operation, arguments, keywords, list(changed.values()))
        inputs = {storage_key(tensor): tensor for tensor in tensors_of((arguments, keywords))}
        like_operation = _is_like_operation(operation)
        origins = set[Origin]().union(
            *(self._origins_of(tensor) for tensor in inputs.values() if not like_operation)
        )
        self._use(origins)
        if self.current_call is not None:
            origins = {CallResult(self.current_call, _SIDE_EFFECT)}
        for tensor in changed.values():
            self._add(tensor, self._origins_of(tensor) | origins)
        # These operations change their statistics, although their schema does not say so.
        silent = inputs if "batch_norm" in operation._schema.name else {}
        self.written |= {self._buffers[each] for each in {**changed, **silent} if each in self._buffers}
        for tensor in tensors_of(result):
            if storage_key(tensor) not in inputs:
                self._add(tensor, origins)
        return result

    def _origins_of(self, tensor: Tensor) -> set[Origin]:
        return self._origins.get(storage_key(tensor), set())

    def _add(self, tensor: Tensor, origins: set[Origin]) -> None:
        if origins:
            self._origins[storage_key(tensor)] = set(origins)
            self._alive.append(tensor.untyped_storage())  # another tensor could get its address otherwise

    def _use(self, origins: set[Origin]) -> None:
        for origin in origins:
            if isinstance(origin, str):
                self.positions_by_name.setdefault(origin, set()).add(self.position)
            else:
                self.last_uses[origin] = self.position

    def order(self, outputs: Any) -> CallOrder:
        """Return the order of calls in a pass that returned `outputs`."""
        for tensor in tensors_of(outputs):
            self._use(self._origins_of(tensor))
        self._require_in_order()
        for source, (tensor, version) in self._new_tensors.items():
            if tensor._version != version:
                self._mark_modified(source)
        parameters = set(self._parameters)
        return CallOrder(
            self.blocks,
            tuple(self.calls),
            {source: last for source, last in self.last_uses.items() if source.leaf != _SIDE_EFFECT},
            {source.call: last for source, last in self.last_uses.items() if source.leaf == _SIDE_EFFECT},
            {name: self._positions(name) for name in self._parameters},
            {name: self._positions(name) for name in self._buffers.values() if name not in parameters},
            frozenset(self.written),
        )

    def _mark_modified(self, source: CallResult) -> None:
        """Note that a call's result is changed in place after the call."""
        call = self.calls[source.call]
        specs = list(call.specs)
        specs[source.leaf] = replace(specs[source.leaf], modified=True)
        self.calls[source.call] = replace(call, specs=tuple(specs))

    def _positions(self, name: str) -> frozenset[int]:
        default = next((at for block, at in self._block_positions.items() if name.startswith(block)), 0)
        return frozenset(self.positions_by_name.get(name, {default}))

    def _require_in_order(self) -> None:
        """Raise HpctrainError if blocks are not called once each, in their order."""
        called = [call.name for call in self.calls if call.is_block]
        rule = "pipeline stages require one call of each block, in their order"
        for name in self.blocks:
            if called.count(name) != 1:
                times = f"is called {called.count(name)} times" if name in called else "is not called"
                raise HpctrainError(f"block {name} {times} in a forward pass ({rule})")
        for name, other in zip(self.blocks, called, strict=True):
            if name != other:
                raise HpctrainError(f"block {other} is called instead of block {name} ({rule})")


def _run_operation(
    operation: Any, arguments: Any, keywords: Mapping[str, Any], changed: Sequence[Tensor]
) -> Any:
    """Run an operation: with values if all arguments have values, else on "meta"."""
    device = HOST
    if _is_like_operation(operation):
        keywords = {**keywords, "device": keywords.get("device") or HOST}
    elif any(tensor.is_meta for tensor in tensors_of((arguments, keywords))):
        if any(not tensor.is_meta for tensor in changed):
            return arguments[0]
        device = META
        arguments, keywords = (map_leaves(each, _without_values) for each in (arguments, keywords))
    if keywords.get("device") is not None:
        keywords = {**keywords, "device": device}
    return operation(*arguments, **keywords)


def _is_like_operation(operation: Any) -> bool:
    """Return True if an operation uses the shape and dtype of a tensor, but no values."""
    name = operation._schema.name.rpartition("::")[2]
    return bool(name.endswith("_like") or name.startswith("new_"))


def _without_values(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


def _written_tensors(
    operation: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Iterator[Tensor]:
    """Yield the arguments that an operation changes in place."""
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = arguments[number] if number < len(arguments) else keywords.get(argument.name)
            yield from tensors_of(value)
