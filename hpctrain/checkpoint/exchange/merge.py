"""Merging of the low-rank adapters of a checkpoint into its matrices: W + (alpha / rank) B A."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, StoredTensor
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.checkpoint.tensor_source import ReadRequest, TensorSource
from hpctrain.checkpoint.verify_checksums import require_checksums
from hpctrain.deck.sections.adapters import Adapters
from hpctrain.parallel.shards import Shard
from hpctrain.sharding.state import MASTER, MODEL


@dataclass(frozen=True)
class AdapterMerge:
    """Adapters of a checkpoint.

    Attributes:
        structure: Index of the checkpoint.
        adapters: Settings of its adapters; None if it has none.
    """

    structure: CheckpointIndex
    adapters: Adapters | None

    def has_adapter(self, dataset: str) -> bool:
        """Return True if a weight "/model/<name>.weight" has an adapter."""
        return self._stored(dataset, "a") is not None

    def factors(self, source: TensorSource, dataset: str) -> tuple[Tensor, Tensor] | None:
        """Return the factors B [out, rank] and A [rank, in] of a weight in fp32; None if it has no adapter.

        Raises:
            InputOutputError: They differ from their checksums.
        """
        a, b = self._stored(dataset, "a"), self._stored(dataset, "b")
        if self.adapters is None or a is None or b is None:
            return None
        return self._read(source, b), self._read(source, a)

    def add_update(self, values: Tensor, first: int, factors: tuple[Tensor, Tensor]) -> Tensor:
        """Return rows of a weight plus the same rows of (alpha / rank) B A, in fp32.

        Args:
            values: The rows, flat.
            first: Number of the first row.
            factors: B and A.
        """
        assert self.adapters is not None
        b, a = factors
        rows = values.view(-1, a.shape[1])
        update = self.adapters.scale * (b[first : first + len(rows)] @ a)
        return (rows.float() + update).reshape(-1)

    def _stored(self, dataset: str, factor: str) -> StoredTensor | None:
        """Return the dataset of a factor "a" or "b", or its master weights; None if there is none."""
        name = f"{dataset.removesuffix('.weight')}.adapter.{factor}"
        datasets: Mapping[str, StoredTensor] = self.structure.datasets
        return datasets.get(name.replace(f"/{MODEL}/", f"/{MASTER}/", 1), datasets.get(name))

    def _read(self, source: TensorSource, stored: StoredTensor) -> Tensor:
        """Return a complete tensor in fp32 after comparing its checksums."""
        shard = Shard.replicated(stored.dataset.rpartition("/")[2], stored.shape)
        values = torch.empty(shard.elements, dtype=getattr(torch, stored.kind))
        sums = checksum.seeds(stored.dataset, stored.kind, stored.shape)
        source.fill([ReadRequest(TensorRange(stored.dataset, shard, values), stored, sums)])
        require_checksums(self.structure.path, stored, sums, self.structure.sums[stored.pieces])
        return values.float().view(stored.shape)
