"""Free memory of ranks, by which generation chooses how to split a model and how large its cache is."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.comm.world import World
from hpctrain.host.device import on_host
from hpctrain.host.memory import available_bytes


def free_bytes_per_rank(world: World) -> int | None:
    """Return the free host memory of each rank, in bytes, on the node where it is least.

    Ranks of a node share its memory evenly. Return None if it is unknown on a node, or if a rank computes on
    a GPU. Collective over all ranks.
    """
    free = available_bytes() if on_host(world.device) else None
    of_ranks = world.everyone.all_gather_object((world.node, free))
    nodes = [node for node, _ in of_ranks]
    shares = [size // nodes.count(node) for node, size in of_ranks if size is not None]
    return min(shares) if len(shares) == len(of_ranks) else None


def fitting_slot_count(count: int, cache_bytes: Callable[[int], int], free_bytes: int | None) -> int:
    """Return the number of texts whose cache takes at most half of the free memory, and at least 1. Local.

    Args:
        count: Desired number of texts, which is halved until the cache fits.
        cache_bytes: Function that returns the bytes of a cache for a number of texts.
        free_bytes: Free memory of this rank in bytes; None if it is unknown, so that nothing is halved.
    """
    while count > 1 and free_bytes is not None and cache_bytes(count) > free_bytes // 2:
        count //= 2
    return count
