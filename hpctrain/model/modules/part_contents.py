"""Contents of a ModulePart: its parameters, layers, blocks and buffers.

A module's own parameters are replaced by hpctrain's `Parameter`s in place, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from hpctrain.model.modules.module_architecture import ModuleArchitecture, find_blocks
from hpctrain.model.modules.module_buffers import ModuleBuffers
from hpctrain.model.modules.module_layers import BlockLayer, ModuleLayer, OuterLayer
from hpctrain.model.modules.pipeline.call_order import find_call_order, watched_modules
from hpctrain.model.modules.pipeline.stage_forward import ModuleForward, StageForward
from hpctrain.model.modules.pipeline.stage_split import StageMessage, StageSlice
from hpctrain.model.modules.tensor_parallel.parallel_layers import LayerGradientParameter
from hpctrain.model.modules.tensor_parallel.unsplit_linear import (
    UnsplitLinear,
    linear_parameters,
    matmul_layers,
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


def contents_of_module(
    module: nn.Module,
    architecture: ModuleArchitecture,
    layer_context: LayerContext,
    partial_gradients: Collection[nn.Parameter],
) -> PartContents:
    """Return the contents of a part that is the whole module.

    Parameters outside of blocks, or in several blocks, belong to the first layer.

    Args:
        module: The module, on "meta". Its parameters and linear layers are replaced.
        architecture: Its architecture.
        layer_context: Process groups and settings of this rank's layers.
        partial_gradients: Parameters whose gradients are summed over tensor ranks.
    """
    replace_one = partial(_replace_parameter, partial_gradients, {*linear_parameters(module)})
    names = _replace_parameters(module, replace_one)
    linear_layers = replace_linear_layers(module, layer_context)
    blocks = find_blocks(module, architecture.pattern)
    within = [set(block.parameters()) for block in blocks.values()]
    outer = {p for number, own in enumerate(within) for p in own if any(p in o for o in within[:number])}
    outside = _modules_outside(module, blocks.values())
    outer |= {p for each in outside for p in each.parameters(recurse=False)}
    outer_parameters = [p for p in names if p in outer]
    make = partial(_make_layer, linear_layers, architecture.sequence)
    layers = (
        make(OuterLayer, "outside", outer_parameters, outside),
        *_block_layers(blocks, block_kinds(blocks), outer, make),
        make(OuterLayer, "result", (), ()),
    )
    buffers = ModuleBuffers(module, layer_context, architecture.buffers, architecture.storage)
    return PartContents(names, layers, blocks, buffers)


def contents_of_stage(
    module: nn.Module,
    architecture: ModuleArchitecture,
    layer_context: LayerContext,
    partial_gradients: Collection[nn.Parameter],
    span: LayerRange,
    shared_parameters: Mapping[str, Parameter],
) -> PartContents:
    """Return the contents of a part that is one pipeline stage of a module.

    Parameters that the stage does not use are replaced by zeros without memory.

    Args:
        module: The module, on "meta". Its parameters and linear layers are replaced.
        architecture: Its architecture.
        layer_context: Process groups and settings of this rank's layers.
        partial_gradients: Parameters whose gradients are summed over tensor ranks.
        span: Blocks of the stage.
        shared_parameters: Parameters of another part on this rank, by name. Those that this part also uses
            are taken from there.
    """
    stage = StageSlice(find_call_order(architecture), span)
    placeholder = layer_context.data.empty((), architecture.storage).zero_()
    kinds = partial_gradients, {*linear_parameters(module)}
    replace_one = partial(_replace_stage_parameter, stage, *kinds, shared_parameters, placeholder)
    names = _replace_parameters(module, replace_one)
    linear_layers = replace_linear_layers(module, layer_context)
    borrowed = tuple(each for each in shared_parameters.values() if each in names)
    every = find_blocks(module, architecture.pattern)
    blocks = {name: each for number, (name, each) in enumerate(every.items()) if stage.has_block(number)}
    before, behind, outer = list[Parameter](), list[Parameter](), set[nn.Parameter](borrowed)
    for parameter in _outer_parameters(stage, names, blocks):
        if parameter not in outer:
            here = set(filter(stage.computes, stage.order.parameters[names[parameter][0]]))
            (behind if here == {stage.order.end_position} else before).append(parameter)
    outer |= {*before, *behind}
    calls = watched_modules(module, every)
    of_before, of_behind = _outer_modules_of_stage(module, stage, every, calls)
    make = partial(_make_layer, linear_layers, architecture.sequence)
    layers = (
        make(OuterLayer, "outside", before, of_before),
        *_block_layers(blocks, block_kinds(every), outer, make),
        make(OuterLayer, "result", behind, of_behind, borrowed),
    )
    rule = architecture.buffers, architecture.storage
    buffers = ModuleBuffers(module, layer_context, *rule, stage.remote_buffers, stage.saved_elsewhere)
    own = [parameter for parameter in names if parameter not in set(borrowed)]
    forward_pass = StageForward(stage, StageMessage.of(stage.order), placeholder.device, own)
    return PartContents(names, layers, blocks, buffers, forward_pass, calls)


def _replace_parameter(
    partial_gradients: Collection[nn.Parameter],
    layer_gradients: Collection[nn.Parameter],
    name: str,
    original: nn.Parameter,
) -> nn.Parameter:
    """Return the Parameter that replaces one of a module: itself if it already is one."""
    if isinstance(original, Parameter):
        return original
    shape, axes = tuple(original.shape), frozenset({"tensor"} if original in partial_gradients else ())
    kind = LayerGradientParameter if original in layer_gradients else Parameter
    own = kind(Shard.replicated(name, shape, axes), has_weight_decay=len(shape) > 1)
    if not original.requires_grad:
        own.requires_grad_(False)
        own.has_weight_decay = False
        return own
    # The module's own hooks on gradients run for each micro-batch.
    for hook in (getattr(original, "_backward_hooks", None) or {}).values():
        own.register_hook(hook)
    for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
        own.register_post_accumulate_grad_hook(hook)
    return own


def _replace_stage_parameter(
    stage: StageSlice,
    partial_gradients: Collection[nn.Parameter],
    layer_gradients: Collection[nn.Parameter],
    shared_parameters: Mapping[str, Parameter],
    placeholder: torch.Tensor,
    name: str,
    original: nn.Parameter,
) -> nn.Parameter:
    """Return the Parameter that replaces one that the stage uses, or zeros without memory."""
    positions, span = stage.order.parameters[name], stage.span
    if not stage.needs(positions):
        return nn.Parameter(placeholder.expand(original.shape), requires_grad=False)
    if name in shared_parameters:
        # The schedule decides in which order the two parts of this rank add their gradients.
        shared_parameters[name].uses, shared_parameters[name].separate_lookups = 2, True
        return shared_parameters[name]
    own = _replace_parameter(partial_gradients, layer_gradients, name, original)
    assert isinstance(own, Parameter)
    if stage.shares(positions):
        own.shard = replace(own.shard, stage_copy=span.tied_stage, stage_copies=span.tied_stages)
    return own


def _replace_parameters(module: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter]) -> Names:
    """Replace all parameters of a module and return the names of those that are now a Parameter.

    `make` returns the replacement from the first name and the original parameter.
    """
    ours: dict[nn.Parameter, nn.Parameter] = {}
    names: Names = {}
    for own_name, original in list(module.named_parameters(remove_duplicate=False)):
        name = original.shard.name if isinstance(original, Parameter) else own_name
        if original not in ours:
            ours[original] = make(name, original)
        own = ours[original]
        if isinstance(own, Parameter):
            names.setdefault(own, []).append(name)
        parent, _, attribute = own_name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, own)
    return names


def _modules_outside(module: nn.Module, blocks: Collection[nn.Module]) -> list[nn.Module]:
    """Return the modules that are inside no block."""
    inside = {each for block in blocks for each in block.modules()}
    return [each for each in module.modules() if each not in inside]


def _outer_parameters(
    stage: StageSlice, names: Names, blocks: Mapping[str, nn.Module]
) -> Iterator[Parameter]:
    """Yield the parameters that others than their own block use, or that are in no block."""
    block_of = {p: name for name, block in blocks.items() for p in block.parameters()}
    position = {name: 2 * number + 1 for number, name in enumerate(stage.order.blocks)}
    for parameter, (name, *_) in names.items():
        if parameter not in block_of or stage.order.parameters[name] != {position[block_of[parameter]]}:
            yield parameter


def block_kinds(blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the kind of each block: its class, with a number if blocks of one class differ in parameters."""
    kinds: dict[str, str] = {}
    known: dict[str, list[object]] = {}
    for name, block in blocks.items():
        kind, form = type(block).__name__, [(own, each.shape) for own, each in block.named_parameters()]
        forms = known.setdefault(kind, [])
        if form not in forms:
            forms.append(form)
        number = forms.index(form)
        kinds[name] = f"{kind} ({number + 1})" if number else kind
    return kinds


