"""What a part holds of a module: its parameters, which become ours in place, its layers and its buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from hpctrain.model.modules.module_architecture import ModuleArchitecture, blocks_in
from hpctrain.model.modules.module_buffers import ModuleBuffers
from hpctrain.model.modules.module_layers import ModuleBlock, ModuleLayer, OutsideOfBlocks
from hpctrain.model.modules.pipeline.call_order import order_of, watched
from hpctrain.model.modules.pipeline.stage_forward import Passage, PiecePassage
from hpctrain.model.modules.pipeline.stage_split import PartPass, Passing
from hpctrain.model.modules.tensor_parallel.parallel_layers import LateParameter
from hpctrain.model.modules.tensor_parallel.unsplit_linear import (
    WholeLinear,
    compute_whole,
    layers_in,
    multiplied,
)
from hpctrain.model.part import LayerRange
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter, Shard

Names = dict[Parameter, list[str]]
"""Of each parameter all names that it has in a module."""


@dataclass(frozen=True)
class PartContents:
    """What a part holds: parameters by names, `layers` of these, the last one behind all blocks, which are
    `blocks` by name; `calls` are modules whose calls the passage is told of, besides.
    """

    names: Names
    layers: tuple[ModuleLayer, ...]
    blocks: Mapping[str, nn.Module]
    buffers: ModuleBuffers
    passage: Passage = field(default_factory=Passage)
    calls: Mapping[str, nn.Module] = field(default_factory=dict)


def hold_all(
    module: nn.Module,
    architecture: ModuleArchitecture,
    groups: LayerContext,
    parted: Collection[nn.Parameter],
) -> PartContents:
    """All of a module; what is outside of blocks, or in several, is in the first layer. Gradients of those
    that are `parted` are partial on tensor ranks.
    """
    names = _own_parameters(module, partial(_whole, parted, {*multiplied(module)}))
    whole = compute_whole(module, groups)
    blocks = blocks_in(module, architecture.pattern)
    within = [set(block.parameters()) for block in blocks.values()]
    several = {p for number, own in enumerate(within) for p in own if any(p in o for o in within[:number])}
    outside = _outside(module, blocks.values())
    several |= {p for each in outside for p in each.parameters(recurse=False)}
    free = [p for p in names if p in several]
    make = partial(_layer, whole, architecture.sequence)
    layers = (
        make(OutsideOfBlocks, "outside", free, outside),
        *_blocks(blocks, kinds_of(blocks), several, make),
        make(OutsideOfBlocks, "result", (), ()),
    )
    buffers = ModuleBuffers(module, groups, architecture.buffers, architecture.storage)
    return PartContents(names, layers, blocks, buffers)


def hold_piece(
    module: nn.Module,
    architecture: ModuleArchitecture,
    groups: LayerContext,
    parted: Collection[nn.Parameter],
    span: LayerRange,
    lent: Mapping[str, Parameter],
) -> PartContents:
    """The piece of a module that a pipeline's part computes. Others' parameters are in their places without
    memory, as zeros; some that another part of the stage uses too are `lent` by it. See `hold_all`, too.
    """
    piece = PartPass(order_of(architecture), span)
    home = groups.data.empty((), architecture.storage).zero_()
    names = _own_parameters(module, partial(_of_piece, piece, parted, {*multiplied(module)}, lent, home))
    whole = compute_whole(module, groups)
    borrowed = tuple(each for each in lent.values() if each in names)
    every = blocks_in(module, architecture.pattern)
    blocks = {name: each for number, (name, each) in enumerate(every.items()) if piece.has_block(number)}
    before, behind, several = list[Parameter](), list[Parameter](), set[nn.Parameter](borrowed)
    for parameter in _outside_of_blocks(piece, names, blocks):
        if parameter not in several:
            here = set(filter(piece.computes, piece.order.parameters[names[parameter][0]]))
            (behind if here == {piece.order.end} else before).append(parameter)
    several |= {*before, *behind}
    calls = watched(module, every)
    of_before, of_behind = _modules_of_piece(module, piece, every, calls)
    make = partial(_layer, whole, architecture.sequence)
    layers = (
        make(OutsideOfBlocks, "outside", before, of_before),
        *_blocks(blocks, kinds_of(every), several, make),
        make(OutsideOfBlocks, "result", behind, of_behind, borrowed),
    )
    buffers = ModuleBuffers(
        module,
        groups,
        architecture.buffers,
        architecture.storage,
        piece.buffers_elsewhere,
        piece.kept_elsewhere,
    )
    own = [parameter for parameter in names if parameter not in set(borrowed)]
    passage = PiecePassage(piece, Passing.of(piece.order), home.device, own)
    return PartContents(names, layers, blocks, buffers, passage, calls)


def _whole(
    parted: Collection[nn.Parameter],
    late: Collection[nn.Parameter],
    name: str,
    theirs: nn.Parameter,
) -> nn.Parameter:
    """The Parameter in the place of one of a module's: itself, where it is ours already."""
    if isinstance(theirs, Parameter):
        return theirs
    shape, axes = tuple(theirs.shape), frozenset({"tensor"} if theirs in parted else ())
    kind = LateParameter if theirs in late else Parameter
    own = kind(Shard.whole(name, shape, axes), decayed=len(shape) > 1)
    if not theirs.requires_grad:
        own.requires_grad_(False)
        own.decayed = False
        return own
    # What a module has asked to be done with gradients is so, of each micro-batch.
    for hook in (getattr(theirs, "_backward_hooks", None) or {}).values():
        own.register_hook(hook)
    for hook in (getattr(theirs, "_post_accumulate_grad_hooks", None) or {}).values():
        own.register_post_accumulate_grad_hook(hook)
    return own


