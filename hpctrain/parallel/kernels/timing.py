"""Measurement of kernels: their time for a pass of a matrix, and whether their results are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite, prod
from time import perf_counter, thread_time
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.parallel.kernels.matmul_kernels import (
    BLOCK_ROWS,
    KERNELS,
    LIBRARY,
    MatmulKernel,
    Pass,
    PassShape,
)

MAX_FLOPS_PER_THREAD = 1 << 29
"""Most FLOPs per thread of a measured product: some milliseconds.

Of a larger product a part is measured, with its longest sides shortened, since the share of the sum in a
weight gradient depends on the rows of tokens.
"""

_SHORTEST = 256
"""Smallest side of a part of a larger product."""

_SECONDS, _ROUNDS = 1.0, 7
"""Time that the rounds of a measurement may take together, and the largest number of rounds."""
_GAIN = 1.02
"""Factor by which another kernel must be faster.

The shortest times of some rounds differ by so much by chance. A wrong choice costs no more than this.
"""

MEASUREMENT = f"measured on {MAX_FLOPS_PER_THREAD} FLOPs, sides from {_SHORTEST}, for gains of {_GAIN}"
"""Description of the measurement. Stored measurements with another description are ignored.

A change of the measurement beyond these numbers must change this text.
"""

_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest relative difference of a result from the library's, in the norm.

It is a hundred times the rounding error of sums in fp32, or some units in the last place in 16 bits.
"""


class MatmulPass(NamedTuple):
    """Pass of a matrix [outputs, inputs] for a number of rows of tokens."""

    kind: Pass
    rows: int
    outputs: int
    inputs: int

    @property
    def flops(self) -> float:
        """FLOPs of the product."""
        return 2.0 * self.rows * self.outputs * self.inputs

    @property
    def shape(self) -> PassShape:
        """Pass and sizes of its matrix, without the number of rows."""
        return self.kind, self.outputs, self.inputs

    def shortened(self, most: float) -> MatmulPass:
        """Return the product that is measured instead, with at most `most` FLOPs or short sides."""
        # The library multiplies a large table in blocks; two of them are measured.
        shortest = (_SHORTEST, 2 * BLOCK_ROWS if self.kind == "logits" else _SHORTEST, _SHORTEST)
        sides = list(self[1:])
        while 2.0 * prod(sides) > most:
            shortenable = [side for side in range(3) if sides[side] > shortest[side]]
            if not shortenable:
                break
            longest = max(shortenable, key=lambda side: sides[side])
            sides[longest] = max(shortest[longest], -(-sides[longest] // 2))
        return MatmulPass(self.kind, *sides)


class Operands:
    """Random operands of a pass, and the sum to which it adds.

    Args:
        measured: The pass.
        storage: Format of the operands.
        gradient: Format of the sum.
    """

    def __init__(self, measured: MatmulPass, storage: torch.dtype, gradient: torch.dtype) -> None:
        rows, outputs, inputs = measured[1:]
        self.kind = measured.kind
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(storage)

        self.inputs, self.output_gradient, self.weight = (
            random(rows, inputs),
            random(rows, outputs),
            random(outputs, inputs),
        )
        self.sum = torch.zeros(outputs, inputs, dtype=gradient)

    def compute(self, kernel: MatmulKernel, overwrite: bool = False) -> Tensor:
        """Return the result of the pass by a kernel. `overwrite` is for a weight gradient."""
        if self.kind == "weight_gradient":
            kernel.add_weight_gradient(self.sum, self.output_gradient, self.inputs, overwrite)
            return self.sum
        if self.kind == "input_gradient":
            return kernel.input_gradient(self.output_gradient, self.weight)
        multiply = kernel.logits if self.kind == "logits" else kernel.forward
        return multiply(self.inputs, self.weight)

    def agrees(self, kernel: MatmulKernel) -> bool:
        """Return True if a kernel has the library's result on this machine, up to rounding."""
        expected = self.compute(LIBRARY, overwrite=True).double()
        try:
            result = self.compute(kernel, overwrite=True).double()
        except RuntimeError:
            return False
        difference = float((result - expected).norm() / expected.norm().clamp_min(1e-30))
        return isfinite(difference) and difference <= _ROUNDING[self.weight.dtype]


def candidates(storage: torch.dtype) -> list[MatmulKernel]:
    """Return the available kernels for operands of a format, in the order of KERNELS."""
    return [kernel for kernel in KERNELS.values() if kernel.is_available(storage)]


def measure(
    passes: Sequence[MatmulPass],
    storage: torch.dtype,
    gradient: torch.dtype,
    longest_over_ranks: Callable[[float], float] = lambda seconds: seconds,
) -> list[dict[str, float]]:
    """Return the seconds of each pass by each available kernel, by its name. Takes about a second.

    They are the shortest of some rounds, and infinite for a kernel with wrong results on this machine.

    Args:
        passes: Passes to measure.
        storage: Format of the operands.
        gradient: Format of weight gradients.
        longest_over_ranks: Returns the longest time of all ranks that measure at the same time, so that
            they make equally many rounds.
    """
    threads, kernels = torch.get_num_threads(), candidates(storage)
    most = float(MAX_FLOPS_PER_THREAD * threads)
    # The CPU time of one thread does not depend on how busy the machine is.
    now = thread_time if threads == 1 else perf_counter
    shortened = [each.shortened(most) for each in passes]
    seconds: dict[MatmulPass, dict[str, float]] = {}
    start = now()
    for each in dict.fromkeys(shortened):
        operands = Operands(each, storage, gradient)
        seconds[each] = {kernel.name: inf for kernel in kernels if not operands.agrees(kernel)}
        _measure_once(operands, kernels, seconds[each], now)
    rounds = max(1, min(_ROUNDS, int(_SECONDS / max(longest_over_ranks(now() - start), 1e-9))))
    for each in dict.fromkeys(shortened):
        operands = Operands(each, storage, gradient)
        for _ in range(rounds):
            _measure_once(operands, kernels, seconds[each], now)
    return [seconds[each] for each in shortened]


def _measure_once(
    operands: Operands, kernels: Sequence[MatmulKernel], seconds: dict[str, float], now: Callable[[], float]
) -> None:
    for kernel in kernels:
        if seconds.get(kernel.name) != inf:
            start = now()
            operands.compute(kernel)
            seconds[kernel.name] = min(seconds.get(kernel.name, inf), now() - start)


def quickest(seconds: Mapping[str, float]) -> str:
    """Return the name of the kernel to choose.

    A kernel that is later in KERNELS must be faster by more than measurements differ by chance.
    """
    names = [name for name in KERNELS if name in seconds]
    best = names[0]
    for name in names[1:]:
        if seconds[name] * _GAIN < seconds[best]:
            best = name
    return best
