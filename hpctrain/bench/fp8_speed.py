"""`hpctrain bench fp8`: what the products of a layer cost in 8 bits, beside those in bf16.

Everything takes turns in one run: forward, input gradient and weight gradient of a matrix by each recipe, and
what they consist of, each by itself: quantizing the operands, and multiplying them once they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch

from hpctrain.bench.measurement import seconds_of, write_json
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.comm.world import World
from hpctrain.deck.sections.machine import Machine
from hpctrain.errors import HpctrainError
from hpctrain.host.device import gpu_name, synchronize
from hpctrain.host.device_memory import used_bytes
from hpctrain.parallel.fp8.delayed_matmul import DelayedMatmul
from hpctrain.parallel.fp8.formats import E4M3, E5M2
from hpctrain.parallel.fp8.matmul_choice import make_matmul
from hpctrain.parallel.fp8.multiply import multiply_quantized, native_products
from hpctrain.parallel.fp8.quantize import QuantizedTensor
from hpctrain.parallel.fp8.quantized_matmul import KINDS
from hpctrain.parallel.fp8.recipes import RECIPES, Fp8Settings, ScalingRecipe
from hpctrain.parallel.layer_context import LayerContext, ProductSettings
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.shards import Parameter, Shard
from hpctrain.plan.memory_demand import require_memory
from hpctrain.text import table
from hpctrain.units import format_seconds

SHAPES = ("2048x768x768", "2048x3072x768", "2048x768x3072")
"""Of a small block's products."""

PASSES = ("forward", "input gradient", "weight gradient")

PARTS = ("quantizing", "multiplying")

SECONDS = 0.02
"""That a measurement takes at least, by repetition."""

BASE = "bf16"

_DIGITS = 18
"""Of a size at most."""


@dataclass(frozen=True)
class MatmulShape:
    """Of m tokens by a matrix [n, k], from k features to n."""

    tokens: int
    outputs: int
    inputs: int

    @staticmethod
    def of(text: str) -> MatmulShape:
        """From "MxNxK"; HpctrainError where it is none."""
        sizes = text.split("x")
        if len(sizes) != 3 or not all(
            size.isdecimal() and len(size) <= _DIGITS and int(size) for size in sizes
        ):
            raise HpctrainError(f"--shape {text}: must be TOKENSxOUTPUTSxINPUTS, such as {SHAPES[0]}")
        return MatmulShape(*map(int, sizes))

    @property
    def least_bytes(self) -> int:
        """Of what a rank holds at once, as all recipes take turns: of each the operands in 16 bits, the
        weight's gradient in 32, and but in bf16 the operands in 8 bits as they lie and transposed.
        """
        weight = self.outputs * self.inputs
        operands = self.tokens * (self.inputs + self.outputs) + weight
        return (1 + len(RECIPES)) * (2 * operands + 4 * weight) + len(RECIPES) * 2 * operands

    def __str__(self) -> str:
        return f"{self.tokens}x{self.outputs}x{self.inputs}"


@dataclass(frozen=True)
class ProductFigures:
    """Seconds of one shape by one recipe, or of "bf16": medians over the rounds, of the slowest rank.

    `native` says which products the device makes in 8 bits (`found.native`), None of bf16; `parts_s` is of
    "quantizing" and "multiplying", each by itself; `of_bf16` the median of all three passes over bf16's.
    """

    shape: str
    recipe: str
    native: str | None
    passes_s: Mapping[str, float]
    parts_s: Mapping[str, float]
    of_bf16: float


def bench_fp8(world: World, shapes: Sequence[str], rounds: int, output: Path | None) -> None:
    """Time products of these shapes ("MxNxK") on the world's device, on every rank at once. Collective.

    HpctrainError, before any is timed, of what is no shape or does not fit into memory.
    """
    with world.agreement():
        wanted = [MatmulShape.of(text) for text in shapes]
    held = used_bytes(world.device)
    for shape in wanted:
        needed = held + shape.least_bytes
        require_memory(world, Machine(), f"--shape {shape}", needed, lambda _: "use a smaller shape")
    figures = [each for shape in wanted for each in measured(world, shape, rounds)]
    with world.agreement():
        if world.rank == 0:
            print("\n".join(lines(figures, gpu_name(world.device) or "CPU")), flush=True)
            if output is not None:
                write_json(output, [asdict(each) for each in figures])


