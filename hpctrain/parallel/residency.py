"""Whether parameters are in memory when a layer computes with them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from hpctrain.parallel.shards import Parameter

Result = TypeVar("Result")


class ParameterResidency:
    """Parameters that are always there. Whoever keeps them elsewhere overrides all methods.

    A parameter stands for all that computes together with it. `gathers` says that some are not there always.
    """

    gathers = False

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:  # noqa: ARG002
        """One step, training or evaluation, of a `kind` that uses parameters in one order."""
        yield

    @contextmanager
    def in_memory(self, parameter: Parameter) -> Iterator[None]:  # noqa: ARG002
        """The parameter is there within."""
        yield

    def around(
        self,
        parameter: Parameter,  # noqa: ARG002
        compute: Callable[[Tensor], Tensor],
        x: Tensor,
    ) -> Tensor:
        """`compute(x)`, whose forward and backward have the parameter there."""
        return compute(x)

    def surround(
        self,
        parameter: Parameter,  # noqa: ARG002
        compute: Callable[[], Result],
        inputs: Sequence[Tensor],  # noqa: ARG002
        tensors_of: Callable[[Result], Iterable[Tensor]],  # noqa: ARG002
    ) -> Result:
        """As `around`, of a layer with any `inputs`, and a result of any form, with the tensors of it."""
        return compute()
