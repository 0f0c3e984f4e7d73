"""Activation memory: what autograd really keeps for backward, and what the published formula says."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

from hpctrain.model.shape import ModelShape


class SavedTensors:
    """Counts the bytes that autograd saves while it is active, each storage once.

    Parameters and other tensors named in `without` are not counted.
    """

    def __init__(self, without: list[Tensor]) -> None:
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in without}
        self.bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def gpt_activation_bytes(
    shape: ModelShape, micro_size: int, tensor: int, sequence_parallel: bool, context: int = 1
) -> int:
    """Bytes of one GPT-2 layer's saved activations on one rank, in a 16-bit format, with dropout.

    Korthikanti et al. 2022 (arXiv 2205.05198), equations 2 and 4 without the terms 5as/h of the attention
    matrix, which fused attention does not keep: s b h (10 + 24/t), with sequence parallelism 34 s b h / t.
    Without dropout the two masks of a byte an element are not there: 2 s b h, or 2 s b h / t, less.
    """
    assert shape.family == "gpt2" and shape.mlp == 4 * shape.hidden, shape
    rows = shape.sequence // context * micro_size * shape.hidden
    masks = 2 if shape.dropout else 0
    whole = 8 + masks
    return rows * (whole + 24) // tensor if sequence_parallel else rows * whole + 24 * rows // tensor


def statistics_bytes(
    shape: ModelShape, micro_size: int, tensor: int, sequence_parallel: bool, context: int = 1
) -> int:
    """Bytes that the formula leaves out: means and deviations of two norms, log-sum-exps of attention.

    The former are kept in the activations' 16-bit format on the CPU, the latter in fp32.
    """
    tokens = shape.sequence // context * micro_size
    norms = 2 * 2 * 2 * tokens // (tensor if sequence_parallel else 1)
    return norms + 4 * tokens * shape.heads // tensor
