"""What the model that a run starts from makes of every answer: computed before the first step, and stored.

In the run's folder `reference.train.npy`, and a file for what is held out, have a row a sequence: the
log-probabilities of its targets, and the CRC-32 of these. A file is complete or not there; a run that goes on
reads it.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from hpctrain.checkpoint.load import read_state
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches, MicroBatch, MicroBatchRequest, SampleSource
from hpctrain.data.corpus import Corpus
from hpctrain.data.held_out import HeldOut
from hpctrain.data.stored import StoredArray
from hpctrain.errors import InputOutputError, failing_as
from hpctrain.files import flush_to_disk, open_regular
from hpctrain.objective.dpo import REFERENCE
from hpctrain.train.scored import log_probabilities_of
from hpctrain.train.step import Step

KNOWN = "reference"
"""What a checkpoint's state has the identity of its run's reference under."""

ROWS_KNOWN = 1000
"""Of a reference that has more, by which it is known."""


def bring_references(world: World, origin: Path, folder: Path) -> None:
    """Have a run that goes on in another folder find its reference there, too: what the folder of its
    `origin` has of one, and this lacks. Collective; InputOutputError on all ranks where it cannot be copied.
    """
    with world.agreement():
        found = [*origin.glob("reference.*.npy"), origin / "reference.h5"] if world.rank == 0 else []
        for path in found:
            there = folder / path.name
            if there.exists() or not path.is_file():
                continue
            with failing_as(f"{there}: cannot be written"):
                partial = there.with_name(f".{there.name}.partial")
                with open_regular(path) as read, partial.open("wb") as written:
                    shutil.copyfileobj(read, written)
                flush_to_disk(partial)
                partial.replace(there)
                flush_to_disk(folder)


def require_same_reference(world: World, path: str | Path, found: str, checkpoint: Path | None) -> None:
    """Refuse a reference there, which is known by what was `found`, where the checkpoint that a run goes on
    from knows another one. Collective; InputOutputError on all ranks.
    """
    before = None if checkpoint is None else read_state(checkpoint, world.everyone).get(KNOWN)
    with world.agreement():
        if before not in {None, found}:
            own = f"whose reference is {before}, not {found} (restore that of its run)"
            raise InputOutputError(f"{path}: belongs to another run than {checkpoint}, {own}")


class ReferenceRows(Protocol):
    """Log-probabilities of the reference, fp32 [s] for each sequence; a tensor [n, s] will do."""

    def __getitem__(self, index: int, /) -> Tensor:
        """Return the row of a sequence."""


@dataclass
class StoredRows:
    """Rows of a reference file, whose checksums are compared when they are read."""

    file: StoredArray

    def __getitem__(self, index: int, /) -> Tensor:
        """Return the row of a sequence; InputOutputError if it is damaged."""
        stored = self.file.read(index, 1)[0]
        if zlib.crc32(stored["values"].tobytes()) != stored["checksum"]:
            raise InputOutputError(f"{self.file.where}: is damaged (row {index})")
        return torch.from_numpy(stored["values"])


@dataclass
class Referenced:
    """Samples whose micro-batches carry the reference's log-probabilities, which `rows` hold."""

    samples: SampleSource
    rows: ReferenceRows
    count: int

    def micro_batches(
        self, requests: Iterable[MicroBatchRequest], upcoming: Iterable[MicroBatchRequest]
    ) -> Iterator[MicroBatch]:
        """See SampleSource. InputOutputError where the rows are of a file that is damaged."""
        batch_requests = list(requests)
        for each, micro in zip(
            batch_requests, self.samples.micro_batches(batch_requests, upcoming), strict=True
        ):
            found = torch.zeros(micro.targets.shape)
            for row, index in enumerate(each.indices):
                found[row] = self.rows[int(index)]
            yield replace(micro, fields={**micro.fields, REFERENCE: found})


