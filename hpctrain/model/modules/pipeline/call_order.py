"""In which order a module calls its blocks, what each of them gives, and where its parameters are used.

One pass on torch's device "meta" tells: every operation of it is looked at, so that of every tensor it is
known of which parameters, and of the results of which calls, it is made. What is made of neither is computed
by every stage of a pipeline, and has values in this pass, too, on which the module's code may depend; results
that a later stage uses are what passes between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from hpctrain.deck.user_code import run_user_code
from hpctrain.errors import HpctrainError
from hpctrain.model.modules.module_architecture import META, ModuleArchitecture, blocks_in, kept_buffers
from hpctrain.model.modules.nested_tensors import (
    InputReference,
    Spec,
    leaves,
    replaced,
    require_seen,
    tensors_of,
)


class Source(NamedTuple):
    """A tensor that a call gives: the number of the call in a pass, and the tensor's among its results."""

    call: int
    leaf: int


@dataclass(frozen=True)
class BlockCall:
    """A call of a block, or of a module outside of blocks, with the structure of what it gives.

    Block number i is at the position 2 i + 1 of a pass, and what is done between it and the one before at
    2 i.
    """

    name: str
    position: int
    form: Any

    @property
    def is_block(self) -> bool:
        """Or a module outside of blocks."""
        return self.position % 2 == 1

    @property
    def specs(self) -> list[Spec]:
        """Of all tensors that it makes."""
        return [each for each in leaves(self.form) if isinstance(each, Spec)]


@dataclass(frozen=True)
class CallOrder:
    """A pass of a module: its `calls` in their order, by their names those of `blocks` among them.

    `uses` tells, of each tensor that a call gives, the last position that uses it, `left` the same of what a
    call leaves behind in other ways. `parameters` and `buffers` tell by name the positions that use them, of
    those that none uses where they belong; `written` are buffers that a pass changes.
    """

    blocks: tuple[str, ...]
    calls: tuple[BlockCall, ...]
    uses: Mapping[Source, int]
    left: Mapping[int, int]
    parameters: Mapping[str, frozenset[int]]
    buffers: Mapping[str, frozenset[int]]
    written: frozenset[str]

    @property
    def end(self) -> int:
        """The position behind the last block."""
        return 2 * len(self.blocks)

    def spec(self, source: Source) -> Spec:
        """Of a tensor that a call gives."""
        return self.calls[source.call].specs[source.leaf]

    def where(self, position: int) -> str:
        """A position in words."""
        if position % 2:
            return f"block {self.blocks[position // 2]}"
        if position in {0, self.end}:
            return "the part before the blocks" if not position else "the part after the blocks"
        return f"the part before block {self.blocks[position // 2]}"


