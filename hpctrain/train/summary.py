"""Lines about a run before its first step and after its last one."""

from __future__ import annotations

from pathlib import Path

from hpctrain.comm.mesh import sizes_text
from hpctrain.data.corpus import Corpus
from hpctrain.data.data_mixture import describe_training_data, mixture_lines
from hpctrain.data.token_files import title_of
from hpctrain.deck.decays import ENDLESS
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.mixture import token_file_patterns
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.deck.sources import toml_value
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.choices.deck_kernels import describe_kernels
from hpctrain.host.device import gpu_name
from hpctrain.model.count import count
from hpctrain.parallel.fp8.multiply import native_products
from hpctrain.parallel.fp8.recipes import RECIPES
from hpctrain.plan.plan_text import active_words
from hpctrain.report.recorded import TRACE_FILE
from hpctrain.sharding.eight_bit_gather import EightBitBucket
from hpctrain.sharding.local_steps.fragments import FragmentSchedule
from hpctrain.text import command, counted
from hpctrain.train.batch_size import samples_of
from hpctrain.train.recompute_summary import describe_recompute
from hpctrain.train.step import TrainState
from hpctrain.train.stored_choices import describe_functions
from hpctrain.units import format_bytes, format_count

MANY_EPOCHS = 16  # from here on, more passes over the same text teach next to nothing (arXiv 2305.16264)


def epochs_text(epochs: float) -> str:
    """Return a number of epochs with its noun, such as "0.16 epochs"."""
    number = f"{epochs:.2g}" if epochs < MANY_EPOCHS else f"{epochs:,.0f}"
    return f"{number} epoch" + "s" * (number != "1")


def introduction(
    deck: Deck, engine: Engine, corpus: Corpus, peak: float, state: TrainState, ranks: str = ""
) -> list[str]:
    """Return the lines that describe a run when it starts.

    Args:
        deck: The deck.
        engine: The engine.
        corpus: The training data.
        peak: Peak rate of a rank, in FLOP/s.
        state: State that the run starts from.
        ranks: Description of the ranks.
    """
    architecture, world, mesh = engine.architecture, engine.world, engine.mesh
    sequences = corpus.train.source.count
    rest = samples_of(deck.batch, deck.run.steps) - samples_of(deck.batch, state.step)
    epochs = corpus.train.epoch(state.samples + rest)
    numbers = count(architecture)
    engine_ranks = f"{counted(world.size, 'rank')} ({sizes_text(mesh.sizes)})"
    active = active_words(numbers.parameters, numbers.active_parameters)
    lines = [
        f"{deck.run.title}: {architecture.title}, {format_count(numbers.parameters)} parameters, {active}"
        f"{deck.precision.format_name}, {ranks or engine_ranks} "
        f"on {counted(world.nodes, 'node')}",
        f"{_training_data_text(corpus, deck)}; "
        f"{format_count(deck.batch.global_size * deck.batch.sequence)} per step, "
        f"{epochs_text(epochs)} in {counted(deck.run.steps, 'step')}; matrix products run at "
        f"{peak / 1e9:.1f} GFLOP/s per rank on {gpu_name(world.device) or 'the CPU'}"
        + " (100% MFU)"
        * (corpus.dataset is None),
    ]
    if deck.data.mixture is not None and corpus.trained is not None:
        lines += mixture_lines(corpus.trained, samples_of(deck.batch, deck.run.steps))
    lines += corpus.trained.notes if corpus.trained is not None else ()
    lines += architecture.notes
    nodes = deck.communication.ranks_per_node
    if nodes is not None:
        lines.append(
            f"communication.ranks_per_node: {counted(len(set(world.topology.nodes)), 'node')} of "
            f"{counted(nodes, 'rank')} each are emulated"
        )
    if deck.communication.emulate is not None:
        whose = "rank's" if nodes is None else "node's"
        lines.append(
            f"communication.emulate: software delays give every {whose} link "
            f"{deck.communication.emulate}; times and tokens/s are those of this link, not of this machine"
        )
    if (
        deck.precision.compute == "fp8"
        and native_products(RECIPES[deck.precision.fp8], world.device) == "none"
    ):
        lines.append(
            f"precision.fp8 = {toml_value(deck.precision.fp8)} is emulated on this device: same results, "
            "but slower than bf16"
        )
    if epochs >= MANY_EPOCHS and corpus.dataset is None and deck.objective.kind not in POLICY_KINDS:
        title = "data.mixture" if deck.data.mixture is not None else title_of(token_file_patterns(deck))
        lines.append(
            f"{title} is small for this run: each of its {counted(sequences, 'sequence')} of "
            f"{deck.batch.sequence} tokens is trained on {epochs:,.0f} times, and the model memorizes it; "
            "use more text or fewer steps"
        )
    lines += describe_kernels(deck, engine.stage.layer_context.products.kernels)
    lines += describe_functions(deck, engine.stage.layer_context.functions)
    if world.malloc_reason:
        lines.append(f"tensors are allocated by malloc, which needs more memory: {world.malloc_reason}")
    if mesh.size("pipeline") > 1:
        lines.append(f"{deck.layout.schedule}: {engine.placement}")
    lines += _compression_lines(deck, engine) + _replica_lines(deck, engine) + _gather_lines(engine)
    lines += describe_recompute(
        deck, architecture, engine.stage.models, engine.schedule, mesh.coordinate("pipeline")
    )
    return lines + ([engine.offload_description] if engine.offload_description else [])


