"""Faults of layouts, which `hpctrain check` must find by comparing a layout with one rank.

Each module has the faults of one seam, a place where parts of the program meet. A fault is planted in the
steps of the layout alone: the run of one rank, with which the layout is compared, has none.
"""

from __future__ import annotations

from tests.train.layout_faults import (
    accumulation,
    context_parallel,
    data_parallel,
    expert_parallel,
    first_faults,
    fp8_products,
    optimizers,
    pipeline_parallel,
    replicas,
    tensor_parallel,
    user_modules,
)
from tests.train.layout_faults.fault import LayoutFault, planted

__all__ = ["FAULTS", "LayoutFault", "planted"]

SEAMS = (
    first_faults,
    data_parallel,
    tensor_parallel,
    context_parallel,
    pipeline_parallel,
    expert_parallel,
    fp8_products,
    accumulation,
    optimizers,
    replicas,
    user_modules,
)

FAULTS = [fault for seam in SEAMS for fault in seam.faults()]
"""All faults, by seam."""
