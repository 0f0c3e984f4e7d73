"""Count of the bytes kept for the backward pass, by autograd and by delayed weight gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor


class ActivationKeeper(Protocol):
    """Interface of objects that keep tensors for the backward pass outside of autograd.

    They call `watch`, if it is not None, for each tensor, and keep the result as long as the tensor.
    """

    watch: Any


class LiveActivations:
    """Context that counts the bytes kept for the backward pass: `bytes` now, and `peak` at most.

    A storage that is kept several times counts once.

    Args:
        excluded: Function that returns tensors that do not count, such as parameters.
        keepers: Objects that keep tensors outside of autograd; None is ignored.

    Attributes:
        bytes: Bytes that are kept now.
        peak: Largest number of bytes kept at once.
        save: Function that counts a tensor for as long as its result exists.
    """

    def __init__(self, excluded: Callable[[], Iterable[Tensor]], *keepers: ActivationKeeper | None) -> None:
        self.bytes = self.peak = 0
        self._excluded = excluded
        self._watched = [each for each in keepers if each is not None]
        self._saved: Counter[int] = Counter()
        self.save = partial(SavedTensor, self)
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

    def add(self, storage: torch.UntypedStorage) -> bool:
        """Count one more reference to a storage. Return True if the storage counts."""
        address = storage.data_ptr()
        if not self._saved[address]:
            if any(address == tensor.untyped_storage().data_ptr() for tensor in self._excluded()):
                return False
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
        self._saved[address] += 1
        return True

    def remove(self, storage: torch.UntypedStorage) -> None:
        """Count one reference to a storage less."""
        address = storage.data_ptr()
        self._saved[address] -= 1
        if not self._saved[address]:
            self.bytes -= storage.nbytes()


class SavedTensor:
    """Tensor whose storage counts as long as this object exists."""

    def __init__(self, owner: LiveActivations, tensor: Tensor) -> None:
        # Keep a Parameter itself, since its memory is replaced when it is gathered. Keep an alias of another
        # tensor: if it is the output of the node that saves it, it would keep itself alive.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.owner = owner
        self.is_counted = owner.add(self.tensor.untyped_storage())

    def unpack(self) -> Tensor:
        """Return the tensor as it was saved."""
        return self.tensor

    def __del__(self) -> None:
        if self.is_counted:
            self.owner.remove(self.tensor.untyped_storage())
