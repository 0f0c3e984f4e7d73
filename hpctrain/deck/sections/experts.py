"""The table [model.experts], mixtures of experts, and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Section, key
from hpctrain.deck.problem import DeckProblem, divisors, must_divide, nearest_numbers
from hpctrain.deck.relations import AtMost, Conflicts, HasEffectWith, Relations
from hpctrain.text import counted, either
from hpctrain.units import format_bytes, format_count

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

LARGEST_SIZE = 10_000_000
"""Largest size in a model, such as its width: larger than any in use, but its divisors are found quickly."""
MOST_LAYERS = 10_000
_MOST_EXPERTS = 100_000


class ExpertsTable(Section):
    """Mixtures of experts: a router sends each token to some of the experts of a block."""

    count: int = key("Number of experts of a mixture.", ge=1, le=_MOST_EXPERTS)
    per_token: int = key("Number of experts that each token is routed to (top-k).", 2, ge=1, le=_MOST_EXPERTS)
    mlp: int = key("Inner width of an expert.", derived="model.mlp", ge=1, le=4 * LARGEST_SIZE)
    shared: int = key(
        "Number of shared experts, which process every token in addition to its routed experts.",
        0,
        ge=0,
        le=_MOST_EXPERTS,
    )
    shared_gate: bool = key(
        "Whether the result of shared experts is multiplied by the sigmoid of a linear layer (Qwen2-MoE).",
        False,
    )
    every: int = key(
        "Distance of the mixtures in blocks: 1 makes every block a mixture, 2 every second one.",
        1,
        unit="blocks",
        ge=1,
        le=MOST_LAYERS,
    )
    dense_first: int = key(
        "Number of blocks at the start of the model that are dense.", 0, unit="blocks", ge=0, le=MOST_LAYERS
    )
    pattern: tuple[bool, ...] = key(
        "Blocks with experts, repeated over all: [false, true]; [] for those of every and dense_first.",
        (),
        strict=False,
    )
    router: Literal["softmax", "sigmoid"] = key(
        "Function that turns the router's logits into probabilities: softmax over experts, or sigmoid "
        "of each one.",
        "softmax",
    )
    router_bias: bool = key("Whether the router adds a trained bias to its logits (gpt-oss).", False)
    router_normalize: bool = key(
        "Whether the weights of a token's experts are normalized to a sum of 1.", True
    )
    router_scale: float = key("Factor by which these weights are multiplied.", 1.0, gt=0)
    router_groups: int = key(
        "Groups of experts; the router first selects groups, by the sum of their highest scores.", 1, ge=1
    )
    router_groups_per_token: int = key("Number of groups that the router selects for each token.", 1, ge=1)
    router_group_best: int = key(
        "Number of highest scores of a group that are summed (DeepSeek-V2: 1, DeepSeek-V3: 2).",
        2,
        ge=1,
        le=_MOST_EXPERTS,
    )
    router_dtype: Literal["fp32", "compute"] = key(
        "Number format of the router's matrix product; compute: the format of precision.compute.", "fp32"
    )
    router_z_loss: float = key(
        "Weight of the squared log-partition function of the router in the loss (ST-MoE); 0: none.",
        0.0,
        ge=0,
        le=1,
    )
    balance: Literal["loss", "bias", "none"] = key(
        "Load balancing of experts: an auxiliary loss, a bias on the router's scores (DeepSeek-V3), or none.",
        "loss",
    )
    balance_loss: float = key(
        "Weight of the load balancing loss: experts x sum of (share of tokens x mean probability).",
        derived='0.01 with balance = "loss", else 0',
        ge=0,
        le=1000,
    )
    balance_over: Literal["micro_batch", "sequence", "step"] = key(
        "Tokens over which the load balancing loss counts each expert's share; step: those of the "
        "previous step.",
        "micro_batch",
    )
    balance_rate: float = key(
        'Amount by which a step changes the bias of an expert (balance = "bias").', 0.001, ge=0, le=1
    )
    capacity: float | None = key(
        "Capacity factor: an expert takes this many times its even share of a micro-batch and drops the "
        "rest.",
        None,
        derived="none: no token is dropped",
        gt=0,
        le=_MOST_EXPERTS,
    )
    record_routing: int = key(
        "Number of first samples whose routing is recorded in routing.h5, which other runs can replay.",
        0,
        unit="samples",
        ge=0,
        le=1 << 20,
    )

    def has_experts(self, block: int) -> bool:
        """Return True if a block has experts."""
        return has_experts(block, self.every, self.dense_first, self.pattern)


def has_experts(block: int, every: int, dense_first: int, pattern: Sequence[bool]) -> bool:
    """Return True if a block has experts.

    Args:
        block: Number of the block, from 0.
        every: Value of model.experts.every.
        dense_first: Value of model.experts.dense_first.
        pattern: Value of model.experts.pattern.
    """
    if pattern:
        return pattern[block % len(pattern)]
    return block >= dense_first and (block + 1) % every == 0


RECORDED_BYTES = 1 << 30
"""Highest number of bytes of the routing that a run records."""


_COUNT, _BALANCE = "model.experts.count", "model.experts.balance"
_ALL_BLOCKS = "the pattern says for each block whether it has experts"

RELATIONS: Relations = (
    AtMost("model.experts.per_token", _COUNT),
    Conflicts("model.experts.pattern", "model.experts.every", because=_ALL_BLOCKS),
    Conflicts("model.experts.pattern", "model.experts.dense_first", because=_ALL_BLOCKS),
    Conflicts(
        "model.experts.router_normalize",
        "model.experts.per_token",
        (True,),
        (1,),
        because="the weight of a token's only expert is 1, and the router learns nothing from the loss",
        for_new_decks=True,
    ),
    Conflicts("model.experts.balance_loss", _BALANCE, None, ("none",)),
    HasEffectWith("model.experts.balance_rate", _BALANCE, ("bias",)),
)
"""Relations of keys that only transformers have."""


def expert_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of [model.experts] that do not depend on the layout; none without that table.

    These are mixtures that no block has, groups of the router that do not fit the experts, a balance_over
    without effect, a capacity below one token, and too many recorded samples. Relations in RELATIONS are
    checked elsewhere.
    """
    experts = deck.model.experts
    if experts is not None:
        yield from _blocks(deck, experts)
        if experts.shared_gate and not experts.shared:
            sentence = "requires shared experts (set model.experts.shared = 1 or more)"
            yield DeckProblem("model.experts.shared_gate", sentence, ("model.experts.shared",))
        yield from _router_groups(experts)
        yield from _balance(experts)
        yield from _capacity(deck, experts)
        yield from _routing_record(deck, experts)


