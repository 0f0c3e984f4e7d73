"""Products that are checked: every flipped bit above rounding is found where it is, and nothing else.

Tests of fault_checks/matmul_audit.py, parallel/product_check.py, fault_checks/audit_kernels.py,
fault_checks/audit_library.py and engine/choices/audit_kernel_choice.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.audit.detected_fault import DetectedFault, SilentFaultError
from hpctrain.comm.world import World
from hpctrain.fault_checks.audit_kernels import (
    AuditKernels,
    CompiledAuditKernels,
    ErrorBounds,
    agree,
)
from hpctrain.fault_checks.audit_library import call_all
from hpctrain.fault_checks.matmul_audit import AuditTarget, MatmulAudit
from hpctrain.host.c_libraries import CompilerError, compile_library, open_library
from hpctrain.parallel.kernels.matmul_kernels import LIBRARY, MatmulKernel
from hpctrain.parallel.shards import Parameter, Shard
from tests.engines import LLAMA, Trainer, one_thread, small_deck, trainer
from tests.model.modules.tensor_parallel.test_unsplit_linear import deck_of

FULL = "stability.corruption=full"

MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.mlp=24")

MARGIN = 30
"""By so many times the root of the squares of a row's errors a flip is above rounding."""

FORMATS = {
    "fp32": (),
    "bf16": ("precision.compute=bf16",),
    "bf16 sums": ("precision.compute=bf16", "precision.gradients=compute"),
    "fp16": ("precision.compute=fp16",),
    "by way of fp32": ("precision.compute=bf16", "machine.products=fp32"),
    "fp8": ("precision.compute=fp8",),
    "untied": ("model.tied=false", "model.family=llama", "model.key_value_heads=2", "model.mlp=48"),
    "mixture": MIXTURE,
    "mixture bf16": (*MIXTURE, "precision.compute=bf16"),
    "recompute": ("memory.recompute=full",),
}

LAYOUTS = {
    "zero 2, sliced": ("layout.zero=2", "memory.accumulate=sliced"),
    "zero 3": ("layout.zero=3", "precision.compute=bf16"),
    "tensor": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "context": ("layout.context=2",),
    "zero bubble": ("layout.pipeline=2", "layout.schedule=zb-h1"),
    "chunks": ("layout.pipeline=2", "layout.chunks=2", "layout.schedule=interleaved", "model.layers=4"),
    "experts": (*MIXTURE, "layout.expert=2"),
    "fp8": ("precision.compute=fp8", "precision.fp8=tensor", "layout.tensor=2"),
}


def compiled() -> AuditKernels:
    """By the library of `audit.c`, of a compiler that must be there."""
    source = Path(str(files("hpctrain.parallel") / "audit.c"))
    try:
        library = open_library(compile_library(source))
    except CompilerError as error:
        pytest.skip(str(error))
    call_all(library)
    return CompiledAuditKernels(library)


def gradients_of(run: Trainer, audit: bool) -> tuple[dict[str, Tensor], list[DetectedFault]]:
    """A step's gradients, on weights that stay, and what was found."""
    judge = run.engine.stage.layer_context.products.audit
    assert judge is not None
    if audit:
        judge.begin_step(1)
    run.step.accumulate(run.state, run.deck.batch.global_size)
    return {
        name: each.clone() for name, each in run.gradients().items()
    }, judge.collect_faults() if audit else []


