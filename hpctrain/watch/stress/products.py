"""Test of matrix products: multiply matrices of integers whose product is known, compare and time them.

The rows of one operand repeat a few vectors of integers, and so do the columns of the other. So all results
are in a small table of products of these vectors, which is computed with integers. The integers are so small
that fp32 sums them without rounding, in whatever order a library adds.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from math import isqrt
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.host.device import gpu_identity, gpu_name, on_host
from hpctrain.parallel.kernels.matmul_kernels import LIBRARY, MatmulKernel, Pass
from hpctrain.parallel.kernels.timing import candidates
from hpctrain.watch.stress.difference import difference
from hpctrain.watch.stress.record import ResultHook, StressRank, StressRecord, TestTime, clock_of, one_thread

TEST = "products"
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS: tuple[Pass, ...] = ("forward", "input_gradient", "weight_gradient")

DISTINCT = 61
"""Number of vectors that repeat. It is a prime, so that each place of a kernel's tiles gets all of them."""

LONGEST = 0.5
"""Largest seconds of a product. Larger shapes are left out for kernels that would need more."""

TIMES = 3
"""Number of times that a timed product is computed."""

_EXACT = 1 << 24  # sums up to here are exact in fp32
_LARGEST = 127
"""Largest integer. 16-bit formats hold it, and it uses all bits of their mantissa."""

_ROUNDING_SHARE = 1e-3
"""Share of a result's elements from which on differences of one unit are another rounding, not a fault."""


class StressShape(NamedTuple):
    """Sizes of a product of rows [rows, inputs] with a matrix [outputs, inputs]."""

    rows: int
    outputs: int
    inputs: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


HOST_SHAPES = (
    StressShape(32, 768, 768),
    StressShape(512, 768, 768),
    StressShape(512, 3072, 768),
    StressShape(512, 768, 3072),
)
GPU_SHAPES = (StressShape(512, 4096, 4096), StressShape(8192, 4096, 4096))
"""Shapes for GPUs. The first is small, and shows which kernels are too slow for the others."""


class Case:
    """Pass of a matrix product with operands and possible results.

    Args:
        kind: The pass.
        shape: Sizes of the product.
        form: Name of the format, one of `FORMATS`.
        device: Device of the operands.
        seed: Seed of the integers.
    """

    def __init__(self, kind: Pass, shape: StressShape, form: str, device: torch.device, seed: int) -> None:
        rows, outputs, inputs = shape
        storage = FORMATS[form]
        self.kind, self.shape, self.form, self.device = kind, shape, form, device
        sides = {"forward": (rows, inputs, outputs), "input_gradient": (rows, outputs, inputs)}
        lefts, length, rights = sides.get(kind, (outputs, rows, inputs))
        left, right = vectors(length, 2 * seed), vectors(length, 2 * seed + 1)
        exact = (
            (left @ right.T)
            .float()
            .to(device)[_repeating_indices(lefts).to(device)][:, _repeating_indices(rights).to(device)]
        )
        left_rows, right_rows = (
            left[_repeating_indices(lefts)].to(storage),
            right[_repeating_indices(rights)].to(storage),
        )
        if kind == "weight_gradient":
            left_rows = left_rows.T.contiguous()
        if kind != "forward":
            right_rows = right_rows.T.contiguous()
        self.left, self.right = left_rows.to(device), right_rows.to(device)
        rounded = exact.to(storage)
        self.possible_results = [rounded]
        if kind == "weight_gradient":  # whether a product is rounded before it is added depends on the kernel
            self.possible_results = [exact] if storage == torch.float32 else [exact, rounded.float()]
            self.sum = torch.empty_like(exact)

    @property
    def flops(self) -> float:
        """FLOPs of one product."""
        return 2.0 * self.shape.rows * self.shape.outputs * self.shape.inputs

    def compute(self, kernel: MatmulKernel) -> Tensor:
        """Return the product of a kernel."""
        if self.kind == "forward":
            return kernel.forward(self.left, self.right)
        if self.kind == "input_gradient":
            return kernel.input_gradient(self.left, self.right)
        kernel.add_weight_gradient(self.sum, self.left, self.right, overwrite=True)
        return self.sum

    def expected(self, actual: Tensor) -> Tensor:
        """Return the expected result. If there are two roundings, it is the one with fewer differences."""
        return min(
            self.possible_results,
            key=lambda known: 0 if torch.equal(known, actual) else _count(known, actual),
        )

    def rounds_otherwise(self, actual: Tensor, expected: Tensor) -> bool:
        """Return True if a result in 16 bits has another rounding, which is not a fault.

        That is so if many elements differ, and only by one unit in the last place: the library rounds more
        than once.
        """
        if self.form == "fp32" or _count(actual, expected) < _ROUNDING_SHARE * actual.numel():
            return False
        storage = FORMATS[self.form]
        steps = actual.to(storage).view(torch.int16).int() - expected.to(storage).view(torch.int16).int()
        return int(steps.abs().max()) <= 1


