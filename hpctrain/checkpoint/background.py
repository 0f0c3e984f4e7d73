"""Saving of a checkpoint during training, with the same file as `save` writes.

A thread of each rank writes its boxes, syncs them to the disk and compares them, without HDF5 and MPI.
Between steps the ranks find out whether all threads have finished. Then they reduce the checksums, and a
thread of rank 0 completes and renames the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.agree import raise_on_all_ranks
from hpctrain.checkpoint.checksum import Sums
from hpctrain.checkpoint.copy_on_write import DraftSnapshot, HostBuffer
from hpctrain.checkpoint.draft import PIECE_BYTES, begin_draft
from hpctrain.checkpoint.save import write_at_offsets
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.comm.group import Group


class BackgroundSave:
    """Checkpoint that a thread writes during training.

    Creating one is collective.

    Args:
        path: The file.
        group: Ranks that write it.
        entries: Ranges of this rank, as in `save`.
        state: Training state.
        buffer: Memory for copies of values that are about to change.

    Raises:
        InputOutputError: The file cannot be created. All ranks raise it.
    """

    def __init__(
        self,
        path: Path,
        group: Group,
        entries: Sequence[TensorRange],
        state: Mapping[str, Any],
        buffer: HostBuffer,
    ) -> None:
        self._draft = begin_draft(path, group, entries, state, min(PIECE_BYTES, buffer.piece_bytes))
        self._snapshot = DraftSnapshot(self._draft.boxes, buffer)
        self.protect = self._snapshot.protect
        self._completing = False
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work = self._threads.submit(self._write)

    @property
    def path(self) -> Path:
        """Name of the complete file."""
        return self._draft.path

    def poll(self, wait: bool = False) -> bool:
        """Return True if the checkpoint is complete, the same on all ranks. Collective.

        Args:
            wait: True to wait until it is complete.

        Raises:
            InputOutputError: The file cannot be written. It is deleted then.
        """
        while True:
            if wait:
                futures.wait([self._work])
            if not _all(self._draft.group, self._work.done()):
                return False
            failed = True
            try:
                with raise_on_all_ranks(self._draft.group), self._draft.errors_with_final_name():
                    self._work.result()
                failed = False
            finally:
                if failed or self._completing:
                    self._threads.shutdown(wait=False)
                    self._draft.close(failed)
            if self._completing:
                return True
            self._completing = True
            self._work = self._threads.submit(self._complete, self._draft.total())

    def abandon(self) -> None:
        """Delete the file, since the values may have been corrupted before they were written. Collective."""
        futures.wait([self._work])
        self._threads.shutdown(wait=False)
        self._draft.close(failed=True)

    def _write(self) -> None:
        try:
            self._draft.store(partial(write_at_offsets, self._draft.descriptor), self._snapshot.take)
        finally:
            self._snapshot.close()
        self._draft.sync_and_verify()

    def _complete(self, total: Sums) -> None:
        if self._draft.group.rank == 0:
            self._draft.publish(total)


def _all(group: Group, condition: bool) -> bool:
    return condition if group.size == 1 else not group.all_reduce(torch.tensor(0 if condition else 1)).item()