def test_compiled_passes_are_those_of_torch() -> None:
    assert agree(compiled(), AuditKernels())

    class Other(AuditKernels):
        def rows(
            self, matrix: Tensor, vector: Tensor, weights: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            products, squares = super().rows(matrix, vector, weights)
            return products, squares * 1.1

    assert not agree(Other(), AuditKernels())


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("name", FORMATS)
def test_nothing_changes_and_nothing_is_found(world: World, name: str) -> None:
    """Of fresh rough weights, and of trained ones."""
    one_thread()
    run = trainer(world, small_deck(FULL, *FORMATS[name]))
    for _ in range(2):
        plain, _ = gradients_of(run, audit=False)
        checked, faults = gradients_of(run, audit=True)
        assert faults == []
        for key, gradient in plain.items():
            assert torch.equal(gradient, checked[key]), key
        run.train(10)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_found_on_any_layout(world: World, name: str) -> None:
    one_thread()
    run = trainer(world, small_deck(FULL, *LAYOUTS[name]))
    audit = run.engine.stage.layer_context.products.audit
    assert audit is not None
    settle, seen = audit.collect_faults, list[int]()

    def counted() -> list[DetectedFault]:
        seen.append(len(audit._worst))
        assert not audit._sums
        return settle()

    audit.collect_faults = counted  # type: ignore[method-assign]
    run.train(6)  # which says what is wrong
    assert len(seen) == 6
    assert min(seen) > 8


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("more", [(), ("model.arguments={forces=false}",)])
def test_nothing_is_found_in_modules(world: World, more: tuple[str, ...]) -> None:
    """To whose gradients others add, too, before or after products of the same matrix."""
    one_thread()
    run = trainer(world, deck_of(FULL, "batch.sequence=8", *more))
    audit = run.engine.stage.layer_context.products.audit
    assert audit is not None
    settle, seen = audit.collect_faults, set[tuple[str, str]]()

    def noted() -> list[DetectedFault]:
        seen.update((where.names[0], where.what) for where in audit._worst)
        return settle()

    audit.collect_faults = noted  # type: ignore[method-assign]
    run.train(3)
    for name in ("fields.0.again.weight", "fields.0.down.weight", "embed.weight"):
        assert (name, "gradient") in seen, sorted(seen)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_step_with_a_wrong_product_is_made_again(world: World) -> None:
    """On all ranks, whichever of them computed it, to the bits of one that nothing happened to."""
    one_thread()
    deck = small_deck(FULL, "layout.zero=1") if world.size > 1 else small_deck(FULL)
    plain, run = trainer(world, deck), trainer(world, deck)
    plain.train(3)
    run.train(1)
    if world.rank == world.size - 1:
        kernel = run.engine.stage.layer_context.products.kernels.default = Flipping()
        kernel.begin_step(Flip(9, 0.3, 30.5 / 32))
    with pytest.raises(SilentFaultError) as caught:
        run.train(1)
    (fault,) = caught.value.faults
    assert fault.kind == "product" and fault.ranks == (world.size - 1,)
    assert caught.value.state_unchanged and run.state.step == 1
    run.engine.stage.layer_context.products.kernels.default = LIBRARY
    run.train(2)
    expected = plain.parameters()
    for name, values in run.parameters().items():
        assert torch.equal(values, expected[name]), name


@dataclass
class Flip:
    """Of the call with this number one element's bit, both told by shares of them."""

    call: int
    element: float
    bit: float
    before: bool = False


class Flipping(MatmulKernel):
    """The library, which flips a bit of one result, or of a sum `before` something is added."""

    def __init__(self) -> None:
        self.flip: Flip | None = None
        self.calls = 0
        self.row, self.by, self.rounding = 0, 0.0, 0.0
        self.additions: list[int] = []

    def begin_step(self, flip: Flip | None) -> None:
        self.flip, self.calls, self.by = flip, 0, 0.0

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = LIBRARY.forward(inputs, weight, bias)
        return self._flipped(output, inputs, weight.t(), bias)

    def logits(self, inputs: Tensor, table: Tensor) -> Tensor:
        return self._flipped(LIBRARY.logits(inputs, table), inputs, table.t())

    def input_gradient(self, output_gradient: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        made = LIBRARY.input_gradient(output_gradient, weight, out)
        return self._flipped(made, output_gradient, weight)

    def add_weight_gradient(
        self, into: Tensor, output_gradient: Tensor, inputs: Tensor, overwrite: bool
    ) -> None:
        flip = self.flip
        if flip is None and not overwrite:
            self.additions.append(self.calls)
        if flip is not None and flip.before and flip.call == self.calls:
            unit = max(torch.finfo(each.dtype).eps for each in (into, inputs))
            sizes = into.double().norm(dim=1)
            self._flip(into, flip)
            self.rounding = max(float(sizes[self.row]), float(sizes.median())) * 4 * unit
        before = torch.zeros_like(into) if overwrite else into.clone()
        LIBRARY.add_weight_gradient(into, output_gradient, inputs, overwrite)
        self._flipped(into, output_gradient.t(), inputs, before)
        if flip is not None and not flip.before and flip.call == self.calls - 1:
            self.rounding *= 2  # as micro-batches make a sum

    def _flipped(self, made: Tensor, left: Tensor, right: Tensor, beside: Tensor | None = None) -> Tensor:
        flip, self.calls = self.flip, self.calls + 1
        if flip is not None and not flip.before and flip.call == self.calls - 1:
            exact = left.double() @ right.double()
            exact = exact if beside is None else exact + beside.double()
            errors = (made.double() - exact).reshape(-1, made.shape[-1]).norm(dim=1)
            self._flip(made, flip)
            self.rounding = max(float(errors[self.row]), float(errors.median()))
        return made

    def _flip(self, made: Tensor, flip: Flip) -> None:
        flat = made.view(-1) if made.is_contiguous() else made.as_strided((made.numel(),), (1,))
        index = int(flip.element * flat.numel())
        bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.int16)
        size = 8 * flat.element_size()
        bit = 1 << int(flip.bit * size)
        before = float(flat[index])
        bits[index] ^= bit if bit < 1 << (size - 1) else -bit
        self.row, self.by = index // made.shape[-1], abs(float(flat[index]) - before)


def flips(count: int, calls: Sequence[int], seed: int, before: bool = False) -> list[Flip]:
    """So many, of calls among these."""
    shares = torch.rand(3, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [Flip(calls[int(a * len(calls))], b, c, before) for a, b, c in shares.t().tolist()]


class Found:
    """What becomes of flips in a step of a run."""

    def __init__(self, world: World, *overrides: str) -> None:
        one_thread()
        self.run = trainer(world.single_rank_world(), small_deck(FULL, "batch.global_size=4", *overrides))
        self.kernel = Flipping()
        self.run.engine.stage.layer_context.products.kernels.default = self.kernel
        audit = self.run.engine.stage.layer_context.products.audit
        assert audit is not None
        self.audit, self.names = audit, dict[int, tuple[str, list[tuple[str, int]]]]()
        judged, adding = audit.check_product, audit.expect_addition

        def product(target: AuditTarget, *given: object, **named: object) -> None:
            self._note(self.kernel.calls - 1, target.weights[:1])
            judged(target, *given, **named)  # type: ignore[arg-type]

        def add(target: AuditTarget, *given: object, **named: object) -> None:
            self._note(self.kernel.calls, target.weights, "backward")
            adding(target, *given, **named)  # type: ignore[arg-type]

        audit.check_product, audit.expect_addition = product, add  # type: ignore[method-assign]
        self.kernel.begin_step(None)
        gradients_of(self.run, audit=True)
        self.calls = self.kernel.calls

    def _note(self, call: int, weights: Sequence[Parameter], phase: str = "") -> None:
        phase = phase or self.run.engine.world.ledger.phase
        self.names[call] = phase, [(each.shard.name, each.shard.local[0]) for each in weights]

    def of(self, flip: Flip) -> bool | None:
        """Whether it was found, and then in its place; None where it is lost in rounding."""
        self.kernel.begin_step(flip)
        _, faults = gradients_of(self.run, audit=True)
        phase, weights = self.names[flip.call]
        if not self.kernel.by > MARGIN * self.kernel.rounding and not faults:
            return None
        if not faults:
            print("missed:", weights, phase, self.kernel.by / self.kernel.rounding)
            return False
        (fault,) = faults
        name, end = weights[0][0], 0
        for each, rows in weights:
            if len(weights) > 1 and end <= self.kernel.row < end + rows:
                name = each
            end += rows
        assert (fault.kind, fault.name, fault.phase, fault.ranks) == ("product", name, phase, (0,)), fault
        return True


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "count"), [("fp32", 120), ("bf16", 60), ("untied", 60), ("fp16", 40)])
def test_flips_are_found_where_they_are(world: World, form: str, count: int) -> None:
    found = Found(world, *FORMATS[form])
    outcomes = [found.of(flip) for flip in flips(count, range(found.calls), seed=count)]
    there, of_all = outcomes.count(True), count - outcomes.count(None)
    print(f"{form}: {there} of {of_all} above rounding, of {count}")
    assert of_all > count / 4 and there >= 0.95 * of_all


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_flips_in_sums_between_micro_batches_are_found(world: World, form: str) -> None:
    """As large as the sums that they are in, or larger."""
    found = Found(world, *FORMATS[form])
    outcomes = [found.of(flip) for flip in flips(40, found.kernel.additions, 7, before=True)]
    there, of_all = outcomes.count(True), 40 - outcomes.count(None)
    print(f"sums, {form}: {there} of {of_all} above rounding, of 40")
    assert of_all > 10 and there >= 0.95 * of_all


