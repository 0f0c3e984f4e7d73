"""Random calls of a Group, the same for all groups of one size, and a transport that flips a bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.calls import Call, Reduction
from hpctrain.comm.group import Group
from hpctrain.comm.transports.transport import (
    ElementRange,
    Steps,
    Transport,
    TransportWork,
    pairwise_ranges,
    run_steps,
)
from hpctrain.comm.work import Work

FLOATS = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
SUMS = ("all_reduce", "reduce_scatter", "reduce")
MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
ROWS = (0, 1, 7, 60, 1000, 9000, 70_000)


def values(rank: int, seed: int, count: int, dtype: torch.dtype, kind: str) -> Tensor:
    """Return the input of a rank, which any rank can compute."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).to(dtype)
    drawn = torch.randn(count, generator=generator, dtype=torch.float64)
    if kind == "wide":
        drawn *= 10.0 ** (60 * torch.rand(count, generator=generator, dtype=torch.float64) - 30)
    elif kind in {"large", "small"}:
        drawn *= 1e30 if kind == "large" else 1e-30
    elif kind == "cancelling":  # pairs of ranks make next to nothing
        drawn = torch.randn(count, generator=generator.manual_seed(seed), dtype=torch.float64)
        drawn = drawn * (-1.0) ** rank * (1 + 1e-6 * rank)
    elif kind == "sparse":
        drawn *= torch.rand(count, generator=generator) < 0.01
    elif kind == "zeros":
        drawn *= 0.0 * (-1) ** rank
    elif kind == "equal":
        drawn = torch.full((count,), 1 / 3 + rank / 7, dtype=torch.float64)
    elif kind == "infinite":
        drawn[:: 3 + rank] = float("inf")
        drawn[1 :: 5 + rank] = float("nan")
        drawn[2 :: 7 + rank] = float("-inf")
    return drawn.to(dtype)


KINDS = ("normal", "wide", "large", "small", "cancelling", "sparse", "zeros", "equal", "infinite")


