"""What is held for backward, counted while it is held: by autograd, and by weight gradients that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor


class ActivationKeeper(Protocol):
    """What keeps tensors for backward in a way of its own, and tells its watch of them."""

    watch: Any


class LiveActivations:
    """Counts the bytes that are kept for backward while this is active: now, and at the most.

    A storage that is kept several times counts once. Those of the tensors that `without` returns, such as
    parameters, do not count. What `others` keep in memory counts as long as they say.
    """

    def __init__(
        self,
        without: Callable[[], Iterable[Tensor]],
        *others: ActivationKeeper | None,
    ) -> None:
        self.bytes = self.peak = 0
        self._without = without
        self._watched = [each for each in others if each is not None]
        self._saved: Counter[int] = Counter()
        self.save = partial(SavedTensor, self)  # counts a tensor for as long as its result is there
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.save, SavedTensor.unpack)

    def __enter__(self) -> LiveActivations:
        for each in self._watched:
            each.watch = self.save
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
        for each in self._watched:
            each.watch = None

    def enter(self, storage: torch.UntypedStorage) -> bool:
        """Count a storage that is kept once more; whether it counts at all."""
        address = storage.data_ptr()
        if not self._saved[address]:
            if any(address == other.untyped_storage().data_ptr() for other in self._without()):
                return False
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
        self._saved[address] += 1
        return True

    def leave(self, storage: torch.UntypedStorage) -> None:
        """A storage is kept once less."""
        address = storage.data_ptr()
        self._saved[address] -= 1
        if not self._saved[address]:
            self.bytes -= storage.nbytes()


class SavedTensor:
    """One tensor that is kept, for as long as this is there."""

    def __init__(self, owner: LiveActivations, tensor: Tensor) -> None:
        # A Parameter is kept as itself: its memory changes hands while it is not gathered. Anything else is
        # kept by an alias, as an output of the node that keeps it would keep itself alive.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.owner = owner
        self.counted = owner.enter(self.tensor.untyped_storage())

    def unpack(self) -> Tensor:
        """The tensor as it was saved."""
        return self.tensor

    def __del__(self) -> None:
        if self.counted:
            self.owner.leave(self.tensor.untyped_storage())