def expert_layout_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of experts that the ranks of a layout cannot split.

    layout.tensor has to divide model.experts.shared x model.experts.mlp. With biases, layout.expert_tensor
    has to divide model.hidden.
    """
    layout, experts = deck.layout, deck.model.experts
    if experts is not None and (shared := experts.shared * experts.mlp) % layout.tensor:
        made = f"model.experts.shared x model.experts.mlp = {experts.shared} x {experts.mlp}"
        most = deck.model.heads
        fitting = nearest_numbers(layout.tensor, [each for each in divisors(shared) if each <= most])
        sentence = f"must divide {made} = {shared} (use {either(fitting)})"
        others = ("model.experts.shared", "model.experts.mlp", "model.heads")
        yield DeckProblem("layout.tensor", sentence, others)
    if experts is not None and deck.model.mlp_bias and deck.model.hidden % layout.expert_tensor:
        fitting = nearest_numbers(layout.expert_tensor, divisors(gcd(deck.model.hidden, experts.mlp)))
        sentence = f"must divide model.hidden = {deck.model.hidden} to split biases (use {either(fitting)})"
        yield DeckProblem("layout.expert_tensor", sentence, ("model.hidden", "model.mlp_bias"))


def expert_world_problems(deck: Deck, stage_ranks: int) -> Iterator[DeckProblem]:
    """Yield the problem of expert axes that do not fit the ranks of a pipeline stage; at most one.

    The problem may also be a group of ZeRO that does not divide the ranks with the same experts, of which
    there are `stage_ranks` / (layout.expert x layout.expert_tensor).

    Args:
        deck: The deck; there are none if its model has no experts.
        stage_ranks: Number of ranks of a pipeline stage of all replicas, which is data x context x tensor.
    """
    layout, experts = deck.layout, deck.model.experts
    if experts is None:
        return
    expert, split = layout.expert, layout.expert_tensor
    among = f"the {counted(stage_ranks, 'rank')} of a pipeline stage"
    axes = ("layout.data", "layout.tensor", "layout.context", "layout.pipeline")
    if stage_ranks % (expert * split):
        if stage_ranks % split:
            would = nearest_numbers(split, divisors(gcd(stage_ranks, experts.mlp)))
            sentence = f"must divide {among} (use {either(would)})"
            yield DeckProblem("layout.expert_tensor", sentence, ("model.experts.mlp", *axes))
            return
        would = nearest_numbers(expert, divisors(gcd(stage_ranks // split, experts.count)))
        over = (
            f" / layout.expert_tensor = {stage_ranks} / {split} = {stage_ranks // split}" if split > 1 else ""
        )
        sentence = f"must divide {among}{over} (use {either(would)})"
        yield DeckProblem("layout.expert", sentence, ("layout.expert_tensor", "model.experts.count", *axes))
        return
    copies, group = stage_ranks // (expert * split), layout.zero_group
    if layout.zero and isinstance(group, int) and group > 0 and copies % group:
        these = either(nearest_numbers(group, divisors(gcd(copies, stage_ranks // layout.tensor))))
        holders = f"the {counted(copies, 'rank')} that hold the same experts"
        sentence = f"must divide {holders}, because it shards these experts over them (use {these})"
        yield DeckProblem("layout.zero_group", sentence, ("layout.expert", "layout.expert_tensor", *axes))


def has_dense_blocks(deck: Deck) -> bool:
    """Return True if some blocks of the model are dense: blocks without experts.

    It is also True for a model without experts, in which all blocks are dense.
    """
    experts = deck.model.experts
    return experts is None or not all(map(experts.has_experts, range(deck.model.layers)))


def _blocks(deck: Deck, experts: ExpertsTable) -> Iterator[DeckProblem]:
    layers = deck.model.layers
    last = layers // experts.every * experts.every - 1
    if experts.pattern:
        if len(experts.pattern) > layers:
            sentence = f"must have at most one value for each of the {counted(layers, 'block')}"
            yield DeckProblem("model.experts.pattern", sentence, ("model.layers",))
        elif not any(experts.pattern):
            sentence = "leaves no block with experts (use true for those that have them)"
            yield DeckProblem("model.experts.pattern", sentence, (_COUNT,))
    elif last < 0:
        sentence = f"leaves no block with experts: must be from 1 to model.layers = {layers}"
        yield DeckProblem("model.experts.every", sentence, ("model.layers", _COUNT))
    elif experts.dense_first > last:
        sentence = f"leaves no block with experts: must be from 0 to {last}"
        others = ("model.layers", "model.experts.every", _COUNT)
        yield DeckProblem("model.experts.dense_first", sentence, others)


def _router_groups(experts: ExpertsTable) -> Iterator[DeckProblem]:
    groups, chosen = experts.router_groups, experts.router_groups_per_token
    if experts.count % groups:
        sentence = must_divide(_COUNT, experts.count, groups)
        yield DeckProblem("model.experts.router_groups", sentence, (_COUNT,))
    elif chosen > groups:
        sentence = f"must be at most model.experts.router_groups = {groups}"
        yield DeckProblem("model.experts.router_groups_per_token", sentence, ("model.experts.router_groups",))
    elif experts.count >= experts.per_token > chosen * (experts.count // groups):
        size = experts.count // groups
        least = -(-experts.per_token // size)
        sentence = (
            f"selects {chosen * size} of {experts.count} experts for a token, which requires "
            f"model.experts.per_token = {experts.per_token} of them (use {least} to {groups})"
        )
        others = ("model.experts.router_groups", _COUNT, "model.experts.per_token")
        yield DeckProblem("model.experts.router_groups_per_token", sentence, others)


def _balance(experts: ExpertsTable) -> Iterator[DeckProblem]:
    usual = ExpertsTable.model_fields["balance_over"].default
    if not experts.balance_loss and experts.balance_over != usual:
        loss = "model.experts.balance_loss"
        sentence = f"has no effect with {loss} = 0 (leave it out, or give a weight above 0)"
        yield DeckProblem("model.experts.balance_over", sentence, (_BALANCE, loss), no_effect=True)


def _capacity(deck: Deck, experts: ExpertsTable) -> Iterator[DeckProblem]:
    """Yield the problem of a capacity that leaves no token of a micro-batch to an expert."""
    if experts.capacity is None:
        return
    tokens = deck.batch.micro_size * deck.batch.sequence
    share = tokens * experts.per_token / experts.count
    if experts.capacity * share < 1:
        sentence = (
            f"limits an expert to {experts.capacity * share:.2g} of the {format_count(tokens)} tokens of a "
            f"micro-batch, which is less than one token (use {_at_least(1 / share)} or more)"
        )
        others = (_COUNT, "model.experts.per_token", "batch.micro_size", "batch.sequence")
        yield DeckProblem("model.experts.capacity", sentence, others)


def _routing_record(deck: Deck, experts: ExpertsTable) -> Iterator[DeckProblem]:
    """Yield the problem of recorded routing that does not fit into memory, or into its file."""
    mixtures = sum(map(experts.has_experts, range(deck.model.layers)))
    of_sample = 4 * max(1, mixtures) * deck.batch.sequence * experts.per_token
    if experts.record_routing * of_sample > RECORDED_BYTES:
        sentence = (
            f"requires {format_bytes(experts.record_routing * of_sample)} on rank 0, more than the limit "
            f"of {format_bytes(RECORDED_BYTES)} for recorded routing (use {RECORDED_BYTES // of_sample} "
            "samples or fewer)"
        )
        others = ("model.layers", "model.experts.per_token", "batch.sequence")
        yield DeckProblem("model.experts.record_routing", sentence, others)


def _at_least(number: float) -> str:
    """Return the shortest decimal text of a number that is at least `number`."""
    digits = next(digits for digits in range(2, 18) if float(f"{number:.{digits}g}") >= number)
    return f"{number:.{digits}g}"
