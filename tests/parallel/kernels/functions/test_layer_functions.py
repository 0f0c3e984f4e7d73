"""Functions of blocks that are compiled, beside exact ones: values, gradients, formats, shapes; compilers.

Tests of host/c_libraries.py, and of parallel/kernels/functions/layer_functions.py,
parallel/kernels/functions/compiled_functions.py, parallel/kernels/functions/compiled_attention.py,
parallel/kernels/functions/function_library.py and parallel/kernels/functions/agreement.py.
"""

from __future__ import annotations

import ctypes
import math
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.deck.activations import ACTIVATIONS, Activation
from hpctrain.engine.choices.function_choice import compile_functions
from hpctrain.host import c_libraries as compiler
from hpctrain.host.c_libraries import (
    CompilerError,
    compile_library,
    open_library,
    try_library,
)
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.kernels.functions import function_library as library
from hpctrain.parallel.kernels.functions.agreement import agrees
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.function_library import workspace_floats
from hpctrain.parallel.kernels.functions.layer_functions import TORCH, LayerFunctions
from hpctrain.parallel.kernels.logits import SoftmaxStatistics, SplitLogits

FORMATS = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""How far results may be from the exact ones, in the norm."""


@pytest.fixture(scope="module")
def compiled() -> CompiledFunctions:
    return CompiledFunctions(open_library(compile_functions()))


@pytest.fixture(scope="module")
def gelu(compiled: CompiledFunctions) -> Callable[[Tensor], Tensor]:
    return partial(compiled.activate, activation=ACTIVATIONS["gelu-tanh"], sizes=())


def gate_by(compiled: CompiledFunctions, name: str) -> Callable[[Tensor], Tensor]:
    """A gated activation of features of the gate and others of the same number."""
    return lambda x: compiled.activate(x, ACTIVATIONS[name], [x.shape[-1] // 2] * 2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def derived(compute: Callable[..., Tensor], inputs: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    """The result and the gradients of its sum with these weights."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = compute(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, weight.to(result.dtype))]


def compare(
    own: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    shape: Sequence[int],
    condition: float = 1,
) -> None:
    """Inputs and results of a function that makes so much more of its operands' rounding in fp32."""
    for form, rounding in FORMATS.items():
        bound = rounding + condition * FORMATS[torch.float32]
        given, weight = [x.to(form) for x in inputs], random(*shape, seed=1).to(form)
        expected = derived(exact, [x.double() for x in given], weight)
        for found, right in zip(derived(own, given, weight), expected, strict=True):
            assert found.dtype == form
            assert (found.double() - right).norm() <= bound * right.norm()


def test_gelu(gelu: Callable[[Tensor], Tensor]) -> None:
    for shape in ((3, 5, 7), (2, 1, 64), (1,)):
        compare(gelu, lambda x: functional.gelu(x, approximate="tanh"), [4 * random(*shape)], shape)
    far = torch.tensor([-1e4, -100.0, -30.0, 0.0, 30.0, 100.0, 1e4], requires_grad=True)
    result = gelu(far)
    result.sum().backward()
    assert result.tolist() == pytest.approx([0, 0, 0, 0, 30, 100, 1e4], abs=1e-20)
    assert far.grad is not None
    assert far.grad.tolist() == pytest.approx([0, 0, 0, 0.5, 1, 1, 1], abs=1e-20)


def test_what_is_huge_has_gates_of_one_and_nought(
    compiled: CompiledFunctions, gelu: Callable[[Tensor], Tensor]
) -> None:
    """As where a run diverges, for which an activation is no reason to say that it is not a number."""
    gated = gate_by(compiled, "swiglu")
    for form in FORMATS:
        huge = torch.tensor([-1e38, -1e18, -2e13, -1e13, 1e13, 2e13, 1e18, 1e38], dtype=form)
        sides = [0.0] * 4 + [1.0] * 4
        x = huge.clone().requires_grad_()
        result = gelu(x)
        assert torch.equal(result, huge.relu())
        assert torch.autograd.grad(result[1:-1].sum(), x)[0].tolist()[1:-1] == sides[1:-1]
        both = torch.stack((huge, torch.ones_like(huge)), -1).requires_grad_()
        result = gated(both)
        assert torch.equal(result[:, 0], huge.relu())
        assert torch.autograd.grad(result.sum(), both)[0][:, 0].tolist() == sides
        infinite = torch.tensor([math.inf], dtype=form)
        assert gelu(infinite).isposinf()
        assert gated(torch.cat((infinite, infinite))).isposinf()


