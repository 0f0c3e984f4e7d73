"""`hpctrain bench train`: tokens/s, MFU, time by phase, losses and memory, variants side by side in one run.

All variants are built first and then take turns, so that the machine's drift meets them alike; what
counts is the ratio within a round.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from hpctrain.bench.measurement import with_vocabulary, write_json
from hpctrain.bench.peers.peer_process import PeerProcess
from hpctrain.bench.peers.training_peers import RIVALS, rival_problems
from hpctrain.bench.pipeline_prediction import StageProbe
from hpctrain.bench.training_table import Setting, TrainingFigures, agrees, figure_lines, most_of_a_node
from hpctrain.bench.variant_memory import measure_afresh
from hpctrain.bench.variant_timing import TimedVariant, VariantTimes, take_turns
from hpctrain.checkpoint.exchange.source import settled_keys
from hpctrain.comm.mesh import Mesh, sizes_text
from hpctrain.comm.world import World
from hpctrain.costs.layer_flops import model_flops
from hpctrain.costs.live_activations import LiveActivations
from hpctrain.costs.part_bytes import gpt_activation_bytes, has_gpt_layers
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.engine.mesh_sizes import expert_split
from hpctrain.errors import HpctrainError
from hpctrain.host.device import gpu_name, on_host
from hpctrain.host.device_memory import peak_bytes
from hpctrain.host.memory import peak_proportional_bytes
from hpctrain.host.processor import processor_name
from hpctrain.model.construction import architecture_of
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.part import blocks_of
from hpctrain.model.precision import Precision
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.random import DropoutSource
from hpctrain.plan.engine import build_within_memory
from hpctrain.report.terminal import stdout_console
from hpctrain.text import either
from hpctrain.train.trainer import Trainer
from hpctrain.units import format_bytes
from hpctrain.watch.peak_flops import measure_gemm_flops

OWN = "deck"


@dataclass(frozen=True)
class TrainingBenchOptions:
    """What to measure beside the deck's own layout, and how long.

    `no_sync`: each rank trains alone, without communication. `data_parallel`: the same global batch
    over data ranks only. `variants`: the same deck with further changes, `KEY=VALUE` separated by spaces.
    `against`: others' ways, of RIVALS. `only`: none of these but the one of this name, or the deck's own
    layout, "deck". `memory`: that of each of our own too where there are several, see measure_afresh.
    """

    steps: int
    rounds: int
    no_sync: bool = False
    data_parallel: bool = False
    against: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    only: str | None = None
    memory: bool = False

    def chosen(self) -> list[str]:
        """The names of what to measure, in order; HpctrainError where `only` is none of them."""
        names = [OWN]
        names += ["data-parallel"] if self.data_parallel else []
        names += ["no-sync"] if self.no_sync else []
        names += [*self.variants, *self.against]
        if self.only is None:
            return names
        if self.only not in names:
            raise HpctrainError(f"--only {self.only}: must be {either(names)}")
        return [self.only]


def bench_train(
    world: World, path: Path, overrides: Sequence[str], wish: TrainingBenchOptions, output: Path | None
) -> int:
    """Time a deck's training step on random tokens; the exit code."""
    with world.agreement():
        deck = with_vocabulary(read_deck(path, overrides, read_source=settled_keys))
        _require_tokens(deck)
        architecture_of(deck, deck.model.vocabulary or 0)  # which refuses what cannot be built
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    mesh = make_mesh(deck, world)
    with world.agreement():
        names = wish.chosen()
        problems = rival_problems(wish.against, deck, world.size, on_host(world.device))
        if problems:
            raise HpctrainError(problems)
        changed: dict[str, Deck] = {}
        for changes in wish.variants:
            other = read_deck(path, [*overrides, *changes.split()], read_source=settled_keys)
            changed[changes] = with_vocabulary(other)
    own = [name for name in names if name not in wish.against]
    afresh = measure_afresh(world, path, overrides, wish, own) if wish.memory else {}
    load = os.getloadavg()[0]
    variants: list[TimedVariant] = []
    with ExitStack() as processes:
        for name in names:
            if name in wish.against:
                split = variants[0].split if variants else ()
                peer = PeerProcess(name, deck, world, split)
                processes.callback(peer.close)
                variants.append(_rival(name, deck, world, peer))
            elif name == "no-sync":
                alone = world.single_rank_world()
                plain = on_one_rank(deck)
                variants.append(own_variant(name, plain, alone, Mesh(alone, {}), world.size, alike=False))
            elif name == "data-parallel":
                plain = on_one_rank(deck)
                copies = Mesh(world, {"data": world.size} | expert_split(plain))
                variants.append(own_variant(layout_name(copies), plain, world, copies))
            elif name in changed:
                other = changed[name]
                variants.append(own_variant(name, other, world, make_mesh(other, world)))
            else:
                variants.append(own_variant(layout_name(mesh), deck, world, mesh))
        dtype = Precision.of(deck).product
        peak = _mean(world, measure_gemm_flops(dtype, world.device))
        measured = take_turns(world, variants, wish.steps, wish.rounds)
        memory = [_memory(world, variant, len(own) == 1) for variant in variants]
    for index, name in enumerate(names):
        memory[index] = afresh.get(name, memory[index])
    peak = max(peak, _mean(world, measure_gemm_flops(dtype, world.device)))
    of_token = model_flops(architecture_of(deck, deck.model.vocabulary or 0)).flops_per_token
    flops = of_token / (peak * world.size)
    figures = [
        _figures(row, measured[0], flops, bytes_of, deck)
        for row, bytes_of in zip(measured, memory, strict=True)
    ]
    # Another engine of the deck, for which there may be no memory beside a variant that was to be alone.
    own_family = wish.only is None and deck.model.module is None
    activations = _activations(deck, world, mesh) if own_family else ""
    if world.rank == 0:
        setting = Setting.of(deck, world, peak, gpu_name(world.device) or processor_name(), load)
        stdout_console().print("\n".join(figure_lines(setting, figures)), markup=False)
        if activations:
            print(activations)
        if output is not None:
            write_json(output, asdict(setting) | {"rows": [asdict(row) for row in figures]})
    return 0


