"""`hpctrain bench fp8`: times of the matrix products of a layer in 8 bits, compared with those in bf16.

Each round measures forward, input gradient and weight gradient of a matrix with each recipe. It also measures
their two parts alone: quantization of the operands, and multiplication of quantized operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch

from hpctrain.bench.measurement import publish, seconds_of
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
"""Default shapes: those of a small transformer block."""

PASSES = ("forward", "input gradient", "weight gradient")

PARTS = ("quantizing", "multiplying")

SECONDS = 0.02
"""Least duration of a measurement, in which the operation is repeated."""

BASE = "bf16"

_DIGITS = 18
"""Largest number of digits of a size."""


@dataclass(frozen=True)
class MatmulShape:
    """Sizes of a product of hidden states [tokens, inputs] and a weight [outputs, inputs].

    Attributes:
        tokens: Number of tokens.
        outputs: Output features.
        inputs: Input features.
    """

    tokens: int
    outputs: int
    inputs: int

    @staticmethod
    def of(text: str) -> MatmulShape:
        """Parse a shape such as "2048x768x768", which gives tokens, outputs and inputs.

        Raises:
            HpctrainError: The text is not a shape.
        """
        sizes = text.split("x")
        if len(sizes) != 3 or not all(
            size.isdecimal() and len(size) <= _DIGITS and int(size) for size in sizes
        ):
            raise HpctrainError(f"--shape {text}: must be TOKENSxOUTPUTSxINPUTS, such as {SHAPES[0]}")
        return MatmulShape(*map(int, sizes))

    @property
    def needed_bytes(self) -> int:
        """Least memory of a rank in bytes.

        For bf16 and each recipe it holds the operands in 16 bits and the weight gradient in 32 bits, and for
        each recipe also the operands in 8 bits, with their transposes.
        """
        weight = self.outputs * self.inputs
        operands = self.tokens * (self.inputs + self.outputs) + weight
        return (1 + len(RECIPES)) * (2 * operands + 4 * weight) + len(RECIPES) * 2 * operands

    def __str__(self) -> str:
        return f"{self.tokens}x{self.outputs}x{self.inputs}"


@dataclass(frozen=True)
class MatmulResult:
    """Times of one shape with one recipe: medians over the rounds, of the slowest rank.

    Attributes:
        shape: Shape as text.
        recipe: Name of the recipe, or "bf16".
        native: Products that the device computes in 8 bits, see `native_products`; None for bf16.
        passes_s: Seconds of each of PASSES.
        parts_s: Seconds of each of PARTS; empty for bf16.
        of_bf16: Time of all three passes relative to bf16.
    """

    shape: str
    recipe: str
    native: str | None
    passes_s: Mapping[str, float]
    parts_s: Mapping[str, float]
    of_bf16: float


def bench_fp8(world: World, shapes: Sequence[str], rounds: int, output: Path | None) -> None:
    """Measure products on every rank at once, and print a table. Collective.

    Args:
        world: All ranks.
        shapes: Shapes, see `MatmulShape.of`.
        rounds: Number of rounds.
        output: File for the results; None for no file.

    Raises:
        HpctrainError: A shape is wrong, or does not fit into memory. Nothing is measured then.
    """
    with world.agreement():
        parsed_shapes = [MatmulShape.of(text) for text in shapes]
    used = used_bytes(world.device)
    for shape in parsed_shapes:
        needed = used + shape.needed_bytes
        require_memory(world, Machine(), f"--shape {shape}", needed, lambda _: "use a smaller shape")
    results = [each for shape in parsed_shapes for each in measure_shape(world, shape, rounds)]
    device = gpu_name(world.device) or "CPU"
    publish(world, result_lines(results, device), [asdict(each) for each in results], output)


def measure_shape(world: World, shape: MatmulShape, rounds: int) -> list[MatmulResult]:
    """Return the times of a shape with bf16 and with each recipe. Collective."""
    variants = {BASE: _variant(shape, None, world.device)}
    variants |= {name: _variant(shape, recipe, world.device) for name, recipe in RECIPES.items()}
    times: dict[tuple[str, str], list[float]] = {}
    repeats: dict[tuple[str, str], int] = {}
    for number in range(rounds + 1):
        for name, runs in variants.items():
            for part, run in runs.items():
                count = repeats.get((name, part), 1)

                def repeated(run: Callable[[], object] = run, count: int = count) -> None:
                    for _ in range(count):
                        run()
                    synchronize(world.device)

                seconds = seconds_of(world, repeated) / count
                if number:
                    times.setdefault((name, part), []).append(seconds)
                else:  # the first round fills caches, and gives the number of repetitions
                    repeated()
                    repeats[name, part] = max(1, int(SECONDS / seconds_of(world, repeated)))
    sums = {
        name: [sum(each) for each in zip(*(times[name, part] for part in PASSES), strict=True)]
        for name in variants
    }
    return [
        MatmulResult(
            str(shape),
            name,
            native_products(RECIPES[name], world.device) if name in RECIPES else None,
            {part: median(times[name, part]) for part in PASSES},
            {part: median(times[name, part]) for part in PARTS if part in runs},
            median(seconds / base for seconds, base in zip(sums[name], sums[BASE], strict=True)),
        )
        for name, runs in variants.items()
    ]


def result_lines(results: Sequence[MatmulResult], device: str) -> list[str]:
    """Return a table of each shape."""
    marks = {"all": "", "stored": " (partly emulated)", "none": " (emulated)", None: ""}
    text: list[str] = []
    for shape in dict.fromkeys(each.shape for each in results):
        rows: list[tuple[str, ...]] = [("recipe", *PASSES, "all three", *PARTS, "of bf16")]
        for each in results:
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
    """Return functions to time, by name: the passes, and with a recipe (None for bf16) also its PARTS."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
        values = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return values.normal_(std=deviation, generator=generator)

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
    _, saved = product.forward_and_save(inputs, None, None, True)
    gathered = product.gather_gradient(gradients, None)
    runs: dict[str, Callable[[], object]] = {
        "forward": lambda: product.forward_and_save(inputs, None, None, True),
        "input gradient": lambda: product.input_gradient(product.gather_gradient(gradients, None)),
        "weight gradient": lambda: product.add_weight_gradient(gathered, saved),
    }
    if recipe is None:
        return runs
    tokens, weights, matrix = recipe.tokens, recipe.weights, weight.data

    def quantized() -> list[tuple[QuantizedTensor, QuantizedTensor, torch.dtype]]:
        x, dy = tokens.quantize(inputs, E4M3), tokens.quantize(gradients, E5M2)
        if tokens.transposed == tokens:  # both products have the same scales
            left, right = dy.transposed(), x.transposed()
        else:
            left, right = tokens.quantize(gradients.t(), E5M2), tokens.quantize(inputs.t(), E4M3)
        return [
            (x, weights.quantize(matrix, E4M3), torch.bfloat16),
            (dy, weights.quantize(matrix.t(), E4M3), torch.bfloat16),
            (left, right, torch.float32),
        ]

    operands = quantized()
    runs["quantizing"] = quantized
    runs["multiplying"] = lambda: [multiply_quantized(*each) for each in operands]
    return runs


def _product(weight: Parameter, recipe: ScalingRecipe | None) -> Matmul:
    one_rank = planned_group(("tensor",), 0, 1, Ledger(), device=weight.device)
    layer_context = LayerContext(tensor=one_rank, context=one_rank)
    settings = None if recipe is None else Fp8Settings(recipe)
    return make_matmul([weight], replace(layer_context, products=ProductSettings(fp8=settings)))
