"""A module that users bring as a Part: its parameters become ours, in place, and its blocks layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.deck.find import users_code
from hpctrain.model.foreign.architecture import META, ModuleArchitecture, blocks_in, plan_of
from hpctrain.model.foreign.arguments import tensors_of
from hpctrain.model.foreign.buffers import ModuleBuffers
from hpctrain.model.foreign.layers import ModuleBlock, ModuleLayer, OutsideOfBlocks, matrices_in
from hpctrain.model.foreign.split import SplitOutputs, split_module
from hpctrain.model.foreign.twin import traced
from hpctrain.model.inputs import Inputs
from hpctrain.model.part import Computed, Layer, Part, Span
from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.random import DropoutSource, key_of
from hpctrain.parallel.residency import Residency
from hpctrain.parallel.saved import Saving
from hpctrain.parallel.shard import Parameter, Shard


class ModulePart(nn.Module):
    """All of a module: a Part, whose result is what the module gives.

    `names` are all those of each parameter: several of one that is tied, which is in memory once, under the
    first of them. Whatever a backward pass does not come to has a gradient of zero.
    """

    def __init__(self, architecture: ModuleArchitecture, groups: LayerGroups, span: Span) -> None:
        super().__init__()
        self.groups, self.span = groups, span
        self.architecture = architecture
        self.title, self.sequence = architecture.title, architecture.sequence
        self.residency = Residency()
        # What runs is no copy: functions that a module makes for itself refer to what was copied.
        planned = groups.tensor.device == META
        self.module = architecture.sketch() if planned else architecture.build(META)
        tensor = groups.tensor.size
        given = json.loads(architecture.plan) if tensor > 1 else None
        plan = plan_of(self.module, given, tensor, groups.sequence_parallel)
        self.split = split_module(self.module, plan, groups, architecture.whole_logits)
        self.names = _own_parameters(self.module, self.split.partial)
        blocks = blocks_in(self.module, architecture.pattern)
        self.layers = (*_layers(self.module, blocks), OutsideOfBlocks("result", (), ()))
        buffers = ModuleBuffers(self.module, groups, architecture.buffers, architecture.storage)
        self.kept, self.layers[0].keeps = buffers, buffers if buffers.kept else None
        for number, layer in enumerate(self.layers):
            layer.traced = partial(traced, self, number)
        self.blocks = tuple(blocks.values())
        for block, layer in zip(self.blocks, self.layers[1:-1], strict=True):
            # Who looks for its forward method finds this one first.
            vars(block)["forward"] = partial(self._run_block, layer, block.forward)
        self._call = architecture.call(self.module)
        self.example = architecture.example
        self._met: set[Parameter] = set()
        self._ends = False
        for parameter in self.names:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._meet)

    def units(self) -> Iterator[list[list[Parameter]]]:
        """See Part."""
        return (unit for layer in self.layers for unit in layer.units())

    def forward(self, inputs: Inputs, hidden: Tensor | None = None) -> Any:
        """See Part: what the module gives for the fields that it takes; fractions are in its own format."""
        assert hidden is None
        recording = torch.is_grad_enabled()
        if self.module.training != recording:
            self.module.train(recording)
        if inputs.dropout is not None:
            seed_draws(inputs.dropout)
        outside = self.layers[0]
        there = self.residency.held(outside.own[0]) if outside.own else nullcontext()
        told = ", ".join(f"{name} of shape {list(inputs.fields[name].shape)}" for name in self._call.names)
        with users_code(f"{self.title} fails with {told}"), there:
            outputs = self._call(inputs.fields)
        for tensor in tensors_of(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)
        return outputs

    def run_layer(self, layer: Layer, inputs: Inputs, x: Tensor) -> Tensor:
        """See Part: not by itself, as what a block takes only the module knows."""
        raise NotImplementedError

    def predict(self, last: Any, compute: Callable[..., Computed]) -> Computed:
        """See Part: of what the module gives."""
        return compute(last if self.split.head is None else SplitOutputs(last, self.split.head))

    def shared_bytes(self, at: Saving) -> int:  # noqa: ARG002
        """See Part: told by the first of them."""
        return 0

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        """See Part: nothing passes."""
        return self.sequence, micro_size, 1

    @property
    def dtype(self) -> torch.dtype:
        """See Part."""
        return next(iter(self.names)).dtype

    def _run_block(self, layer: ModuleLayer, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What a block gives, computed again in backward where that is wished."""
        compute = partial(self.groups.saved_policy.call, forward, *given, **named)
        if not layer.own:
            return compute()
        inputs = list(tensors_of((given, named)))
        return self.residency.surround(layer.own[0], compute, inputs, tensors_of)

    def _meet(self, parameter: Tensor) -> None:
        """A backward pass has come to all uses of a parameter, even if with no gradient."""
        assert isinstance(parameter, Parameter)
        self._met.add(parameter)
        if parameter.grad is None:
            self.groups.weight_gradients.submit(parameter.added)

    def _begin_backward(self, gradient: Tensor) -> None:  # noqa: ARG002
        """A backward pass comes from what the module gave: have its end told."""
        if not self._ends:
            self._ends = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """Tell of the parameters that a backward pass did not come to, in one order on all ranks."""
        self._ends = False
        for parameter in [*self.names][::-1]:
            if parameter.requires_grad and parameter not in self._met:
                parameter.added()
        self._met.clear()