MATRICES = {
    "normal": lambda x: x,
    "tiny": lambda x: x * 1e-20,
    "huge": lambda x: x * 1e20,
    "zeros": lambda x: x * 0,
    "rows of zeros": lambda x: x * (torch.arange(len(x)) % 3 == 0).unsqueeze(1),
    "one row": lambda x: x * (torch.arange(len(x)) == 5).unsqueeze(1),
    "an outlier": lambda x: x * (1 + 1e4 * (torch.arange(x.shape[1]) == 3)),
    "a large mean": lambda x: 1 + x * 1e-3,
    "one number": lambda x: torch.full_like(x, 0.1),
    "all sizes": lambda x: x * torch.logspace(-9, 9, len(x)).unsqueeze(1),
    "not finite": lambda x: x.index_fill(0, torch.tensor([2]), torch.inf),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_library", [False, True])
def test_rounding_is_no_fault(form: torch.dtype, by_library: bool) -> None:
    """Of all pairs of matrices of these kinds, whatever signs are drawn."""
    one_thread()
    weight = Parameter(Shard.replicated("weight", (40, 72)))
    audit = MatmulAudit(5, 0, lambda: "forward", compiled() if by_library else AuditKernels())
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for one, left in MATRICES.items():
            for other, right in MATRICES.items():
                audit.begin_step(step)
                x = left(torch.randn(64, 72, generator=generator)).to(form)
                matrix = right(torch.randn(40, 72, generator=generator)).to(form)
                bias = torch.randn(40, generator=generator).to(form)
                audit.check_product(
                    AuditTarget([weight], 0), x, matrix, LIBRARY.forward(x, matrix, bias), bias
                )
                y = LIBRARY.forward(x, matrix)
                audit.check_product(
                    AuditTarget([weight], 0), y, matrix, LIBRARY.input_gradient(y, matrix), transposed=True
                )
                into = torch.empty(40, 72)
                rounded = None if form == into.dtype else form
                for first in (True, False, False):
                    audit.expect_addition(AuditTarget([weight], 0), y, x, into, first, rounded)
                    LIBRARY.add_weight_gradient(into, y, x, first)
                audit.check_gradients([weight])
                assert audit.collect_faults() == [], (one, other)


def test_no_number_is_a_fault_where_operands_are_small() -> None:
    weight = Parameter(Shard.replicated("weight", (8, 16)))
    for passes in (AuditKernels(), compiled()):
        audit = MatmulAudit(0, 3, lambda: "backward", passes)
        for value in (torch.inf, torch.nan, 1e38):
            audit.begin_step(0)
            x, matrix = torch.randn(4, 16), torch.randn(8, 16)
            output = x @ matrix.t()
            output[2, 3] = value
            audit.check_product(AuditTarget([weight], 0), x, matrix, output)
            (fault,) = audit.collect_faults()
            assert (fault.name, fault.phase, fault.ranks) == ("weight", "backward", (3,))


def test_signs_are_others_in_each_step() -> None:
    """So that what one step's do not tell, as of two elements that changed by as much, another's do."""
    weight = Parameter(Shard.replicated("weight", (8, 16)))
    audit = MatmulAudit(0, 0, lambda: "forward")
    x, matrix = torch.randn(4, 16), torch.randn(8, 16)
    output = x @ matrix.t()
    output[1, :2] += 1
    found = []
    for step in range(20):
        audit.begin_step(step)
        audit.check_product(AuditTarget([weight], 0), x, matrix, output)
        found.append(bool(audit.collect_faults()))
    assert 3 < sum(found) < 17


def test_bounds_follow_from_formats() -> None:
    accumulated, besides = ErrorBounds(54, 42, torch.float32).factors
    assert (accumulated, besides) == (8 * 2.0**-24 * 4, 0)
    assert ErrorBounds(1, 1, torch.bfloat16, torch.bfloat16, 4).factors[1] == 8 * 2.0**-8 * 2


def test_a_library_of_other_functions_is_not_taken() -> None:
    with pytest.raises(AttributeError):
        call_all(ctypes.CDLL(None))
