"""What a layer needs to know of the mesh."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.comm.work import Work
from hpctrain.parallel.kernels.layer_functions import TORCH, LayerFunctions
from hpctrain.parallel.kernels.matmul_kernels import KernelTable
from hpctrain.parallel.product_audit.matmul_audit import MatmulAudit
from hpctrain.parallel.saved_policy import SavedPolicy
from hpctrain.parallel.step_statistics import StepStatistics
from hpctrain.parallel.weight_gradients import WeightGradientQueue

if TYPE_CHECKING:
    from hpctrain.parallel.fp8.settings import Fp8Settings  # fp8/ imports this module

ContextForm = Literal["ring", "all_to_all"]


def _unsplit() -> Group:
    """The group of an axis along which nothing is split: it has one rank, and so never moves anything."""
    return planned_group(("expert",), 0, 1, Ledger())


def _one_stage() -> Group:
    """The group of a pipeline of one stage."""
    return planned_group(("pipeline",), 0, 1, Ledger())


@dataclass(frozen=True)
class LayerContext:
    """The groups over which layers are split, and how.

    `sequence_parallel` splits what lies between the tensor-parallel layers by sequence over the
    tensor axis; `context_form` says how attention crosses the context axis; `saved_policy` decides what
    is kept of the blocks for backward; `product_format` is that in which matrices are multiplied, which
    chooses the layers' Products, and `eight_bits` says how some are multiplied in 8 bits, if any; `kernels`
    say what computes the products of the others, and `functions` compute what is no product with a matrix;
    `noted` takes what layers and Products note of a step, and `audit`, if any, checks products; of a table
    split over the vocabulary every rank has a multiple of `table_rows`. Experts are spread over `expert` and
    each of them split over `expert_tensor`; the ranks of `micro_batch` train on tokens of the same
    micro-batches, those of `data` on others; layers before and behind these lie on the ranks of `pipeline`.
    """

    tensor: Group
    context: Group
    sequence_parallel: bool = False
    context_form: ContextForm = "ring"
    weight_gradients: WeightGradientQueue = field(default_factory=WeightGradientQueue)
    saved_policy: SavedPolicy = field(default_factory=SavedPolicy)
    product_format: torch.dtype = torch.float32
    fp8: Fp8Settings | None = None
    kernels: KernelTable = field(default_factory=KernelTable)
    functions: LayerFunctions = TORCH
    statistics: StepStatistics = field(default_factory=StepStatistics)
    audit: MatmulAudit | None = None
    table_rows: int = 1
    expert: Group = field(default_factory=_unsplit)
    expert_tensor: Group = field(default_factory=_unsplit)
    micro_batch: Group = field(default_factory=_unsplit)
    data: Group = field(default_factory=_unsplit)
    pipeline: Group = field(default_factory=_one_stage)

    def row_sizes(self, rows: int) -> list[int]:
        """How many of the rows of all tensor ranks each one takes where they are split."""
        ranks = self.tensor.size
        return [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]

    def gathered(self, x: Tensor) -> Tensor:
        """The whole sequence [s, ...] of x, which is a piece of it under sequence parallelism."""
        return self.tensor.all_gather(x) if self.sequence_parallel else x

    def start_sum(self, x: Tensor, blocking: bool = False) -> Work[Tensor]:
        """Sum x [s, ...] over the tensor axis: a piece of it under sequence parallelism, else in place."""
        if self.tensor.size == 1:
            return Work(x)
        start = self.tensor.start_reduce_scatter if self.sequence_parallel else self.tensor.start_all_reduce
        return start(x, blocking=blocking)

    def sum(self, x: Tensor) -> Tensor:
        """As `start_sum`, at once."""
        return self.start_sum(x, True).wait()

    @property
    def sequence_partial(self) -> frozenset[str]:
        """Axes over which parameters applied to the split sequence get partial gradients."""
        return frozenset({"tensor"}) if self.sequence_parallel else frozenset()
