"""Log-probabilities of all answers by the reference model, computed before the first step and stored.

The reference is the model that the run starts from. The file `reference.train.npy` in the run folder, and one
file for each held-out set, have one row per sequence: the log-probabilities of its targets, and their CRC-32.
A file is complete or absent. A resumed run reads it.
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
from hpctrain.train.step import Step
from hpctrain.train.token_scores import log_probabilities_of

REFERENCE_CHECKSUM = "reference"
"""Key of a checkpoint's state for the checksum of its run's reference."""

CHECKSUM_ROWS = 1000
"""Largest number of rows in the checksum of a reference."""


def copy_references(world: World, source: Path, folder: Path) -> None:
    """Copy the files of the reference into the folder of a run that resumes in another folder. Collective.

    Args:
        world: The world.
        source: Folder of the run that wrote the checkpoint.
        folder: Folder of the resumed run.

    Raises:
        InputOutputError: A file cannot be copied; raised on all ranks.
    """
    with world.agreement():
        paths = [*source.glob("reference.*.npy"), source / "reference.h5"] if world.rank == 0 else []
        for path in paths:
            target = folder / path.name
            if target.exists() or not path.is_file():
                continue
            with failing_as(f"{target}: cannot be written"):
                partial = target.with_name(f".{target.name}.partial")
                with open_regular(path) as read, partial.open("wb") as written:
                    shutil.copyfileobj(read, written)
                flush_to_disk(partial)
                partial.replace(target)
                flush_to_disk(folder)


def require_same_reference(world: World, path: str | Path, checksum: str, checkpoint: Path | None) -> None:
    """Check that a reference is the one of the checkpoint that a run resumes from. Collective.

    Args:
        world: The world.
        path: File of the reference, for errors.
        checksum: Checksum of the reference.
        checkpoint: The checkpoint; None for a new run.

    Raises:
        InputOutputError: The checkpoint belongs to another reference; raised on all ranks.
    """
    before = None if checkpoint is None else read_state(checkpoint, world.everyone).get(REFERENCE_CHECKSUM)
    with world.agreement():
        if before not in {None, checksum}:
            other = f"whose reference is {before}, not {checksum} (restore that of its run)"
            raise InputOutputError(f"{path}: belongs to another run than {checkpoint}, {other}")


class ReferenceRows(Protocol):
    """Log-probabilities of the reference, fp32 [s] for each sequence, such as a tensor [n, s]."""

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
class SamplesWithReference:
    """Samples whose micro-batches have a field with the log-probabilities of the reference."""

    samples: SampleSource
    rows: ReferenceRows
    count: int

    def micro_batches(
        self, requests: Iterable[MicroBatchRequest], upcoming: Iterable[MicroBatchRequest]
    ) -> Iterator[MicroBatch]:
        """Yield micro-batches as a SampleSource does; raise InputOutputError if a row is damaged."""
        batch_requests = list(requests)
        for each, micro in zip(
            batch_requests, self.samples.micro_batches(batch_requests, upcoming), strict=True
        ):
            values = torch.zeros(micro.targets.shape)
            for row, index in enumerate(each.indices):
                values[row] = self.rows[int(index)]
            yield replace(micro, fields={**micro.fields, REFERENCE: values})


def add_reference(
    step: Step, corpus: Corpus, held_out: tuple[HeldOut, ...], folder: Path, checkpoint: Path | None
) -> tuple[tuple[HeldOut, ...], dict[str, str]]:
    """Add the reference to the samples of a run. Collective; errors are those of `with_reference`.

    Returns:
        The held-out sets with the reference, and the entries of a checkpoint's state about it.
    """
    step.batches = with_reference(step, corpus.train, folder, "train", checkpoint)
    source, world = step.batches.source, step.engine.world
    assert isinstance(source, SamplesWithReference) and isinstance(source.rows, StoredRows)
    file = source.rows.file
    with world.agreement():
        checksum = _checksum(file)
    require_same_reference(world, file.where, checksum, checkpoint)
    sets_with_reference = tuple(
        replace(each, batches=with_reference(step, each.batches, folder, each.name, checkpoint))
        for each in held_out
    )
    return sets_with_reference, {REFERENCE_CHECKSUM: checksum}


def _checksum(rows: StoredArray) -> str:
    """Return the checksum of a reference, from the checksums of evenly spaced rows."""
    numbers = np.linspace(0, rows.size - 1, min(rows.size, CHECKSUM_ROWS)).astype(int).tolist()
    return blake2b(
        b"".join(rows.read(row, 1)["checksum"].tobytes() for row in numbers), digest_size=8
    ).hexdigest()


def with_reference(
    step: Step, batches: Batches, folder: Path, split: str, checkpoint: Path | None = None
) -> Batches:
    """Return the batches with the log-probabilities of the reference. Collective.

    A new run computes them with the present parameters, and stores them in its folder. A resumed run reads
    them from there, or from the folder of its checkpoint.

    Raises:
        InputOutputError: They cannot be stored or read; raised on all ranks.
    """
    world, path = step.engine.world, folder / f"reference.{split}.npy"
    if checkpoint is None:
        _store(step, batches, path)
    elif not world.everyone.broadcast_object(path.exists()):
        path = checkpoint.parent.parent / path.name
    with world.agreement():
        rows = _open(path, batches.source.count, step.engine.architecture.sequence)
    return batches.with_source(SamplesWithReference(batches.source, StoredRows(rows), batches.source.count))


def with_reference_of(step: Step, batches: Batches) -> Batches:
    """Return batches of few sequences with the log-probabilities of the model of `step`. Collective."""
    rows = torch.cat(list(log_probabilities_of(step, batches)))
    return batches.with_source(SamplesWithReference(batches.source, rows, batches.source.count))


def _row(sequence: int) -> np.dtype[Any]:
    return np.dtype([("values", "<f4", (sequence,)), ("checksum", "<u4")])


def _open(path: Path, count: int, sequence: int) -> StoredArray:
    reason = "which a run writes at its start and requires to resume (restore it, or start the run again)"
    kind = _row(sequence)
    try:
        with open_regular(path) as file:
            npy.read_magic(file)
            shape, _, stored_kind = npy.read_array_header_1_0(file)
            has_all_rows = os.fstat(file.fileno()).st_size == file.tell() + count * kind.itemsize
            if shape == (count,) and stored_kind == kind and has_all_rows:
                return StoredArray(str(path), os.dup(file.fileno()), file.tell(), kind, count)
    except FileNotFoundError:
        raise InputOutputError(f"{path}: is missing, {reason}") from None
    except (OSError, ValueError, EOFError) as error:
        raise InputOutputError(f"{path}: cannot be read ({error}), {reason}") from None
    raise InputOutputError(
        f"{path}: is incomplete, or not of {count} sequences of {sequence} tokens, {reason}"
    )


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
        for values in log_probabilities_of(step, batches):
            with world.agreement(), failing_as(f"{path}: cannot be written"):
                if file is not None:
                    rows = np.empty(len(values), kind)
                    rows["values"] = values.numpy()
                    rows["checksum"] = [zlib.crc32(row.tobytes()) for row in rows["values"]]
                    file.write(rows.tobytes())
    with world.agreement(), failing_as(f"{path}: cannot be written"):
        if first:
            flush_to_disk(partial)
            partial.replace(path)
            flush_to_disk(path.parent)
