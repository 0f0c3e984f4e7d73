"""`verify_layout`: two tiny steps on the run's layout and on one rank, compared tensor by tensor.

A step has three micro-batches or more, and one more than there are pipeline stages; one of them has a row
less than the others, and no two have as many targets. The first step's rotary positions are the first ones,
the second step's lie up to the end of the deck's sequence. What optimizer, routers and products keep is
compared after both steps. Three kinds of decks have more compared. Compressed sums of gradients, whose
residual is kept, are compared in a third step: sum and residual together are the exact sum. Products in
8 bits are compared in steps of their own, in which all else is in fp64, and so are their scales, unless these
are of blocks: another power of two often gives the same numbers in a small model. Replicas that make steps by
themselves are compared in steps of plain gradient descent with an outer step after each.

The model is the deck's in miniature: the same family, heads, layout and dropout, with small heads, two
layers and a short sequence, in fp32, so that any rank can compute it alone and rounding explains next
to nothing. A module that users bring is in double precision, and in the first step compared with what its
own code alone computes, in plain torch. No two tensors are alike, so that none can stand in for another
unnoticed. The steps are the run's own: the first one with what watches it, the second one with what was
learned in the first, as the order in which parameters are gathered. Updates are clipped and decayed. Their
epsilon is of the size of the gradients: rounding stays what it is, and what an optimizer divides by counts.
Replicas that make steps by themselves sum gradients in these, as in `communication.warmup`: then each of them
is to have what one rank has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.dataset import dataset_of
from hpctrain.data.loader import DatasetSource
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.local_steps import has_outer_model
from hpctrain.engine.build import build_engine
from hpctrain.engine.built_engine import Engine
from hpctrain.errors import EXIT_INTERNAL, HpctrainError
from hpctrain.model.modules.module_part import ModulePart
from hpctrain.model.precision import DOUBLE_FP8
from hpctrain.parallel.fp8.quantization_loss import is_count
from hpctrain.parallel.fp8.recipes import RECIPES
from hpctrain.parallel.shards import Shard
from hpctrain.train.hook import Hook
from hpctrain.train.layout_difference import TOLERANCE, LayoutDifference, difference_of
from hpctrain.train.layout_state import StatePiece, residuals, spread_positions, state_pieces
from hpctrain.train.module_probe import ProbeFinding, probe, shared_memory
from hpctrain.train.outputs import in_order_of, outputs_of
from hpctrain.train.plain_torch_step import bare_module, call_in, losses_of, plain_module, plain_step
from hpctrain.train.scaled_down_deck import (
    MICRO_SIZE,
    batch_of,
    has_residuals,
    miniature_of,
    with_fp8_products,
    with_outer_steps,
)
from hpctrain.train.trainer import Trainer

_WATCHED = 4  # data ranks whose outputs are compared

_DOCUMENTS = 0.2  # share of tokens that end a document, where these are masked
_PADDING = 0.2  # share of sequences that is padding, where conversations fill them

_SECOND_STEP = " in the second step"
_AT_THE_END = " after both steps"

NOISE_STD = 0.2  # standard deviation of what biases and norm weights differ by


def is_state(name: str) -> bool:
    """Return True if `name`, from `compare`, is the name of state other than parameters."""
    return name.endswith(_AT_THE_END) and not name.startswith("parameter ")


class LayoutError(HpctrainError):
    """The layout does not compute what one rank computes."""

    exit_code = EXIT_INTERNAL


def tiny_trainer(deck: Deck, world: World, mesh: Mesh) -> Trainer:
    """Trainer of a miniature deck, on random tokens of which some are masked, or on its dataset."""
    engine = build_engine(deck, world, mesh, noise_std=NOISE_STD)
    if deck.data.dataset is not None:
        return Trainer(deck, engine, Batches(DatasetSource(dataset_of(deck), 0.0, "train"), deck.run.seed))
    assert deck.model.vocabulary is not None
    documents = _DOCUMENTS if deck.data.document_mask else 0.0
    source = SyntheticSource(
        deck.batch.sequence,
        deck.model.vocabulary,
        seed=deck.run.seed,
        masked=0.2,
        documents=documents,
        padding=0.0 if deck.objective.kind == "next-token" else _PADDING,
    )
    return Trainer(deck, engine, Batches(source, deck.run.seed))


def compare(
    deck: Deck, world: World, mesh: Mesh, longest: int = 0, one_rank: Deck | None = None
) -> list[LayoutDifference]:
    """Compare the first two steps of a miniature deck on this layout with those of one rank. Collective.

    Args:
        deck: The miniature.
        world: All ranks.
        mesh: The layout.
        longest: Length of the sequences near whose end rotary positions of the second step lie; 0: as short
            as the miniature's.
        one_rank: The deck of one rank, where that is not `deck` without its layout.

    Returns:
        The same list on all ranks, in the order of the computation: parameters, then of each step the loss
        and other metrics, gradients from the last layer to the first and their norm, then parameters and
        other state at the end; of a module also what its parts give in the first step.
    """
    batch = {"global_size": batch_of(deck, mesh)}
    deck = deck.with_keys(batch=batch)
    expected: dict[str, _Computed] = {}
    beside: dict[str, str] = {}
    if world.rank == 0:
        only = world.single_rank_world()
        plain = on_one_rank(deck if one_rank is None else one_rank.with_keys(batch=batch))
        whole = tiny_trainer(plain.with_keys(memory={"recompute": "none"}), only, Mesh(only, {}))
        outputs, own = _of_own_code(whole, mesh.size("data")) if deck.model.module is not None else ({}, {})
        on_one = _compute(whole, longest)
        for name, each in on_one.items():
            expected |= outputs if name == "loss" else {}
            expected[name] = own.get(name, each)
        beside = {name: _beside(expected[name], on_one.get(name)) for name in (*outputs, *own)}
    trainer = tiny_trainer(deck, world, mesh)
    computed = _compute(trainer, longest)
    described: dict[str, _Description] = world.everyone.broadcast_object(
        {
            name: _Description.of(each, _scale(name, expected), beside.get(name))
            for name, each in expected.items()
        }
    )
    shapes = {name: each.calls for name, each in described.items()}
    pieces = mesh.size("tensor") if deck.layout.sequence_parallel else 1
    comparable = _comparable(computed, shapes, world, pieces)
    nothing = _Computed(torch.empty(0))  # of a tensor that another stage holds
    differences = []
    for name in comparable:
        description = described[name]
        shared = description.share(expected[name].values if world.rank == 0 else None, world)
        mine = computed.get(name, nothing)
        if mine.cut:
            number = mesh.coordinate("tensor")
            given = [each.chunk(pieces, 1)[number] for each in _apart(shared, shapes[name])]
            shared = torch.cat([each.reshape(-1) for each in given])
        elif len(mine.calls) > 1:
            wanted, given = _apart(shared, shapes[name]), _apart(mine.values, mine.calls)
            mine = mine._replace(values=torch.cat([each.reshape(-1) for each in in_order_of(wanted, given)]))
        if mine.shards:
            shared = shared.view(mine.shards[0].shape)
            spans = mine.spans or (slice(None),) * len(mine.shards)
            pieces_of = zip(mine.shards, spans, strict=True)
            shared = torch.cat([shard.take(shared).reshape(-1)[span] for shard, span in pieces_of])
        elif name not in computed:
            shared = torch.empty(0)
        shard = mine.shards[0] if mine.shards else None
        sums = _sums_of(name)
        found = difference_of(name, mine.values, shared, description.scale, world, mesh, shard, sums)
        differences.append(replace(found, beside=description.reference or found.beside))
    trainer.engine.close()
    return differences


def compare_miniature(
    deck: Deck, world: World, mesh: Mesh
) -> tuple[Deck, list[ProbeFinding], list[LayoutDifference]]:
    """The miniature of a deck, and what `probe_module` and `compare` find of it. Collective; errors as in
    `miniature_of`.
    """
    with world.agreement():
        small = miniature_of(deck, mesh)
    longest = deck.batch.sequence
    found = compare(small, world, mesh, longest)
    if deck.precision.compute == "fp8" and deck.model.module is None:
        with world.agreement():
            quantized = with_fp8_products(deck, small)
        found += _renamed(compare(quantized, world, mesh, longest), "with products in 8 bits")
    if has_outer_model(deck) and deck.model.module is None:
        replicas, one_rank = with_outer_steps(deck, small)
        found += _renamed(compare(replicas, world, mesh, longest, one_rank), "with outer steps")
    return small, probe_module(small, world), found


def probe_module(small: Deck, world: World) -> list[ProbeFinding]:
    """What is found of the module of a miniature by itself, on rank 0, the same list on all ranks; of our own
    families nothing. Collective.
    """
    found: list[ProbeFinding] = []
    with world.agreement():
        if world.rank == 0 and small.model.module is not None:
            alone = world.single_rank_world()
            trainer = tiny_trainer(on_one_rank(small), alone, Mesh(alone, {}))
            weights = {shard.name: piece for shard, piece in _pieces(trainer.engine, gradients=False)}
            found += shared_memory(bare_module(trainer.engine, small.run.seed))
            call = call_in(trainer.engine, plain_module(trainer.engine, weights, small.run.seed))
            micro = next(iter(trainer.step.batches.step(0, MICRO_SIZE, 0, 1, MICRO_SIZE)))
            found += probe(call, micro, partial(losses_of, trainer.engine))
    shared: list[ProbeFinding] = world.everyone.broadcast_object(found)
    return shared


def verify_layout(deck: Deck, world: World, mesh: Mesh) -> str:
    """Compare and raise LayoutError on all ranks at the first tensor that differs, or HpctrainError for what
    a module does that no layout goes with; else a sentence. Errors as of `compare_miniature`.
    """
    _, noticed, differences = compare_miniature(deck, world, mesh)
    if wrong := [f"layout check: {each.sentence}" for each in noticed if each.fails]:
        raise HpctrainError(wrong)
    for difference in differences:
        if difference.fails:
            raise LayoutError(f"layout check: {difference}")
    worst = max(differences, key=lambda difference: difference.error)
    return (
        f"layout check passed: {len(differences)} tensors of two small steps agree with one rank; "
        f"largest difference {worst.error:.1e} ({worst.name})"
    )


def _renamed(differences: Iterable[LayoutDifference], how: str) -> list[LayoutDifference]:
    """Return the differences with a suffix on their names that says which steps were compared."""
    return [replace(each, name=f"{each.name}, {how}") for each in differences]


def _sums_of(name: str) -> Literal["all", "tensor", "none"]:
    """Return the axes over which a missing or doubled sum could explain a difference.

    State is excluded, since its slices have different lengths on each rank. For outputs of modules only the
    tensor axis counts, since the ranks of other axes compute on different data.
    """
    if is_state(name):
        return "none"
    return "tensor" if name.startswith("output of ") else "all"


class _Computed(NamedTuple):
    """What all ranks have, or this rank's pieces of a tensor behind each other; of what a part gives the
    shapes in its calls, and whether these are pieces of the sequence. `spans` are the elements of the local
    piece of each shard, if not all of them.
    """

    values: Tensor
    shards: tuple[Shard, ...] = ()
    spans: tuple[slice, ...] = ()
    calls: tuple[torch.Size, ...] = ()
    cut: bool = False


class _Description(NamedTuple):
    """Description, on all ranks, of a tensor that rank 0 has computed alone.

    Attributes:
        calls: Shapes of the tensor in each call of its module.
        shape: Shape of the tensor.
        dtype: dtype of the tensor.
        scale: Value that errors are relative to.
        reference: What the tensor is compared with; None for the one-rank run.
    """

    calls: tuple[torch.Size, ...]
    shape: torch.Size
    dtype: torch.dtype
    scale: float
    reference: str | None

    @staticmethod
    def of(expected: _Computed, scale: float, reference: str | None) -> _Description:
        """Return the description of a tensor that rank 0 has computed."""
        values = expected.values
        return _Description(expected.calls or (values.shape,), values.shape, values.dtype, scale, reference)

    def share(self, values: Tensor | None, world: World) -> Tensor:
        """Return rank 0's `values` on every rank. Collective."""
        tensor = torch.empty(self.shape, dtype=self.dtype) if values is None else values.cpu().contiguous()
        return world.everyone.broadcast(tensor)


