"""`hpctrain bench train`: tokens/s, MFU and time by phase, variants side by side in one run.

All variants are built first and then take turns, so that the machine's drift meets them alike; what
counts is the ratio within a round. One alone shows the memory that it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from hpctrain.bench.mixtral import MIXTRAL_RIVALS, mixtral_step
from hpctrain.bench.peers import start_gloo, stop_gloo
from hpctrain.bench.stages import Prediction, StageProbe, sentence, stage_lines
from hpctrain.bench.timing import with_vocabulary, write_json
from hpctrain.bench.torch_model import torch_step
from hpctrain.bench.torch_pipeline import PIPELINE_RIVALS, pipeline_step
from hpctrain.bench.torch_sharded import SHARDED_RIVALS, sharded_step
from hpctrain.checkpoint.exchange.source import settled_keys
from hpctrain.comm.device import peak_bytes
from hpctrain.comm.mesh import Mesh, sizes_text
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.read import read_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import build_engine, make_mesh
from hpctrain.engine.sizes import expert_sizes
from hpctrain.errors import HpctrainError
from hpctrain.memory.live import LiveActivations
from hpctrain.memory.saved import gpt_activation_bytes
from hpctrain.model.count import count
from hpctrain.model.inputs import Inputs
from hpctrain.model.part import blocks_of
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.random import DropoutSource
from hpctrain.plan.engine import build_within_memory
from hpctrain.report.terminal import stdout_console
from hpctrain.table import table
from hpctrain.train.trainer import Trainer
from hpctrain.train.verify import on_one_rank
from hpctrain.units import format_bytes, format_count
from hpctrain.watch.machine import measure_gemm_flops

OWN = "deck"
PHASES = ("forward", "backward", "synchronize", "step", "other")


@dataclass(frozen=True)
class Variant:
    """Something to time: `step` does one step on all ranks, `tokens` is this rank's part of its tokens.

    `phases` gives the seconds spent in each phase since it was last asked. `split` are the blocks of each
    part of the model; `probe` measures the stages of a pipeline.
    """

    name: str
    step: Callable[[], object]
    tokens: float
    phases: Callable[[], dict[str, float]]
    split: tuple[int, ...] = ()
    probe: StageProbe | None = None


@dataclass(frozen=True)
class TrainingFigures:
    """What one variant reached: tokens/s of all ranks together, by round; milliseconds a step by phase.

    `pipeline` is the simulator's prediction, of a variant with stages. `peak_bytes` is the most memory that
    a rank had in use, of a variant alone in its process.
    """

    name: str
    tokens_per_s: list[float]
    mfu: float
    phase_ms: dict[str, float]
    pipeline: Prediction | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class TrainingWish:
    """What to measure beside the deck's own layout, and how long.

    `no_sync`: each rank trains alone, without communication. `data_parallel`: the same global batch
    over data ranks only. `variants`: the same deck with further changes, `KEY=VALUE` separated by spaces.
    `against`: others' ways, by the names that the verb's help tells. `only`: none of these but the one of
    this name, or the deck's own layout, "deck".
    """

    steps: int
    rounds: int
    no_sync: bool = False
    data_parallel: bool = False
    against: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    only: str | None = None


def bench_train(
    world: World, path: Path, overrides: Sequence[str], wish: TrainingWish, output: Path | None
) -> int:
    """Time a deck's training step on random tokens; the exit code."""
    with world.agreement():
        deck = with_vocabulary(read_deck(path, overrides, read_source=settled_keys))
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device)
    mesh = make_mesh(deck, world)
    with world.agreement():
        names = _chosen(wish)
        changed: dict[str, Deck] = {}
        for changes in wish.variants:
            other = read_deck(path, [*overrides, *changes.split()], read_source=settled_keys)
            changed[changes] = with_vocabulary(other)
    gloo = any(name in wish.against and name not in MIXTRAL_RIVALS for name in names)
    if gloo:
        start_gloo(world)
    variants: list[Variant] = []
    for name in names:
        if name in wish.against:
            split = variants[0].split if variants else ()
            variants.append(_rival(name, deck, world, split))
        elif name == "no-sync":
            alone = world.alone()
            variants.append(own_variant(name, on_one_rank(deck), alone, Mesh(alone, {}), share=world.size))
        elif name == "data-parallel":
            plain = on_one_rank(deck)
            copies = Mesh(world, {"data": world.size} | expert_sizes(plain))
            variants.append(own_variant(layout_name(copies), plain, world, copies))
        elif name in changed:
            other = changed[name]
            variants.append(own_variant(name, other, world, make_mesh(other, world)))
        else:
            variants.append(own_variant(layout_name(mesh), deck, world, mesh))
    dtype = Precision.of(deck).product
    peak = _mean(world, measure_gemm_flops(dtype, world.device))
    measured = take_turns(world, variants, wish)
    own = torch.tensor(peak_bytes(world.device))
    memory = int(world.everyone.all_reduce(own, "max").item()) if len(variants) == 1 else None
    peak = max(peak, _mean(world, measure_gemm_flops(dtype, world.device)))
    flops = count(ModelShape.of(deck, deck.model.vocabulary or 0)).flops_per_token
    figures = []
    for variant, rates, phases in measured:
        mfu = median(rates) * flops / (peak * world.size)
        prediction = variant.probe.prediction() if variant.probe is not None else None
        figures.append(TrainingFigures(variant.name, rates, mfu, phases, prediction, memory))
    if gloo:
        stop_gloo()
    # Another engine of the deck, for which there may be no memory beside a variant that was to be alone.
    activations = _activations(deck, world, mesh) if wish.only is None else ""
    if world.rank == 0:
        _show(deck, world, figures, peak)
        if activations:
            print(activations)
        if output is not None:
            write_json(output, [asdict(row) for row in figures])
    return 0


