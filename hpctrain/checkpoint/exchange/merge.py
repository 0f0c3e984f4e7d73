"""Adapters of a checkpoint, merged into the matrices that they are beside: W + (alpha / rank) B A."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, StoredTensor
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.checkpoint.tensor_source import ReadRequest, TensorSource
from hpctrain.deck.sections.adapters import Adapters
from hpctrain.errors import InputOutputError
from hpctrain.parallel.shards import Shard
from hpctrain.sharding.state import MASTER, MODEL


@dataclass(frozen=True)
class AdapterMerge:
    """The adapters of a checkpoint's model, if it has any."""

    structure: CheckpointIndex
    adapters: Adapters | None

    def has(self, dataset: str) -> bool:
        """Whether one belongs to a tensor, "/model/<name>.weight"."""
        return self._stored(dataset, "a") is not None

    def factors(self, source: TensorSource, dataset: str) -> tuple[Tensor, Tensor] | None:
        """B and A of a tensor, in fp32, if it has any. InputOutputError where the file is damaged."""
        a, b = self._stored(dataset, "a"), self._stored(dataset, "b")
        if self.adapters is None or a is None or b is None:
            return None
        return self._read(source, b), self._read(source, a)

    def merged(self, values: Tensor, first: int, factors: tuple[Tensor, Tensor]) -> Tensor:
        """Rows of a matrix, flat, from the row `first` on, with those of (alpha / rank) B A added."""
        assert self.adapters is not None
        b, a = factors
        own = values.view(-1, a.shape[1])
        return (own.float() + self.adapters.scale * (b[first : first + len(own)] @ a)).reshape(-1)

    def _stored(self, dataset: str, factor: str) -> StoredTensor | None:
        name = f"{dataset.removesuffix('.weight')}.adapter.{factor}"
        datasets: Mapping[str, StoredTensor] = self.structure.datasets
        return datasets.get(name.replace(f"/{MODEL}/", f"/{MASTER}/", 1), datasets.get(name))

    def _read(self, source: TensorSource, stored: StoredTensor) -> Tensor:
        """All of a small tensor in fp32, compared with its checksums."""
        shard = Shard.replicated(stored.dataset.rpartition("/")[2], stored.shape)
        values = torch.empty(shard.elements, dtype=getattr(torch, stored.kind))
        sums = checksum.seeds(stored.dataset, stored.kind, stored.shape)
        source.fill([ReadRequest(TensorRange(stored.dataset, shard, values), stored, sums)])
        if not np.array_equal(sums, self.structure.sums[stored.pieces]):
            damage = "is damaged: it differs from its checksums"
            raise InputOutputError(f"{self.structure.path}: {stored.dataset} {damage}")
        return values.float().view(stored.shape)
