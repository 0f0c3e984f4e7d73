"""Interface of what replicas exchange, and when.

In hybrid sharding, replicas are the ranks that hold the same slices. SyncEveryStep adds their gradients in
each step. LocalSteps lets them diverge and synchronizes their weights every few steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Protocol

from torch import Tensor
from typing_extensions import override

from hpctrain.memory.scratch import Flat
from hpctrain.sharding.bucket import Bucket


class Weights(Protocol):
    """fp32 master weights of the elements that this rank updates in each bucket (`Bucket.owned_slice`)."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Buckets that the weights belong to."""

    @property
    def masters(self) -> Sequence[Flat]:
        """The weights, which may be changed in place."""

    @property
    def updates(self) -> int:
        """Number of updates of the whole run, including those before a resume."""

    def copy_to_parameters(self) -> None:
        """Copy the weights into the parameters. Collective over each bucket's own group."""


class ReplicaSync(Protocol):
    """Keeps replicas equal, or lets them diverge for some steps (`ZeroSharding.diverging`).

    Diverging replicas clip gradients by their own norms. State that all replicas share is not `per_replica`
    (see StateTensor). A shared model has the kind MODEL and the resume mode "always", and readers of a
    checkpoint use it as the model.
    """

    def begin(self, weights: Weights) -> None:  # noqa: ARG002
        """Use the initial weights of a run, or those of another model. A resume loads the state later.

        By default nothing happens.
        """
        return

    @property
    def in_flight(self) -> dict[str, int]:
        """State of transfers between replicas for a checkpoint, the same on all ranks."""

    def resume(self, weights: Weights, replicas: int, in_flight: Mapping[str, int]) -> None:  # noqa: ARG002
        """Continue with weights, updates and state that were loaded from a checkpoint.

        By default nothing happens. Collective over each bucket's own group.

        Args:
            weights: The weights.
            replicas: Number of diverging replicas in the checkpoint; 0 if they did not diverge.
            in_flight: Value of `in_flight` in the checkpoint.
        """
        return

    def before_update(self, buckets: Sequence[Bucket]) -> None:
        """Synchronize gradients, if replicas do so, before the update. Collective over the replicas.

        The gradients are summed over each bucket's own group. The loss was divided by the tokens of all
        replicas.
        """

    def after_update(self, weights: Weights) -> Mapping[str, Tensor]:
        """Synchronize weights, if it is time to. Collective over the replicas.

        All ranks call it after the update of a step, and not after a skipped one.

        Returns:
            Square sums by name, fp64 0-dim, the same names on all ranks. They are added over all ranks, and
            their roots become metrics.
        """

    @property
    def common_model_differs(self) -> bool:
        """True if the model that replicas have in common may differ from the model of each replica."""

    def common_weights(self, weights: Weights) -> AbstractContextManager[None]:
        """Replace the weights by those that replicas have in common, during the block.

        Afterwards the weights have the same bits as before. Collective over each bucket's own group.
        """


class SyncEveryStep(ReplicaSync):
    """Replicas that sum their gradients in every step, and so are always equal."""

    common_model_differs = False
    in_flight: ClassVar[dict[str, int]] = {}

    @override
    def before_update(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket.sharding.replicas.size > 1:
                bucket.sharding.replicas.all_reduce(bucket.owned_gradients)

    @override
    def after_update(self, weights: Weights) -> Mapping[str, Tensor]:
        return {}

    @override
    def common_weights(self, weights: Weights) -> AbstractContextManager[None]:
        return nullcontext()