def _training_data_text(corpus: Corpus, deck: Deck) -> str:
    """Return a description of the training data."""
    if corpus.trained is not None:
        return describe_training_data(corpus.trained)
    assert corpus.dataset is not None
    held_out = corpus.validation.source.count if corpus.validation is not None else 0
    held_out_text = f", {format_count(held_out)} of them held out" if held_out else ""
    by = f", loaded by {counted(deck.data.workers, 'process')} per rank" if deck.data.workers else ""
    return f"{corpus.dataset.title}: {counted(corpus.dataset.count, 'sample')}{held_out_text}{by}"


def _compression_lines(deck: Deck, engine: Engine) -> list[str]:
    """Return a line about compressed reductions of gradients, or why they have no effect, if any."""
    keys, sharding = deck.communication, engine.stage.buckets[0].sharding
    if keys.compress == "none":
        return []
    form = f"communication.compress = {toml_value(keys.compress)}"
    if sharding.group.size == 1:
        return [f"{form} has no effect with one data rank"]
    if keys.warmup >= deck.run.steps:
        warmup = f"communication.warmup = {keys.warmup}"
        return [f"{form} has no effect: with {warmup} all {counted(deck.run.steps, 'step')} are exact"]
    if sharding.nodes is not None and sharding.nodes.between.size == 1:
        return [
            f'communication.{keys.compress}.between = "nodes": all of these ranks are on one node, '
            "so that sums are exact"
        ]
    among = (
        f"{sharding.group.size} ranks" if sharding.nodes is None else f"{sharding.nodes.between.size} nodes"
    )
    after = f", after {counted(keys.warmup, 'exact step')}" if keys.warmup else ""
    return [f"gradients are reduced over {among} with {keys.compress}{after}"]


def _replica_lines(deck: Deck, engine: Engine) -> list[str]:
    """Return a line about the synchronization of replicas, if there are any."""
    keys, replicas = deck.layout.local_steps, engine.stage.replica[1]
    if replicas == 1 or keys is None:
        return []
    who = f"{counted(replicas, 'replica')} of {counted(engine.world.size // replicas, 'rank')}"
    line = f"{who} synchronize every {counted(keys.steps, 'step')} ({keys.outer})"
    timing = FragmentSchedule(keys.steps, keys.fragments, keys.delay, deck.communication.warmup)
    if left := max(timing.updates_since_sync(deck.run.steps)):
        part = " of a part of the model" if keys.fragments > 1 else ""
        line += (
            f"; the last {counted(left, 'step')}{part} of {deck.run.steps} are not synchronized, so that the "
            "evaluated and saved model does not contain them"
        )
    return [line]


def _gather_lines(engine: Engine) -> list[str]:
    """Return a line if weights are gathered in 8 bits."""
    if not any(isinstance(bucket, EightBitBucket) and bucket.sharers > 1 for bucket in engine.stage.buckets):
        return []
    return [
        "precision.fp8_gather = true does not reduce traffic here, since the ranks of a node share their "
        "weights; it uses memory for a copy in 8 bits, but each rank quantizes only its part"
    ]


def decay_ended(deck: Deck, step: int) -> str:
    """Return a warning if the decay of the learning rate has ended after `step` steps; "" otherwise."""
    rate = deck.learning_rate
    if rate.decay in ENDLESS or not rate.decay_steps <= step < deck.run.steps:
        return ""
    return deck.problem(
        "learning_rate.decay_steps",
        f"the decay has ended: steps {step + 1} to {deck.run.steps} train at its floor, {rate.floor:g} of "
        "the peak (with --set learning_rate.decay_steps= it ends with the run)",
    )


def outcome(folder: Path, trace: bool, saved: Path | None, skipped: int) -> list[str]:
    """Return the lines about the files of a run that has ended."""
    lines = [
        f"metrics     {folder / 'metrics.jsonl'} (plot with {command('plot', folder)})",
        f"trace       {folder / TRACE_FILE} (open in ui.perfetto.dev)" if trace else "",
        f"checkpoint  {saved} ({format_bytes(saved.stat().st_size)})" if saved else "",
        f"skipped     {counted(skipped, 'step')}" if skipped else "",
    ]
    return [line for line in lines if line]
