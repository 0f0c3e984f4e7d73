"""The memory of a rank by kind: what a plan predicts and what a run holds are told in the same words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from hpctrain.memory.scratch import Flat

OF_GPU = frozenset({"runtime", "fragmented"})
"""Kinds of memory that only a GPU has."""


@dataclass(frozen=True)
class MemoryAccount:
    """Bytes of one rank by kind.

    `parameter`: values that layers compute with, in the compute format, and matrices of these that stay
    converted to fp32; of values that ranks of a node have in common, a part as large for each.
    `gradient`: their sums. `optimizer`:
    moments, master weights where these are not the parameters themselves, and what else belongs to them.
    `activation`: what autograd keeps for backward, at its peak. `cache`: keys and values of the texts that a
    model which learns by rewards writes, while there are no activations. `buffer`: memory that communication
    and gathered or opened buckets take turns in. `other`: what computing needs in passing, and on a CPU the
    interpreter, its libraries, what the allocator keeps free, and what a checkpoint copies meanwhile. Only a
    GPU has `runtime`: CUDA's context and buffers of NCCL; and `fragmented`: memory between tensors.
    """

    parameter: int = 0
    gradient: int = 0
    optimizer: int = 0
    activation: int = 0
    cache: int = 0
    buffer: int = 0
    other: int = 0
    runtime: int = 0
    fragmented: int = 0

    @property
    def total(self) -> int:
        """All kinds together, of activations and cache the larger one."""
        return sum(self.kinds().values()) - min(self.activation, self.cache)

    def kinds(self) -> dict[str, int]:
        """Bytes by kind, in order."""
        return dict(vars(self))

    def row(self) -> dict[str, int]:
        """As written into JSON: `parameter_bytes` and so on, and `total_bytes`; a CPU has fewer kinds."""
        kinds = {kind: size for kind, size in self.kinds().items() if size or kind not in OF_GPU}
        return {f"{kind}_bytes": size for kind, size in kinds.items()} | {"total_bytes": self.total}


def storage_bytes(tensors: Iterable[Flat | None]) -> int:
    """Bytes of the memory behind tensors, each storage once; what lies in files takes none."""
    storages = (tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
