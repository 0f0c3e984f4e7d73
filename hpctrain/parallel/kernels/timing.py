"""How long the kernels take for a pass of a matrix, measured here, and whether their results are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite, prod
from time import perf_counter, thread_time
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.parallel.kernels.matmul_kernels import BLOCK_ROWS, KERNELS, LIBRARY, MatmulKernel, Matrix, Pass

FLOPS = 1 << 29
"""Of a product that is measured, for each thread at most: some milliseconds. Of a larger one a piece is
measured, with its longest sides cut: how a sum weighs beside its product depends on the rows of tokens.
"""

_SHORTEST = 256
"""Of a side of what is measured of a larger product."""

_SECONDS, _ROUNDS = 1.0, 7
_GAIN = 1.02
"""How much quicker another kernel has to be: quickest times of some rounds differ by so much by chance. Most
of a block's products gain little each, and its step as much; a wrong choice costs no more than this.
"""

MEASUREMENT = f"measured on {FLOPS} FLOPs, sides from {_SHORTEST}, for gains of {_GAIN}"
"""What tells how is measured and chosen: what was kept of another way does not count. Whoever changes more of
it than these numbers says so here.
"""

_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""How far a kernel's result may be from the library's, in the norm: some hundred times what rounding of sums
in fp32 makes, or some units in the last place of results in 16 bits.
"""


class MatmulPass(NamedTuple):
    """A pass of a matrix [outputs, inputs] for so many rows of tokens."""

    kind: Pass
    rows: int
    outputs: int
    inputs: int

    @property
    def flops(self) -> float:
        """Of one product."""
        return 2.0 * self.rows * self.outputs * self.inputs

    @property
    def matrix(self) -> Matrix:
        """The same for any number of rows."""
        return self.kind, self.outputs, self.inputs

    def cut(self, most: float) -> MatmulPass:
        """What is measured for it: of at most so many FLOPs, or of sides that are short."""
        # The library takes a large table by blocks, of which there are then two.
        shortest = (_SHORTEST, 2 * BLOCK_ROWS if self.kind == "logits" else _SHORTEST, _SHORTEST)
        sides = list(self[1:])
        while 2.0 * prod(sides) > most:
            left = [side for side in range(3) if sides[side] > shortest[side]]
            if not left:
                break
            longest = max(left, key=lambda side: sides[side])
            sides[longest] = max(shortest[longest], -(-sides[longest] // 2))
        return MatmulPass(self.kind, *sides)


class Operands:
    """Random operands of a pass, of a format, and what it adds to."""

    def __init__(self, measured: MatmulPass, storage: torch.dtype, gradient: torch.dtype) -> None:
        rows, outputs, inputs = measured[1:]
        self.kind = measured.kind
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(storage)

        self.inputs, self.of_output, self.weight = (
            random(rows, inputs),
            random(rows, outputs),
            random(outputs, inputs),
        )
        self.sum = torch.zeros(outputs, inputs, dtype=gradient)

    def compute(self, kernel: MatmulKernel, first: bool = False) -> Tensor:
        """The pass by a kernel: its result; what is summed is overwritten with `first`."""
        if self.kind == "forward":
            return kernel.forward(self.inputs, self.weight)
        if self.kind == "logits":
            return kernel.logits(self.inputs, self.weight)
        if self.kind == "input_gradient":
            return kernel.input_gradient(self.of_output, self.weight)
        kernel.add_weight_gradient(self.sum, self.of_output, self.inputs, first)
        return self.sum

    def agrees(self, kernel: MatmulKernel) -> bool:
        """Whether a kernel multiplies these here as the library does, but for rounding."""
        expected = self.compute(LIBRARY, first=True).double()
        try:
            found = self.compute(kernel, first=True).double()
        except RuntimeError:
            return False
        apart = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
        return isfinite(apart) and apart <= _ROUNDING[self.weight.dtype]


def candidates(storage: torch.dtype) -> list[MatmulKernel]:
    """The kernels that there are here for operands of a format, in the order of KERNELS."""
    return [kernel for kernel in KERNELS.values() if kernel.multiplies(storage)]


def measure(
    wanted: Sequence[MatmulPass],
    storage: torch.dtype,
    gradient: torch.dtype,
    together: Callable[[float], float] = lambda seconds: seconds,
) -> list[dict[str, float]]:
    """Seconds of the quickest of some rounds, of each of the `wanted` by each kernel that there is, by name;
    infinite of one whose result is wrong here.

    Takes about a second. Ranks that measure at the same time make as many rounds: `together` gives all of
    them the longest of their times of one round.
    """
    threads, kernels = torch.get_num_threads(), candidates(storage)
    most = float(FLOPS * threads)
    # What one thread computes takes as much of its own time on a busy machine.
    now = thread_time if threads == 1 else perf_counter
    cut = [each.cut(most) for each in wanted]
    seconds: dict[MatmulPass, dict[str, float]] = {}
    began = now()
    for each in dict.fromkeys(cut):
        operands = Operands(each, storage, gradient)
        seconds[each] = {kernel.name: inf for kernel in kernels if not operands.agrees(kernel)}
        _measure_once(operands, kernels, seconds[each], now)
    rounds = max(1, min(_ROUNDS, int(_SECONDS / max(together(now() - began), 1e-9))))
    for each in dict.fromkeys(cut):
        operands = Operands(each, storage, gradient)
        for _ in range(rounds):
            _measure_once(operands, kernels, seconds[each], now)
    return [seconds[each] for each in cut]


def _measure_once(
    operands: Operands, kernels: Sequence[MatmulKernel], seconds: dict[str, float], now: Callable[[], float]
) -> None:
    for kernel in kernels:
        if seconds.get(kernel.name) != inf:
            began = now()
            operands.compute(kernel)
            seconds[kernel.name] = min(seconds.get(kernel.name, inf), now() - began)


def quickest(seconds: Mapping[str, float]) -> str:
    """The name of the kernel to choose: another than the one before in KERNELS has to be quicker by more than
    what measurements differ by.
    """
    names = [name for name in KERNELS if name in seconds]
    best = names[0]
    for name in names[1:]:
        if seconds[name] * _GAIN < seconds[best]:
            best = name
    return best
