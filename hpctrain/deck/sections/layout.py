"""The section [layout], and the checks of its keys that do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from hpctrain.deck.head_split import HeadSplit
from hpctrain.deck.key import PathText, Section, key, table
from hpctrain.deck.problem import DeckProblem, divisors, multiples, nearest_numbers
from hpctrain.deck.relations import (
    GIVEN,
    Above,
    Conflicts,
    Divides,
    OtherThan,
    Relations,
    Requires,
    relation_problems,
)
from hpctrain.deck.schedules import ONE_CHUNK, TWO_CHUNKS, V_SHAPED
from hpctrain.deck.sections.experts import expert_layout_problems, has_dense_blocks
from hpctrain.deck.sections.local_steps import LocalStepsTable
from hpctrain.deck.sections.rank_partition import count_dedicated_ranks
from hpctrain.text import counted, either

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck


class Layout(Section):
    """Distribution of the work over ranks: ranks = pipeline x data x context x tensor.

    Expert layers use the same ranks with other axes: pipeline x expert data x expert x expert_tensor.
    `layout = "auto"` in place of the section lets hpctrain choose all of these keys.
    """

    auto: bool = key(
        "Whether hpctrain chooses the keys that are not given, micro_size and recompute: the fastest "
        "that fits.",
        False,
    )
    data: int | None = key(
        "Data-parallel copies of the model, which train on different sequences.",
        None,
        unit="ranks",
        derived="all remaining ranks",
        ge=1,
    )
    tensor: int = key("Ranks that split each layer's weights.", 1, unit="ranks", ge=1)
    context: int = key("Ranks that split each sequence.", 1, unit="ranks", ge=1)
    expert: int = key(
        "Ranks of a stage over which the experts are distributed; data, context and tensor use the same "
        "ranks.",
        1,
        unit="ranks",
        ge=1,
    )
    expert_tensor: int = key("Ranks that split each expert's weights.", 1, unit="ranks", ge=1)
    pipeline: int = key(
        "Stages that split the layers, each of them one rank or more.", 1, unit="stages", ge=1
    )
    schedule: PathText = key(
        "Pipeline schedule: a name of `hpctrain schedule`, or the file of one.", "1f1b", min_length=1
    )
    chunks: int = key(
        "Parts of the model (virtual stages) that each stage holds.",
        derived="2 if the schedule requires two, else 1",
        ge=1,
    )
    split: Annotated[tuple[int, ...], Field(strict=False)] | Literal["balanced"] | None = key(
        'Layers of each part of the model, first to last; "balanced": by the measured time of each kind.',
        None,
        derived="the split that minimizes the FLOPs of the largest stage",
    )
    zero: int = key(
        "State sharded over data and context ranks (ZeRO): 1 optimizer state, 2 gradients too, 3 "
        "parameters too.",
        0,
        ge=0,
        le=3,
    )
    zero_group: int | Literal["node"] | None = key(
        'Ranks over which layout.zero shards, replicated between such groups; "node": the ranks of a node.',
        None,
        unit="ranks",
        derived="all data x context ranks",
    )
    sequence_parallel: bool = key("Whether norms and residuals are split over the tensor ranks too.", False)
    context_form: Literal["ring", "all_to_all"] = key(
        "Attention of context ranks: keys and values pass around a ring, or an all-to-all swaps "
        "sequence for heads.",
        "ring",
    )
    chosen: tuple[str, ...] = key(
        "Keys that auto chose for a run (written by hpctrain); --set layout=auto chooses them again.",
        (),
        strict=False,
    )
    local_steps: LocalStepsTable | None = table(
        "Replicas that train independently for some steps and then exchange weights (Local SGD, DiLoCo).",
        derived="none: gradients are summed over all data ranks in every step",
    )

    @property
    def replicas(self) -> int:
        """Number of replicas that train by themselves; 1 without local steps."""
        return 1 if self.local_steps is None else self.local_steps.replicas

    @property
    def steps_between_syncs(self) -> int:
        """Number of steps between two synchronizations of replicas; 1 without local steps."""
        return 1 if self.local_steps is None else self.local_steps.steps


_MODULE, _SERVER, _COMPRESS = "model.module", "communication.server.mode", "communication.compress"
_COUNT = "model.experts.count"
_WHOLE_MODEL = "a worker is one rank, which has the whole model"
_BUILT_IN_EXPERTS = "only experts of built-in models are distributed"

_SHAPE_RELATIONS: Relations = (
    Requires("layout.sequence_parallel", "layout.tensor", Above(1)),
    (
        Conflicts("layout.expert", _MODULE, because=_BUILT_IN_EXPERTS),
        Requires("layout.expert", _COUNT, GIVEN),
        Divides("layout.expert", _COUNT),
    ),
    (
        Conflicts("layout.expert_tensor", _MODULE, because=_BUILT_IN_EXPERTS),
        Requires("layout.expert_tensor", _COUNT, GIVEN),
        Divides("layout.expert_tensor", "model.experts.mlp"),
    ),
)
"""Relations that the model and the layout of ranks must fulfill, as `layout_problems` checks."""

RELATIONS: Relations = (
    *_SHAPE_RELATIONS,
    Conflicts("layout.auto", _MODULE, because="the cost model supports built-in models only"),
    Conflicts("layout.tensor", _SERVER, because=_WHOLE_MODEL),
    Conflicts("layout.pipeline", _SERVER, because=_WHOLE_MODEL),
    Conflicts("layout.context", _SERVER, because=_WHOLE_MODEL),
    Conflicts("layout.context", _MODULE, because="only the attention of built-in models splits sequences"),
    Conflicts("layout.zero", _SERVER, because="each server already has a shard of all state"),
    Conflicts(
        "layout.zero_group", "layout.local_steps.replicas", because="layout.zero shards within each replica"
    ),
    (
        Conflicts(
            "layout.zero",
            _COMPRESS,
            (2, 3),
            OtherThan("none"),
            because="each rank needs complete gradients to keep what it does not send",
            hint="use 0 or 1",
        ),
        Conflicts(
            "layout.zero_group",
            _COMPRESS,
            because="gradients would be summed exactly between groups",
            further_keys=("layout.zero",),
        ),
    ),
    Conflicts("layout.local_steps", _SERVER, because="workers have no weights of their own for local steps"),
    Conflicts("layout.local_steps", _MODULE, because="only replicas of built-in models are synchronized"),
)


def layout_problems(deck: Deck) -> list[DeckProblem]:
    """Return the problems of the layout of a deck with a transformer; empty if it has none.

    Problems that depend on the number of ranks are not among them. Only the keys of tensor, context, pipeline
    and expert ranks are checked, against each other and the model. A search for a layout calls this for each
    candidate.
    """
    return [*relation_problems(deck, _SHAPE_RELATIONS), *transformer_layout_problems(deck)]


def transformer_layout_problems(deck: Deck) -> list[DeckProblem]:
    """Return the problems of `layout_problems` except for those of relations that are in `RELATIONS`."""
    return [*_tensor(deck), *_context(deck), *_pipeline(deck), *expert_layout_problems(deck)]


_MOST_SIZES = 8
"""Largest number of sizes that a message names, so that it also has those that fit few ranks."""


def _tensor(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of layout.tensor."""
    model, layout = deck.model, deck.layout
    tensor = layout.tensor
    length = deck.batch.sequence // layout.context
    split_sequence = layout.sequence_parallel and deck.batch.sequence % layout.context == 0

    demands: dict[str, Callable[[int], bool]] = {
        "model.heads": lambda ranks: ranks <= model.heads,
        "model.mlp": lambda ranks: not has_dense_blocks(deck) or model.mlp % ranks == 0,
        "batch.sequence": lambda ranks: not split_sequence or length % ranks == 0,
    }
    possible = range(1, model.heads + 1)
    fitting = [ranks for ranks in possible if all(fits(ranks) for fits in demands.values())]
    would = nearest_numbers(tensor, fitting, _MOST_SIZES)

    def problem(demand: str, name: str, candidates: Iterable[int]) -> DeckProblem:
        """Return the problem of layout.tensor with near sizes that fit, and other keys that exclude more."""
        near = nearest_numbers(tensor, candidates, _MOST_SIZES)
        limits = []
        for other, fits in demands.items():
            if other != name and near != would and not all(fits(ranks) for ranks in near):
                limits.append(f"{other} = {deck.value(other)}")
                near = [ranks for ranks in near if fits(ranks)]
        given = f", given {' and '.join(limits)}" if limits else ""
        others = ("layout.context", "layout.sequence_parallel", *demands)
        return DeckProblem("layout.tensor", f"{demand} (use {either(would)}{given})", others)

    if not demands["model.heads"](tensor):
        yield problem(f"must be at most model.heads = {model.heads}", "model.heads", possible)
    if not demands["model.mlp"](tensor):
        yield problem(f"must divide model.mlp = {model.mlp}", "model.mlp", divisors(model.mlp))
    split = _head_split(deck)
    if split is not None and not split.is_even and deck.communication.compress in {"sign", "onebit"}:
        sentence = (
            f"conflicts with layout.tensor = {tensor}, which does not divide the heads evenly: ranks get "
            'padding of zeros, which have no signs (use "bf16", "int8", "topk" or "powersgd")'
        )
        yield DeckProblem(_COMPRESS, sentence, ("layout.tensor", "model.heads", "model.key_value_heads"))
    if split_sequence and length % tensor and tensor <= model.heads:
        unit = layout.context * tensor
        yield DeckProblem(
            "batch.sequence",
            f"must be a multiple of layout.context x layout.tensor = {layout.context} x {tensor} = {unit} "
            f"with layout.sequence_parallel (use {multiples(deck.batch.sequence, unit)})",
            ("layout.tensor", "layout.context", "layout.sequence_parallel"),
        )


