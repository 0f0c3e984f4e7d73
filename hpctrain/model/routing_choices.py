"""Which experts tokens go to, written down or given: a record beside the inputs of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class RoutingChoices:
    """The routers' choices in one micro-batch.

    `given`, by router: of some tokens the experts that they are to go to, int64 [samples, s, k] on the
    device, -1 where the router chooses itself. Where it is `recorded`, `made` takes what tokens went to, by
    router: int64 rows of sample of the micro-batch, position, experts [n, 2 + k]; a layer that is computed
    again says the same again. Nothing here waits for the device.
    """

    def __init__(self, recorded: bool, given: Mapping[str, Tensor]) -> None:
        self.recorded, self.given = recorded, given
        self.made: dict[str, Tensor] = {}

    def settle(self, router: str, chosen: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        """The experts [n, k] that rows go to, of which the router has `chosen` these; int64 [n] tell of which
        sample and position each is.
        """
        given = self.given.get(router)
        if given is not None:
            known = given[samples, positions]
            chosen = torch.where(known < 0, chosen, known)
        if self.recorded:
            self.made[router] = torch.cat((samples.unsqueeze(1), positions.unsqueeze(1), chosen), dim=1)
        return chosen
