"""State, residuals and rotary positions that the layout check (`train/layout_verification.py`) uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.engine.built_engine import Engine
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.sequence import context_positions
from hpctrain.parallel.shards import Shard
from hpctrain.sharding.state import MODEL, OPTIMIZER

RESIDUAL = "reducer/residual"
"""Kind of the state that holds residuals: what error feedback adds to the next compressed gradients."""

_PRIME = 7919
"""Factor that makes the distances between positions irregular."""


class StatePiece(NamedTuple):
    """A part of one tensor of the state on this rank.

    Attributes:
        name: Name of the tensor, for messages.
        shard: Shard of the global tensor that this rank owns.
        values: Flat elements of the part.
        span: Range of these elements in the flattened shard.
    """

    name: str
    shard: Shard
    values: Tensor
    span: slice


def state_pieces(engine: Engine, outer: bool = False) -> Iterator[StatePiece]:
    """Yield the state of an engine other than its parameters.

    That is the state of the optimizer, the routers, fp8 products, gradient compression and outer steps. State
    that is offloaded to files is skipped.

    Args:
        engine: The engine.
        outer: True to yield only the state that all replicas share, such as the outer model. False to yield
            the state that each replica has itself.
    """
    for tensor in engine.state():
        left_out = tensor.per_replica if outer else tensor.kind == MODEL
        if isinstance(tensor.values, Tensor) and not left_out:
            kind = tensor.kind.removeprefix(OPTIMIZER)
            span = slice(tensor.offset, tensor.offset + tensor.values.numel())
            shard = tensor.shard.unstacked if tensor.per_replica else tensor.shard
            yield StatePiece(f"{kind} of {tensor.shard.name}", shard, tensor.values, span)


def residuals(engine: Engine) -> dict[str, Tensor]:
    """Return the sum of the residuals over all ranks, by name of the parameter. Collective.

    Each tensor is flat and has the elements of this rank's shard of the parameter.
    """
    residual_tensors = [tensor for tensor in engine.state() if tensor.kind == RESIDUAL]
    sums = {}
    for bucket in engine.stage.synchronizer.buckets:
        for segment in bucket.segments:
            name = segment.parameter.shard.name
            total = torch.zeros(segment.length, device=bucket.sharding.group.device)
            for tensor in residual_tensors:
                if tensor.shard.name == name and isinstance(tensor.values, Tensor):
                    total[tensor.offset : tensor.offset + tensor.values.numel()] += tensor.values
            bucket.sharding.group.all_reduce(total)
            sums[name] = bucket.sharding.replicas.all_reduce(total)
    return sums


@contextmanager
def spread_positions(engine: Engine, longest: int) -> Iterator[None]:
    """Use rotary positions that are spread over a sequence of `longest` tokens during the block.

    The short sequence of the check would not reach the positions of the real one. Each of its positions is
    replaced by one position from an interval of the long sequence. The distances are irregular, since equal
    distances could hide a wrong order of positions. A context rank gets positions from its own part of the
    long sequence.

    Args:
        engine: The engine of the check.
        longest: Length of the long sequence, in tokens.
    """
    sequence, layer_context = engine.architecture.sequence, engine.stage.layer_context
    interval = longest // sequence
    parts = [part for part in engine.stage.models if isinstance(part, Transformer)] if interval > 1 else []
    for part in parts:
        long_positions = context_positions(
            layer_context.context, layer_context.context_form, sequence * interval
        )
        intervals = long_positions.view(-1, interval)
        distance_to_end = sequence - 1 - intervals[:, :1] // interval
        offsets = interval - 1 - distance_to_end * (distance_to_end + _PRIME) % interval
        part.rotary_positions = intervals.gather(1, offsets).view(-1).to(engine.world.device)
    yield
    for part in parts:
        part.rotary_positions = None
