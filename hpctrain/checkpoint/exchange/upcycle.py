"""Initialization of a mixture of experts from a dense model (sparse upcycling, arXiv 2212.05055).

Each expert is a copy of the feed-forward part of its block, and routers are new. Since the weights of a
token's experts add up to one, the mixture first computes the same as the dense model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from hpctrain.checkpoint.tensor_ranges import Index, TensorRange
from hpctrain.parallel.shards import Shard

_EXPERTS = {
    f".experts.{native_name}.{kind}": tuple(f".{each}.{kind}" for each in dense)
    for native_name, dense in (("gate_up", ("gate", "up")), ("up", ("up",)), ("down", ("down",)))
    for kind in ("weight", "bias")
}
_ROUTER = (".feed_forward.router.weight", ".feed_forward.router.bias")


def dense_entries(entry: TensorRange) -> Iterator[TensorRange]:
    """Yield the entries of a dense model whose values initialize an entry of a mixture.

    They are none for a router. For experts, there is an entry of the feed-forward part for each expert of
    which this rank has elements.

    Args:
        entry: Entry `/model/<name>` of the mixture.
    """
    name = entry.shard.name
    if name.endswith(_ROUTER):
        return
    for suffix, dense in _EXPERTS.items():
        if name.endswith(suffix):
            yield from _entries_of_experts(entry, tuple(name.removesuffix(suffix) + each for each in dense))
            return
    yield entry


def _entries_of_experts(entry: TensorRange, names: tuple[str, ...]) -> Iterator[TensorRange]:
    """Yield the entries for a tensor [experts, ...], or [experts, names, ...] if there are several names."""
    shard = entry.shard
    depth = 1 if len(names) == 1 else 2
    inner: Index = shard.local[depth:]
    size, first, last = prod(inner), entry.offset, entry.offset + entry.values.numel()
    for number in range(first // size, -(-last // size)):
        begin, end = max(first, number * size), min(last, (number + 1) * size)
        name = names[number % len(names)]
        yield replace(
            entry,
            dataset=f"/model/{name}",
            shard=Shard(name, shard.shape[depth:], shard.start[depth:], inner, split=shard.split),
            values=entry.values[begin - first : end - first],
            offset=begin - number * size,
            copy=0,
            copies=1,
        )
