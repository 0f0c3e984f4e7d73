"""Tensors of every kind, and the layouts in which ranks may hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.parallel.shards import Shard

Tensors = dict[str, Tensor]


def split(name: str, shape: tuple[int, ...], dim: int, part: int, parts: int) -> Shard:
    """Piece `part` of `parts` along `dim`, equally long ones, so that the last reach into padding."""
    length = -(-shape[dim] // parts)
    start, local = [0] * len(shape), list(shape)
    start[dim], local[dim] = min(part * length, shape[dim]), length
    return Shard(name, shape, tuple(start), tuple(local))


def whole(tensors: Tensors, rank: int, size: int) -> list[TensorRange]:
    return [entry(name, tensor, copy=rank, copies=size) for name, tensor in tensors.items()]


def rows(tensors: Tensors, rank: int, size: int) -> list[TensorRange]:
    return _split(tensors, 0, rank, size)


def columns(tensors: Tensors, rank: int, size: int) -> list[TensorRange]:
    return _split(tensors, -1, rank, size)


def flat(tensors: Tensors, rank: int, size: int) -> list[TensorRange]:
    """Each rank an equal range of the flat tensor, as optimizer states are held."""
    return [_range(e, rank, size) for e in whole(tensors, 0, 1)]


def flat_columns(tensors: Tensors, rank: int, size: int) -> list[TensorRange]:
    """Columns over the first half of the ranks and over the second, of each a range."""
    parts = size // 2 if size % 2 == 0 else 1
    return [_range(e, rank // parts, size // parts) for e in columns(tensors, rank % parts, parts)]


def stages(tensors: Tensors, rank: int, size: int) -> list[TensorRange]:
    """Each tensor on one rank only, and where there are four ranks, none on the last."""
    holders = max(1, size - 1)
    return [entry(name, tensor) for i, (name, tensor) in enumerate(tensors.items()) if i % holders == rank]


LAYOUTS: dict[str, Callable[[Tensors, int, int], list[TensorRange]]] = {
    f.__name__: f for f in (whole, rows, columns, flat, flat_columns, stages)
}


def entry(
    name: str, tensor: Tensor, shard: Shard | None = None, copy: int = 0, copies: int = 1
) -> TensorRange:
    shard = shard or Shard.replicated(name, tuple(tensor.shape))
    # Padding that is not zero, so that storing it, or leaving it as it was, is noticed.
    values = torch.ones(shard.local, dtype=tensor.dtype)
    values[tuple(slice(0, n) for n in shard.extent)] = tensor[shard.slices]
    return TensorRange(f"/model/{name}", shard, values.reshape(-1), 0, copy, copies)


def _split(tensors: Tensors, dim: int, rank: int, size: int) -> list[TensorRange]:
    found = []
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            found.append(entry(name, tensor, copy=rank, copies=size))
        else:
            shard = split(name, tuple(tensor.shape), dim % tensor.dim(), rank, size)
            found.append(entry(name, tensor, shard))
    return found


def _range(held: TensorRange, rank: int, size: int) -> TensorRange:
    count = held.values.numel()
    part = held.part(count * rank // size, count * (rank + 1) // size)
    return replace(part, copy=held.copy, copies=held.copies)


@pytest.fixture
def tensors() -> Tensors:
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    return {
        "large.weight": normal(1500, 801),  # two checksum pieces, and rows that cross their border
        "matrix": normal(37, 19),
        "layers.0.cube": normal(7, 6, 5).bfloat16(),
        "half": normal(11).half(),
        "double": normal(5, 7).double(),
        "counts": torch.randint(-(2**40), 2**40, (4, 3), generator=draw),
        "flags": normal(9) > 0,
        "int": torch.arange(6, dtype=torch.int32),
        "scalar": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
        "small": normal(2).bfloat16(),  # less than one element a rank where there are four
    }


@pytest.fixture
def flip() -> Callable[[Path, int], None]:
    """`flip(path, offset)` inverts one bit of the byte at `offset`."""

    def invert(path: Path, offset: int) -> None:
        with path.open("r+b") as stream:
            stream.seek(offset)
            byte = stream.read(1)[0]
            stream.seek(offset)
            stream.write(bytes([byte ^ (1 << (offset % 8))]))

    return invert