def _of_piece(
    piece: PartPass,
    parted: Collection[nn.Parameter],
    late: Collection[nn.Parameter],
    lent: Mapping[str, Parameter],
    home: torch.Tensor,
    name: str,
    theirs: nn.Parameter,
) -> nn.Parameter:
    """As `_whole`, of one that the piece uses; else one that has no memory but that of a number."""
    positions, span = piece.order.parameters[name], piece.span
    if not piece.uses(positions):
        return nn.Parameter(home.expand(theirs.shape), requires_grad=False)
    if name in lent:
        # Two parts of a stage add in an order that the schedule decides.
        lent[name].uses, lent[name].apart = 2, True
        return lent[name]
    own = _whole(parted, late, name, theirs)
    assert isinstance(own, Parameter)
    if piece.shares(positions):
        own.shard = replace(own.shard, stage_copy=span.tied_stage, stage_copies=span.tied_stages)
    return own


def _own_parameters(module: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter]) -> Names:
    """Put others in the places of all parameters of a module, each made of one and its first name; the names
    of those of them that are ours.
    """
    ours: dict[nn.Parameter, nn.Parameter] = {}
    names: Names = {}
    for own_name, theirs in list(module.named_parameters(remove_duplicate=False)):
        name = theirs.shard.name if isinstance(theirs, Parameter) else own_name
        if theirs not in ours:
            ours[theirs] = make(name, theirs)
        own = ours[theirs]
        if isinstance(own, Parameter):
            names.setdefault(own, []).append(name)
        home, _, last = own_name.rpartition(".")
        setattr(module.get_submodule(home), last, own)
    return names


def _outside(module: nn.Module, blocks: Collection[nn.Module]) -> list[nn.Module]:
    """The modules that are within no block."""
    inside = {each for block in blocks for each in block.modules()}
    return [each for each in module.modules() if each not in inside]


def _outside_of_blocks(piece: PartPass, names: Names, blocks: Mapping[str, nn.Module]) -> Iterator[Parameter]:
    """The parameters that are not used by the block alone that has them."""
    home = {p: name for name, block in blocks.items() for p in block.parameters()}
    position = {name: 2 * number + 1 for number, name in enumerate(piece.order.blocks)}
    for parameter, (name, *_) in names.items():
        if parameter not in home or piece.order.parameters[name] != {position[home[parameter]]}:
            yield parameter


def kinds_of(blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Kinds of blocks by name: those of one class are of one if their parameters are alike."""
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


def _layer(
    whole: Mapping[nn.Module, WholeLinear],
    sequence: int,
    make: type[ModuleLayer],
    kind: str,
    parameters: Sequence[Parameter],
    modules: Sequence[nn.Module],
    borrowed: Sequence[Parameter] = (),
) -> ModuleLayer:
    """A layer of these, which computes these modules."""
    return make(kind, parameters, modules, layers_in(modules, whole), sequence, borrowed)


def _blocks(
    blocks: Mapping[str, nn.Module],
    kinds: Mapping[str, str],
    several: Collection[nn.Parameter],
    make: Callable[..., ModuleLayer],
) -> Iterator[ModuleLayer]:
    """The layers of blocks, without what is of several."""
    for name, block in blocks.items():
        own = [p for p in block.parameters() if isinstance(p, Parameter) and p not in several]
        yield make(ModuleBlock, kinds[name], own, list(block.modules()))


def _modules_of_piece(
    module: nn.Module, piece: PartPass, blocks: Mapping[str, nn.Module], calls: Mapping[str, nn.Module]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules outside of blocks that a part computes: those that are called behind all blocks alone, and
    the others, in front of these.
    """
    end, behind, others = piece.order.end, set[nn.Module](), set[nn.Module]()
    for name, each in calls.items():
        if name in blocks:
            continue
        at = {call.position for call in piece.order.calls if call.name == name}
        if at == {end}:
            behind |= set(each.modules())
        if not any(map(piece.computes, at or {0})):
            others |= set(each.modules())
    here = [each for each in _outside(module, blocks.values()) if each not in others]
    return [each for each in here if each not in behind], [each for each in here if each in behind]
