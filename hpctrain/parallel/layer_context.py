"""Context of the layers of one rank: the groups that they are split over, and how they compute.

Every layer receives one `LayerContext` and keeps it as `layer_context`. With 2 data, 2 pipeline and 2 tensor
ranks, rank 5 has these groups (the tensor axis is innermost):

| group | ranks | layers use it for |
|---|---|---|
| `tensor` | 4, 5 | features of the linear layers, rows of the vocabulary |
| `context` | 5 | pieces of a sequence in attention |
| `micro_batch` | 4, 5 | all ranks with tokens of the same micro-batches |
| `pipeline` | 1, 5 | stages before and after this one |
| `data` | 5, 7 | ranks with other micro-batches |
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.comm.work import Work
from hpctrain.parallel.backward.saved_policy import SavedPolicy
from hpctrain.parallel.backward.weight_gradients import WeightGradientQueue
from hpctrain.parallel.kernels.functions.layer_functions import TORCH, LayerFunctions
from hpctrain.parallel.kernels.matmul_kernels import KernelTable
from hpctrain.parallel.product_check import ProductCheck
from hpctrain.parallel.sequence import ContextForm
from hpctrain.parallel.step_statistics import StepStatistics

if TYPE_CHECKING:
    from hpctrain.parallel.fp8.recipes import Fp8Settings  # fp8/ imports this module


@dataclass(frozen=True)
class ProductSettings:
    """Settings of the layers' products with weight matrices.

    Attributes:
        kernels: Choice of the library for each product that is not in 8 bits.
        fp8: Settings of products in 8 bits. None if there are none.
        audit: Check of the products of training steps. None if they are not checked.
    """

    kernels: KernelTable = field(default_factory=KernelTable)
    fp8: Fp8Settings | None = None
    audit: ProductCheck | None = None

    @property
    def active_audit(self) -> ProductCheck | None:
        """Check of products within a step that is checked; None in other steps."""
        return self.audit if self.audit is not None and self.audit.active else None


def _one_rank(axis: str) -> Group:
    """Return the group of an axis along which nothing is split."""
    return planned_group((axis,), 0, 1, Ledger())


@dataclass(frozen=True)
class LayerContext:
    """Groups and choices with which a layer is built.

    Attributes:
        tensor: Ranks that split features (tensor parallelism).
        context: Ranks that split sequences in attention (context parallelism).
        sequence_parallel: True if tensor ranks also split the sequence between the linear layers
            (arXiv 2205.05198).
        context_form: How attention exchanges pieces of a sequence over `context`.
        expert: Ranks that split the experts of a mixture.
        expert_tensor: Ranks that split the features of each expert.
        micro_batch: Ranks with tokens of the same micro-batches.
        data: Ranks that hold the same parts of the model and compute other micro-batches (data parallelism).
        pipeline: One rank of each stage, between which hidden states are sent (pipeline parallelism).
        products: How products with weight matrices are computed.
        functions: What computes attention, norms, activations and softmax.
        table_rows: Each rank's rows of a table that is split over the vocabulary are a multiple of this.
        saved_policy: Decides what layers save for the backward pass.
        weight_gradients: Weight gradients that are computed later.
        statistics: Receives what layers record of a step.
    """

    tensor: Group
    context: Group
    sequence_parallel: bool = False
    context_form: ContextForm = "ring"
    expert: Group = field(default_factory=lambda: _one_rank("expert"))
    expert_tensor: Group = field(default_factory=lambda: _one_rank("expert_tensor"))
    micro_batch: Group = field(default_factory=lambda: _one_rank("tensor"))
    data: Group = field(default_factory=lambda: _one_rank("data"))
    pipeline: Group = field(default_factory=lambda: _one_rank("pipeline"))
    products: ProductSettings = field(default_factory=ProductSettings)
    functions: LayerFunctions = TORCH
    table_rows: int = 1
    saved_policy: SavedPolicy = field(default_factory=SavedPolicy)
    weight_gradients: WeightGradientQueue = field(default_factory=WeightGradientQueue)
    statistics: StepStatistics = field(default_factory=StepStatistics)

    def unsplit(self) -> LayerContext:
        """Return the context of a layer that every tensor rank computes as a whole, without messages."""
        return replace(self, tensor=_one_rank("tensor"), sequence_parallel=False)

    def row_sizes(self, rows: int) -> list[int]:
        """Return how many of `rows` rows each tensor rank has if they are split as evenly as possible."""
        ranks = self.tensor.size
        return [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]

    def gather_sequence(self, x: Tensor) -> Tensor:
        """Return the full sequence [s, ...]. Collective over `tensor` under sequence parallelism.

        Args:
            x: This rank's piece [s/t, ...] under sequence parallelism, else the full sequence.
        """
        return self.tensor.all_gather(x) if self.sequence_parallel else x

    def start_tensor_sum(self, x: Tensor, blocking: bool = False) -> Work[Tensor]:
        """Start to sum partial results over tensor ranks. Collective over `tensor`.

        Examples are the output of a row-parallel layer and the input gradient of a column-parallel one.

        Args:
            x: This rank's term [s, ...]; the sum may overwrite it.
            blocking: True if the caller waits at once.

        Returns:
            Work whose result is this rank's piece [s/t, ...] under sequence parallelism (a reduce-scatter),
            else the sum [s, ...] (an all-reduce).
        """
        if self.tensor.size == 1:
            return Work(x)
        start = self.tensor.start_reduce_scatter if self.sequence_parallel else self.tensor.start_all_reduce
        return start(x, blocking=blocking)

    def tensor_sum(self, x: Tensor) -> Tensor:
        """Sum partial results over tensor ranks, as `start_tensor_sum` does. Collective over `tensor`."""
        return self.start_tensor_sum(x, True).wait()

    @property
    def sequence_partial(self) -> frozenset[str]:
        """Axes over which gradients of replicated parameters are partial, as for `Shard.partial`.

        Under sequence parallelism a norm sees a piece of the sequence on each tensor rank.
        """
        return frozenset({"tensor"}) if self.sequence_parallel else frozenset()
