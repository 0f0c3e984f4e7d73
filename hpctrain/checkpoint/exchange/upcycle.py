"""A mixture of experts begun from a dense model (sparse upcycling, arXiv 2212.05055).

Every expert begins as a copy of the block's feed-forward part; routers are new. As the weights of a token's
experts add up to one, the mixture computes at first what the dense model does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from hpctrain.checkpoint.tensor_ranges import Index, TensorRange
from hpctrain.parallel.shards import Shard

_EXPERTS = {
    f".experts.{ours}.{kind}": tuple(f".{each}.{kind}" for each in dense)
    for ours, dense in (("gate_up", ("gate", "up")), ("up", ("up",)), ("down", ("down",)))
    for kind in ("weight", "bias")
}
_ROUTER = (".feed_forward.router.weight", ".feed_forward.router.bias")


def upcycled(entry: TensorRange) -> Iterator[TensorRange]:
    """Of an entry `/model/<name>` of a mixture what a dense model has for it: nothing of a router, of experts
    one entry of the feed-forward part for each expert's matrix of which this rank has elements.
    """
    name = entry.shard.name
    if name.endswith(_ROUTER):
        return
    for suffix, dense in _EXPERTS.items():
        if name.endswith(suffix):
            yield from _copies(entry, tuple(name.removesuffix(suffix) + each for each in dense))
            return
    yield entry


def _copies(entry: TensorRange, names: tuple[str, ...]) -> Iterator[TensorRange]:
    """Those of [experts, ...], or [experts, names, ...] where there are several names."""
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
