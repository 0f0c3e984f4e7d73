"""State and positions of the steps in which a layout is compared with one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.engine.build import Engine
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.context import context_positions
from hpctrain.parallel.shard import Shard
from hpctrain.sharding.state import MODEL, OPTIMIZER

RESIDUAL = "reducer/residual"
"""Kind of state that holds what compressed sums of gradients lack."""


_ODD = 7919
"""What makes distances between positions irregular."""


class StatePiece(NamedTuple):
    """Flat elements `span` of this rank's piece of one tensor of the state, and where that piece lies."""

    name: str
    shard: Shard
    values: Tensor
    span: slice


def state_pieces(engine: Engine, outer: bool = False) -> Iterator[StatePiece]:
    """Yield the state beside the parameters: of optimizer, routers, products, sums and outer steps.

    What each replica has of its own is to be what one rank has. With `outer`, what replicas have in common,
    as the outer model, is yielded instead. State in files is left out.
    """
    for tensor in engine.state():
        left_out = tensor.of_replicas if outer else tensor.kind == MODEL
        if isinstance(tensor.values, Tensor) and not left_out:
            kind = tensor.kind.removeprefix(OPTIMIZER)
            span = slice(tensor.offset, tensor.offset + tensor.values.numel())
            shard = tensor.shard.unstacked if tensor.of_replicas else tensor.shard
            yield StatePiece(f"{kind} of {tensor.shard.name}", shard, tensor.values, span)


def residuals(engine: Engine) -> dict[str, Tensor]:
    """Return by parameter the sum of the gradients that ranks have kept instead of sending. Collective.

    Each tensor is flat, and has the elements of this rank's piece of the parameter.
    """
    own = [tensor for tensor in engine.state() if tensor.kind == RESIDUAL]
    sums = {}
    for bucket in engine.synchronizer.buckets:
        for segment in bucket.segments:
            name = segment.parameter.shard.name
            total = torch.zeros(segment.length, device=bucket.sharding.group.device)
            for tensor in own:
                if tensor.shard.name == name and isinstance(tensor.values, Tensor):
                    total[tensor.offset : tensor.offset + tensor.values.numel()] += tensor.values
            bucket.sharding.group.all_reduce(total)
            sums[name] = bucket.sharding.replicas.all_reduce(total)
    return sums


@contextmanager
def far_positions(engine: Engine, longest: int) -> Iterator[None]:
    """Rotate queries and keys as at positions spread over a sequence of `longest` tokens, up to its end.

    Each position stands for as many of the long sequence, and is one of these, in no regular distances, which
    rounding might leave as they are. A rank has those of the part of the long sequence that the layout gives
    it.
    """
    sequence, groups = engine.architecture.sequence, engine.groups
    stretch = longest // sequence
    parts = [part for part in engine.models if isinstance(part, Transformer)] if stretch > 1 else []
    for part in parts:
        every = context_positions(groups.context, groups.context_form, sequence * stretch)
        stretches = every.view(-1, stretch)
        from_end = sequence - 1 - stretches[:, :1] // stretch
        chosen = stretch - 1 - from_end * (from_end + _ODD) % stretch
        part.rotary_positions = stretches.gather(1, chosen).view(-1).to(engine.world.device)
    yield
    for part in parts:
        part.rotary_positions = None
