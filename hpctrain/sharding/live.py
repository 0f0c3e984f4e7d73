"""What autograd holds for backward, counted while it holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor


class LiveActivations:
    """Counts the bytes that autograd keeps while this is active: now, and at the most.

    A storage that is kept several times counts once. Those whose addresses `without` returns, such as
    parameters, do not count. What other hooks for saved tensors take charge of is not seen.
    """

    def __init__(self, without: Callable[[], set[int]]) -> None:
        self.bytes = self.peak = 0
        self._without = without
        self._kept: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _Kept.unpack)

    def __enter__(self) -> LiveActivations:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Kept:
        return _Kept(self, tensor)

    def enter(self, storage: torch.UntypedStorage) -> bool:
        """Count a storage that is kept once more; whether it counts at all."""
        address = storage.data_ptr()
        if not self._kept[address]:
            if address in self._without():
                return False
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
        self._kept[address] += 1
        return True

    def leave(self, storage: torch.UntypedStorage) -> None:
        """A storage is kept once less."""
        address = storage.data_ptr()
        self._kept[address] -= 1
        if not self._kept[address]:
            self.bytes -= storage.nbytes()


class _Kept:
    """One saved tensor, for as long as its graph is there."""

    def __init__(self, owner: LiveActivations, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output of the node itself would keep itself alive
        self.owner = owner
        self.counted = owner.enter(self.tensor.untyped_storage())

    def unpack(self) -> Tensor:
        """The tensor as it was saved."""
        return self.tensor

    def __del__(self) -> None:
        if self.counted:
            self.owner.leave(self.tensor.untyped_storage())