def refer(
    step: Step, corpus: Corpus, held_out: tuple[HeldOut, ...], folder: Path, checkpoint: Path | None
) -> tuple[tuple[HeldOut, ...], dict[str, str]]:
    """Have a run train on batches with the reference; what it evaluates, with the same, and what a
    checkpoint's state is to know of it. Collective, errors as in `with_reference`.
    """
    step.batches = with_reference(step, corpus.train, folder, "train", checkpoint)
    source, world = step.batches.source, step.engine.world
    assert isinstance(source, Referenced) and isinstance(source.rows, StoredRows)
    file = source.rows.file
    with world.agreement():
        found = _identity(file)
    require_same_reference(world, file.where, found, checkpoint)
    evaluated = tuple(
        replace(each, batches=with_reference(step, each.batches, folder, each.name, checkpoint))
        for each in held_out
    )
    return evaluated, {KNOWN: found}


def _identity(rows: StoredArray) -> str:
    """By what it is known: checksums of some rows, from first to last."""
    numbers = np.linspace(0, rows.size - 1, min(rows.size, ROWS_KNOWN)).astype(int).tolist()
    return blake2b(
        b"".join(rows.read(row, 1)["checksum"].tobytes() for row in numbers), digest_size=8
    ).hexdigest()


def with_reference(
    step: Step, batches: Batches, folder: Path, split: str, checkpoint: Path | None = None
) -> Batches:
    """The batches with the reference's log-probabilities. These are computed with the present parameters, and
    stored in the run's folder; a run that goes on from a `checkpoint` has them there, or in the folder that
    this is of. Collective; InputOutputError, on all ranks, where they cannot be stored or read.
    """
    world, path = step.engine.world, folder / f"reference.{split}.npy"
    if checkpoint is None:
        _store(step, batches, path)
    elif not world.everyone.broadcast_object(path.exists()):
        path = checkpoint.parent.parent / path.name
    with world.agreement():
        rows = _open(path, batches.source.count, step.engine.architecture.sequence)
    return batches.of(Referenced(batches.source, StoredRows(rows), batches.source.count))


def with_reference_of(step: Step, batches: Batches) -> Batches:
    """Return the batches with the log-probabilities of the model of `step`, which stay in memory: those of a
    few sequences. Collective.
    """
    rows = torch.cat(list(log_probabilities_of(step, batches)))
    return batches.of(Referenced(batches.source, rows, batches.source.count))


def _row(sequence: int) -> np.dtype[Any]:
    return np.dtype([("values", "<f4", (sequence,)), ("checksum", "<u4")])


def _open(path: Path, count: int, sequence: int) -> StoredArray:
    lost = "which a run writes at its start and requires to resume (restore it, or start the run again)"
    kind = _row(sequence)
    try:
        with open_regular(path) as file:
            npy.read_magic(file)
            shape, _, found = npy.read_array_header_1_0(file)
            whole = os.fstat(file.fileno()).st_size == file.tell() + count * kind.itemsize
            if shape == (count,) and found == kind and whole:
                return StoredArray(str(path), os.dup(file.fileno()), file.tell(), kind, count)
    except FileNotFoundError:
        raise InputOutputError(f"{path}: is missing, {lost}") from None
    except (OSError, ValueError, EOFError) as error:
        raise InputOutputError(f"{path}: cannot be read ({error}), {lost}") from None
    raise InputOutputError(f"{path}: is incomplete, or not of {count} sequences of {sequence} tokens, {lost}")


def _store(step: Step, batches: Batches, path: Path) -> None:
    world, count, sequence = step.engine.world, batches.source.count, step.engine.architecture.sequence
    partial, first = path.with_name(f".{path.name}.partial"), world.rank == 0
    kind = _row(sequence)
    with ExitStack() as opened:
        file: BinaryIO | None = None
        with world.agreement(), failing_as(f"{path}: cannot be written"):
            if first:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = opened.enter_context(partial.open("wb"))
                head = {"descr": npy.dtype_to_descr(kind), "fortran_order": False, "shape": (count,)}
                npy.write_array_header_1_0(file, head)
        for found in log_probabilities_of(step, batches):
            with world.agreement(), failing_as(f"{path}: cannot be written"):
                if file is not None:
                    rows = np.empty(len(found), kind)
                    rows["values"] = found.numpy()
                    rows["checksum"] = [zlib.crc32(row.tobytes()) for row in rows["values"]]
                    file.write(rows.tobytes())
    with world.agreement(), failing_as(f"{path}: cannot be written"):
        if first:
            flush_to_disk(partial)
            partial.replace(path)
            flush_to_disk(path.parent)