def vectors(length: int, seed: int) -> Tensor:
    """Return [DISTINCT, length] odd integers. Scalar products of two of these vectors are at most 2^24."""
    largest = min(_LARGEST, isqrt(_EXACT // length))
    largest -= 1 - largest % 2
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, largest + 1, (DISTINCT, length), generator=generator) | 1
    return sizes * (1 - 2 * torch.randint(0, 2, (DISTINCT, length), generator=generator))


class ProductTest:
    """Test of every pass of some shapes, in each format, by each kernel and on each core.

    One thread computes a product, bound to one core. The rates are those of the forward pass of the second
    shape, so that they can be compared.

    Args:
        this_rank: This rank.
        cores: Cores that this rank tests; empty on GPUs.
        shapes: Shapes of the products.
        on_result: Function that is called with each result before it is compared.
    """

    def __init__(
        self,
        this_rank: StressRank,
        cores: Sequence[int],
        shapes: Sequence[StressShape],
        on_result: ResultHook,
    ) -> None:
        self.this_rank, self.cores, self.shapes, self.on_result = (
            this_rank,
            tuple(cores),
            tuple(shapes),
            on_result,
        )
        self._steps = self._cases()
        self._speeds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._pace: dict[tuple[str, Pass, str], float] = {}  # seconds of a FLOP
        self._excluded: set[tuple[str, str]] = set()

    def run(self, record: StressRecord, test_time: TestTime, number: int) -> None:  # noqa: ARG002
        """Multiply until the time is over. Continue after the last product of the previous call."""
        mask = os.sched_getaffinity(0) if self.cores else set()
        try:
            with one_thread(), torch.no_grad():
                while True:
                    case, kernel, core = next(self._steps)
                    if (case.form, kernel.name) not in self._excluded:
                        self._test(case, kernel, self._bind(core), record)
                    if test_time.over:
                        break
        finally:
            if mask:
                os.sched_setaffinity(0, mask)
        for form, storage in FORMATS.items():
            kernels = [(form, kernel.name) for kernel in self._kernels(storage)]
            kernels = [kernel for kernel in kernels if kernel not in self._excluded]
            # The fastest kernel may be one that was not timed yet.
            if kernels and all(self._speeds[kernel] for kernel in kernels):
                record.rates[f"{form} {TEST}"] = max(median(self._speeds.pop(kernel)) for kernel in kernels)

    def _kernels(self, storage: torch.dtype) -> list[MatmulKernel]:
        return candidates(storage) if on_host(self.this_rank.device) else [LIBRARY]

    def _cases(self) -> Iterator[tuple[Case, MatmulKernel, int]]:
        """Yield all cases endlessly, with other integers each time."""
        device = self.this_rank.device
        for seed in count():
            for shape in self.shapes:
                for kind in KINDS:
                    for form, storage in FORMATS.items():
                        case = Case(kind, shape, form, device, seed)
                        for core in self.cores or (-1,):
                            for kernel in self._kernels(storage):
                                pace = self._pace.get((form, kind, kernel.name), 0.0)
                                if pace * case.flops <= LONGEST:
                                    yield case, kernel, core

    def _bind(self, core: int) -> str:
        """Bind this thread to a core. Return the name of what computes now, for messages."""
        device = self.this_rank.device
        if not on_host(device):
            return f"GPU {device.index} ({gpu_name(device)}, {gpu_identity(device)})"
        with suppress(OSError):  # taken from this process meanwhile
            if core >= 0:
                os.sched_setaffinity(0, {core})
                return f"core {core}"
        return "one of its cores"

    def _test(self, case: Case, kernel: MatmulKernel, core: str, record: StressRecord) -> None:
        """Multiply and compare. Timed products are repeated, since the first one takes longer."""
        timed = case.kind == KINDS[0] and case.shape == self.shapes[:2][-1]
        now = clock_of(self.this_rank.device)
        for again in range(TIMES if timed else 1):
            start = now()
            actual = case.compute(kernel)
            seconds = now() - start
            self._pace[case.form, case.kind, kernel.name] = seconds / case.flops
            if again:
                self._speeds[case.form, kernel.name].append(case.flops / max(seconds, 1e-9))
            self.on_result(TEST, actual)
            if not self._is_right(case, kernel, actual, core, record):
                return

    def _is_right(
        self, case: Case, kernel: MatmulKernel, actual: Tensor, core: str, record: StressRecord
    ) -> bool:
        expected = case.expected(actual)
        wrong_bits = difference(actual, expected)
        if wrong_bits is None:
            return True
        if case.rounds_otherwise(actual, expected):
            self._excluded.add((case.form, kernel.name))
            text = f"kernel {kernel.name} rounds {case.form} several times and is not tested"
            record.notes.append((TEST, text))
            return False
        row, column = divmod(wrong_bits.position, actual.shape[-1])
        what = f"{case.form} product ({case.kind.replace('_', ' ')}, {case.shape}, kernel {kernel.name})"
        same = difference(case.compute(kernel), expected)
        text = "wrong again when repeated" if same else "correct when repeated"
        where = f"{self.this_rank.name}, {core}"
        sentence = f"{where}: a {what} has {wrong_bits} at [{row}, {column}], {text}"
        record.add_wrong(TEST, sentence, self.this_rank.hosts[self.this_rank.rank])
        return False


def _repeating_indices(count: int) -> Tensor:
    """Return `count` numbers of vectors, in which 0 to `DISTINCT` - 1 repeat."""
    return torch.arange(count) % DISTINCT


def _count(one: Tensor, other: Tensor) -> int:
    return int((one != other).sum())
