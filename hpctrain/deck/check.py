"""Checks of keys against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpctrain.deck.check_adapters import adapter_problems
from hpctrain.deck.check_compression import compression_problems
from hpctrain.deck.check_evaluation import evaluation_problems
from hpctrain.deck.check_layout import layout_problems, zero_problems
from hpctrain.deck.check_local_steps import local_step_problems
from hpctrain.deck.check_mixture import mixture_problems
from hpctrain.deck.check_module import module_problems, without_module
from hpctrain.deck.check_noise_scale import noise_scale_problems
from hpctrain.deck.check_parametrization import parametrization_problems
from hpctrain.deck.check_precision import precision_problems
from hpctrain.deck.check_server import server_problems
from hpctrain.deck.check_stability import stability_problems
from hpctrain.deck.check_world import batch_sizes
from hpctrain.deck.data_mixture import data_problems
from hpctrain.deck.dataset import dataset_problems
from hpctrain.deck.decays import DECAYS
from hpctrain.deck.objective import OF_SCORES, objective_problems
from hpctrain.deck.optimizer import UPDATES_MATRICES, optimizer_problems
from hpctrain.deck.policy import policy_problems
from hpctrain.deck.problem import DeckProblem, divisors, must_divide, nearest_numbers
from hpctrain.deck.run_length import length_problems
from hpctrain.deck.schema import Deck, fields, sections
from hpctrain.deck.sources import toml_value
from hpctrain.text import control_problem, either

_TITLE_BYTES = 200  # names of files may have 255 bytes, and some consist of the title and more

NO_HOST = 'is for GPUs; on the CPU the device is the host ("device" or "disk" would do)'
NO_HOST_ACTIVATIONS = 'is for GPUs; on the CPU they are in host memory anyway ("keep" or "disk" would do)'


def check_deck(deck: Deck, ranks: int | None = None) -> list[DeckProblem]:
    """Return the problems of a deck that do not depend on the number of ranks.

    If `ranks` is given, problems of batch sizes that depend on it are left to `world_problems`.
    """
    return [
        *_texts(deck),
        *_title(deck),
        *(_transformer(deck) if deck.model.module is None else module_problems(deck)),
        *zero_problems(deck),
        *compression_problems(deck),
        *precision_problems(deck),
        *server_problems(deck),
        *dataset_problems(deck),
        *data_problems(deck),
        *objective_problems(deck),
        *policy_problems(deck),
        *_batch(deck, ranks),
        *_learning_rate(deck),
        *optimizer_problems(deck),
        *length_problems(deck),
        *_run(deck),
        *evaluation_problems(deck),
        *_offload(deck),
        *local_step_problems(deck),
        *noise_scale_problems(deck),
        *stability_problems(deck),
    ]


def _transformer(deck: Deck) -> list[DeckProblem]:
    """Return the problems of the sizes and the layout of a transformer."""
    return [
        *without_module(deck),
        *_model(deck),
        *parametrization_problems(deck),
        *adapter_problems(deck),
        *mixture_problems(deck),
        *layout_problems(deck),
        *_memory(deck),
    ]


def source_problems(deck: Deck, source: Mapping[str, object]) -> list[DeckProblem]:
    """Return the problems of keys that contradict the model of `model.from`, which has the keys `source`.

    The vocabulary may be larger. With learned positions the sequence may be shorter, otherwise it is free.
    """
    name = f"model.from = {toml_value(deck.model.source)}"
    problems = []
    for key, own in source.items():
        value = deck.value(key)
        if key == "model.vocabulary":
            if isinstance(value, int) and isinstance(own, int) and value < own:
                sentence = f"is smaller than the {own} of {name}, whose vocabulary can only grow"
                problems.append(DeckProblem(key, sentence))
        elif key == "batch.sequence":
            if deck.model.family == "gpt2" and isinstance(own, int) and deck.batch.sequence > own:
                sentence = f"is longer than the {own} learned positions of {name}"
                problems.append(DeckProblem(key, sentence, ("model.family",)))
        elif value != own and not (key == "model.tied" and deck.objective.kind in OF_SCORES):
            sentence = f"contradicts {name}, whose model has {toml_value(own)} (leave the key out)"
            problems.append(DeckProblem(key, sentence))
    if source and deck.model.parametrization == "mup" and "model.parametrization" not in source:
        sentence = f'contradicts {name}, whose model is of the "standard" one (leave the key out)'
        problems.append(DeckProblem("model.parametrization", sentence))
    if source and deck.model.experts and "model.experts.count" not in source:
        problems += _upcycling(deck, name)
    return problems


def _upcycling(deck: Deck, name: str) -> Iterator[DeckProblem]:
    """Yield the problems of a mixture that starts from a dense model, whose function it must keep."""
    model, experts = deck.model, deck.model.experts
    assert experts is not None
    begin = f"as the experts begin as copies of the feed-forward parts of {name}, a dense model"
    if experts.mlp != model.mlp:
        sentence = f"must be model.mlp = {model.mlp}, {begin}"
        yield DeckProblem("model.experts.mlp", sentence, ("model.mlp", "model.experts.count"))
    if not experts.router_normalize:
        sentence = f"must be true, {begin}: their weights have to add up to one"
        yield DeckProblem("model.experts.router_normalize", sentence, ("model.experts.count",))
    if experts.router_scale != 1:
        sentence = f"must be 1, {begin}: their weights have to add up to one"
        yield DeckProblem("model.experts.router_scale", sentence, ("model.experts.count",))
    if experts.shared:
        sentence = f"must be 0, {begin}, to which shared ones would add"
        yield DeckProblem("model.experts.shared", sentence, ("model.experts.count",))


def _title(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of a title, which must be usable as the name of a folder, a file and a job."""
    title, why = deck.run.title, ""
    if "/" in title or title == "." or ".." in title:
        why = 'names a folder, so it must not be "." or contain "/" or ".."'
    elif len(title.encode("utf-8", "replace")) > _TITLE_BYTES:
        why = f"names a folder, so it must have {_TITLE_BYTES} bytes at most"
    elif not title.strip():
        why = "names a folder, so it must be more than blanks"
    if why:
        yield DeckProblem("run.title", why, for_new_decks=True)