def _head_split(deck: Deck) -> HeadSplit | None:
    """Return how tensor ranks split the heads; None if they cannot, which is a problem of its own."""
    model, tensor = deck.model, deck.layout.tensor
    if tensor > model.heads or model.heads % model.key_value_heads:
        return None
    return HeadSplit.of(model.heads, model.key_value_heads, tensor)


def _context(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of layout.context."""
    layout, sequence = deck.layout, deck.batch.sequence
    context = layout.context
    if context == 1:
        return
    ring = layout.context_form == "ring"
    split = _head_split(deck)
    heads, key_value_heads = (1, 1) if split is None else split.padded_heads
    if not ring and split is not None and not _exchanges(heads, key_value_heads, context):
        fitting = [ranks for ranks in divisors(heads) if _exchanges(heads, key_value_heads, ranks)]
        would = either(nearest_numbers(context, [ranks for ranks in fitting if sequence % ranks == 0]))
        also = ""
        if heads % context == 0:
            also = f", and divide or be a multiple of its {key_value_heads} key/value heads,"
        padded = "" if split.is_even else " (with padding)"
        demand = f"must divide the {heads} heads of a tensor rank{padded}{also} with layout.context_form = "
        demand += '"all_to_all"'
        sentence = f'{demand} (use {would}, or the form "ring")'
        others = ("layout.tensor", "model.heads", "model.key_value_heads", "batch.sequence")
        yield DeckProblem("layout.context", sentence, ("layout.context_form", *others))
        return
    unit = 2 * context if ring else context
    if sequence % unit:
        pieces = f"layout.context = {unit}"
        if ring:
            pieces = f"2 x {pieces}, since each context rank has an early and a late piece"
        sentence = f"must be a multiple of {pieces} (use {multiples(sequence, unit)})"
        yield DeckProblem("batch.sequence", sentence, ("layout.context", "layout.context_form"))


def _exchanges(heads: int, key_value_heads: int, ranks: int) -> bool:
    """Return True if context ranks can exchange these numbers of query heads and of key/value heads."""
    return heads % ranks == 0 and (key_value_heads % ranks == 0 or ranks % key_value_heads == 0)


def _pipeline(deck: Deck) -> Iterator[DeckProblem]:
    layout, layers = deck.layout, deck.model.layers
    parts = layout.pipeline * layout.chunks
    made = f"layout.pipeline x layout.chunks = {layout.pipeline} x {layout.chunks}"
    most = layers + (
        2 if parts > 2 else 1
    )  # the first part may have only the embedding, the last one only the output layer
    if parts > most:
        least = 2 if layout.schedule in TWO_CHUNKS else 1
        fewer = most // layout.chunks
        chunks = most // layout.pipeline
        hint = f"layout.pipeline = {fewer}" if fewer >= least else f"layout.chunks = {chunks}"
        would = f" (use {hint})" if max(fewer, chunks) >= least else ""
        sentence = f"{made} requires {max(1, parts - 2)} layers or more, but model.layers is {layers}{would}"
        yield DeckProblem("layout.pipeline", sentence, ("layout.chunks", "model.layers"))
    yield from schedule_problems(deck)
    if layout.split is not None and layout.split != "balanced":
        inner, least = layout.split[1:-1] if parts > 1 else layout.split, min(layout.split, default=0)
        if len(layout.split) != parts or least < 0 or 0 in inner:
            ends = ", or 0 for the first (embedding) and the last (output layer)" if parts > 1 else ""
            sentence = f"must give 1 layer or more to each of the {parts} parts of {made}{ends}"
            yield DeckProblem("layout.split", sentence, ("layout.pipeline", "layout.chunks"))
        elif sum(layout.split) != layers:
            sentence = f"must add up to model.layers = {layers}, not {sum(layout.split)}"
            yield DeckProblem("layout.split", sentence, ("model.layers",))


def schedule_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problem of stages and chunks that the pipeline schedule does not allow; at most one.

    It does not depend on the model. Schedules in files are not read.
    """
    layout = deck.layout
    if layout.schedule in TWO_CHUNKS and (layout.chunks < 2 or layout.pipeline < 2):
        key = "layout.chunks" if layout.chunks < 2 else "layout.pipeline"
        exactly = key == "layout.chunks" and layout.schedule != "interleaved"
        sentence = f'must be 2{"" if exactly else " or more"} with layout.schedule = "{layout.schedule}"'
        yield DeckProblem(key, sentence, ("layout.schedule",))
    elif layout.schedule in V_SHAPED and layout.chunks != 2:
        sentence = f'must be 2 with layout.schedule = "{layout.schedule}"'
        yield DeckProblem("layout.chunks", sentence, ("layout.schedule",))
    elif layout.schedule in ONE_CHUNK and layout.chunks > 1:
        sentence = f'must be 1 with layout.schedule = "{layout.schedule}" (use "interleaved" for more)'
        yield DeckProblem("layout.chunks", sentence, ("layout.schedule",))
    elif layout.chunks > 1 and layout.pipeline < 2:
        yield DeckProblem("layout.chunks", "must be 1 with layout.pipeline = 1", ("layout.pipeline",))


def zero_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problem of layout.zero_group that depends neither on the model nor on the ranks; at most one.

    It is a number below 1, or a group without layout.zero.
    """
    group = deck.layout.zero_group
    if isinstance(group, int) and group < 1:
        yield DeckProblem("layout.zero_group", 'must be a number of ranks, 1 or more, or "node"')
    elif group is not None and not deck.layout.zero:
        yield DeckProblem(
            "layout.zero_group", "requires layout.zero = 1, 2 or 3, but it is 0", ("layout.zero",)
        )


def model_ranks(deck: Deck) -> int:
    """Return the number of ranks that hold one copy of the model: pipeline x tensor x context."""
    return deck.layout.pipeline * deck.layout.tensor * deck.layout.context


def axis_problems(deck: Deck, ranks: int) -> list[DeckProblem]:
    """Return the problem of axes that do not fit the number of ranks; at most one, and none if they fit.

    The product pipeline x tensor x context must divide the ranks, and layout.data, if given, be the quotient.
    Expert axes and replicas are left to `expert_world_problems` and `replica_world_problems`.

    Args:
        deck: The deck.
        ranks: Number of ranks that parameter servers and dedicated ranks of other models leave.
    """
    layout = deck.layout
    names = ["pipeline", "tensor", "context"] if layout.pipeline > 1 else ["tensor", "context"]
    keys = tuple(f"layout.{name}" for name in names)
    product = f"{' x '.join(keys)} = {' x '.join(str(getattr(layout, name)) for name in names)}"
    if ranks % model_ranks(deck):
        wrong = next((f"layout.{name}" for name in names if getattr(layout, name) > 1), keys[0])
        would = f"{multiples(ranks, model_ranks(deck))} ranks would fit"
        of = "ranks of the policy" if count_dedicated_ranks(deck) else "ranks"
        return [DeckProblem(wrong, f"{product} must divide the number of {of}, {ranks} ({would})", keys)]
    data = ranks // model_ranks(deck)
    if layout.data is not None and layout.data != data:
        made = f"must be {data}, the number of data ranks of {counted(ranks, 'rank')} with {product}"
        would = f"leave the key out, or start {counted(layout.data * model_ranks(deck), 'rank')}"
        return [DeckProblem("layout.data", f"{made} ({would})", keys)]
    return []


def zero_group_problems(deck: Deck, data_ranks: int) -> Iterator[DeckProblem]:
    """Yield the problem of groups of ZeRO that the ranks cannot form; at most one.

    Groups have to divide the data x context ranks of a replica, and ZeRO-3 needs two ranks or more.

    Args:
        deck: The deck.
        data_ranks: Number of data ranks of all replicas together. With their context ranks they form the
            groups.
    """
    layout = deck.layout
    ranks = max(1, data_ranks * layout.context // layout.replicas)
    among = counted(ranks, "data x context rank") + " of a replica" * (layout.replicas > 1)
    size = max(1, layout.zero_group) if isinstance(layout.zero_group, int) else ranks
    if ranks % size:
        would = f"use {either(nearest_numbers(size, divisors(ranks)))}"
        sentence = f"must divide the {among} ({would})"
        yield DeckProblem("layout.zero_group", sentence, ("layout.data", "layout.context"))
    elif layout.zero == 3 and size == 1:
        name, others = ("layout.zero_group", ("layout.zero",)) if layout.zero_group else ("layout.zero", ())
        yield DeckProblem(
            name,
            "shards parameters, which requires two ranks or more, over a single rank (use layout.zero = "
            f"0, 1 or 2; the ranks form {among})",
            others,
        )
