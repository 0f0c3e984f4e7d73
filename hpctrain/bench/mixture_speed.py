"""`hpctrain bench mixture`: costs of expert parallelism and of routing.

Each round measures a step of the deck and a step of the same model with all experts on every rank. It also
measures a mixture layer, a dense layer with as many active features, and dispatch and combination alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from hpctrain.bench.measurement import publish, time_by_turns, with_vocabulary
from hpctrain.bench.training_speed import hpctrain_variant, layout_name
from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.engine.mesh_sizes import expert_split
from hpctrain.errors import HpctrainError
from hpctrain.model.block import FeedForward
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.mixtures.mixture import Mixture
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.experts.dispatch import Dispatch
from hpctrain.parallel.experts.grouped_products import row_unit
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.shards import Parameter
from hpctrain.parallel.tensor import MatmulLayer
from hpctrain.text import counted, table


@dataclass(frozen=True)
class MixtureResult:
    """Measured times, in seconds of the slowest rank by round, and ratios, as medians over the rounds.

    Attributes:
        step_s: Step with the experts distributed as in the deck.
        whole_s: Step with all experts on every rank; None on one rank.
        mixture_s: Forward and backward pass of a mixture layer on one rank.
        dense_s: The same for the dense layer.
        exchange_s: Dispatch and combination of all layers and micro-batches of a step.
        spread: Tokens/s of the deck relative to all experts on every rank; None on one rank.
        layer: FLOP/s of the mixture layer relative to the dense layer.
        exchange: Share of dispatch and combination in a step.
    """

    step_s: list[float]
    whole_s: list[float] | None
    mixture_s: list[float]
    dense_s: list[float]
    exchange_s: list[float]
    spread: float | None
    layer: float
    exchange: float


def bench_mixture(
    world: World, path: Path, overrides: Sequence[str], steps: int, rounds: int, output: Path | None
) -> None:
    """Measure the mixture layers of a deck on random tokens, and print a table. Collective.

    Args:
        world: All ranks.
        path: File of the deck.
        overrides: Deck keys to change, as KEY=VALUE.
        steps: Steps of each variant in a round.
        rounds: Number of rounds.
        output: File for the results; None for no file.

    Raises:
        HpctrainError: The deck has no experts, or other axes than those of experts and data.
    """
    with world.agreement():
        deck = with_vocabulary(read_deck(path, overrides, world.size, read_source_keys))
        if not deck.model.experts:
            raise HpctrainError(f"{deck.sources.name}: requires [model.experts]")
        if deck.layout.tensor * deck.layout.context * deck.layout.pipeline > 1:
            problem = "must be 1, as layout.context and layout.pipeline: only expert axes are measured"
            raise HpctrainError(deck.problem("layout.tensor", problem))
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    results = _measure(world, deck, steps, rounds)
    publish(world, _result_lines(deck, world, results), asdict(results), output)


def _measure(world: World, deck: Deck, steps: int, rounds: int) -> MixtureResult:
    shape = ModelShape.of(deck, deck.model.vocabulary or 0)
    mesh = make_mesh(deck, world)
    deck_step = hpctrain_variant(layout_name(mesh), deck, world, mesh).step
    passes = deck.batch.global_size // (deck.batch.micro_size * mesh.size("data"))
    mixture_layers = sum(shape.is_mixture(index) for index in range(shape.layers))
    layers = _MeasuredLayers(deck, shape, _one_rank_context(world), world.device)
    operations: dict[str, Callable[[], object]] = {
        "step": deck_step,
        "mixture": layers.mixture,
        "dense": layers.dense,
        "exchange": _exchange(deck, shape, mesh, world.device),
    }
    if world.size > 1:
        plain = on_one_rank(deck)
        data_mesh = Mesh(world, {"data": world.size} | expert_split(plain))
        operations["data"] = hpctrain_variant(layout_name(data_mesh), plain, world, data_mesh).step
    seconds = time_by_turns(world, operations, rounds, steps)
    step, data_step = seconds["step"], seconds.get("data")
    exchanges = [passes * mixture_layers * each for each in seconds["exchange"]]
    return MixtureResult(
        step,
        data_step,
        seconds["mixture"],
        seconds["dense"],
        exchanges,
        _median_ratio(data_step, step) if data_step is not None else None,
        _median_ratio(seconds["dense"], seconds["mixture"]) * layers.flops_ratio,
        _median_ratio(exchanges, step),
    )


def _median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def _one_rank_context(world: World) -> LayerContext:
    mesh = Mesh(world.single_rank_world(), {})
    return LayerContext(tensor=mesh.group("tensor"), context=mesh.group("context"))


class _MeasuredLayers:
    """Mixture layer and dense layer with as many active features.

    Attributes:
        flops_ratio: FLOPs of the mixture layer relative to the dense layer.
    """

    def __init__(
        self, deck: Deck, shape: ModelShape, layer_context: LayerContext, device: torch.device
    ) -> None:
        formats, micro = Precision.of(deck), deck.batch.micro_size
        self._mixture = Mixture("mixture", shape, layer_context)
        table = shape.experts
        assert table is not None
        inner = (table.per_token + table.shared) * table.mlp
        self._dense = FeedForward("dense", shape, layer_context, inner)
        for layer in (self._mixture, self._dense):
            _fill(layer, formats.storage, formats.gradient, device)
        elements = [_elements(layer) for layer in (self._mixture, self._dense)]
        elements[0] += table.count * shape.hidden  # of the router
        self.flops_ratio = elements[0] / elements[1]
        self._x = torch.randn(shape.sequence, micro, shape.hidden, dtype=formats.storage, device=device)
        tokens = torch.zeros(shape.sequence, micro, dtype=torch.int64, device=device)
        self._inputs = ModelInputs.of_tokens(tokens, torch.arange(shape.sequence, device=device))

    def mixture(self) -> None:
        """Run the mixture layer forward and backward."""
        self._passes(lambda x: self._mixture(x, self._inputs, ParameterResidency()))

    def dense(self) -> None:
        """Run the dense layer forward and backward."""
        self._passes(self._dense)

    def _passes(self, layer: Callable[[Tensor], Tensor]) -> None:
        x = self._x.detach().requires_grad_()
        layer(x).backward(self._x)


def _elements(layer: nn.Module) -> int:
    """Return the number of weights that a token multiplies, without those of a router."""
    return sum(
        matrix.elements
        for each in layer.modules()
        if isinstance(each, MatmulLayer)
        for matrix in each.matrices
    )


def _fill(layer: nn.Module, storage: torch.dtype, gradient: torch.dtype, device: torch.device) -> None:
    """Allocate the parameters and gradients of each module in contiguous buffers, as in a Bucket."""
    for module in layer.modules():
        parameters = [p for p in module.parameters(recurse=False) if isinstance(p, Parameter)]
        total = sum(p.shard.elements for p in parameters)
        values = torch.randn(total, device=device).mul_(0.02).to(storage)
        sums = torch.zeros(total, dtype=gradient, device=device)
        start = 0
        for parameter in parameters:
            end = start + parameter.shard.elements
            parameter.data = values[start:end].view(parameter.shard.local)
            parameter.gradient = sums[start:end].view(parameter.shard.local)
            start = end


def _exchange(deck: Deck, shape: ModelShape, mesh: Mesh, device: torch.device) -> Callable[[], None]:
    """Return a function that dispatches and combines a micro-batch in one layer, forward and backward."""
    dtype, rows = Precision.of(deck).storage, shape.sequence * deck.batch.micro_size
    x = torch.randn(rows, shape.hidden, dtype=dtype, device=device)
    table = shape.experts
    assert table is not None
    experts = torch.rand(rows, table.count, device=device).topk(table.per_token).indices
    values = torch.rand(rows, table.per_token, device=device)
    unit = row_unit(dtype, device)
    groups = mesh.group("expert"), mesh.group("expert_tensor")

    def once() -> None:
        leaf, weights = x.detach().requires_grad_(), values.detach().requires_grad_()
        dispatch = Dispatch(experts, None, table.count, *groups, unit)
        arrived = dispatch.receive(dispatch.send(leaf))
        dispatch.combine(dispatch.send_back(arrived), weights).backward(x)

    return once


def _result_lines(deck: Deck, world: World, results: MixtureResult) -> list[str]:
    """Return the results as a table with sentences."""
    tokens = deck.batch.global_size * deck.batch.sequence
    times = {
        "step, experts distributed as in the deck": results.step_s,
        "step, all experts on every rank": results.whole_s,
        "mixture layer on one rank": results.mixture_s,
        "dense layer with as many active features": results.dense_s,
        "dispatch and combination in a step": results.exchange_s,
    }
    rows = [["time in ms", "median", "lowest", "highest"]]
    for name, seconds in times.items():
        if seconds is not None:
            rows.append([name, *(f"{1e3 * statistic(seconds):.1f}" for statistic in (median, min, max))])
    relative_speed = f"tokens/s relative to all experts on every rank: {results.spread or 0:.1%}"
    return [
        f"{deck.run.title}: {deck.precision.format_name}, {counted(world.size, 'rank')}, "
        f"{tokens} tokens per step",
        *table(rows),
        *([relative_speed] if results.spread is not None else []),
        f"FLOP/s of the mixture layer relative to the dense layer: {results.layer:.1%}",
        f"share of dispatch and combination in the step: {results.exchange:.1%}",
    ]