def module_parts(architecture: ModuleArchitecture, groups: LayerGroups, spans: Sequence[Span]) -> list[Part]:
    """The whole module, in one part."""
    (span,) = spans
    return [ModulePart(architecture, groups, span)]


def _own_parameters(module: nn.Module, partial: Collection[nn.Parameter]) -> dict[Parameter, list[str]]:
    """Put our Parameters in the place of all parameters of a module that are not ours yet; of each all names
    it has there. Of some the gradients are `partial` on tensor ranks.
    """
    ours: dict[nn.Parameter, Parameter] = {}
    names: dict[Parameter, list[str]] = {}
    for name, theirs in list(module.named_parameters(remove_duplicate=False)):
        if isinstance(theirs, Parameter):
            names.setdefault(theirs, [theirs.shard.name])
            continue
        if theirs not in ours:
            shape, axes = tuple(theirs.shape), frozenset({"tensor"} if theirs in partial else ())
            own = ours[theirs] = Parameter(Shard.whole(name, shape, axes), decayed=len(shape) > 1)
            if not theirs.requires_grad:
                own.requires_grad_(False)
                own.decayed = False
        names.setdefault(ours[theirs], []).append(name)
        home, _, last = name.rpartition(".")
        setattr(module.get_submodule(home), last, ours[theirs])
    return names


def _layers(module: nn.Module, blocks: dict[str, nn.Module]) -> Iterator[ModuleLayer]:
    """What is outside of blocks, and these; a parameter of several is outside."""
    within = [set(block.parameters()) for block in blocks.values()]
    several = {p for number, own in enumerate(within) for p in own if any(p in o for o in within[:number])}
    inside = {each for block in blocks.values() for each in block.modules()}
    outside = [each for each in module.modules() if each not in inside]
    several |= {p for each in outside for p in each.parameters(recurse=False)}
    free = [p for p in module.parameters() if p in several]
    assert all(isinstance(p, Parameter) for p in module.parameters())
    yield OutsideOfBlocks("outside", [p for p in free if isinstance(p, Parameter)], matrices_in(outside))
    for block in blocks.values():
        own = [p for p in block.parameters() if isinstance(p, Parameter) and p not in several]
        yield ModuleBlock(type(block).__name__, own, matrices_in(list(block.modules())))


def seed_draws(source: DropoutSource) -> None:
    """Have what the module draws be a function of seed, step and sample."""
    torch.manual_seed(key_of(source.seed, f"module {source.step} {source.first}") & 0x7FFFFFFFFFFFFFFF)
