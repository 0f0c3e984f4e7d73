"""Messages of an optimizer's update, without values."""

from __future__ import annotations

import torch

from hpctrain.optim.matrix.matrix_optimizer import MatrixOptimizer
from hpctrain.optim.matrix.replicated_matrices import ReplicatedMatrices
from hpctrain.optim.optimizer import Optimizer
from hpctrain.sharding.state import MASTER


def send_update_messages(optimizer: Optimizer) -> None:
    """Send the messages of a step of an optimizer, up to `copy_to_parameters`, without values.

    Only optimizers of whole matrices have any. Collective over the ranks that hold them.
    """
    if not isinstance(optimizer, MatrixOptimizer):
        return
    for matrices in optimizer.parameters:
        split = matrices.split_matrix
        if matrices.segment.parameter.requires_grad and split is not None and not matrices.is_exchanged:
            device = matrices.state[MASTER].device
            piece = torch.empty(matrices.local, dtype=optimizer.rules.matrix_rule.dtype, device=device)
            for _ in range(matrices.count):
                split.gather(piece)
    for exchanged in optimizer.exchanged:
        exchanged.exchange.run(None, None, None)
    optimizer.update_replicated(_start, 0.0)


def _start(matrices: ReplicatedMatrices) -> None:
    for exchanged in matrices.exchanged:
        exchanged.exchange.run(None, None, None)
    matrices.start_gather(matrices.empty_directions())