def test_a_gate(compiled: CompiledFunctions) -> None:
    for width in (5, 16, 48):

        def exact(x: Tensor, width: int = width) -> Tensor:
            return x[..., :width] * torch.sigmoid(x[..., :width]) * x[..., width:]

        compare(
            gate_by(compiled, "swiglu"),
            exact,
            [3 * random(4, 2, 2 * width)],
            (4, 2, width),
        )


def test_a_gate_of_gelu(compiled: CompiledFunctions) -> None:
    for width in (5, 16, 48):

        def exact(x: Tensor, width: int = width) -> Tensor:
            return functional.gelu(x[..., :width], approximate="tanh") * x[..., width:]

        compare(gate_by(compiled, "geglu"), exact, [3 * random(4, 2, 2 * width)], (4, 2, width))


def test_rms_norm_of_one_plus_the_weight(compiled: CompiledFunctions) -> None:
    for width in (5, 32, 100):
        compare(
            lambda x, weight: compiled.rms_norm(x, weight, 1e-3, 1),
            lambda x, weight: x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (1 + weight),
            [random(6, 3, width), random(width, seed=2)],
            (6, 3, width),
        )


@pytest.mark.parametrize("offset", [0, 1])
def test_norm_of_heads(compiled: CompiledFunctions, offset: int) -> None:
    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (weight + offset)

    for heads, head in ((3, 10), (1, 32), (4, 5)):
        shape = (6, 2, heads, head)
        compare(
            lambda x, weight: compiled.head_norm(x, weight, 1e-3, offset),
            exact,
            [random(*shape), random(head, seed=2)],
            shape,
        )
        # Heads of queries beside those of keys, as one product computes them.
        both, weight = random(6, 2, (heads + 2) * head), random(head, seed=2)
        part = both[..., : heads * head].unflatten(-1, (heads, head))
        found = compiled.head_norm(part, weight, 1e-3, offset)
        assert torch.equal(found, compiled.head_norm(part.contiguous(), weight, 1e-3, offset))
        turned = part.transpose(0, 1)
        found = compiled.head_norm(turned, weight, 1e-3, offset)
        assert torch.equal(found, compiled.head_norm(turned.contiguous(), weight, 1e-3, offset))


def test_rms_norm(compiled: CompiledFunctions) -> None:
    for width in (5, 32, 100):
        compare(
            lambda x, weight: compiled.rms_norm(x, weight, 1e-3),
            lambda x, weight: x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight,
            [random(6, 3, width), random(width, seed=2)],
            (6, 3, width),
        )


@pytest.mark.parametrize("width", [5, 64, 600])
def test_rows_have_the_same_bits_alone_and_in_groups(compiled: CompiledFunctions, width: int) -> None:
    rows, weight = random(7, width).bfloat16().requires_grad_(), random(width, seed=2).bfloat16()
    gradient = random(7, width, seed=3).bfloat16()
    together = compiled.rms_norm(rows, weight, 1e-3)
    alone = torch.stack([compiled.rms_norm(row, weight, 1e-3) for row in rows])
    assert torch.equal(together, alone)
    assert torch.equal(
        torch.autograd.grad(together, rows, gradient)[0], torch.autograd.grad(alone, rows, gradient)[0]
    )