def _compute(trainer: Trainer, longest: int) -> dict[str, _Computed]:
    """Return by name what `compare` compares, in its order."""
    engine = trainer.engine
    engine.stage.layer_context.statistics.detailed_step = _has_same_scales(trainer.deck)

    def parameters(when: str) -> dict[str, _Computed]:
        return _by_name(("parameter ", when), _pieces(engine, gradients=False))

    sums = _SummedGradients(engine)
    trainer.hooks.append(sums)
    results = parameters("")
    for step in ("", _SECOND_STEP):
        sums.pieces.clear()
        data = engine.mesh.coordinate("data")
        watched = not step and data < _WATCHED
        parts = [part for part in engine.stage.models if isinstance(part, ModulePart) and watched]
        watching = outputs_of({part.module: part.computing for part in parts})
        with spread_positions(engine, longest if step else 0), watching as given:
            result = trainer.train_step()
        if not sums.pieces:  # the update was skipped
            sums.before_update()
        results |= _outputs(given, data)
        results |= {f"{name}{step}": _number(value) for name, value in result.metrics.items()}
        results[f"tokens{step}"] = _number(result.tokens)
        results |= {
            f"statistics of {name}{step}": _Computed(each)
            for name, each in result.statistics.items()
            if not is_count(name)
        }
        results |= reversed(_by_name(("gradient of ", step), sums.pieces).items())
        results[f"gradient norm{step}"] = _number(result.grad_norm)
    if engine.stage.replica_sync.common_model_differs and trainer.deck.communication.warmup == 0:
        # Each replica has gradients of its own.
        results = {name: each for name, each in results.items() if not name.startswith("gradient")}
    results |= parameters(_AT_THE_END) | _state(engine, trainer.deck.communication.warmup == 0)
    if has_residuals(trainer.deck):
        sums.pieces.clear()
        trainer.train_step()
        unsent = residuals(engine)
        whole = [(shard, piece + unsent[shard.name].view_as(piece)) for shard, piece in sums.pieces]
        results |= _by_name(("gradient of ", " in the third step, with all residuals"), whole)
    return results