def _texts(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of texts with control characters, which may reach a log, a terminal or a script."""
    for section in sections():
        for name in fields(section):
            key = f"{section}.{name}"
            value = deck.value(key)
            texts = value if isinstance(value, tuple) else (value,)
            problem = control_problem("".join(text for text in texts if isinstance(text, str)))
            if problem and (key != "run.dir" or value != f"runs/{deck.run.title}"):
                yield DeckProblem(key, problem)


def _model(deck: Deck) -> Iterator[DeckProblem]:
    model, heads_divide = deck.model, "model.head_size" in deck.sources.defaulted
    if not heads_divide and model.family == "llama" and model.head_size % 2:
        sentence = f"must be even for rotary positions ({model.head_size + 1} would)"
        yield DeckProblem("model.head_size", sentence, ("model.family",))
    elif heads_divide and model.hidden % model.heads:
        sentence = must_divide("model.hidden", model.hidden, model.heads)
        yield DeckProblem("model.heads", sentence, ("model.hidden",))
    elif heads_divide and model.family == "llama" and model.hidden // model.heads % 2:
        even = [heads for heads in divisors(model.hidden) if model.hidden // heads % 2 == 0]
        would = f" ({either(nearest_numbers(model.heads, even))} heads would)" if even else ""
        yield DeckProblem(
            "model.heads",
            f"must leave an even size of each head for rotary positions, but model.hidden / model.heads = "
            f"{model.hidden} / {model.heads} = {model.hidden // model.heads}{would}",
            ("model.hidden", "model.family"),
        )
    if model.heads % model.key_value_heads:
        sentence = must_divide("model.heads", model.heads, model.key_value_heads)
        yield DeckProblem("model.key_value_heads", sentence, ("model.heads",))
    if model.family == "gpt2" and model.rope_base != type(model).model_fields["rope_base"].default:
        sentence = 'has no effect on model.family = "gpt2", whose positions are learned (leave it out)'
        yield DeckProblem("model.rope_base", sentence, ("model.family",))
    if model.family == "gpt2" and model.query_key_norm != "none":
        sentence = 'is for model.family = "llama", not "gpt2" ("none" would do)'
        yield DeckProblem("model.query_key_norm", sentence, ("model.family",))


def _memory(deck: Deck) -> Iterator[DeckProblem]:
    layout, recompute = deck.layout, deck.memory.recompute
    longest = deck.model.layers - max(0, layout.pipeline * layout.chunks - 2)
    if isinstance(layout.split, tuple):
        longest = max(layout.split, default=1)
    if isinstance(recompute, int) and not 1 <= recompute <= max(1, longest):
        yield DeckProblem(
            "memory.recompute",
            f"must be from 1 to {max(1, longest)} as a number, the blocks of the longest part of the model "
            '("full", "sqrt", "selective" and "none" would do, too)',
            ("model.layers", "layout.pipeline", "layout.chunks", "layout.split"),
        )


def _batch(deck: Deck, ranks: int | None) -> Iterator[DeckProblem]:
    batch = deck.batch
    sizes = {"batch.global_size": batch.global_size, "batch.ramp_from": batch.ramp_from}
    if ranks is None:
        yield from batch_sizes(batch.micro_size, deck.layout.data or 1, sizes)
    if batch.ramp_from > batch.global_size:
        sentence = f"must be at most batch.global_size = {batch.global_size}, to which it grows"
        yield DeckProblem("batch.ramp_from", sentence, ("batch.global_size",))
    if batch.ramp_from and not batch.ramp_steps:
        yield DeckProblem("batch.ramp_from", "needs batch.ramp_steps of at least 1", ("batch.ramp_steps",))
    if batch.ramp_steps and not batch.ramp_from:
        yield DeckProblem("batch.ramp_steps", "needs batch.ramp_from of at least 1", ("batch.ramp_from",))


def _run(deck: Deck) -> Iterator[DeckProblem]:
    run, limit, margin = deck.run, deck.run.time_limit, deck.run.time_margin
    if limit is not None and margin is not None and margin >= limit:
        sentence = f"must be less than run.time_limit = {toml_value(limit)}"
        yield DeckProblem("run.time_margin", sentence, ("run.time_limit",))
    if 0 < deck.stability.straggler_factor <= 1:
        sentence = "must be above 1, or 0 to name no rank: half of all ranks take longer than the median"
        yield DeckProblem("stability.straggler_factor", sentence)
    if deck.communication.transport == "nccl" and run.device == "cpu":
        sentence = 'works between GPUs only, but run.device = "cpu" ("auto" or "mpi" would do)'
        yield DeckProblem("communication.transport", sentence, ("run.device",))
    transport = deck.communication.transport
    nodes = deck.communication.ranks_per_node
    delayed = {"auto", "mpi", "shared"} if nodes else {"auto", "mpi"}
    if deck.communication.emulate is not None and transport not in delayed:
        sentence = f'delays what the host sends, but communication.transport = "{transport}" ("mpi" would do)'
        yield DeckProblem("communication.emulate", sentence, ("communication.transport",))
    if nodes and transport == "nccl":
        sentence = 'is for what hosts send, but communication.transport = "nccl" (leave it out)'
        yield DeckProblem("communication.ranks_per_node", sentence, ("communication.transport",))
    kept = deck.checkpoint
    if not kept.mirror and kept.mirror_every != type(kept).model_fields["mirror_every"].default:
        sentence = "has no effect without checkpoint.mirror = true (leave it out)"
        yield DeckProblem("checkpoint.mirror_every", sentence, ("checkpoint.mirror",), no_effect=True)


def _learning_rate(deck: Deck) -> Iterator[DeckProblem]:
    rate, others = deck.learning_rate, ("learning_rate.decay", "learning_rate.decay_steps", "run.steps")
    no_effect = f'has no effect with learning_rate.decay = "{rate.decay}" (leave it out)'
    form = DECAYS[rate.decay]
    # A warm-up or ramp longer than the run is no mistake: a trial run stops early.
    if form.ends and rate.warmup > rate.decay_steps:
        sentence = f"must be at most learning_rate.decay_steps = {rate.decay_steps}"
        yield DeckProblem("learning_rate.warmup", sentence, others)
    elif form.has_cooldown and rate.cooldown > rate.decay_steps - rate.warmup:
        sentence = (
            f"must be at most {rate.decay_steps - rate.warmup}, which learning_rate.warmup = {rate.warmup} "
            f"leaves of learning_rate.decay_steps = {rate.decay_steps}"
        )
        yield DeckProblem("learning_rate.cooldown", sentence, ("learning_rate.warmup", *others))
    if not form.has_floor and rate.floor != type(rate).model_fields["floor"].default:
        yield DeckProblem("learning_rate.floor", no_effect, ("learning_rate.decay",), no_effect=True)
    if not form.has_cooldown and rate.cooldown:
        yield DeckProblem("learning_rate.cooldown", no_effect, ("learning_rate.decay",), no_effect=True)
    # With a decay that has neither an end nor a floor, decay_steps has always been accepted.
    if not form.ends and form.has_floor and "learning_rate.decay_steps" not in deck.sources.defaulted:
        yield DeckProblem("learning_rate.decay_steps", no_effect, ("learning_rate.decay",), no_effect=True)


def _offload(deck: Deck) -> Iterator[DeckProblem]:
    memory = deck.memory
    if memory.parameters != "device" and deck.layout.zero < 3:
        sentence = (
            f"needs layout.zero = 3, which gathers parameters when they are needed, not {deck.layout.zero}"
        )
        yield DeckProblem("memory.parameters", sentence, ("layout.zero",))
    in_blocks = deck.optimizer.name in UPDATES_MATRICES
    for name in ("optimizer", "parameters"):
        if in_blocks and getattr(memory, name) != "device":
            updates = f'{deck.optimizer.name} updates parameters in blocks ("device" would do)'
            sentence = f"is for state that is kept by element, but {updates}"
            yield DeckProblem(f"memory.{name}", sentence, ("optimizer.name",))
    if memory.parameters != "device" and memory.optimizer == "device" and not in_blocks:
        sentence = 'needs memory.optimizer = "host" or "disk": the update is where the parameters are'
        yield DeckProblem("memory.parameters", sentence, ("memory.optimizer",))
    if memory.activations == "host" and deck.run.device == "cpu":
        yield DeckProblem("memory.activations", NO_HOST_ACTIVATIONS, ("run.device",))
    if memory.activation_format == "bf16" and deck.precision.compute != "fp32":
        nothing = f'saves nothing with precision.compute = "{deck.precision.compute}", of 16 bits as well'
        sentence = f'{nothing} ("exact" or "int8" would do)'
        yield DeckProblem("memory.activation_format", sentence, ("precision.compute",))
    for name in ("optimizer", "parameters"):
        if getattr(memory, name) == "host" and deck.run.device == "cpu":
            yield DeckProblem(f"memory.{name}", NO_HOST, ("run.device",))