def _require_tokens(deck: Deck) -> None:
    """HpctrainError where a deck's module takes no tokens, or has a loss that no peer has."""
    for key in ("data.dataset", "model.loss"):
        if deck.value(key) is not None:
            raise HpctrainError(
                deck.problem(
                    key,
                    "is unsupported in bench train, which measures the next-token loss on token sequences",
                )
            )
    if deck.objective.kind in POLICY_KINDS:
        sentence = 'is unsupported in bench train (use "next-token" to measure its layers)'
        raise HpctrainError(deck.problem("objective.kind", sentence))


def _rival(name: str, deck: Deck, world: World, peer: PeerProcess) -> TimedVariant:
    """Others' step."""
    tokens = deck.batch.global_size * deck.batch.sequence / world.size
    return TimedVariant(name, peer.step, tokens, alike=RIVALS[name].alike, memory=peer.memory)


def _memory(world: World, variant: TimedVariant, alone: bool) -> tuple[int, int] | None:
    """The most that a rank had resident, and that the ranks of a node had together; None where that is not
    known, since other variants of ours were in the same processes, or lies on a GPU. Collective.
    """
    if variant.memory is not None:
        resident, own = variant.memory()
    elif alone:
        resident, own = peak_bytes(world.device), peak_proportional_bytes() if on_host(world.device) else 0
    else:
        return None
    return most_of_a_node(world, resident, own)


def _figures(
    row: VariantTimes, first: VariantTimes, flops: float, memory: tuple[int, int] | None, deck: Deck
) -> TrainingFigures:
    prediction = row.variant.probe.prediction() if row.variant.probe is not None else None
    ratios = [own / other for own, other in zip(first.tokens_per_s, row.tokens_per_s, strict=True)]
    alike = agrees(first.losses, row.losses, deck) if row.variant.alike and first.variant.alike else None
    resident, of_node = memory if memory is not None else (None, None)
    return TrainingFigures(
        name=row.variant.name,
        tokens_per_s=row.tokens_per_s,
        ratios=ratios,
        step_seconds=row.seconds,
        mfu=median(row.tokens_per_s) * flops,
        phase_ms={phase: 1e3 * seconds for phase, seconds in row.phases.items()},
        losses=row.losses,
        losses_agree=alike,
        pipeline=prediction,
        peak_bytes=resident,
        node_bytes=of_node or None,
    )


def layout_name(mesh: Mesh) -> str:
    """The axes along which there are several ranks."""
    return sizes_text(mesh.sizes, 2) or "one rank"


def own_variant(
    name: str, deck: Deck, world: World, mesh: Mesh, share: int = 1, alike: bool = True
) -> TimedVariant:
    """Our own step; `share` is the part of the global batch that this world takes (1/share)."""
    assert deck.model.vocabulary is not None
    engine, _ = build_within_memory(deck, world, mesh)
    source = SyntheticSource(deck.batch.sequence, deck.model.vocabulary, seed=deck.run.seed)
    batches = Batches(source, deck.run.seed)
    trainer = Trainer(deck, engine, batches)
    batch = deck.batch.global_size // share

    def phases() -> dict[str, float]:
        seconds = dict(world.ledger.phase_seconds)
        world.ledger.reset()
        return seconds

    probe = StageProbe(engine, trainer.step) if mesh.size("pipeline") > 1 else None
    tokens = batch * deck.batch.sequence / world.size

    def step() -> float:
        return trainer.train_step(batch).loss

    return TimedVariant(name, step, tokens, phases, engine.placement.split, probe, alike)


def _activations(deck: Deck, world: World, mesh: Mesh) -> str:
    """What one layer keeps for backward on this rank, measured, and by the published formula; "" where its
    first part has no block. Collective.
    """
    engine = build_engine(deck, world, mesh)
    assert isinstance(engine.model, Transformer)
    shape, layer_context, micro, dtype = (
        engine.shape,
        engine.stage.layer_context,
        deck.batch.micro_size,
        engine.model.dtype,
    )
    hidden = engine.model.hidden_shape(micro)
    x = torch.randn(hidden, dtype=dtype, device=world.device, requires_grad=True)
    samples = torch.arange(micro, device=world.device)
    source = DropoutSource(0, 0, samples, engine.positions) if shape.dropout else None
    tokens = torch.zeros(len(engine.positions), micro, dtype=torch.int64, device=world.device)
    inputs = ModelInputs.of_tokens(tokens, engine.positions, source)
    if not (blocks := blocks_of(engine.model)):
        return ""
    first = blocks[0]
    with engine.stage.residency.in_memory(first.gather_keys[0]):
        parameters = [bucket.values for bucket in engine.stage.buckets if bucket.values is not None]
        with LiveActivations(lambda: parameters) as saved:
            engine.model.run_layer(first, inputs, x)
    text = f"activations of one layer on one rank: {format_bytes(saved.peak)} measured"
    if has_gpt_layers(shape) and dtype.itemsize == 2 and layer_context.context.size == 1:
        formula = gpt_activation_bytes(
            shape, micro, layer_context.tensor.size, layer_context.sequence_parallel
        )
        text += f", {format_bytes(formula)} by the formula (arXiv 2205.05198, fused attention)"
    return text


def _mean(world: World, value: float) -> float:
    total = world.everyone.all_reduce(torch.tensor(value, dtype=torch.float64))
    return float(total.item()) / world.size