def _has_same_scales(deck: Deck) -> bool:
    """Return True if products in 8 bits have the same scales on every layout.

    Blocks of some tokens have other scales where context ranks cut them.
    """
    keys = deck.precision
    return keys.compute == DOUBLE_FP8 and RECIPES[keys.fp8].tokens.blocks.columns is None


def _number(value: float) -> _Computed:
    return _Computed(torch.tensor(value, dtype=torch.float64))


def _state(engine: Engine, outer: bool) -> dict[str, _Computed]:
    """Return this rank's pieces of all state beside parameters, by name; with that of the `outer` model."""
    found: dict[str, list[StatePiece]] = {}
    for each in state_pieces(engine, outer):
        found.setdefault(f"{each.name}{_AT_THE_END}", []).append(each)
    return {
        name: _Computed(
            torch.cat([each.values.reshape(-1) for each in some]).clone(),
            tuple(each.shard for each in some),
            tuple(each.span for each in some),
        )
        for name, some in found.items()
    }


def _by_name(around: tuple[str, str], pieces: Iterable[tuple[Shard, Tensor]]) -> dict[str, _Computed]:
    """Pieces of tensors, of which a rank may have several, by their tensor's name with `around`."""
    found: dict[str, list[tuple[Shard, Tensor]]] = {}
    for shard, piece in pieces:
        found.setdefault(f"{around[0]}{shard.name}{around[1]}", []).append((shard, piece.reshape(-1).clone()))
    return {
        name: _Computed(torch.cat([piece for _, piece in some]), tuple(shard for shard, _ in some))
        for name, some in found.items()
    }


