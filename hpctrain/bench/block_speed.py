"""`hpctrain bench blocks`: the speed of the blocks of families, compared with a plain matrix product.

Models of about 17M parameters, which differ only by their family, are compared with the product of their
largest matrix alone. The share of its speed that a family reaches shows what norms, biases, activations and
attention cost. On CPUs processor time is measured, which does not depend on other programs of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from hpctrain.bench.measurement import clock, publish, slowest
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.costs.layer_flops import model_flops
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.deck_layer_context import make_layer_context
from hpctrain.engine.choices.kernel_choice import choose_kernels
from hpctrain.engine.stages.stage import build_stage
from hpctrain.errors import HpctrainError
from hpctrain.host.device import gpu_name
from hpctrain.host.processor import processor_name
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.part import LayerRange, parameter_list
from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.backward.autograd import BackwardStart
from hpctrain.parallel.backward.saved_policy import SavedPolicy
from hpctrain.parallel.tensor import SplitLinear
from hpctrain.plan.calibrate.calibration_decks import SMALL, gpt_deck
from hpctrain.sharding.replication import Replications
from hpctrain.text import either, table
from hpctrain.units import format_count, format_seconds

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "llama": (),
    "qwen2": ("model.attention_bias=query_key_value",),
    "qwen3": ("model.query_key_norm=head",),
    "gemma": ("model.family=gemma",),
    "gemma2": ("model.family=gemma2",),
    "gemma3": ("model.family=gemma3",),
}
"""Families by name, with the keys by which their decks differ from one of Llama."""

_DECK = ("model.family=llama", "model.mlp=1408", "model.initial_std=0.02")
_MICRO_SIZE, _SEQUENCE = 4, 256


@dataclass(frozen=True)
class BlocksResult:
    """Measured speed of the blocks of one family.

    Attributes:
        family: Name of the family.
        parameters: Parameters of the blocks.
        seconds: Seconds of forward and backward pass of a micro-batch, of the slowest rank, in each round.
        share: FLOP/s of the blocks relative to those of a matrix alone, in each round.
        relative: Share divided by that of the first measured family, in the order of FAMILIES, in each round.
    """

    family: str
    parameters: int
    seconds: list[float]
    share: list[float]
    relative: list[float]


@dataclass(frozen=True)
class _Work:
    """Computation to measure.

    Attributes:
        run: Function that performs it once.
        flops: Number of its FLOPs.
        parameters: Number of parameters.
    """

    run: Callable[[], object]
    flops: float
    parameters: int = 0


def bench_blocks(
    world: World, families: Sequence[str], overrides: Sequence[str], rounds: int, output: Path | None
) -> None:
    """Measure the blocks of families on every rank at once, and print a table. Collective.

    Args:
        world: All ranks.
        families: Names of families, all of FAMILIES if empty.
        overrides: Deck keys that are changed for all families, as KEY=VALUE.
        rounds: Number of rounds, in each of which everything is measured once.
        output: File for the results; None for no file.

    Raises:
        HpctrainError: A family is unknown, or a deck is invalid.
    """
    with world.agreement():
        if unknown := [name for name in families if name not in FAMILIES]:
            raise HpctrainError(f"--family {unknown[0]}: must be {either(FAMILIES)}")
        decks = {
            name: gpt_deck(SMALL, _MICRO_SIZE, _SEQUENCE, *_DECK, *changes, *overrides)
            for name, changes in FAMILIES.items()
            if name in families or not families
        }
    torch.set_num_threads(1)
    results = measure_blocks(world, decks, rounds)
    deck = next(iter(decks.values()))
    tokens = f"{deck.batch.micro_size * deck.batch.sequence:,} tokens"
    setting = f"{tokens}, {deck.precision.format_name}, {gpu_name(world.device) or processor_name()}"
    publish(world, result_lines(results, setting), [asdict(each) for each in results], output)


def measure_blocks(world: World, decks: Mapping[str, Deck], rounds: int) -> list[BlocksResult]:
    """Return the speeds of the blocks of decks. Collective.

    Args:
        world: All ranks.
        decks: Decks by the name of their family.
        rounds: Number of rounds.
    """
    works, products = {}, []
    for name, deck in decks.items():
        works[name], product = _works(world, deck)
        products.append(product)
    product = products[0]  # all families have the same largest matrix
    times: dict[str, list[float]] = {name: [] for name in ("", *works)}
    for number in range(rounds + 1):
        order = [("", product), *works.items()]
        for name, work in order if number % 2 else reversed(order):
            world.everyone.barrier()
            start = clock(world.device)
            work.run()
            seconds = slowest(world, clock(world.device) - start)
            if number:  # the first round fills caches
                times[name].append(seconds)
    matrix_rates = [product.flops / seconds for seconds in times.pop("")]
    shares = {
        name: [
            works[name].flops / duration / rate for duration, rate in zip(seconds, matrix_rates, strict=True)
        ]
        for name, seconds in times.items()
    }
    first = next(iter(shares.values()))
    return [
        BlocksResult(
            name,
            works[name].parameters,
            seconds,
            shares[name],
            [share / reference for share, reference in zip(shares[name], first, strict=True)],
        )
        for name, seconds in times.items()
    ]


def result_lines(results: Sequence[BlocksResult], setting: str) -> list[str]:
    """Return a table of the results with a heading.

    Args:
        results: The results.
        setting: Tokens, format and device.
    """
    first = results[0].family
    rows: list[tuple[str, ...]] = [
        ("family", "parameters", "time", "share", f"of {first}", "lowest", "highest")
    ]
    for each in results:
        relative = (f"{statistic(each.relative):.3f}" for statistic in (median, min, max))
        share = f"{median(each.share):.1%}"
        rows.append(
            (
                each.family,
                format_count(each.parameters),
                format_seconds(median(each.seconds)),
                share,
                *relative,
            )
        )
    heading = f"Blocks, {setting}; share of the FLOP/s of a matrix alone"
    return [heading, *table(rows)]


def _works(world: World, deck: Deck) -> tuple[_Work, _Work]:
    """Return the work of all blocks of a deck, and that of their largest matrix alone. Collective.

    Each rank does all of both. The matrix product is repeated until its FLOPs are about those of the blocks.
    """
    mesh = Mesh(world.single_rank_world(), {})
    deck = choose_kernels(deck, world, mesh)
    layer_context = make_layer_context(deck, mesh, SavedPolicy(), world.device)
    assert deck.model.vocabulary is not None
    shape = ModelShape.of(deck, deck.model.vocabulary)
    part = Transformer(shape, layer_context, LayerRange(0, shape.layers, False, False))
    replications = Replications.of_one_rank(mesh.new_subgroup("data", 1))
    generator = torch.Generator(world.device).manual_seed(0)
    for bucket in build_stage(deck, layer_context, [part], replications, has_gradients=True).buckets:
        assert bucket.values is not None
        bucket.values.normal_(std=shape.initial_std, generator=generator)
    matrix = max((layer for layer in part.modules() if isinstance(layer, SplitLinear)), key=_elements)
    x = torch.empty(part.hidden_shape(deck.batch.micro_size), dtype=part.dtype, device=world.device)
    x.normal_(generator=generator)
    tokens = torch.zeros(x.shape[:2], dtype=torch.int64, device=world.device)
    inputs = ModelInputs.of_tokens(tokens, torch.arange(shape.sequence, device=world.device))

    def passes(layer: Callable[[Tensor], Tensor]) -> None:
        output = layer(x.detach().requires_grad_())
        with layer_context.weight_gradients.backward(deferring=False):
            BackwardStart(output).backward(output.detach())

    flops = 3.0 * model_flops(shape).block_forward * tokens.numel()
    matrix_flops = 6.0 * _elements(matrix) * tokens.numel()
    repetitions = max(1, round(flops / matrix_flops))

    def products() -> None:
        for _ in range(repetitions):
            passes(matrix)

    parameters = sum(parameter.shard.elements for parameter in parameter_list(part))
    blocks = _Work(lambda: passes(lambda hidden: part(inputs, hidden)), flops, parameters)
    return blocks, _Work(products, matrix_flops * repetitions)


def _elements(layer: SplitLinear) -> int:
    """Return the number of elements of the matrix of a layer."""
    return sum(matrix.elements for matrix in layer.matrices)