def _make_layer(
    linear_layers: Mapping[nn.Module, UnsplitLinear],
    sequence: int,
    make: type[ModuleLayer],
    kind: str,
    parameters: Sequence[Parameter],
    modules: Sequence[nn.Module],
    borrowed: Sequence[Parameter] = (),
) -> ModuleLayer:
    """Return a layer with these parameters, which computes these modules."""
    return make(kind, parameters, modules, matmul_layers(modules, linear_layers), sequence, borrowed)


def _block_layers(
    blocks: Mapping[str, nn.Module],
    kinds: Mapping[str, str],
    outer: Collection[nn.Parameter],
    make: Callable[..., ModuleLayer],
) -> Iterator[ModuleLayer]:
    """Yield the layers of blocks, without parameters that belong to an outer layer."""
    for name, block in blocks.items():
        own = [p for p in block.parameters() if isinstance(p, Parameter) and p not in outer]
        yield make(BlockLayer, kinds[name], own, list(block.modules()))


def _outer_modules_of_stage(
    module: nn.Module, stage: StageSlice, blocks: Mapping[str, nn.Module], calls: Mapping[str, nn.Module]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules outside of blocks that a stage computes.

    The first list has those before or between blocks, the second one those that run after all blocks only.
    """
    end, behind, others = stage.order.end_position, set[nn.Module](), set[nn.Module]()
    for name, each in calls.items():
        if name in blocks:
            continue
        at = {call.position for call in stage.order.calls if call.name == name}
        if at == {end}:
            behind |= set(each.modules())
        if not any(map(stage.computes, at or {0})):
            others |= set(each.modules())
    here = [each for each in _modules_outside(module, blocks.values()) if each not in others]
    return [each for each in here if each not in behind], [each for each in here if each in behind]