def _chosen(wish: TrainingWish) -> list[str]:
    """The names of what to measure, in order; HpctrainError where `only` is none of them."""
    names = [OWN]
    names += ["data-parallel"] if wish.data_parallel else []
    names += ["no-sync"] if wish.no_sync else []
    names += [*wish.variants, *wish.against]
    if wish.only is None:
        return names
    if wish.only not in names:
        raise HpctrainError(f"--only {wish.only}: is not among what is compared: {', '.join(names)}")
    return [wish.only]


def _rival(name: str, deck: Deck, world: World, split: Sequence[int]) -> Variant:
    """Others' step; `split` are the blocks of each part of our pipeline, empty where it is not measured."""
    step: Callable[[], object]
    if name in MIXTRAL_RIVALS:
        step = mixtral_step(name, deck, world)
    elif name in PIPELINE_RIVALS:
        step = pipeline_step(name, deck, world, split)
    elif name in SHARDED_RIVALS:
        step = sharded_step(name, deck, world)
    else:
        step = torch_step(name, deck, world)
    return Variant(name, step, deck.batch.global_size * deck.batch.sequence / world.size, dict)


def layout_name(mesh: Mesh) -> str:
    """The axes along which there are several ranks."""
    return sizes_text(mesh.sizes, 2) or "one rank"


def own_variant(name: str, deck: Deck, world: World, mesh: Mesh, share: int = 1) -> Variant:
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
    return Variant(name, partial(trainer.train_step, batch), tokens, phases, engine.placement.split, probe)


def take_turns(
    world: World, variants: Sequence[Variant], wish: TrainingWish
) -> list[tuple[Variant, list[float], dict[str, float]]]:
    """Rounds of `steps` steps of each variant in turn, after one round that is not counted."""
    rates: list[list[float]] = [[] for _ in variants]
    phases: list[dict[str, float]] = [{} for _ in variants]
    for turn in range(wish.rounds + 1):
        for index, variant in enumerate(variants):
            world.everyone.barrier()
            variant.phases()
            started = time.perf_counter()
            for _ in range(wish.steps if turn else 1):
                variant.step()
            seconds = (time.perf_counter() - started) / wish.steps
            rate = variant.tokens / seconds
            spent = variant.phases()
            # Ranks that wait for each other take as long as the slowest; independent ones add up.
            total = _mean(world, rate) * world.size
            if turn:
                rates[index].append(total)
                for phase, part in spent.items():
                    phases[index][phase] = phases[index].get(phase, 0.0) + part
                if variant.probe is not None:
                    variant.probe(seconds, {phase: part / wish.steps for phase, part in spent.items()})
    count = wish.steps * wish.rounds
    return [
        (variant, rate, {phase: 1e3 * seconds / count for phase, seconds in phase_sums.items()})
        for variant, rate, phase_sums in zip(variants, rates, phases, strict=True)
    ]


