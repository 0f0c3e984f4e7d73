"""`hpctrain bench mixture`: what spreading experts over ranks costs, what routing does, and what is left.

Everything takes turns in one run: a step of the deck and one of the same model without its experts spread, a
mixture's layer and a dense one of as many active FLOPs, and the exchanges of a layer without its experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from hpctrain.bench.measurement import slowest, with_vocabulary, write_json
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
class MixtureFigures:
    """By round: seconds of a step with experts spread, of one without (None on one rank), of one layer and
    of the dense one, forward and backward on every rank by itself, and of a layer's exchanges in a step.

    `spread` is tokens/s with experts spread over those without, `layer` FLOP/s of a mixture's layer over
    those of the dense one, `exchange` the share of dispatch and combination in a step: medians over rounds.
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
) -> int:
    """Time a deck's mixtures on random tokens; the exit code. Collective."""
    with world.agreement():
        deck = with_vocabulary(read_deck(path, overrides, world.size, read_source_keys))
        if not deck.model.experts:
            raise HpctrainError(f"{deck.sources.name}: requires [model.experts]")
        if deck.layout.tensor * deck.layout.context * deck.layout.pipeline > 1:
            asked = "must be 1, as layout.context and layout.pipeline: only expert axes are measured"
            raise HpctrainError(deck.problem("layout.tensor", asked))
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    figures = _measure(world, deck, steps, rounds)
    if world.rank == 0:
        _show(deck, world, figures)
        if output is not None:
            write_json(output, asdict(figures))
    return 0


def _measure(world: World, deck: Deck, steps: int, rounds: int) -> MixtureFigures:
    shape = ModelShape.of(deck, deck.model.vocabulary or 0)
    mesh = make_mesh(deck, world)
    spread = hpctrain_variant(layout_name(mesh), deck, world, mesh).step
    whole = None
    if world.size > 1:
        plain = on_one_rank(deck)
        copies = Mesh(world, {"data": world.size} | expert_split(plain))
        whole = hpctrain_variant(layout_name(copies), plain, world, copies).step
    passes = deck.batch.global_size // (deck.batch.micro_size * mesh.size("data"))
    routed = sum(shape.is_mixture(index) for index in range(shape.layers))
    alone = _one_rank(world)
    layers = _Layers(deck, shape, alone, world.device)
    exchange = _exchange(deck, shape, mesh, world.device)
    timed: list[Callable[[], object]] = [spread, layers.mixture, layers.dense, exchange]
    timed += [whole] if whole is not None else []
    seconds: list[list[float]] = [[] for _ in timed]
    for turn in range(rounds + 1):
        for index, once in enumerate(timed):
            world.everyone.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                once()
            taken = slowest(world, time.perf_counter() - began) / steps
            if turn:
                seconds[index].append(taken)
    step, mixture, dense, exchanges, *others = seconds
    exchanges = [passes * routed * each for each in exchanges]
    return MixtureFigures(
        step,
        others[0] if others else None,
        mixture,
        dense,
        exchanges,
        _ratio(others[0], step) if others else None,
        _ratio(dense, mixture) * layers.flops_ratio,
        _ratio(exchanges, step),
    )


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return median(first / second for first, second in zip(above, below, strict=True))


def _one_rank(world: World) -> LayerContext:
    mesh = Mesh(world.single_rank_world(), {})
    return LayerContext(tensor=mesh.group("tensor"), context=mesh.group("context"))


class _Layers:
    """One mixture and one dense layer of as many active features, with weights and gradients of their own."""

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
        elements[0] += table.count * shape.hidden  # the router's
        self.flops_ratio = elements[0] / elements[1]
        self._x = torch.randn(shape.sequence, micro, shape.hidden, dtype=formats.storage, device=device)
        tokens = torch.zeros(shape.sequence, micro, dtype=torch.int64, device=device)
        self._inputs = ModelInputs.of_tokens(tokens, torch.arange(shape.sequence, device=device))

    def mixture(self) -> None:
        """Forward and backward."""
        self._both(lambda x: self._mixture(x, self._inputs, ParameterResidency()))

    def dense(self) -> None:
        """Forward and backward."""
        self._both(self._dense)

    def _both(self, layer: Callable[[Tensor], Tensor]) -> None:
        x = self._x.detach().requires_grad_()
        layer(x).backward(self._x)


def _elements(layer: nn.Module) -> int:
    return sum(
        matrix.elements
        for each in layer.modules()
        if isinstance(each, MatmulLayer)
        for matrix in each.matrices
    )


def _fill(layer: nn.Module, storage: torch.dtype, gradient: torch.dtype, device: torch.device) -> None:
    """Give parameters memory: those of a layer's module behind each other, as in a Bucket."""
    for module in layer.modules():
        own = [p for p in module.parameters(recurse=False) if isinstance(p, Parameter)]
        total = sum(p.shard.elements for p in own)
        values = torch.randn(total, device=device).mul_(0.02).to(storage)
        sums = torch.zeros(total, dtype=gradient, device=device)
        start = 0
        for parameter in own:
            end = start + parameter.shard.elements
            parameter.data = values[start:end].view(parameter.shard.local)
            parameter.gradient = sums[start:end].view(parameter.shard.local)
            start = end


def _exchange(deck: Deck, shape: ModelShape, mesh: Mesh, device: torch.device) -> Callable[[], None]:
    """One micro-batch's dispatch and combination in one layer, and of backward, without experts."""
    dtype, rows = Precision.of(deck).storage, shape.sequence * deck.batch.micro_size
    x = torch.randn(rows, shape.hidden, dtype=dtype, device=device)
    table = shape.experts
    assert table is not None
    chosen = torch.rand(rows, table.count, device=device).topk(table.per_token).indices
    values = torch.rand(rows, table.per_token, device=device)
    unit = row_unit(dtype, device)
    groups = mesh.group("expert"), mesh.group("expert_tensor")

    def once() -> None:
        leaf, weights = x.detach().requires_grad_(), values.detach().requires_grad_()
        dispatch = Dispatch(chosen, None, table.count, *groups, unit)
        arrived = dispatch.receive(dispatch.send(leaf))
        dispatch.combine(dispatch.send_back(arrived), weights).backward(x)

    return once


def _show(deck: Deck, world: World, figures: MixtureFigures) -> None:
    tokens = deck.batch.global_size * deck.batch.sequence
    ranks = counted(world.size, "rank")
    print(f"{deck.run.title}: {deck.precision.format_name}, {ranks}, {tokens} tokens per step")
    rows = [["time in ms", "median", "lowest", "highest"]]
    timed = {
        "step, experts distributed as in the deck": figures.step_s,
        "step, all experts on every rank": figures.whole_s,
        "mixture layer on one rank": figures.mixture_s,
        "dense layer with as many active features": figures.dense_s,
        "dispatch and combination in a step": figures.exchange_s,
    }
    for name, seconds in timed.items():
        if seconds is not None:
            rows.append([name, *(f"{1e3 * of(seconds):.1f}" for of in (median, min, max))])
    print("\n".join(table(rows)))
    if figures.spread is not None:
        print(f"tokens/s relative to all experts on every rank: {figures.spread:.1%}")
    print(f"FLOP/s of the mixture layer relative to the dense layer: {figures.layer:.1%}")
    print(f"share of dispatch and combination in the step: {figures.exchange:.1%}")