def test_subnormal_results_are_rounded_to_bf16_as_others(gelu: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(1, 400, dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(gelu(x), (x.double() / 2).bfloat16())


def test_layer_norm(compiled: CompiledFunctions) -> None:
    def exact(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        middle = x - x.mean(-1, keepdim=True)
        return middle / (middle.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight + bias

    for width in (5, 32, 100):
        # Far from nought and nearly alike, where a sum of squares would lose what they differ by.
        for at, spread in ((0.0, 1.0), (3.0, 1.0), (100.0, 0.1)):
            x = (at + spread * random(6, 3, width)).bfloat16().float()
            given = [x, random(width, seed=2), random(width, seed=3)]
            compare(
                lambda x, *of: compiled.layer_norm(x, *of, 1e-3), exact, given, (6, 3, width), 1 + at / spread
            )
    for width in (1, 96, 768, 4096):
        for number in (30.3, 1000.1, 12345.6, -1e-7):
            x = torch.full((3, width), number)
            result = compiled.layer_norm(x, torch.ones(width), torch.full((width,), 0.5), 1e-12)
            assert (result == 0.5).all(), (width, number)
    for size in (1e20, 3e38):  # what torch has no numbers for
        x = size * random(3, 40)
        ones = torch.ones(2, 40)
        assert not torch.layer_norm(x, (40,), *ones).isfinite().any()
        assert not compiled.layer_norm(x, *ones, 1e-5).isfinite().any()
    x, fixed = random(2, 8).requires_grad_(), random(8)
    compiled.layer_norm(x, fixed, fixed, 1e-3).sum().backward()
    assert fixed.grad is None


def softmax_attention(tables: Sequence[Tensor], scale: float | None) -> Callable[..., Tensor]:
    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, _, heads, size = query.shape
        if tables:
            half = size // 2
            cosine, sine = (table[..., :half].to(query.dtype) for table in tables)

            def turn(x: Tensor) -> Tensor:
                left, right = x[..., :half], x[..., half:]
                return torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1)

            query, key = turn(query), turn(key)
        key, value = (x.repeat_interleave(heads // x.shape[2], 2) for x in (key, value))
        logits = torch.einsum("ibhd,jbhd->bhij", query, key) * (size**-0.5 if scale is None else scale)
        logits = logits.masked_fill(torch.ones(rows, rows).triu(1).bool(), -math.inf)
        return torch.einsum("bhij,jbhd->ibhd", logits.softmax(-1), value)

    return compute


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(
    ("rows", "batch", "heads", "groups", "size"),
    [(1, 1, 1, 1, 2), (33, 2, 4, 2, 6), (64, 1, 2, 2, 16), (65, 2, 3, 1, 40), (150, 1, 2, 1, 24)],
)
def test_attention(
    compiled: CompiledFunctions, turns: bool, rows: int, batch: int, heads: int, groups: int, size: int
) -> None:
    angles = random(rows, 1, 1, size // 2).repeat(1, 1, 1, 2)
    for scale in (None, 0.3):
        # In bf16 the tables are rounded, too.
        for form, rounding in FORMATS.items():
            tables = [x.to(form) for x in (angles.cos(), angles.sin())] if turns else []
            inputs = [random(rows, batch, count, size, seed=count) for count in (heads, groups)]
            inputs = [x.to(form) for x in (*inputs, random(rows, batch, groups, size, seed=9))]
            weight = random(rows, batch, heads, size, seed=1).to(form)
            by = {"tables": tuple(tables)}
            rule = AttentionRule(size**-0.5 if scale is None else scale)
            own = derived(
                lambda *x, by=by, rule=rule: compiled.attend(AttentionInputs(*x, **by), rule), inputs, weight
            )
            exact = derived(softmax_attention(tables, scale), [x.double() for x in inputs], weight)
            largest = max(float(x.norm()) for x in exact[1:])
            for found, right in zip(own, exact, strict=True):
                # A single row's queries and keys have no gradient.
                bound = 3 * rounding * max(float(right.norm()), 0.1 * largest)
                assert float((found.double() - right).norm()) <= bound


def test_operands_may_lie_anywhere(compiled: CompiledFunctions, gelu: Callable[[Tensor], Tensor]) -> None:
    inner = random(20, 2, 3 * 4 * 8)
    parts = [part.unflatten(-1, (4, 8)) for part in inner.split(32, -1)]
    rule = AttentionRule(0.3)
    found = compiled.attend(AttentionInputs(*parts), rule)
    contiguous = AttentionInputs(*(part.contiguous() for part in parts))
    assert torch.equal(found, compiled.attend(contiguous, rule))
    crosswise = [part.transpose(2, 3).contiguous().transpose(2, 3) for part in parts]
    assert torch.equal(found, compiled.attend(AttentionInputs(*crosswise), rule))
    assert torch.equal(gelu(inner.transpose(0, 1)), gelu(inner).transpose(0, 1))


def test_what_is_not_finite_stays_so(compiled: CompiledFunctions, gelu: Callable[[Tensor], Tensor]) -> None:
    for form in FORMATS:
        for bad in (math.nan, math.inf):
            x = random(40, 1, 1, 8).to(form)
            x[11, 0, 0, 3] = bad
            assert not compiled.attend(AttentionInputs(x, x, x), AttentionRule(0.3))[11].isfinite().all()
            for result in (
                compiled.rms_norm(x, torch.ones(8, dtype=form), 1e-5),
                compiled.layer_norm(x, *torch.ones(2, 8, dtype=form), 1e-5),
                gate_by(compiled, "swiglu")(torch.cat((x, x), -1)),
                gelu(x),
            ):
                assert not result[11].isfinite().all()
                assert result[:11].isfinite().all()


def test_memory_is_as_told(compiled: CompiledFunctions) -> None:
    found = compiled._library
    assert found is not None
    found.attention_floats.restype = ctypes.c_size_t
    for rows, head in ((1, 1), (33, 40), (4096, 128)):
        told = found.attention_floats(ctypes.c_int64(rows), ctypes.c_int64(head))
        assert told == workspace_floats(rows, head)


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 1, 33, 100])
def test_scores_of_masked_tiles_are_not_read(
    compiled: CompiledFunctions, monkeypatch: pytest.MonkeyPatch, window: int, cap: float
) -> None:
    """They are not computed, and their memory is filled with NaN here."""
    inputs, weight = [random(150, 1, 2, 20, seed=seed) for seed in range(3)], random(150, 1, 2, 20, seed=3)

    def attend(*operands: Tensor) -> Tensor:
        return compiled.attend(AttentionInputs(*operands), AttentionRule(0.3, window, cap))

    expected = derived(attend, inputs, weight)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: empty(*sizes, **options).fill_(torch.nan))
    assert all(map(torch.equal, derived(attend, inputs, weight), expected))


def test_a_query_is_computed_only_with_keys_near_its_window(compiled: CompiledFunctions) -> None:
    """A key that is NaN spoils the queries of the tiles of 8 rows that see it, and no others."""
    query, key, value = (random(256, 1, 1, 16, seed=seed) for seed in range(3))
    key[100], window = math.nan, 32
    result = compiled.attend(AttentionInputs(query, key, value), AttentionRule(0.3, window))
    value[100] = math.nan
    spoiled = compiled.attend(
        AttentionInputs(query, random(256, 1, 1, 16), value), AttentionRule(0.3, window)
    )
    for each in (result, spoiled):
        finite = each.flatten(1).isfinite().all(1)
        assert not finite[100 : 100 + window].any()
        assert finite[:96].all() and finite[100 + window + 8 :].all()


def test_a_library_that_computes_something_else_is_found_out(compiled: CompiledFunctions) -> None:
    assert agrees(compiled)
    assert agrees(TORCH)

    class Wrong(LayerFunctions):
        def activate(self, x: Tensor, activation: Activation, sizes: Sequence[int]) -> Tensor:
            return (1.001 if activation.gated else 1.0) * super().activate(x, activation, sizes)

    assert not agrees(Wrong())

    class WrongInHalf(LayerFunctions):
        def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, offset: int = 0) -> Tensor:
            result = super().rms_norm(x, weight, epsilon, offset)
            return 1.05 * result if x.dtype == torch.bfloat16 else result

    assert not agrees(WrongInHalf())

    class WrongWithoutBias(LayerFunctions):
        def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
            return super().layer_norm(x, weight, 0.9 * bias, epsilon)

    assert not agrees(WrongWithoutBias())

    class WrongSums(LayerFunctions):
        def softmax_statistics(self, logits: SplitLogits, column: Tensor) -> SoftmaxStatistics:
            found = super().softmax_statistics(logits, column)
            if logits.products.dtype == torch.bfloat16:
                found.total *= 1.1
            return found

    assert not agrees(WrongSums())


def trapping(before: str, instead: str = "__builtin_trap();") -> bytes:
    """The library of `functions.c` with something that is not to be done in one of its functions."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "functions.c"
        text = Path(library.__file__).with_name("functions.c").read_text()
        at = text.index("{", text.index(f"\nvoid {before}(")) + 1
        source.write_text(text[:at] + instead + text[at:])
        return compile_library(source)


def test_a_library_is_tried_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Path(library.__file__)
    try_library(compile_functions(), program)
    for name in ("gelu_gradient", "softmax_gradient", "attend_gradient"):
        with pytest.raises(CompilerError, match=r"does not run on this processor: SIG(ILL|TRAP)$"):
            try_library(trapping(name), program)
    with pytest.raises(CompilerError, match=r"does not run .*SIG(ILL|TRAP)"):  # in bf16 alone
        try_library(trapping("gated", "if (size == 2) __builtin_trap();"), program)
    for case in ("columns > 1024", "column[0] < 0", "column[1] >= 1024"):  # more than one block of logits
        with pytest.raises(CompilerError, match=r"does not run .*SIG(ILL|TRAP)"):
            try_library(trapping("softmax_statistics", f"if ({case}) __builtin_trap();"), program)
    source = tmp_path / "small.c"
    source.write_text("void gelu(void) {}\n")
    with pytest.raises(CompilerError, match=r"does not run on this processor: .*undefined symbol: gated"):
        try_library(compile_library(source), program)
    with pytest.raises(CompilerError, match="does not run on this processor"):
        try_library(b"no library", program)
    endless = trapping("rms_norm", "for (volatile int one = 1; one;);")
    monkeypatch.setattr(compiler, "SECONDS", 1.0)
    with pytest.raises(CompilerError, match="does not run on this processor: not finished after 1 s"):
        try_library(endless, program)
