"""Contents of a ModulePart: its parameters, layers, blocks and buffers.

A module's own parameters are replaced by hpctrain's `Parameter`s in place, under the same names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from hpctrain.model.modules.module_architecture import ModuleArchitecture, find_blocks
from hpctrain.model.modules.module_buffers import ModuleBuffers
from hpctrain.model.modules.module_layers import ModuleLayer
from hpctrain.model.modules.pipeline.call_order import find_call_order, watched_modules
from hpctrain.model.modules.pipeline.stage_forward import ModuleForward, StageForward
from hpctrain.model.modules.pipeline.stage_split import StageMessage, StageSlice
from hpctrain.model.modules.tensor_parallel.parallel_layers import LayerGradientParameter, replacement
from hpctrain.model.modules.tensor_parallel.unsplit_linear import (
    linear_parameters,
    replace_linear_layers,
)
from hpctrain.model.part import LayerRange
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter, Shard

Names = dict[Parameter, list[str]]
"""All names of each parameter in a module."""


@dataclass(frozen=True)
class PartContents:
    """Contents of a part.

    Attributes:
        names: All names of each parameter.
        layers: The layer before the blocks, the blocks, and the layer after them.
        blocks: The blocks by name.
        buffers: The buffers of the module.
        forward_pass: How a pass runs through the part.
        calls: Further modules whose calls `forward_pass` handles, by name.
    """

    names: Names
    layers: tuple[ModuleLayer, ...]
    blocks: Mapping[str, nn.Module]
    buffers: ModuleBuffers
    forward_pass: ModuleForward = field(default_factory=ModuleForward)
    calls: Mapping[str, nn.Module] = field(default_factory=dict)


def contents_of_part(
    module: nn.Module,
    architecture: ModuleArchitecture,
    layer_context: LayerContext,
    partial_gradients: Collection[nn.Parameter],
    span: LayerRange,
    shared_parameters: Mapping[str, Parameter],
) -> PartContents:
    """Return the contents of a part: the whole module, or one pipeline stage of it. Local.

    Parameters that the part does not use are replaced by zeros without memory.

    Args:
        module: The module, on "meta". Its parameters and linear layers are replaced.
        architecture: Its architecture.
        layer_context: Process groups and settings of this rank's layers.
        partial_gradients: Parameters whose gradients are summed over tensor ranks.
        span: Blocks of the part.
        shared_parameters: Parameters of another part on this rank, by name. Those that this part also uses
            are taken from there.
    """
    stage = StageSlice(find_call_order(architecture), span) if architecture.has_stages else None
    placeholder = layer_context.data.empty((), architecture.storage).zero_()
    layer_gradients = {*linear_parameters(module)}
    replacement = _ParameterReplacement(
        stage, partial_gradients, layer_gradients, shared_parameters, placeholder
    )
    names = replacement.replace_all(module)
    linear_layers = replace_linear_layers(module, layer_context)
    all_blocks = find_blocks(module, architecture.pattern)
    numbered = enumerate(all_blocks.items())
    blocks = {name: each for number, (name, each) in numbered if span.first <= number < span.last}
    other_part_parameters = tuple(each for each in shared_parameters.values() if each in names)
    if stage is None:
        outer = _outer_of_module(module, names, blocks)
    else:
        outer = _outer_of_stage(module, stage, names, all_blocks, blocks, {*other_part_parameters})
    elsewhere = {*outer.parameters_before, *outer.parameters_after, *other_part_parameters}
    kinds, further = block_kinds(all_blocks), (linear_layers, architecture.sequence)
    block_layers = (
        ModuleLayer(kinds[name], True, _parameters_except(block, elsewhere), [*block.modules()], *further)
        for name, block in blocks.items()
    )
    layers = (
        ModuleLayer("outside", False, outer.parameters_before, outer.modules_before, *further),
        *block_layers,
        ModuleLayer(
            "result", False, outer.parameters_after, outer.modules_after, *further, other_part_parameters
        ),
    )
    rule = architecture.buffers, architecture.storage
    if stage is None:
        return PartContents(names, layers, blocks, ModuleBuffers(module, layer_context, *rule))
    buffers = ModuleBuffers(module, layer_context, *rule, stage.remote_buffers, stage.saved_elsewhere)
    stage_parameters = [parameter for parameter in names if parameter not in set(other_part_parameters)]
    forward_pass = StageForward(stage, StageMessage.of(stage.order), placeholder.device, stage_parameters)
    return PartContents(names, layers, blocks, buffers, forward_pass, watched_modules(module, all_blocks))


def _parameters_except(block: nn.Module, elsewhere: Collection[nn.Parameter]) -> list[Parameter]:
    return [p for p in block.parameters() if isinstance(p, Parameter) and p not in elsewhere]


class _OuterContents(NamedTuple):
    """Parameters and modules of a part that belong to no block, or to several.

    Attributes:
        parameters_before: Parameters that are used before or between blocks.
        modules_before: Modules that run before or between blocks.
        parameters_after: Parameters that are used after all blocks only.
        modules_after: Modules that run after all blocks only.
    """

    parameters_before: Sequence[Parameter]
    modules_before: Sequence[nn.Module]
    parameters_after: Sequence[Parameter] = ()
    modules_after: Sequence[nn.Module] = ()


def _outer_of_module(module: nn.Module, names: Names, blocks: Mapping[str, nn.Module]) -> _OuterContents:
    """Return what is outside of the blocks of a whole module, all of it before the blocks."""
    outside = _modules_outside(module, blocks.values())
    used_by = Counter(p for block in blocks.values() for p in set(block.parameters()))
    outer = {p for each in outside for p in each.parameters(recurse=False)}
    return _OuterContents([p for p in names if p in outer or used_by[p] > 1], outside)


def _outer_of_stage(
    module: nn.Module,
    stage: StageSlice,
    names: Names,
    all_blocks: Mapping[str, nn.Module],
    blocks: Mapping[str, nn.Module],
    other_part_parameters: Set[Parameter],
) -> _OuterContents:
    """Return what a stage uses outside of its blocks, by the positions at which a pass uses it."""
    order, before, after = stage.order, list[Parameter](), list[Parameter]()
    block_of = {p: name for name, block in blocks.items() for p in block.parameters()}
    for parameter, (name, *_) in names.items():
        positions = order.parameters[name]
        in_block = parameter in block_of and positions == {order.block_position(block_of[parameter])}
        if not in_block and parameter not in other_part_parameters:
            at_end = {*filter(stage.computes, positions)} == {order.end_position}
            (after if at_end else before).append(parameter)
    modules_after, remote = set[nn.Module](), set[nn.Module]()
    for name, each in watched_modules(module, all_blocks).items():
        if name in all_blocks:
            continue
        at = {call.position for call in order.calls if call.name == name}
        if at == {order.end_position}:
            modules_after |= set(each.modules())
        if not any(map(stage.computes, at or {0})):
            remote |= set(each.modules())
    local_modules = [each for each in _modules_outside(module, all_blocks.values()) if each not in remote]
    return _OuterContents(
        before,
        [each for each in local_modules if each not in modules_after],
        after,
        [each for each in local_modules if each in modules_after],
    )


@dataclass(frozen=True)
class _ParameterReplacement:
    """Replacement of a module's parameters by those of a part.

    Attributes:
        stage: The stage; None if the part is the whole module.
        partial_gradients: Parameters whose gradients are summed over tensor ranks.
        layer_gradients: Parameters whose gradients their layers add to buffers.
        shared_parameters: Parameters of another part on this rank, by name.
        placeholder: 0-dim zero, which is expanded to the shapes of other stages' parameters.
    """

    stage: StageSlice | None
    partial_gradients: Collection[nn.Parameter]
    layer_gradients: Collection[nn.Parameter]
    shared_parameters: Mapping[str, Parameter]
    placeholder: torch.Tensor

    def replace_all(self, module: nn.Module) -> Names:
        """Replace all parameters of a module and return the names of those that are now a Parameter."""
        ours: dict[nn.Parameter, nn.Parameter] = {}
        names: Names = {}
        for own_name, original in list(module.named_parameters(remove_duplicate=False)):
            name = original.shard.name if isinstance(original, Parameter) else own_name
            if original not in ours:
                ours[original] = self._replacement_of(name, original)
            new = ours[original]
            if isinstance(new, Parameter):
                names.setdefault(new, []).append(name)
            parent, _, attribute = own_name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, new)
        return names

    def _replacement_of(self, name: str, original: nn.Parameter) -> nn.Parameter:
        """Return the Parameter that replaces one of a module, or zeros if the stage does not use it."""
        if self.stage is None:
            return self._replace(name, original)
        positions, span = self.stage.order.parameters[name], self.stage.span
        if not self.stage.needs(positions):
            return nn.Parameter(self.placeholder.expand(original.shape), requires_grad=False)
        if name in self.shared_parameters:
            shared = self.shared_parameters[name]
            shared.uses, shared.separate_lookups = 2, 1
            return shared
        new = self._replace(name, original)
        if self.stage.shares(positions):
            new.shard = replace(new.shard, stage_copy=span.tied_stage, stage_copies=span.tied_stages)
        return new

    def _replace(self, name: str, original: nn.Parameter) -> Parameter:
        """Return the Parameter that replaces one of a module: itself if it already is one."""
        if isinstance(original, Parameter):
            return original
        kind = LayerGradientParameter if original in self.layer_gradients else Parameter
        partial_axes = frozenset({"tensor"} if original in self.partial_gradients else ())
        shard = Shard.replicated(name, tuple(original.shape), partial_axes)
        new = replacement(kind, original, shard)
        if original.requires_grad:
            # The module's own hooks on gradients run for each micro-batch.
            for hook in (getattr(original, "_backward_hooks", None) or {}).values():
                new.register_hook(hook)
            for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
                new.register_post_accumulate_grad_hook(hook)
        return new


def _modules_outside(module: nn.Module, blocks: Collection[nn.Module]) -> list[nn.Module]:
    """Return the modules that are inside no block."""
    inside = {each for block in blocks for each in block.modules()}
    return [each for each in module.modules() if each not in inside]


def block_kinds(blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the kind of each block: its class, with a number if blocks of one class differ in parameters."""
    kinds: dict[str, str] = {}
    known: dict[str, list[object]] = {}
    for name, block in blocks.items():
        kind, form = (
            type(block).__name__,
            [(parameter_name, each.shape) for parameter_name, each in block.named_parameters()],
        )
        forms = known.setdefault(kind, [])
        if form not in forms:
            forms.append(form)
        number = forms.index(form)
        kinds[name] = f"{kind} ({number + 1})" if number else kind
    return kinds