def _comparable(
    computed: dict[str, _Computed], shapes: Mapping[str, tuple[torch.Size, ...]], world: World, pieces: int
) -> Sequence[str]:
    """Return the names of what is expected in some `shapes` and any rank has computed. Collective.

    What a part gives in another shape, as of some heads, or in other calls, as those of a rank's experts, is
    taken out of what this rank has, but for so many equal pieces of sequences [b, s, h]. State that ranks
    have of their own, as the residual of a sum, is taken out too: one rank has another number of these.
    """

    def is_cut(own: Sequence[torch.Size], whole: Sequence[torch.Size]) -> bool:
        return len(own) == len(whole) and all(
            len(a) == len(b) == 3 and b == (a[0], pieces * a[1], a[2])
            for a, b in zip(own, whole, strict=True)
        )

    for name, each in list(computed.items()):
        own, whole = each.calls or (each.values.shape,), shapes.get(name, ())
        if pieces > 1 and each.calls and is_cut(own, whole):
            computed[name] = each._replace(cut=True)
        else:
            same = whole == ((prod(each.shards[0].shape),),) if each.spans else sorted(own) == sorted(whole)
            if not same and (each.spans or not each.shards):
                del computed[name]
    known = set().union(*world.everyone.all_gather_object(set(computed)))
    return [name for name in shapes if name in known]


