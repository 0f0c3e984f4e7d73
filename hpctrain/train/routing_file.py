"""Routing files: the experts that routers have chosen for the tokens of some samples.

An HDF5 file with this content:

    /            attributes: format, version, experts, and the CRC-32 of all else
    /blocks      int32 [mixtures], the blocks that are mixtures
    /samples     int64 [samples], their numbers: positions in the order of samples, counted from a run's first
    /choices     int32 [mixtures, samples, sequence, k], the experts of every token, the best first; -1 where
                 a sequence is padding

All numbers are little-endian. The content does not depend on layout or time.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.error_messages import error_reason
from hpctrain.deck.sections.experts import RECORDED_BYTES
from hpctrain.errors import HpctrainError, InputOutputError, failing_as
from hpctrain.files import flush_to_disk, open_regular
from hpctrain.hdf5 import DAMAGE, CheckedFile, open_checked
from hpctrain.model.shape import ModelShape

FORMAT, VERSION = "hpctrain routing", 1
PADDING = -1
"""Value in place of an expert where a sequence is padding."""
FILE_BYTES = 2 * RECORDED_BYTES
"""Largest size of an array."""

_TYPES = {"blocks": "<i4", "samples": "<i8", "choices": "<i4"}


@dataclass(frozen=True)
class RoutingFile:
    """Content of a routing file, with the arrays as above."""

    experts: int
    blocks: NDArray[np.int32]
    samples: NDArray[np.int64]
    choices: NDArray[np.int32]

    @staticmethod
    def read(path: Path) -> RoutingFile:
        """Read a file.

        Raises:
            InputOutputError: The file cannot be read, or is damaged.
        """
        with failing_as(f"{path}: cannot be read"):
            open_regular(path).close()
        try:
            with open_checked(path) as file:
                if not file.has_attribute("format") or file.text("format") != FORMAT:
                    raise InputOutputError(
                        f"{path}: is not a routing file (a run with model.experts.record_routing writes one)"
                    )
                if (version := file.integer("version")) != VERSION:
                    raise InputOutputError(f"{path}: unsupported version {version} (expected {VERSION})")
                arrays = {name: _array(file, name) for name in _TYPES}
                experts, stored = file.integer("experts"), file.integer("checksum")
        except DAMAGE as error:
            raise InputOutputError(
                f"{path}: is damaged, or not an HDF5 file ({error_reason(error)})"
            ) from None
        content = RoutingFile(experts, **arrays)
        if content.checksum != stored:
            raise InputOutputError(f"{path}: is damaged: its checksum differs")
        return content

    def write(self, path: Path) -> None:
        """Write the file under a temporary name, flush it to disk, and rename it.

        HDF5 builds it in memory, since the library can crash if a disk is full.

        Raises:
            InputOutputError: The file cannot be written.
        """
        with h5py.File("routing", "w", driver="core", backing_store=False) as file:
            file.attrs["format"], file.attrs["version"] = np.bytes_(FORMAT), VERSION
            file.attrs["experts"], file.attrs["checksum"] = self.experts, self.checksum
            for name, kind in _TYPES.items():
                file.create_dataset(name, data=getattr(self, name).astype(kind), track_times=False)
            file.flush()
            content = file.id.get_file_image()
        temporary = path.with_name(f".{path.name}.partial")
        try:
            with failing_as(f"{path}: cannot be written"):
                temporary.write_bytes(content)
                flush_to_disk(temporary)
                temporary.replace(path)
                flush_to_disk(path.parent)
        finally:
            with suppress(OSError):
                temporary.unlink()

    @property
    def checksum(self) -> int:
        """CRC-32 of sizes and contents."""
        crc = zlib.crc32(f"{self.experts} {self.choices.shape}".encode())
        for name, kind in _TYPES.items():
            crc = zlib.crc32(np.ascontiguousarray(getattr(self, name).astype(kind)).data, crc)
        return crc

    def require_fit(self, path: Path, shape: ModelShape) -> None:
        """Raise HpctrainError if the choices do not fit a model, or are invalid."""
        blocks = list(shape.mixture_blocks)
        if shape.experts is None or not blocks:
            raise HpctrainError(f"{path}: requires a model with experts ([model.experts])")
        mixtures, samples, sequence, chosen = self.choices.shape
        for what, here, there in (
            ("choices of the blocks", blocks, self.blocks.tolist()),
            ("model.experts.count", shape.experts.count, self.experts),
            ("model.experts.per_token", shape.experts.per_token, chosen),
            ("batch.sequence", shape.sequence, sequence),
        ):
            if here != there:
                raise HpctrainError(f"{path}: does not fit: {what} = {there}, but {here} in this run")
        ordered = np.sort(self.choices[(self.choices != PADDING).any(axis=3)], axis=1)
        twice = chosen > 1 and bool((np.diff(ordered, axis=1) == 0).any())
        sound = (
            len(self.blocks) == mixtures and len(set(self.samples.tolist())) == len(self.samples) == samples
        )
        if not sound or twice or (ordered.size and not 0 <= ordered.min() <= ordered.max() < self.experts):
            raise HpctrainError(
                f"{path}: does not fit: expected {chosen} different experts of {self.experts} for each "
                "token, and each sample once"
            )

    def joined(self, other: RoutingFile) -> RoutingFile:
        """Return the samples of this file, and those of `other` that it lacks."""
        new = ~np.isin(other.samples, self.samples)
        samples = np.concatenate((self.samples, other.samples[new]))
        choices = np.concatenate((self.choices, other.choices[:, new]), axis=1)
        return RoutingFile(self.experts, self.blocks, samples, choices)

    def before(self, sample: int) -> RoutingFile:
        """Return only the samples with lower numbers than `sample`."""
        is_before = self.samples < sample
        return RoutingFile(self.experts, self.blocks, self.samples[is_before], self.choices[:, is_before])


def _array(file: CheckedFile, name: str) -> NDArray[Any]:
    """Read a dataset, after a check of its type and number of dims."""
    dataset = file.dataset(f"/{name}")
    if dataset.dtype != np.dtype(_TYPES[name]):
        raise ValueError(f"{name} has an unexpected type")
    if len(dataset.shape) != (4 if name == "choices" else 1):
        raise ValueError(f"{name} has an unexpected shape")
    return dataset.read(FILE_BYTES)
