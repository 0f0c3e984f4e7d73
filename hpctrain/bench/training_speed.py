"""`hpctrain bench train`: speed, time by phase, losses and memory of a deck's step and of its variants.

All variants are built first. They are then measured by turns in each round, so that a change in the speed of
the machine affects all of them. Only ratios within a round are meaningful.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from hpctrain.bench.measurement import publish, with_vocabulary
from hpctrain.bench.peers.peer_process import PeerProcess
from hpctrain.bench.peers.training_peers import TRAINING_PEERS, peer_problems
from hpctrain.bench.pipeline_prediction import StageProbe
from hpctrain.bench.training_table import Setting, TrainingResult, highest_memory, result_lines, same_losses
from hpctrain.bench.variant_memory import measure_peak_memory
from hpctrain.bench.variant_timing import TimedVariant, VariantTimes, time_variants
from hpctrain.checkpoint.exchange.source import read_source_keys
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
from hpctrain.text import either
from hpctrain.train.trainer import Trainer
from hpctrain.units import format_bytes
from hpctrain.watch.peak_flops import measure_gemm_flops

DECK_VARIANT = "deck"
"""Name by which `--only` selects the unchanged deck."""


@dataclass(frozen=True)
class TrainingBenchOptions:
    """Options of `hpctrain bench train`: what to measure besides the deck, and for how long.

    Attributes:
        steps: Steps of each variant in a round.
        rounds: Number of rounds.
        no_sync: Also measure ranks that train alone, without communication.
        data_parallel: Also measure the same global batch with data parallelism only.
        against: Peers to measure, of TRAINING_PEERS.
        variants: Further overrides of the deck to measure, each as `KEY=VALUE` separated by spaces.
        only: Name of the only variant to measure, "deck" for the unchanged deck; None to measure all.
        memory: Also measure the peak memory of each variant of hpctrain, see `measure_peak_memory`.
    """

    steps: int
    rounds: int
    no_sync: bool = False
    data_parallel: bool = False
    against: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    only: str | None = None
    memory: bool = False

    def variant_names(self) -> list[str]:
        """Return the names of the variants to measure, in order.

        Raises:
            HpctrainError: `only` names none of them.
        """
        names = [DECK_VARIANT]
        names += ["data-parallel"] if self.data_parallel else []
        names += ["no-sync"] if self.no_sync else []
        names += [*self.variants, *self.against]
        if self.only is None:
            return names
        if self.only not in names:
            raise HpctrainError(f"--only {self.only}: must be {either(names)}")
        return [self.only]


def bench_train(
    world: World, path: Path, overrides: Sequence[str], options: TrainingBenchOptions, output: Path | None
) -> None:
    """Measure the training step of a deck on random tokens, and print tables. Collective.

    Args:
        world: All ranks.
        path: File of the deck.
        overrides: Deck keys to change, as KEY=VALUE.
        options: What to measure.
        output: File for the results; None for no file.
    """
    with world.agreement():
        deck = with_vocabulary(read_deck(path, overrides, read_source=read_source_keys))
        _require_tokens(deck)
        architecture_of(deck, deck.model.vocabulary or 0)  # raises an error if the model cannot be built
    torch.set_num_threads(deck.run.threads)
    world.use_device(deck.run.device, deck.machine.deterministic)
    mesh = make_mesh(deck, world)
    with world.agreement():
        names = options.variant_names()
        problems = peer_problems(options.against, deck, world.size, on_host(world.device))
        if problems:
            raise HpctrainError(problems)
        changed_decks: dict[str, Deck] = {}
        for changes in options.variants:
            changed = read_deck(path, [*overrides, *changes.split()], read_source=read_source_keys)
            changed_decks[changes] = with_vocabulary(changed)
    hpctrain_names = [name for name in names if name not in options.against]
    peaks = measure_peak_memory(world, path, overrides, options, hpctrain_names) if options.memory else {}
    load = os.getloadavg()[0]
    variants: list[TimedVariant] = []
    with ExitStack() as processes:
        for name in names:
            if name in options.against:
                split = variants[0].split if variants else ()
                peer = PeerProcess(name, deck, world, split)
                processes.callback(peer.close)
                variants.append(_peer_variant(name, deck, world, peer))
            else:
                changed = changed_decks.get(name, deck)
                variants.append(_build_variant(name, changed, world))
        dtype = Precision.of(deck).product
        peak = _mean(world, measure_gemm_flops(dtype, world.device))
        times = time_variants(world, variants, options.steps, options.rounds)
        memory = [_memory(world, variant, len(hpctrain_names) == 1) for variant in variants]
    for index, name in enumerate(names):
        memory[index] = peaks.get(name, memory[index])
    peak = max(peak, _mean(world, measure_gemm_flops(dtype, world.device)))
    token_flops = model_flops(architecture_of(deck, deck.model.vocabulary or 0)).flops_per_token
    mfu_per_rate = token_flops / (peak * world.size)
    results = [
        _variant_result(row, times[0], mfu_per_rate, peak_memory, deck)
        for row, peak_memory in zip(times, memory, strict=True)
    ]
    # Activations are measured with a second engine of the deck, which may not fit beside a variant of --only.
    has_activations = options.only is None and deck.model.module is None
    activations = _activations(deck, world, mesh) if has_activations else ""
    setting = Setting.of(deck, world, peak, gpu_name(world.device) or processor_name(), load)
    lines = [*result_lines(setting, results), *([activations] if activations else [])]
    publish(world, lines, asdict(setting) | {"rows": [asdict(row) for row in results]}, output)


def _require_tokens(deck: Deck) -> None:
    """Raise HpctrainError if the deck does not train the next-token loss on token sequences."""
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


def _build_variant(name: str, deck: Deck, world: World) -> TimedVariant:
    """Build a variant of hpctrain by its name, one of `TrainingBenchOptions.variant_names`. Collective."""
    if name == "no-sync":
        deck, one_rank = on_one_rank(deck), world.single_rank_world()
        return hpctrain_variant(name, deck, one_rank, Mesh(one_rank, {}), world.size, same_training=False)
    if name == "data-parallel":
        deck = on_one_rank(deck)
        mesh = Mesh(world, {"data": world.size} | expert_split(deck))
    else:
        mesh = make_mesh(deck, world)
    title = layout_name(mesh) if name in (DECK_VARIANT, "data-parallel") else name
    return hpctrain_variant(title, deck, world, mesh)


def _peer_variant(name: str, deck: Deck, world: World, peer: PeerProcess) -> TimedVariant:
    tokens = deck.batch.global_size * deck.batch.sequence / world.size
    same_training = TRAINING_PEERS[name].same_training
    return TimedVariant(name, peer.step, tokens, same_training=same_training, memory=peer.memory)


def _memory(world: World, variant: TimedVariant, only_variant: bool) -> tuple[int, int] | None:
    """Return the peak memory of a variant as from `highest_memory`. Collective.

    Args:
        world: All ranks.
        variant: The variant.
        only_variant: True if no other variant of hpctrain ran in these processes. If there was one, the
            result is None for a variant without processes of its own.
    """
    if variant.memory is not None:
        resident, proportional = variant.memory()
    elif only_variant:
        resident = peak_bytes(world.device)
        proportional = peak_proportional_bytes() if on_host(world.device) else 0
    else:
        return None
    return highest_memory(world, resident, proportional)


def _variant_result(
    row: VariantTimes, first: VariantTimes, mfu_per_rate: float, memory: tuple[int, int] | None, deck: Deck
) -> TrainingResult:
    """Return the results of a variant.

    Args:
        row: Times of the variant.
        first: Times of the first variant, which it is compared with.
        mfu_per_rate: MFU divided by tokens/s.
        memory: Peak bytes of a rank and of a node; None if unknown.
        deck: The deck.
    """
    prediction = row.variant.probe.prediction() if row.variant.probe is not None else None
    ratios = [a / b for a, b in zip(first.tokens_per_s, row.tokens_per_s, strict=True)]
    comparable = row.variant.same_training and first.variant.same_training
    rank_bytes, node_bytes = memory if memory is not None else (None, None)
    return TrainingResult(
        name=row.variant.name,
        tokens_per_s=row.tokens_per_s,
        ratios=ratios,
        step_seconds=row.seconds,
        mfu=median(row.tokens_per_s) * mfu_per_rate,
        phase_ms={phase: 1e3 * seconds for phase, seconds in row.phases.items()},
        losses=row.losses,
        losses_agree=same_losses(first.losses, row.losses, deck) if comparable else None,
        pipeline=prediction,
        peak_bytes=rank_bytes,
        node_bytes=node_bytes or None,
    )


def layout_name(mesh: Mesh) -> str:
    """Return the sizes of the axes with several ranks as text."""
    return sizes_text(mesh.sizes, 2) or "one rank"


def hpctrain_variant(
    name: str, deck: Deck, world: World, mesh: Mesh, share: int = 1, same_training: bool = True
) -> TimedVariant:
    """Build the engine of a deck, and return its training step as a variant. Collective.

    Args:
        name: Name of the variant.
        deck: The deck, with a vocabulary.
        world: Ranks that train together.
        mesh: Arrangement of these ranks.
        share: Number of worlds that divide the global batch. This one trains its 1/share.
        same_training: See TimedVariant.
    """
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

    return TimedVariant(name, step, tokens, phases, engine.placement.split, probe, same_training)


def _activations(deck: Deck, world: World, mesh: Mesh) -> str:
    """Return a sentence on the activations that a layer keeps for the backward pass on this rank. Collective.

    It gives measured bytes and, where it applies, the published formula. It is empty if the first model part
    of this rank has no block.
    """
    engine = build_engine(deck, world, mesh)
    assert isinstance(engine.model, Transformer)
    shape, layer_context = engine.shape, engine.stage.layer_context
    micro, dtype = deck.batch.micro_size, engine.model.dtype
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
    """Return the mean of a value over all ranks. Collective."""
    total = world.everyone.all_reduce(torch.tensor(value, dtype=torch.float64))
    return float(total.item()) / world.size
