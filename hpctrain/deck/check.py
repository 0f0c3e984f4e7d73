"""Checks of keys against each other, and of the deck against the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.characters import control_problem
from hpctrain.deck.defaults import TWO_CHUNKS
from hpctrain.deck.schema import Deck, fields, sections
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError

ONE_CHUNK = frozenset({"naive", "gpipe", "1f1b", "zb-h1", "zb-h2"})
"""Schedules of one part a stage."""
SCHEDULES = ONE_CHUNK | TWO_CHUNKS
"""Those that have a name; all others are in files."""

MOST_MICRO_BATCHES = 65_536
"""Of a rank in one step: a schedule lists the actions of each."""
MOST_PASSES = 1 << 20
"""Of micro-batches through the parts of a model, in one schedule."""

_TITLE_BYTES = 200
"""Names of files may have 255, and some are the title and more."""

NO_HOST = 'is for GPUs; on the CPU the device is the host ("device" or "disk" would do)'
NO_HOST_ACTIVATIONS = 'is for GPUs; on the CPU they are in host memory anyway ("keep" or "disk" would do)'


@dataclass(frozen=True)
class Problem:
    """What is wrong with `key`, as the rest of a sentence that begins with the key and its value.

    `others` are the other keys whose values the check looked at. What is `for_writers` is told whoever writes
    it, but a deck that has trained so is good.
    """

    key: str
    sentence: str
    others: tuple[str, ...] = ()
    for_writers: bool = False


def check_deck(deck: Deck, ranks: int | None = None) -> list[Problem]:
    """Everything that can be wrong with a deck whatever the number of ranks.

    Where `ranks` is known, what depends on it is left to `world_problems`.
    """
    return [
        *_texts(deck),
        *_title(deck),
        *_model(deck),
        *_tensor(deck),
        *_context(deck),
        *_pipeline(deck),
        *_zero(deck),
        *_memory(deck),
        *_batch(deck, ranks),
        *_schedule(deck),
        *_evaluation(deck),
        *_times(deck),
        *_devices(deck),
        *_offload(deck),
    ]


def source_problems(deck: Deck, source: Mapping[str, object]) -> list[Problem]:
    """Every key that the model named by model.from, with the keys `source`, cannot have.

    Its vocabulary may grow; of learned positions the first may be taken; others are not bound to a length.
    """
    name = f"model.from = {toml_value(deck.model.source)}"
    problems = []
    for key, own in source.items():
        value = deck.value(key)
        if key == "model.vocabulary":
            if isinstance(value, int) and isinstance(own, int) and value < own:
                problems.append(
                    Problem(key, f"is smaller than the {own} of {name}, whose vocabulary can only grow")
                )
        elif key == "batch.sequence":
            if deck.model.family == "gpt2" and isinstance(own, int) and deck.batch.sequence > own:
                told = f"is longer than the {own} learned positions of {name}"
                problems.append(Problem(key, told, ("model.family",)))
        elif value != own:
            told = f"contradicts {name}, whose model has {toml_value(own)} (leave the key out)"
            problems.append(Problem(key, told))
    return problems


def check_world(deck: Deck, ranks: int) -> None:
    """Raise `HpctrainError` with everything in the deck that does not fit this number of ranks."""
    problems = world_problems(deck, ranks)
    if problems:
        raise HpctrainError([deck.problem(problem.key, problem.sentence) for problem in problems])


def data_ranks(deck: Deck, ranks: int) -> int:
    """Size of the data axis: the ranks that the other axes leave. Raises as `check_world` does."""
    check_world(deck, ranks)
    return ranks // _model_ranks(deck)


def world_problems(deck: Deck, ranks: int) -> list[Problem]:
    """Everything in the deck that does not fit this number of ranks."""
    layout, batch = deck.layout, deck.batch
    model_ranks = _model_ranks(deck)
    names = ["pipeline", "tensor", "context"] if layout.pipeline > 1 else ["tensor", "context"]
    keys = tuple(f"layout.{name}" for name in names)
    product = f"{' x '.join(keys)} = {' x '.join(str(getattr(layout, name)) for name in names)}"
    if ranks % model_ranks:
        key = next((key for key, name in zip(keys, names, strict=True) if getattr(layout, name) > 1), keys[0])
        return [
            Problem(
                key,
                f"{product} must divide the number of ranks, {ranks} "
                f"({_multiples(ranks, model_ranks)} ranks would fit)",
                keys,
            )
        ]
    data = ranks // model_ranks
    if layout.data is not None and layout.data != data:
        return [
            Problem(
                "layout.data",
                f"{_many(ranks, 'rank')} with {product} make {_many(data, 'data rank')} "
                f"(leave the key out, or start {_many(layout.data * model_ranks, 'rank')})",
                keys,
            )
        ]
    return [
        *_global_batch(
            batch.micro_size,
            data,
            {"batch.global_size": batch.global_size, "batch.ramp_from": batch.ramp_from},
        ),
        *_micro_batches(deck, data),
        *_zero_groups(deck, data * layout.context),
    ]


def _micro_batches(deck: Deck, data: int) -> Iterator[Problem]:
    """A step of as many as a schedule can list."""
    batch, parts = deck.batch, deck.layout.pipeline * deck.layout.chunks
    unit, most = batch.micro_size * data, min(MOST_MICRO_BATCHES, MOST_PASSES // parts)
    if batch.global_size > most * unit:
        yield Problem(
            "batch.global_size",
            f"makes {batch.global_size // unit} micro-batches of batch.micro_size x data ranks = "
            f"{batch.micro_size} x {data} = {unit}; must make at most {most} ({most * unit} would do)",
            ("batch.micro_size", "layout.data", "layout.pipeline", "layout.chunks"),
        )


def _zero_groups(deck: Deck, ranks: int) -> Iterator[Problem]:
    """ZeRO over so many data x context ranks."""
    layout = deck.layout
    among = f"{_many(ranks, 'data x context rank')}"
    size = max(1, layout.zero_group) if isinstance(layout.zero_group, int) else ranks
    if ranks % size:
        yield Problem(
            "layout.zero_group",
            f"must divide the {among} ({_or(nearest(size, divisors(ranks)))} would)",
            ("layout.data", "layout.context"),
        )
    elif layout.zero == 3 and size == 1:
        key, others = ("layout.zero_group", ("layout.zero",)) if layout.zero_group else ("layout.zero", ())
        yield Problem(
            key,
            "cuts parameters over a single rank, but needs two or more; layout.zero of 0, 1 or 2 would do "
            f"(there {'is' if ranks == 1 else 'are'} {among})",
            others,
        )


def _global_batch(micro_size: int, data: int, sizes: dict[str, int]) -> Iterator[Problem]:
    unit = micro_size * data
    for key, size in sizes.items():
        if size % unit:
            yield Problem(
                key,
                f"must be a multiple of batch.micro_size x data ranks = {micro_size} x {data} = {unit} "
                f"({_multiples(size, unit)} would)",
                ("batch.micro_size", "layout.data"),
            )


def _title(deck: Deck) -> Iterator[Problem]:
    """What keeps a title from naming a folder, a file or a job."""
    title, why = deck.run.title, ""
    if "/" in title or title == "." or ".." in title:
        why = 'names a folder, so it must not be "." or contain "/" or ".."'
    elif len(title.encode("utf-8", "replace")) > _TITLE_BYTES:
        why = f"names a folder, so it must have {_TITLE_BYTES} bytes at most"
    if why:
        yield Problem("run.title", why, for_writers=True)


def _texts(deck: Deck) -> Iterator[Problem]:
    """Every text of the deck reaches a log, a terminal or a script."""
    for section in sections():
        for name in fields(section):
            key = f"{section}.{name}"
            value = deck.value(key)
            texts = value if isinstance(value, tuple) else (value,)
            problem = control_problem("".join(text for text in texts if isinstance(text, str)))
            if problem and (key != "run.dir" or value != f"runs/{deck.run.title}"):
                yield Problem(key, problem)


def _model(deck: Deck) -> Iterator[Problem]:
    model = deck.model
    if model.hidden % model.heads:
        yield Problem(
            "model.heads",
            _must_divide("model.hidden", model.hidden, nearest(model.heads, divisors(model.hidden))),
            ("model.hidden",),
        )
    elif model.family == "llama" and model.hidden // model.heads % 2:
        even = [heads for heads in divisors(model.hidden) if model.hidden // heads % 2 == 0]
        would = f" ({_or(nearest(model.heads, even))} heads would)" if even else ""
        yield Problem(
            "model.heads",
            f"must leave an even size of each head for rotary positions, but model.hidden / model.heads = "
            f"{model.hidden} / {model.heads} = {model.hidden // model.heads}{would}",
            ("model.hidden", "model.family"),
        )
    if model.heads % model.key_value_heads:
        yield Problem(
            "model.key_value_heads",
            _must_divide("model.heads", model.heads, nearest(model.key_value_heads, divisors(model.heads))),
            ("model.heads",),
        )
    if model.family == "gpt2" and model.rope_base != type(model).model_fields["rope_base"].default:
        yield Problem(
            "model.rope_base",
            'has no effect on model.family = "gpt2", whose positions are learned (leave it out)',
            ("model.family",),
        )


def _tensor(deck: Deck) -> Iterator[Problem]:
    model, layout = deck.model, deck.layout
    tensor = layout.tensor
    length = deck.batch.sequence // layout.context
    split_sequence = layout.sequence_parallel and deck.batch.sequence % layout.context == 0

    demands: dict[str, Callable[[int], bool]] = {
        "model.heads": lambda ranks: model.heads % ranks == 0,
        "model.key_value_heads": lambda ranks: _shares(model.key_value_heads, ranks),
        "model.mlp": lambda ranks: model.mlp % ranks == 0,
        "batch.sequence": lambda ranks: not split_sequence or length % ranks == 0,
    }
    fitting = [ranks for ranks in divisors(model.heads) if all(fits(ranks) for fits in demands.values())]
    would = nearest(tensor, fitting)

    def problem(asked: str, key: str, candidates: Iterable[int]) -> Problem:
        """What layout.tensor must be, the sizes that would do, and which other keys leave so few of them."""
        near = nearest(tensor, candidates)
        limits = []
        for other, fits in demands.items():
            if other != key and near != would and not all(fits(ranks) for ranks in near):
                limits.append(f"{other} = {deck.value(other)}")
                near = [ranks for ranks in near if fits(ranks)]
        given = f", given {' and '.join(limits)}" if limits else ""
        others = ("layout.context", "layout.sequence_parallel", *demands)
        return Problem("layout.tensor", f"{asked} ({_or(would)} would{given})", others)

    for key, size in (("model.heads", model.heads), ("model.mlp", model.mlp)):
        if size % tensor:
            yield problem(f"must divide {key} = {size}", key, divisors(size))
    if model.heads % tensor == 0 and not _shares(model.key_value_heads, tensor):
        asked = f"must divide model.key_value_heads = {model.key_value_heads} or be a multiple of it"
        shared = [ranks for ranks in divisors(model.heads) if _shares(model.key_value_heads, ranks)]
        yield problem(asked, "model.key_value_heads", shared)
    if layout.sequence_parallel and tensor == 1:
        yield Problem(
            "layout.sequence_parallel",
            "splits the sequence over the tensor ranks and so needs layout.tensor of at least 2, not 1",
            ("layout.tensor",),
        )
    elif split_sequence and length % tensor and not model.heads % tensor:
        unit = layout.context * tensor
        yield Problem(
            "batch.sequence",
            f"must be a multiple of layout.context x layout.tensor = {layout.context} x {tensor} = {unit} "
            f"under layout.sequence_parallel ({_multiples(deck.batch.sequence, unit)} would)",
            ("layout.tensor", "layout.context", "layout.sequence_parallel"),
        )


def _context(deck: Deck) -> Iterator[Problem]:
    model, layout, sequence = deck.model, deck.layout, deck.batch.sequence
    context, tensor = layout.context, layout.tensor
    if context == 1:
        return
    ring = layout.context_form == "ring"
    heads, shared = model.heads // tensor, max(1, model.key_value_heads // tensor)
    if not ring and model.heads % tensor == 0 and not _exchanges(heads, shared, context):
        fitting = [ranks for ranks in divisors(heads) if _exchanges(heads, shared, ranks)]
        would = _or(nearest(context, [ranks for ranks in fitting if sequence % ranks == 0]))
        also = "" if heads % context else f", and divide or be a multiple of its {shared} key/value heads"
        yield Problem(
            "layout.context",
            f'must divide the heads of a tensor rank, {heads}{also}, in the form "all_to_all" '
            f'({would} would; the form "ring" does not ask for it)',
            (
                "layout.context_form",
                "layout.tensor",
                "model.heads",
                "model.key_value_heads",
                "batch.sequence",
            ),
        )
        return
    unit = 2 * context if ring else context
    if sequence % unit:
        pieces = f"2 x layout.context = {unit}, an early and a late piece for each context rank"
        yield Problem(
            "batch.sequence",
            f"must be a multiple of {pieces if ring else f'layout.context = {unit}'} "
            f"({_multiples(sequence, unit)} would)",
            ("layout.context", "layout.context_form"),
        )


def _exchanges(heads: int, shared: int, ranks: int) -> bool:
    """Whether context ranks can exchange these heads, and these key/value heads, for sequence."""
    return heads % ranks == 0 and _shares(shared, ranks)


def _model_ranks(deck: Deck) -> int:
    """Ranks that one copy of the model takes."""
    return deck.layout.pipeline * deck.layout.tensor * deck.layout.context


def _pipeline(deck: Deck) -> Iterator[Problem]:
    layout, layers = deck.layout, deck.model.layers
    parts = layout.pipeline * layout.chunks
    made = f"layout.pipeline x layout.chunks = {layout.pipeline} x {layout.chunks}"
    if parts > layers:
        least = 2 if layout.schedule in TWO_CHUNKS else 1
        fewer = layers // layout.chunks
        hint = (
            f"layout.pipeline = {fewer}" if fewer >= least else f"layout.chunks = {layers // layout.pipeline}"
        )
        possible = fewer >= least or layers // layout.pipeline >= least
        yield Problem(
            "layout.pipeline",
            f"{made} needs {parts} layers or more, but model.layers = {layers}"
            + (f" ({hint} would do)" if possible else ""),
            ("layout.chunks", "model.layers"),
        )
    if layout.schedule in TWO_CHUNKS and (layout.chunks < 2 or layout.pipeline < 2):
        key = "layout.chunks" if layout.chunks < 2 else "layout.pipeline"
        exactly = key == "layout.chunks" and layout.schedule != "interleaved"
        yield Problem(
            key,
            f'must be 2{"" if exactly else " or more"} with layout.schedule = "{layout.schedule}"',
            ("layout.schedule",),
        )
    elif layout.schedule in TWO_CHUNKS - {"interleaved"} and layout.chunks != 2:
        yield Problem(
            "layout.chunks", f'must be 2 with layout.schedule = "{layout.schedule}"', ("layout.schedule",)
        )
    elif layout.schedule in ONE_CHUNK and layout.chunks > 1:
        yield Problem(
            "layout.chunks",
            f'must be 1 with layout.schedule = "{layout.schedule}" ("interleaved" takes more)',
            ("layout.schedule",),
        )
    if layout.split is not None and layout.split != "balanced":
        if len(layout.split) != parts or min(layout.split) < 1:
            yield Problem(
                "layout.split",
                f"must have a number of at least 1 for each of the {parts} parts of {made}",
                ("layout.pipeline", "layout.chunks"),
            )
        elif sum(layout.split) != layers:
            yield Problem(
                "layout.split",
                f"adds up to {sum(layout.split)}, not model.layers = {layers}",
                ("model.layers",),
            )


def _zero(deck: Deck) -> Iterator[Problem]:
    zero, memory, group = deck.layout.zero, deck.memory, deck.layout.zero_group
    if isinstance(group, int) and group < 1:
        yield Problem("layout.zero_group", 'must be a number of ranks, 1 or more, or "node"')
    elif group is not None and not zero:
        yield Problem("layout.zero_group", "needs layout.zero of 1, 2 or 3, not 0", ("layout.zero",))
    if memory.keep_gathered and zero != 3:
        yield Problem("memory.keep_gathered", f"needs layout.zero = 3, not {zero}", ("layout.zero",))
    if memory.accumulate == "sliced" and zero < 2:
        yield Problem("memory.accumulate", f"needs layout.zero of 2 or 3, not {zero}", ("layout.zero",))


def _memory(deck: Deck) -> Iterator[Problem]:
    layout, recompute = deck.layout, deck.memory.recompute
    parts, split = layout.pipeline * layout.chunks, layout.split
    if split is None:
        longest = -(-deck.model.layers // parts)
    else:
        longest = max(split, default=1) if split != "balanced" else deck.model.layers - parts + 1
    if isinstance(recompute, int) and not 1 <= recompute <= max(1, longest):
        yield Problem(
            "memory.recompute",
            f"must be from 1 to {max(1, longest)} as a number, the blocks of the longest part of the model "
            '("full", "sqrt", "selective" and "none" would do, too)',
            ("model.layers", "layout.pipeline", "layout.chunks", "layout.split"),
        )


def _batch(deck: Deck, ranks: int | None) -> Iterator[Problem]:
    batch = deck.batch
    sizes = {"batch.global_size": batch.global_size, "batch.ramp_from": batch.ramp_from}
    if ranks is None:
        yield from _global_batch(batch.micro_size, deck.layout.data or 1, sizes)
    if batch.ramp_from > batch.global_size:
        yield Problem(
            "batch.ramp_from",
            f"must be at most batch.global_size = {batch.global_size}, to which it grows",
            ("batch.global_size",),
        )
    if batch.ramp_from and not batch.ramp_steps:
        yield Problem("batch.ramp_from", "needs batch.ramp_steps of at least 1", ("batch.ramp_steps",))
    if batch.ramp_steps and not batch.ramp_from:
        yield Problem("batch.ramp_steps", "needs batch.ramp_from of at least 1", ("batch.ramp_from",))


def _schedule(deck: Deck) -> Iterator[Problem]:
    # A warm-up or ramp longer than the run is no mistake: a trial run stops early.
    rate = deck.learning_rate
    if rate.decay != "constant" and rate.warmup > rate.decay_steps:
        yield Problem(
            "learning_rate.warmup",
            f"must be at most learning_rate.decay_steps = {rate.decay_steps}",
            ("learning_rate.decay_steps", "learning_rate.decay", "run.steps"),
        )


def _evaluation(deck: Deck) -> Iterator[Problem]:
    every = deck.run.evaluate_every
    if every and not deck.data.validation:
        yield Problem(
            "run.evaluate_every",
            "evaluates on held-out sequences, but data.validation = 0 holds none out (0.01 would; or leave "
            "the key out)",
            ("data.validation",),
            for_writers=True,
        )


def _times(deck: Deck) -> Iterator[Problem]:
    limit, margin, factor = deck.run.time_limit, deck.run.time_margin, deck.stability.straggler_factor
    if limit is not None and margin is not None and margin >= limit:
        yield Problem(
            "run.time_margin", f"must be less than run.time_limit = {toml_value(limit)}", ("run.time_limit",)
        )
    if 0 < factor <= 1:
        yield Problem(
            "stability.straggler_factor",
            "must be above 1, or 0 to name no rank: half of all ranks take longer than the median",
        )


def _devices(deck: Deck) -> Iterator[Problem]:
    if deck.communication.transport == "nccl" and deck.run.device == "cpu":
        yield Problem(
            "communication.transport",
            'works between GPUs only, but run.device = "cpu" ("auto" or "mpi" would do)',
            ("run.device",),
        )


def _offload(deck: Deck) -> Iterator[Problem]:
    memory = deck.memory
    if memory.parameters != "device" and deck.layout.zero < 3:
        yield Problem(
            "memory.parameters",
            f"needs layout.zero = 3, which gathers parameters when they are needed, not {deck.layout.zero}",
            ("layout.zero",),
        )
    if memory.parameters != "device" and memory.optimizer == "device":
        yield Problem(
            "memory.parameters",
            'needs memory.optimizer = "host" or "disk": the update is where the parameters are',
            ("memory.optimizer",),
        )
    if memory.activations == "host" and deck.run.device == "cpu":
        yield Problem("memory.activations", NO_HOST_ACTIVATIONS, ("run.device",))
    if memory.activation_format == "bf16" and deck.precision.compute != "fp32":
        yield Problem(
            "memory.activation_format",
            f'saves nothing with precision.compute = "{deck.precision.compute}", of 16 bits as well '
            '("exact" or "int8" would do)',
            ("precision.compute",),
        )
    for name in ("optimizer", "parameters"):
        if getattr(memory, name) == "host" and deck.run.device == "cpu":
            yield Problem(f"memory.{name}", NO_HOST, ("run.device",))


def _shares(heads: int, ranks: int) -> bool:
    """Whether ranks can have whole key/value heads each, or share each one among equally many."""
    return heads % ranks == 0 or ranks % heads == 0


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, smallest first."""
    small = [ranks for ranks in range(1, int(number**0.5) + 1) if number % ranks == 0]
    return sorted({*small, *(number // ranks for ranks in small)})


def nearest(number: int, candidates: Iterable[int], count: int = 4) -> list[int]:
    """The few candidates that are nearest to a number, smallest first."""
    return sorted(sorted(candidates, key=lambda candidate: (abs(candidate - number), candidate))[:count])


def _multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return _or([size for size in (below, below + unit) if size])


def _must_divide(key: str, size: int, would: Sequence[int]) -> str:
    return f"must divide {key} = {size} ({_or(would)} would)"


def _or(numbers: Sequence[int]) -> str:
    *first, last = (str(number) for number in numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
