"""Residency of parameters: in memory when a layer computes with them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from hpctrain.parallel.shards import Parameter

Result = TypeVar("Result")


class ParameterResidency:
    """Residency of parameters that are always in memory.

    A subclass that stores them elsewhere overrides all methods. A layer passes one of its parameters,
    whichever it is. It stands for all that are gathered with it.

    Attributes:
        gathers: True if some parameters are not always in memory.
    """

    gathers = False

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:  # noqa: ARG002
        """Return a context for one step of training or evaluation.

        Args:
            kind: Kind of step. Steps of one kind use parameters in the same order.
        """
        yield

    @contextmanager
    def in_memory(self, parameter: Parameter) -> Iterator[None]:  # noqa: ARG002
        """Return a context within which a parameter is in memory."""
        yield

    def run_layer(
        self,
        parameter: Parameter,  # noqa: ARG002
        compute: Callable[[Tensor], Tensor],
        x: Tensor,
    ) -> Tensor:
        """Return `compute(x)`, with the parameters of a layer in memory in its forward and backward pass.

        Args:
            parameter: Any parameter of the layer.
            compute: The layer.
            x: Hidden states.
        """
        return compute(x)

    def run_module(
        self,
        parameter: Parameter,  # noqa: ARG002
        compute: Callable[[], Result],
        inputs: Sequence[Tensor],  # noqa: ARG002
        tensors_of: Callable[[Result], Iterable[Tensor]],  # noqa: ARG002
    ) -> Result:
        """Return `compute()`, with a parameter in memory in its forward and backward pass.

        Args:
            parameter: Any parameter of the layer.
            compute: Layer with a result of any type.
            inputs: Tensors that the layer receives.
            tensors_of: Returns the tensors in the result.
        """
        return compute()
