"""Matrix products of integers, whose results are known: what a core or a GPU multiplies wrong, and how fast.

The rows of one operand are taken in turn from a few vectors of integers, as are the columns of the other: so
all results are in a small table of products of these, which integers compute. The integers are so small that
no sum of them is rounded in fp32, in whatever order a library adds.
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
from hpctrain.watch.stress.record import Look, StressRank, StressRecord, TestTime, clock_of, one_thread

TEST = "products"
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS: tuple[Pass, ...] = ("forward", "input_gradient", "weight_gradient")

DISTINCT = 61
"""Vectors that rows are taken from: a prime, so that each place of a kernel's tiles gets all of them."""

LONGEST = 0.5
"""Seconds of a product: of a kernel that would take longer larger shapes are left out, as runs leave it."""

TIMES = 3
"""So often what is timed is computed."""

_EXACT = 1 << 24  # sums up to here are exact in fp32
_LARGEST = 127  # so that 16 bits hold it, with all of a mantissa's bits in use
_OTHERWISE = 1e-3  # of a result, from where on it is no fault but another way to round


class StressShape(NamedTuple):
    """Rows of tokens, which are multiplied with a matrix [outputs, inputs]."""

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
"""The first is small, and tells which kernels are too slow for the others."""


class Case:
    """A pass of a matrix, its operands in a format, and what may come out."""

    def __init__(self, kind: Pass, shape: StressShape, form: str, device: torch.device, seed: int) -> None:
        rows, outputs, inputs = shape
        storage = FORMATS[form]
        self.kind, self.shape, self.form, self.device = kind, shape, form, device
        sides = {"forward": (rows, inputs, outputs), "input_gradient": (rows, outputs, inputs)}
        lefts, length, rights = sides.get(kind, (outputs, rows, inputs))
        left, right = vectors(length, 2 * seed), vectors(length, 2 * seed + 1)
        exact = (left @ right.T).float().to(device)[_turns(lefts).to(device)][:, _turns(rights).to(device)]
        one, other = left[_turns(lefts)].to(storage), right[_turns(rights)].to(storage)
        if kind == "weight_gradient":
            one = one.T.contiguous()
        if kind != "forward":
            other = other.T.contiguous()
        self.one, self.other = one.to(device), other.to(device)
        rounded = exact.to(storage)
        self.known = [rounded]
        if kind == "weight_gradient":  # whether a product is rounded before it is added depends on the kernel
            self.known = [exact] if storage == torch.float32 else [exact, rounded.float()]
            self.sum = torch.empty_like(exact)

    @property
    def flops(self) -> float:
        """Of one product."""
        return 2.0 * self.shape.rows * self.shape.outputs * self.shape.inputs

    def compute(self, kernel: MatmulKernel) -> Tensor:
        """The product by a kernel."""
        if self.kind == "forward":
            return kernel.forward(self.one, self.other)
        if self.kind == "input_gradient":
            return kernel.input_gradient(self.one, self.other)
        kernel.add_weight_gradient(self.sum, self.one, self.other, overwrite=True)
        return self.sum

    def expected(self, found: Tensor) -> Tensor:
        """What is known of it: of two roundings the one that it is nearer to."""
        return min(self.known, key=lambda known: 0 if torch.equal(known, found) else _count(known, found))

    def rounds_otherwise(self, found: Tensor, expected: Tensor) -> bool:
        """Whether many elements, in 16 bits, are the neighbours of what they are to be: a library that rounds
        more than once, and no fault.
        """
        if self.form == "fp32" or _count(found, expected) < _OTHERWISE * found.numel():
            return False
        storage = FORMATS[self.form]
        steps = found.to(storage).view(torch.int16).int() - expected.to(storage).view(torch.int16).int()
        return int(steps.abs().max()) <= 1