def measured(world: World, shape: MatmulShape, rounds: int) -> list[ProductFigures]:
    """Of bf16 and of every recipe. Collective."""
    variants = {BASE: _variant(shape, None, world.device)}
    variants |= {name: _variant(shape, recipe, world.device) for name, recipe in RECIPES.items()}
    times: dict[tuple[str, str], list[float]] = {}
    repeats: dict[tuple[str, str], int] = {}
    for number in range(rounds + 1):
        for name, runs in variants.items():
            for part, run in runs.items():
                again = repeats.get((name, part), 1)

                def repeated(run: Callable[[], object] = run, again: int = again) -> None:
                    for _ in range(again):
                        run()
                    synchronize(world.device)

                spent = seconds_of(world, repeated) / again
                if number:
                    times.setdefault((name, part), []).append(spent)
                else:  # the first round, which fills caches, tells how often
                    repeated()
                    repeats[name, part] = max(1, int(SECONDS / seconds_of(world, repeated)))
    wholes = {
        name: [sum(each) for each in zip(*(times[name, part] for part in PASSES), strict=True)]
        for name in variants
    }
    return [
        ProductFigures(
            str(shape),
            name,
            native_products(RECIPES[name], world.device) if name in RECIPES else None,
            {part: median(times[name, part]) for part in PASSES},
            {part: median(times[name, part]) for part in PARTS if part in runs},
            median(own / base for own, base in zip(wholes[name], wholes[BASE], strict=True)),
        )
        for name, runs in variants.items()
    ]


def lines(figures: Sequence[ProductFigures], device: str) -> list[str]:
    """For people: a table of each shape."""
    marks = {"all": "", "stored": " (partly emulated)", "none": " (emulated)", None: ""}
    text: list[str] = []
    for shape in dict.fromkeys(each.shape for each in figures):
        rows: list[tuple[str, ...]] = [("recipe", *PASSES, "all three", *PARTS, "of bf16")]
        for each in figures:
            if each.shape == shape:
                passes = [each.passes_s[part] for part in PASSES]
                parts = [format_seconds(each.parts_s[part]) if each.parts_s else "" for part in PARTS]
                times = map(format_seconds, (*passes, sum(passes)))
                rows.append((each.recipe + marks[each.native], *times, *parts, f"{each.of_bf16:.2f}"))
        sizes = MatmulShape.of(shape)
        head = (
            f"Matrix products: {sizes.tokens} tokens, {sizes.inputs} inputs, {sizes.outputs} "
            f"outputs, {device}"
        )
        text += [*([""] if text else []), head, *table(rows)]
    return text


def _variant(
    shape: MatmulShape, recipe: ScalingRecipe | None, device: torch.device
) -> dict[str, Callable[[], object]]:
    """What is timed, by its name: the passes, in bf16 where there is no recipe, or else their parts, too."""
    maker = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
        values = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return values.normal_(std=deviation, generator=maker)

    inputs = normal(shape.tokens, shape.inputs, 1.0)
    gradients = normal(shape.tokens, shape.outputs, 1e-6)
    sizes = (shape.outputs, shape.inputs)
    weight = Parameter(Shard.replicated("matrix", sizes))
    weight.data = normal(*sizes, 0.02)
    weight.gradient = torch.zeros(sizes, device=device)
    product = _product(weight, recipe)
    if isinstance(product, DelayedMatmul):
        for kind, values in zip(KINDS, (inputs, weight.data, gradients), strict=True):
            product.histories[kind].append(values.abs().amax())
    _, kept = product.forward_and_save(inputs, None, None, True)
    whole = product.gather_gradient(gradients, None)
    runs: dict[str, Callable[[], object]] = {
        "forward": lambda: product.forward_and_save(inputs, None, None, True),
        "input gradient": lambda: product.input_gradient(product.gather_gradient(gradients, None)),
        "weight gradient": lambda: product.add_weight_gradient(whole, kept),
    }
    if recipe is None:
        return runs
    tokens, weights, matrix = recipe.tokens, recipe.weights, weight.data

    def quantized() -> list[tuple[QuantizedTensor, QuantizedTensor, torch.dtype]]:
        lying = tokens.quantize(inputs, E4M3), tokens.quantize(gradients, E5M2)
        if tokens.transposed == tokens:  # one scale is that of both products
            left, right = lying[1].transposed(), lying[0].transposed()
        else:
            left, right = tokens.quantize(gradients.t(), E5M2), tokens.quantize(inputs.t(), E4M3)
        return [
            (lying[0], weights.quantize(matrix, E4M3), torch.bfloat16),
            (lying[1], weights.quantize(matrix.t(), E4M3), torch.bfloat16),
            (left, right, torch.float32),
        ]

    operands = quantized()
    runs["quantizing"] = quantized
    runs["multiplying"] = lambda: [multiply_quantized(*each) for each in operands]
    return runs


def _product(weight: Parameter, recipe: ScalingRecipe | None) -> Matmul:
    alone = planned_group(("tensor",), 0, 1, Ledger(), device=weight.device)
    layer_context = LayerContext(tensor=alone, context=alone)
    settings = None if recipe is None else Fp8Settings(recipe)
    return make_matmul([weight], replace(layer_context, products=ProductSettings(fp8=settings)))
