"""What of a communication hides behind products that are computed meanwhile."""

from __future__ import annotations

import torch

from hpctrain.comm.group import Group
from hpctrain.plan.calibrate.clock import Clock

_SIDE, _PRODUCTS = 512, 8


def measure_overlap(group: Group, size: int, asked: bool, clock: Clock) -> float:
    """The share of an all-reduce of `size` bytes that products hide, which take about as long. Where it is
    `asked` how far it is, between products, as sums of gradients are, it may go on there. Collective.
    """
    side = _SIDE
    left, right, result = (torch.randn(side, side, device=group.device) for _ in range(3))
    whole = group.empty((max(1, size // 4),), torch.float32).zero_()
    one = clock.seconds("overlap", lambda: torch.mm(left, right, out=result))
    alone = clock.of_group("overlap", group, lambda: group.all_reduce(whole))
    count = max(_PRODUCTS, min(50 * _PRODUCTS, int(2 * alone / one)))

    def products() -> None:
        for _ in range(count):
            torch.mm(left, right, out=result)

    def both() -> None:
        work = group.start_all_reduce(whole)
        for _ in range(count):
            torch.mm(left, right, out=result)
            if asked:
                work.test()
        work.wait()

    apart = clock.of_group("overlap", group, products)
    together = clock.of_group("overlap", group, both)
    return min(1.0, max(0.0, (apart + alone - together) / alone))