def _activations(deck: Deck, world: World, mesh: Mesh) -> str:
    """What one layer keeps for backward on this rank, measured, and by the published formula; "" where its
    first part has no block. Collective.
    """
    engine = build_engine(deck, world, mesh)
    shape, groups, micro, dtype = engine.shape, engine.groups, deck.batch.micro_size, engine.model.dtype
    hidden = engine.model.hidden_shape(micro)
    x = torch.randn(hidden, dtype=dtype, device=world.device, requires_grad=True)
    samples = torch.arange(micro, device=world.device)
    source = DropoutSource(0, 0, samples, engine.positions) if shape.dropout else None
    tokens = torch.zeros(len(engine.positions), micro, dtype=torch.int64, device=world.device)
    inputs = Inputs(tokens, engine.positions, source)
    if not (blocks := blocks_of(engine.model)):
        return ""
    first = blocks[0]
    with engine.residency.held(first.held[0]):
        parameters = [bucket.values for bucket in engine.buckets if bucket.values is not None]
        with LiveActivations(lambda: parameters) as saved:
            engine.model.run_layer(first, inputs, x)
    text = f"activations of one layer on one rank: {format_bytes(saved.peak)} measured"
    if shape.family == "gpt2" and dtype.itemsize == 2 and groups.context.size == 1:
        formula = gpt_activation_bytes(shape, micro, groups.tensor.size, groups.sequence_parallel)
        text += f", {format_bytes(formula)} by the formula (arXiv 2205.05198, fused attention)"
    return text


def _mean(world: World, value: float) -> float:
    total = world.everyone.all_reduce(torch.tensor(value, dtype=torch.float64))
    return float(total.item()) / world.size


def _show(deck: Deck, world: World, figures: Sequence[TrainingFigures], peak: float) -> None:
    shape = ModelShape.of(deck, deck.model.vocabulary or 0)
    console = stdout_console()
    console.print(
        f"{deck.run.title}: {shape.family}, {format_count(count(shape).parameters)} parameters, "
        f"{deck.precision.words}, {world.size} ranks, batch {deck.batch.global_size} x "
        f"{deck.batch.sequence} tokens; a matrix product runs at {peak / 1e9:.1f} GFLOP/s a rank"
    )
    rates = [["variant", "tokens/s", "lowest", "highest", "mfu", "ratio"]]
    for row in figures:
        ratios = [first / own for first, own in zip(figures[0].tokens_per_s, row.tokens_per_s, strict=True)]
        speeds = [format_count(of(row.tokens_per_s)) for of in (median, min, max)]
        rates.append([row.name, *speeds, f"{row.mfu:.1%}", f"{median(ratios):.1%}"])
    console.print("\n".join(table(rates)), markup=False)
    console.print(f"ratio: tokens/s of {figures[0].name} over the variant's, median over the rounds")
    phases = [["ms a step", *PHASES]]
    timed = (row for row in figures if row.phase_ms)
    phases += ([row.name, *(f"{row.phase_ms.get(phase, 0.0):.1f}" for phase in PHASES)] for row in timed)
    console.print("\n".join(table(phases)), markup=False)
    for row in figures:
        if row.pipeline is not None:
            console.print("\n".join(stage_lines(row.pipeline)))
            console.print(sentence(row.pipeline))
        if row.peak_bytes is not None:
            console.print(f"{row.name}: a rank had at most {format_bytes(row.peak_bytes)} of memory in use")
