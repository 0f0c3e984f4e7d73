"""What replicas, the ranks that hold the same slices in hybrid sharding, do with each other, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Protocol

from torch import Tensor

from hpctrain.memory.scratch import Flat
from hpctrain.sharding.bucket import Bucket


class Weights(Protocol):
    """Updated fp32 weights that this rank owns of each bucket (`Bucket.own`)."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Buckets that the weights belong to."""

    @property
    def masters(self) -> Sequence[Flat]:
        """The weights, which may be changed in place."""

    @property
    def updates(self) -> int:
        """Number of updates of the whole run, including those before a resume."""

    def publish(self) -> None:
        """Copy the weights into the parameters. Collective over each bucket's own group."""


class ReplicaSync(Protocol):
    """Keeps the replicas together, or lets them part for some steps (`Sharding.apart`).

    Those that are apart are clipped by their own norms. What they have in common is state that is not
    `apart`: a model between them is of the kind MODEL, resumed "always", which readers of a checkpoint take
    for the model.
    """

    def begin(self, weights: Weights) -> None:
        """Use the initial weights of a run, or those of another model. A resume loads the state later."""

    @property
    def under_way(self) -> dict[str, int]:
        """State of transfers between replicas for a checkpoint. It is the same on all ranks."""

    def resumed(self, weights: Weights, replicas: int, under_way: Mapping[str, int]) -> None:
        """Weights, their updates and state are there as a checkpoint has them, which `replicas` were in, none
        or several of them apart, and what it says is `under_way`. Collective over each bucket's own group.
        """

    def before_update(self, buckets: Sequence[Bucket]) -> None:
        """The gradients of a step are summed over each bucket's own group; the loss was divided by the tokens
        of all replicas. Collective over the replicas.
        """

    def after_update(self, weights: Weights) -> Mapping[str, Tensor]:
        """The step's update is done, on all ranks; not called where it is skipped. Collective, as above.

        What there is to tell of it: sums of squares by name, fp64 0-dim, which are added up over all ranks,
        and whose roots are figures. The same names on all ranks.
        """

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that transfers between replicas use while gradients are summed."""

    @property
    def differs(self) -> bool:
        """True if the model that replicas have in common may differ from the model of each replica."""

    def shown(self, weights: Weights) -> AbstractContextManager[None]:
        """Replace the weights by those that replicas have in common, during the block.

        Afterwards the weights have the same bits as before. Collective over each bucket's own group.
        """


class SyncEveryStep:
    """Replicas sum their gradients in every step, so that they never differ."""

    differs = False
    scratch_bytes = 0
    under_way: ClassVar[dict[str, int]] = {}

    def begin(self, weights: Weights) -> None:
        """All have the same."""

    def resumed(self, weights: Weights, replicas: int, under_way: Mapping[str, int]) -> None:
        """All have the same."""

    def before_update(self, buckets: Sequence[Bucket]) -> None:
        """Sum the slices."""
        for bucket in buckets:
            if bucket.sharding.replicas.size > 1:
                bucket.sharding.replicas.all_reduce(bucket.own_gradients)

    def after_update(self, weights: Weights) -> Mapping[str, Tensor]:  # noqa: ARG002
        """All have the same."""
        return {}

    def shown(self, weights: Weights) -> AbstractContextManager[None]:  # noqa: ARG002
        """All have the same."""
        return nullcontext()
