"""Memory of a rank by kind, in the same terms for what a plan predicts and what a run measures."""

from __future__ import annotations

from dataclasses import dataclass

GPU_MEMORY_KINDS = frozenset({"runtime", "fragmented"})
"""Kinds of memory that only a GPU has."""


@dataclass(frozen=True)
class MemoryAccount:
    """Bytes of one rank by kind.

    If ranks of a node share memory, each rank counts an equal part of it.

    Attributes:
        parameter: Values that layers compute with, in the compute format, and matrices that are kept
            converted to fp32.
        gradient: Accumulated gradients.
        optimizer: Moments, master weights unless they are the parameters themselves, and other state of the
            optimizer.
        activation: Tensors that autograd keeps for the backward pass, at their peak.
        cache: Keys and values of sequences that a model generates in training with rewards. They do not exist
            at the same time as activations.
        buffer: Memory that communication and gathered buckets use in turn.
        other: Temporary memory of computations. On a CPU also the interpreter, its libraries, free memory of
            the allocator, and copies for checkpoints.
        runtime: On a GPU, CUDA's context and buffers of NCCL.
        fragmented: On a GPU, unused memory between tensors.
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
        """Bytes of all kinds; of activations and cache only the larger one counts."""
        return sum(self.kinds().values()) - min(self.activation, self.cache)

    def kinds(self) -> dict[str, int]:
        """Return the bytes by kind, in order."""
        return dict(vars(self))

    def row(self) -> dict[str, int]:
        """Return the account as in JSON files: `parameter_bytes` and so on, and `total_bytes`.

        Kinds that only a GPU has are left out if they are 0.
        """
        kinds = {kind: size for kind, size in self.kinds().items() if size or kind not in GPU_MEMORY_KINDS}
        return {f"{kind}_bytes": size for kind, size in kinds.items()} | {"total_bytes": self.total}