@lru_cache(maxsize=32)
def order_of(architecture: ModuleArchitecture) -> CallOrder:
    """That of the module with a micro-batch of its deck's. HpctrainError where it cannot be found, or is none
    that stages can follow.
    """
    module = architecture.build(META)
    kept = kept_buffers(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and (name in kept or isinstance(tensor, nn.Parameter)):
            tensor.data = tensor.data.to(architecture.storage)
    for parameter in module.parameters():
        # What is frozen later, or already, learns here: then gradients come by.
        parameter.requires_grad_(True)
    fields = {
        name: torch.ones(field.shape, dtype=field.dtype)
        for name, field in architecture.example(architecture.micro_size).items()
    }
    call = partial(architecture.call(module), fields)
    with run_user_code('its forward pass on the device "meta" of torch, whose tensors have no values, fails'):
        return find_order(module, call, blocks_in(module, architecture.pattern))


def find_order(module: nn.Module, call: Callable[[], Any], blocks: Mapping[str, nn.Module]) -> CallOrder:
    """That of a `call` of a module on the device "meta", which is of no use afterwards. Errors as in
    `order_of`.
    """
    trace = _Trace(module.train(), tuple(blocks))
    for name, each in watched(module, blocks).items():
        vars(each)["forward"] = partial(trace.called, name, each.forward)
    with trace:
        outputs = call()
    return trace.order(outputs)


def watched(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The blocks, and outside of them the largest modules that have parameters, by name: those whose results
    stand for all that is in them.
    """
    found = {each: name for name, each in blocks.items()}
    home = set(found)

    def visit(prefix: str, each: nn.Module) -> None:
        inner = set(each.modules())
        alone = each is not module and type(each).forward is not nn.Module.forward
        if each in home or (alone and not inner & home and any(True for _ in each.parameters())):
            found.setdefault(each, prefix)
            return
        for name, child in each.named_children():
            visit(f"{prefix}.{name}" if prefix else name, child)

    visit("", module)
    return {name: each for each, name in found.items()}


HOST = torch.device("cpu")

_LEFT = -1
"""In the place of the number of a result: what a call leaves behind otherwise."""

Origin = Source | str
"""What a tensor is made of: a call's result, or a parameter or buffer by its name."""


class _Trace(TorchDispatchMode):
    """Looks at the operations of a pass."""

    def __init__(self, module: nn.Module, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks = blocks
        self.calls: list[BlockCall] = []
        self.uses: dict[Source, int] = {}
        self.named: dict[str, set[int]] = {}
        self.written: set[str] = set()
        self.done = 0
        self.current: int | None = None
        self._made: dict[Source, tuple[Tensor, int]] = {}
        self._origins: dict[int, set[Origin]] = {}
        self._alive: list[object] = []
        self._buffers: dict[int, str] = {}
        self._homes = {f"{name}.": 2 * number + 1 for number, name in enumerate(blocks)}
        self._parameters = [name for name, _ in module.named_parameters()]
        for name, parameter in module.named_parameters():
            self._add(parameter, {name})
        for name, buffer in module.named_buffers():
            self._add(buffer, {name})
            self._buffers[_memory(buffer)] = name

    @property
    def position(self) -> int:
        """Where the pass is."""
        return self.calls[self.current].position if self.current is not None else 2 * self.done

    def called(self, name: str, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """In the place of a watched module's forward method."""
        if self.current is not None:
            return forward(*given, **named)
        taken = list(leaves((given, named)))
        versions = [tensor._version for tensor in taken]
        self.current = number = len(self.calls)
        self.calls.append(BlockCall(name, 2 * self.done + (name in self.blocks), None))
        result = forward(*given, **named)
        self.current = None
        require_seen(name, result)
        made = 0

        def spec(tensor: Tensor) -> Spec | InputReference:
            nonlocal made
            for index, each in enumerate(taken):
                if each is tensor and each._version == versions[index]:
                    return InputReference(index)
                if each is tensor:
                    raise HpctrainError(
                        f"{name}: changes its input in place and returns it (return a new "
                        "tensor for pipeline stages)"
                    )
            source, made = Source(number, made), made + 1
            self._made[source] = tensor, tensor._version
            self._add(tensor, (self._of(tensor) - {Source(number, _LEFT)}) | {source})
            return Spec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

        self.calls[number] = replace(self.calls[number], form=replaced(result, spec))
        self.done += name in self.blocks
        return result

    @override
    def __torch_dispatch__(self, function: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        named = named or {}
        changed = {_memory(tensor): tensor for tensor in _written(function, given, named)}
        result = _computed(function, given, named, list(changed.values()))
        taken = {_memory(tensor): tensor for tensor in tensors_of((given, named))}
        of_form = _is_of_form(function)
        origins = set[Origin]().union(*(self._of(tensor) for tensor in taken.values() if not of_form))
        self._use(origins)
        if self.current is not None:
            origins = {Source(self.current, _LEFT)}
        for tensor in changed.values():
            self._add(tensor, self._of(tensor) | origins)
        # These change their statistics, and their schema does not say so.
        silent = taken if "batch_norm" in function._schema.name else {}
        self.written |= {self._buffers[each] for each in {**changed, **silent} if each in self._buffers}
        for tensor in tensors_of(result):
            if _memory(tensor) not in taken:
                self._add(tensor, origins)
        return result

    def _of(self, tensor: Tensor) -> set[Origin]:
        return self._origins.get(_memory(tensor), set())

    def _add(self, tensor: Tensor, origins: set[Origin]) -> None:
        if origins:
            self._origins[_memory(tensor)] = set(origins)
            self._alive.append(tensor.untyped_storage())  # or another would have its address

    def _use(self, origins: set[Origin]) -> None:
        for origin in origins:
            if isinstance(origin, str):
                self.named.setdefault(origin, set()).add(self.position)
            else:
                self.uses[origin] = self.position

    def order(self, outputs: Any) -> CallOrder:
        """What was found, of a pass that gave these."""
        for tensor in leaves(outputs):
            self._use(self._of(tensor))
        self._require_in_order()
        changed = {source for source, (tensor, was) in self._made.items() if tensor._version != was}
        calls = tuple(_with_changes(call, number, changed) for number, call in enumerate(self.calls))
        parameters = set(self._parameters)
        return CallOrder(
            self.blocks,
            calls,
            {source: last for source, last in self.uses.items() if source.leaf != _LEFT},
            {source.call: last for source, last in self.uses.items() if source.leaf == _LEFT},
            {name: self._positions(name) for name in self._parameters},
            {name: self._positions(name) for name in self._buffers.values() if name not in parameters},
            frozenset(self.written),
        )

    def _positions(self, name: str) -> frozenset[int]:
        home = next((at for block, at in self._homes.items() if name.startswith(block)), 0)
        return frozenset(self.named.get(name, {home}))

    def _require_in_order(self) -> None:
        """HpctrainError where blocks are not called once each, in their order."""
        called = [call.name for call in self.calls if call.is_block]
        rule = "pipeline stages require one call of each block, in their order"
        for name in self.blocks:
            if called.count(name) != 1:
                times = f"is called {called.count(name)} times" if name in called else "is not called"
                raise HpctrainError(f"block {name} {times} in a forward pass ({rule})")
        for name, other in zip(self.blocks, called, strict=True):
            if name != other:
                raise HpctrainError(f"block {other} is called instead of block {name} ({rule})")


def _with_changes(call: BlockCall, number: int, changed: set[Source]) -> BlockCall:
    """The call, its results marked that are changed in place afterwards."""
    leaf = -1

    def marked(each: Spec | InputReference) -> Spec | InputReference:
        nonlocal leaf
        if isinstance(each, InputReference):
            return each
        leaf += 1
        return replace(each, changed=True) if Source(number, leaf) in changed else each

    return replace(call, form=replaced(call.form, marked))


def _computed(function: Any, given: Any, named: Mapping[str, Any], changed: Sequence[Tensor]) -> Any:
    """What an operation gives: without values as soon as anything that it takes has none."""
    device = HOST
    if _is_of_form(function):
        named = {**named, "device": named.get("device") or HOST}
    elif any(tensor.is_meta for tensor in tensors_of((given, named))):
        if any(not tensor.is_meta for tensor in changed):
            return given[0]
        device = META
        given, named = (replaced(each, _without_values) for each in (given, named))
    if named.get("device") is not None:
        named = {**named, "device": device}
    return function(*given, **named)


def _is_of_form(function: Any) -> bool:
    """Whether an operation asks for no values, but for the form of a tensor."""
    name = function._schema.name.rpartition("::")[2]
    return bool(name.endswith("_like") or name.startswith("new_"))


def _without_values(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


def _memory(tensor: Tensor) -> int:
    """What tensors have in common that are views of one."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _written(function: Any, given: Sequence[Any], named: Mapping[str, Any]) -> Iterator[Tensor]:
    """What an operation changes in place."""
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given[number] if number < len(given) else named.get(argument.name)
            yield from tensors_of(value)