@dataclass
class RandomCalls:
    """Random calls of a seed, with `operations` and `dtypes`.

    Some of them are only started, and completed later in an order that differs between ranks.
    """

    group: Group
    seed: int
    operations: tuple[str, ...] = (*SUMS, *MOVES, "send", "barrier")
    dtypes: tuple[torch.dtype, ...] = (*FLOATS, *INTEGERS, torch.bool)
    kinds: tuple[str, ...] = KINDS
    rows: tuple[int, ...] = ROWS
    hows: tuple[Reduction, ...] = ("sum", "sum", "sum", "max", "min")
    started: float = 0.4
    results: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.rank_draw = random.Random(f"{self.seed} {self.group.rank}")
        self.works: list[tuple[int, Work[Any]]] = []
        self.unsigned: set[int] = set()  # the larger one of 0 and -0 is either, as they lie in memory

    def make(self, count: int) -> list[Tensor | None]:
        """Make so many calls. Return the result of each; None for a call without a result."""
        for _ in range(count):
            self.one()
            if self.draw.random() < 0.2:
                self.wait()
        self.wait()
        for place in self.unsigned:
            result = self.results[place]
            self.results[place] = None if result is None else result + 0.0
        return self.results

    def wait(self) -> None:
        """Complete the started calls, in a random order that differs between ranks."""
        self.rank_draw.shuffle(self.works)
        for place, work in self.works:
            work.test()
            self.results[place] = work.wait()
        self.works.clear()

    def one(self) -> None:
        """Make one call."""
        draw, group = self.draw, self.group
        operation, dtype = draw.choice(self.operations), draw.choice(self.dtypes)
        kind, seed = draw.choice(self.kinds), draw.randrange(10**6)
        rows, root, even = draw.choice(self.rows), draw.randrange(group.size), draw.random() < 0.5
        sizes = [rows if even else draw.choice((0, rows, rows // 2 + 1)) for _ in range(group.size)]
        how: Reduction = draw.choice(self.hows) if dtype != torch.bool else "sum"
        shift, later = draw.randrange(3), draw.random() < self.started
        rank, size = group.rank, group.size

        def rank_input(count: int, of: int = rank) -> Tensor:
            made = values(of, seed, count + shift, dtype, kind)
            return made[shift:]  # not where words begin

        given = None if even else sizes
        work: Work[Any]
        if operation == "all_reduce":
            work = group.start_all_reduce(rank_input(rows), how, blocking=not later)
        elif operation == "reduce":
            work = group.start_reduce(rank_input(rows), root, how, blocking=not later)
        elif operation == "reduce_scatter":
            whole = rank_input(sum(sizes))
            work = group.start_reduce_scatter(whole, None, given, how, blocking=not later)
        elif operation == "broadcast":
            work = group.start_broadcast(rank_input(rows), root, blocking=not later)
        elif operation == "all_gather":
            work = group.start_all_gather(rank_input(sizes[rank]), None, given, blocking=not later)
        elif operation == "gather":
            work = group.start_gather(rank_input(sizes[rank]), root, None, given, blocking=not later)
        elif operation == "scatter":
            tensor = rank_input(sum(sizes)) if rank == root else None
            output = rank_input(sizes[rank])
            work = group.start_scatter(tensor, output, root, given, blocking=not later)
        elif operation == "all_to_all":
            table = [sizes[each:] + sizes[:each] for each in range(size)]
            sends, receives = (None, None) if even else (table[rank], [each[rank] for each in table])
            work = group.start_all_to_all(rank_input(sum(sizes)), None, sends, receives, blocking=not later)
        elif operation == "send":
            tag = draw.randrange(3)
            sent = group.start_send(rank_input(rows), (rank + 1) % size, tag)
            work = group.start_recv(rank_input(rows).clone(), (rank - 1) % size, tag)
            self.works.append((len(self.results), sent))
            self.results.append(None)
            later = True
        else:
            work = group.start_barrier(blocking=not later)
        if operation in SUMS and how != "sum" and dtype.is_floating_point:
            self.unsigned.add(len(self.results))
        self.results.append(None if later else work.wait())
        if later:
            self.works.append((len(self.results) - 1, work))


@dataclass
class Flip:
    """Bit that changes in a call.

    It changes in the output of `rank` in the `number`-th call that fills one, or, if `given`, in an input of
    a reduction after all checks of it. Once it has changed, `done` is the name of the operation, `call` the
    number of the reduction (-1 if it is none), and `delta` the difference of the value.
    """

    rank: int
    number: int
    seed: int
    given: bool = False
    done: str = ""
    dtype: torch.dtype | None = None
    call: int = -1
    delta: float = 0.0

    def of(self, tensor: Tensor, span: ElementRange) -> None:
        """Change a random bit in a range of a flat tensor."""
        draw = random.Random(self.seed)
        place = span[0] + draw.randrange(span[1])
        before = float(tensor[place])
        octets = tensor[place : place + 1].view(torch.uint8)
        bit = 0 if tensor.dtype == torch.bool else draw.randrange(8 * len(octets))
        octets[bit // 8] ^= 1 << bit % 8
        self.delta, self.dtype = abs(float(tensor[place]) - before), tensor.dtype


class FlippingTransport(Transport):
    """Transport that flips a bit in one call of the transport `inner`.

    `absolutes` has the sum of the absolute values of each reduction's input.
    """

    def __init__(self, inner: Transport, flip: Flip) -> None:
        self.inner, self.flip = inner, flip
        self.rank, self.size, self.sharers = inner.rank, inner.size, inner.sharers
        self.absolutes: list[float] = []

    def run(self, call: Call) -> TransportWork | None:
        """Run a call on the inner transport, and flip the bit if it is due."""
        return run_steps(self._steps(call, call.tensor, call.output), call.blocking)

    def adds_at_owner(self, call: Call) -> bool:
        """Return what the inner transport returns."""
        return self.inner.adds_at_owner(call)

    def _steps(self, call: Call, tensor: Tensor | None, output: Tensor | None) -> Steps:
        due, index = self._is_due(call), -1
        if call.reduction is not None and tensor is not None:
            index = len(self.absolutes)
            self.absolutes.append(float(tensor.detach().double().abs().sum()))
        if due and self.flip.given:
            assert tensor is not None
            self._do(call, index, tensor, [(0, tensor.numel())])
        yield self.inner.run(call)
        if due and not self.flip.given:
            assert output is not None
            self._do(call, index, output, self._arriving(call.with_memory(tensor, output)))

    def _do(self, call: Call, index: int, tensor: Tensor, spans: Sequence[ElementRange]) -> None:
        self.flip.of(tensor.detach().view(-1), random.Random(self.flip.seed).choice(spans))
        self.flip.done, self.flip.call = call.operation, index

    def _is_due(self, call: Call) -> bool:
        flip = self.flip
        if self.rank != flip.rank or flip.number < 0:
            return False
        if flip.given and (call.reduction is None or call.tensor is None or not call.tensor.numel()):
            return False
        if not flip.given and not self._arriving(call):
            return False
        flip.number -= 1
        return flip.number < 0

    def _arriving(self, call: Call) -> list[ElementRange]:
        """Return the ranges of the output that other ranks fill."""
        if call.output is None or not call.output.numel():
            return []
        if call.reduction is not None or call.operation in {"recv", "broadcast"}:
            return [(0, call.output.numel())]
        spans = pairwise_ranges(call, self.size)[3]
        return [span for peer, span in enumerate(spans) if span[1] and peer != self.rank]