def vectors(length: int, seed: int) -> Tensor:
    """So many odd integers in each of DISTINCT vectors; products of two of these are at most 2^24."""
    largest = min(_LARGEST, isqrt(_EXACT // length))
    largest -= 1 - largest % 2
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, largest + 1, (DISTINCT, length), generator=generator) | 1
    return sizes * (1 - 2 * torch.randint(0, 2, (DISTINCT, length), generator=generator))


class ProductTest:
    """The test: every pass of the shapes in each format, by each kernel there is and on each core in turn.

    `cores` are those that this rank tests; a product is computed by one thread, bound to one of them. The
    forward pass of the second shape tells how fast that is, so that rates can be compared.
    """

    def __init__(
        self, place: StressRank, cores: Sequence[int], shapes: Sequence[StressShape], look: Look
    ) -> None:
        self.place, self.cores, self.shapes, self.look = place, tuple(cores), tuple(shapes), look
        self._steps = self._endless()
        self._speeds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._pace: dict[tuple[str, Pass, str], float] = {}  # seconds of a FLOP
        self._left_out: set[tuple[str, str]] = set()

    def run(self, record: StressRecord, turn: TestTime, number: int) -> None:  # noqa: ARG002
        """Multiply until the turn is over, going on where the last one was."""
        mask = os.sched_getaffinity(0) if self.cores else set()
        try:
            with one_thread(), torch.no_grad():
                while True:
                    case, kernel, core = next(self._steps)
                    if (case.form, kernel.name) not in self._left_out:
                        self._test(case, kernel, self._bind(core), record)
                    if turn.over:
                        break
        finally:
            if mask:
                os.sched_setaffinity(0, mask)
        for form, storage in FORMATS.items():
            ways = [(form, kernel.name) for kernel in self._kernels(storage)]
            ways = [way for way in ways if way not in self._left_out]
            if ways and all(self._speeds[way] for way in ways):  # else the quickest may be one to come
                record.rates[f"{form} {TEST}"] = max(median(self._speeds.pop(way)) for way in ways)

    def _kernels(self, storage: torch.dtype) -> list[MatmulKernel]:
        return candidates(storage) if on_host(self.place.device) else [LIBRARY]

    def _endless(self) -> Iterator[tuple[Case, MatmulKernel, int]]:
        """All that is tested, again and again, each time with other integers; first what is timed."""
        device = self.place.device
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
        """Go to a core; in words, what computes then."""
        device = self.place.device
        if not on_host(device):
            return f"GPU {device.index} ({gpu_name(device)}, {gpu_identity(device)})"
        with suppress(OSError):  # taken from this process meanwhile
            if core >= 0:
                os.sched_setaffinity(0, {core})
                return f"core {core}"
        return "one of its cores"

    def _test(self, case: Case, kernel: MatmulKernel, core: str, record: StressRecord) -> None:
        """Multiply and compare; what is timed more than once, since the first time takes longer."""
        timed = case.kind == KINDS[0] and case.shape == self.shapes[:2][-1]
        now = clock_of(self.place.device)
        for again in range(TIMES if timed else 1):
            began = now()
            found = case.compute(kernel)
            seconds = now() - began
            self._pace[case.form, case.kind, kernel.name] = seconds / case.flops
            if again:
                self._speeds[case.form, kernel.name].append(case.flops / max(seconds, 1e-9))
            self.look(TEST, found)
            if not self._is_right(case, kernel, found, core, record):
                return

    def _is_right(
        self, case: Case, kernel: MatmulKernel, found: Tensor, core: str, record: StressRecord
    ) -> bool:
        expected = case.expected(found)
        apart = difference(found, expected)
        if apart is None:
            return True
        if case.rounds_otherwise(found, expected):
            self._left_out.add((case.form, kernel.name))
            told = f"kernel {kernel.name} rounds {case.form} several times and is not tested"
            record.notes.append((TEST, told))
            return False
        row, column = divmod(apart.position, found.shape[-1])
        what = f"{case.form} product ({case.kind.replace('_', ' ')}, {case.shape}, kernel {kernel.name})"
        same = difference(case.compute(kernel), expected)
        told = "wrong again when repeated" if same else "correct when repeated"
        where = f"{self.place.name}, {core}"
        sentence = f"{where}: a {what} has {apart} at [{row}, {column}], {told}"
        record.add_wrong(TEST, sentence, self.place.hosts[self.place.rank])
        return False


def _turns(count: int) -> Tensor:
    return torch.arange(count) % DISTINCT


def _count(one: Tensor, other: Tensor) -> int:
    return int((one != other).sum())