def _of_own_code(trainer: Trainer, ranks: int) -> tuple[dict[str, _Computed], dict[str, _Computed]]:
    """What is to be of the first step by a module's own code alone: what its parts give for the first
    micro-batches of the first of so many data ranks; loss and gradients.
    """
    weights = {shard.name: piece for shard, piece in _pieces(trainer.engine, gradients=False)}
    own = plain_step(trainer, weights, min(ranks, _WATCHED))
    outputs = {
        name: each
        for number, given in enumerate(own.outputs)
        for name, each in _outputs(given, number).items()
    }
    found = {f"gradient of {name}": _Computed(gradient) for name, gradient in own.gradients.items()}
    numbers = {"loss": own.loss, "gradient norm": own.norm}
    found |= {name: _Computed(torch.tensor(each, dtype=torch.float64)) for name, each in numbers.items()}
    return outputs, found


def _beside(expected: _Computed, on_one_rank: _Computed | None) -> str:
    """What something is compared with that is `expected` by a module's own code."""
    own = "its own code in plain torch"
    if on_one_rank is None:
        return own
    values, others = (each.values.double().reshape(-1) for each in (expected, on_one_rank))
    bound = TOLERANCE * float(values.abs().nan_to_num().max()) if len(values) else 0.0
    as_one = len(values) == len(others) and torch.allclose(values, others, 0, bound, equal_nan=True)
    return f"the one-rank run, and from {own}," if as_one else f"{own}, as the one-rank run does,"


def _outputs(given: Mapping[str, Sequence[Tensor]], data: int) -> dict[str, _Computed]:
    """What parts of a module give on a data rank, all calls behind each other."""
    where = f" on data rank {data}" if data else ""
    return {
        f"output of {name}{where}": _Computed(
            torch.cat([each.reshape(-1) for each in calls]), calls=tuple(each.shape for each in calls)
        )
        for name, calls in given.items()
    }


def _apart(values: Tensor, calls: Sequence[torch.Size]) -> list[Tensor]:
    """What was given in each of several calls, of all of it."""
    pieces = values.split([shape.numel() for shape in calls])
    return [piece.view(shape) for piece, shape in zip(pieces, calls, strict=True)]


class _SummedGradients(Hook):
    """This rank's piece of every gradient as it was before clipping."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pieces: list[tuple[Shard, Tensor]] = []

    def before_update(self) -> None:
        """Copy them."""
        self.pieces += [(shard, piece.clone()) for shard, piece in _pieces(self.engine, gradients=True)]


def _pieces(engine: Engine, gradients: bool) -> Iterator[tuple[Shard, Tensor]]:
    """Shard and local piece of every parameter (or its gradient), in the order of the forward pass."""
    for bucket in engine.stage.synchronizer.buckets if gradients else engine.stage.buckets:
        flat = bucket.gather_owned(bucket.owned_gradients if gradients else bucket.owned_values)
        for segment in bucket.segments:
            yield segment.parameter.shard, segment.view(flat)


def _is_metric(name: str) -> bool:
    """Return True for the name of a figure of a step, such as its loss."""
    others = ("gradient", "parameter", "statistics", "tokens", "output")
    return not name.startswith(others) and not is_state(name)


def _scale(name: str, expected: Mapping[str, _Computed]) -> float:
    """Return the largest element that a difference is measured against.

    It is that of the tensor itself, with two exceptions. Figures are means of terms that may nearly cancel,
    such as scores of either sign: the largest figure of the same step counts. Gradients of queries and
    keys, and state made of them, go through softmax, where sums of terms as large as those of the values
    nearly cancel: it does not see a bias of the keys, nor much of queries and keys that tell little apart.
    """
    names = {name}
    if name.startswith("gradient") or is_state(name):
        names |= {re.sub(r"\.(query|key)\.", ".value.", name)} & expected.keys()
    if _is_metric(name):
        second = name.endswith(_SECOND_STEP)
        names |= {each for each in expected if _is_metric(each) and each.endswith(_SECOND_STEP) == second}
    values = [expected[each].values for each in names]
    return max((float(each.double().abs().max()) for each in values if each.numel()), default=0.0)
