"""Save a checkpoint while training goes on: the same file as `save` makes.

A thread of every rank writes its pieces at their places in the file, brings them to the disk and compares
them, without HDF5 and without MPI. Between steps the ranks ask each other whether all have come that far;
then they add up the checksums, and a thread of rank 0 completes the file and gives it its name.
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
    """One checkpoint that is being written."""

    def __init__(
        self,
        path: Path,
        group: Group,
        entries: Sequence[TensorRange],
        state: Mapping[str, Any],
        buffer: HostBuffer,
    ) -> None:
        """Begin; collective. Parameters and errors as in `save`, besides the memory that copies may take."""
        self._draft = begin_draft(path, group, entries, state, min(PIECE_BYTES, buffer.piece_bytes))
        self._snapshot = DraftSnapshot(self._draft.pieces, buffer)
        self.protect = self._snapshot.protect
        self._completing = False
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work = self._threads.submit(self._write)

    @property
    def path(self) -> Path:
        """The name the file will have."""
        return self._draft.path

    def poll(self, wait: bool = False) -> bool:
        """Whether the checkpoint is complete, the same on all ranks; collective.

        With `wait`, only then it returns. Errors as in `save`; after one, the save is over.
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
        """Leave no file: what was stored may not be what was to be. Collective."""
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


def _all(group: Group, here: bool) -> bool:
    return here if group.size == 1 else not group.all_reduce(torch.tensor(0 if here else 1)).item()
