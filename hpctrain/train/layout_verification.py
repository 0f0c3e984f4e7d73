"""Layout check: two small steps on a layout and on one rank, compared tensor by tensor.

The model is a small version of the deck's (see `train/scaled_down_deck.py`): the same family, layout, dropout
and number of heads, with small heads, two layers and a short sequence. It computes in fp32, so that any rank
can compute it alone and rounding errors are tiny. A user's module computes in fp64, and in the first step it
is also compared with its own code in plain PyTorch. No two tensors have the same values, so that a swapped
tensor shows.

A step has at least three micro-batches, and one more than there are pipeline stages. One of them has a row
less than the others, and no two have the same number of targets. The first step uses the first rotary
positions, the second step positions up to the end of the deck's sequence. The steps are those of a run: the
second one uses what the first one has recorded, such as the order in which parameters are gathered. Updates
are clipped and decayed. The epsilon of the optimizer is as large as the gradients, so that rounding errors do
not grow but a wrong second moment shows. State of optimizer, routers and products is compared after both
steps.

Some decks need further steps:

- With error feedback, reduced gradients are compared in a third step: sum and residuals are the exact sum.
- Products in 8 bits are compared in steps of their own, with everything else in fp64. Their scales are
  compared as well, except those of blocks, since other powers of two often give the same numbers.
- Replicas with local steps reduce their gradients in the first steps, as in `communication.warmup`. They are
  compared again in steps of plain gradient descent with an outer step after each.
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
from hpctrain.train.layout_difference import TOLERANCE, ComparedTensor, LayoutDifference, difference_of
from hpctrain.train.layout_state import StatePiece, residuals, spread_positions, state_pieces
from hpctrain.train.module_probe import ProbeFinding, probe, shared_memory
from hpctrain.train.outputs import match_calls, outputs_of
from hpctrain.train.plain_torch_step import bare_module, call_in, losses_of, plain_module, plain_step
from hpctrain.train.scaled_down_deck import (
    MICRO_SIZE,
    batch_of,
    has_residuals,
    scale_down,
    with_fp8_products,
    with_outer_steps,
)
from hpctrain.train.trainer import Trainer

_WATCHED = 4
"""Number of data ranks whose outputs are compared."""

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
    """Return the trainer of a scaled-down deck, on random tokens or on its dataset."""
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
    """Compare the first two steps of a scaled-down deck on this layout with those of one rank. Collective.

    Args:
        deck: The scaled-down deck.
        world: All ranks.
        mesh: The layout.
        longest: Length of the sequences near whose end rotary positions of the second step lie; 0: as short
            as the deck's.
        one_rank: The deck of one rank, where that is not `deck` without its layout.

    Returns:
        The same list on all ranks, in the order of the computation: parameters, then of each step the loss
        and other metrics, gradients from the last layer to the first and their norm, then parameters and
        other state at the end; of a module also the outputs of its parts in the first step.
    """
    batch = {"global_size": batch_of(deck, mesh)}
    deck = deck.with_keys(batch=batch)
    expected: dict[str, _Computed] = {}
    references: dict[str, str] = {}
    if world.rank == 0:
        reference_deck = on_one_rank(deck if one_rank is None else one_rank.with_keys(batch=batch))
        expected, references = _compute_on_one_rank(reference_deck, world, longest, mesh.size("data"))
    trainer = tiny_trainer(deck, world, mesh)
    computed = _compute(trainer, longest)
    descriptions: dict[str, _Description] = world.everyone.broadcast_object(
        {
            name: _Description.of(each, _scale(name, expected), references.get(name))
            for name, each in expected.items()
        }
    )
    shapes = {name: each.calls for name, each in descriptions.items()}
    pieces = mesh.size("tensor") if deck.layout.sequence_parallel else 1
    differences = []
    for name in _comparable(computed, shapes, world, pieces):
        description, local = descriptions[name], computed.get(name)
        global_values = description.share(expected[name].values if world.rank == 0 else None, world)
        piece = mesh.coordinate("tensor") if pieces > 1 else 0
        values, expected_values = _matching_elements(local, global_values, shapes[name], piece, pieces)
        shard = local.shards[0] if local is not None and local.shards else None
        tensor = ComparedTensor(name, values, expected_values, description.scale, shard, _sums_of(name))
        difference = difference_of(tensor, world, mesh)
        differences.append(replace(difference, reference=description.reference or difference.reference))
    trainer.engine.close()
    return differences


def _compute_on_one_rank(
    deck: Deck, world: World, longest: int, data_ranks: int
) -> tuple[dict[str, _Computed], dict[str, str]]:
    """Compute on this rank alone what `compare` expects.

    A user's module is expected to compute what its own code in plain PyTorch does.

    Returns:
        The expected values by name, and descriptions of the references that are not the one-rank run.
    """
    alone = world.single_rank_world()
    trainer = tiny_trainer(deck.with_keys(memory={"recompute": "none"}), alone, Mesh(alone, {}))
    outputs: dict[str, _Computed] = {}
    plain: dict[str, _Computed] = {}
    if deck.model.module is not None:
        outputs, plain = _plain_first_step(trainer, data_ranks)
    computed = _compute(trainer, longest)
    expected: dict[str, _Computed] = {}
    for name, each in computed.items():
        expected |= outputs if name == "loss" else {}
        expected[name] = plain.get(name, each)
    references = {
        name: _describe_reference(expected[name], computed.get(name)) for name in (*outputs, *plain)
    }
    return expected, references


def _matching_elements(
    local: _Computed | None, expected: Tensor, calls: Sequence[torch.Size], piece: int, pieces: int
) -> tuple[Tensor, Tensor]:
    """Return this rank's elements of a tensor, and the same elements of its expected global values.

    Args:
        local: What this rank has computed; None if another stage holds the tensor.
        expected: Expected global values.
        calls: Expected shapes in each call of a module.
        piece: Number of this rank's piece of the sequence.
        pieces: Number of pieces of the sequence.
    """
    if local is None:
        return torch.empty(0), torch.empty(0)
    values = local.values
    if local.cut:
        expected_pieces = [each.chunk(pieces, 1)[piece] for each in _split_calls(expected, calls)]
        expected = torch.cat([each.reshape(-1) for each in expected_pieces])
    elif len(local.calls) > 1:
        matched = match_calls(_split_calls(expected, calls), _split_calls(values, local.calls))
        values = torch.cat([each.reshape(-1) for each in matched])
    if local.shards:
        expected = expected.view(local.shards[0].shape)
        spans = local.spans or (slice(None),) * len(local.shards)
        shards = zip(local.shards, spans, strict=True)
        expected = torch.cat([shard.take(expected).reshape(-1)[span] for shard, span in shards])
    return values, expected


def compare_scaled_down(
    deck: Deck, world: World, mesh: Mesh
) -> tuple[Deck, list[ProbeFinding], list[LayoutDifference]]:
    """Scale a deck down, and check it with `probe_module` and `compare`. Collective.

    Returns:
        The scaled-down deck, the findings about its module, and the differences.

    Raises:
        HpctrainError: The deck cannot be scaled down (see `scale_down`).
    """
    with world.agreement():
        small = scale_down(deck, mesh)
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
    """Probe the user's module of a scaled-down deck on rank 0. Return the findings on all ranks. Collective.

    There are none for the built-in families.
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
    """Run the layout check before a run. Return a sentence about it. Collective.

    Raises:
        LayoutError: A tensor differs; raised on all ranks.
        HpctrainError: A user's module does something that no layout supports, or the deck cannot be scaled
            down; raised on all ranks.
    """
    _, noticed, differences = compare_scaled_down(deck, world, mesh)
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
    """Value that a step has computed.

    Attributes:
        values: The value, or the flat pieces of this rank one after the other.
        shards: Shards of the pieces; empty for values that all ranks have.
        spans: Elements of the local piece of each shard, if not all of them.
        calls: Shapes of a module's output in each of its calls.
        cut: True if outputs are pieces of the sequence.
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
        return _by_name("parameter ", _pieces(engine, gradients=False), when)

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
        results |= reversed(_by_name("gradient of ", sums.pieces, step).items())
        results[f"gradient norm{step}"] = _number(result.grad_norm)
    if engine.stage.replica_sync.common_model_differs and trainer.deck.communication.warmup == 0:
        # Each replica has other gradients.
        results = {name: each for name, each in results.items() if not name.startswith("gradient")}
    results |= parameters(_AT_THE_END) | _state(engine, trainer.deck.communication.warmup == 0)
    if has_residuals(trainer.deck):
        sums.pieces.clear()
        trainer.train_step()
        unsent = residuals(engine)
        exact = [(shard, piece + unsent[shard.name].view_as(piece)) for shard, piece in sums.pieces]
        results |= _by_name("gradient of ", exact, " in the third step, with all residuals")
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
    """Return this rank's pieces of all state except parameters, by name (`outer`: of outer steps)."""
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


def _by_name(prefix: str, pieces: Iterable[tuple[Shard, Tensor]], suffix: str = "") -> dict[str, _Computed]:
    """Return the pieces of tensors by name, with a prefix and a suffix."""
    found: dict[str, list[tuple[Shard, Tensor]]] = {}
    for shard, piece in pieces:
        found.setdefault(f"{prefix}{shard.name}{suffix}", []).append((shard, piece.reshape(-1).clone()))
    return {
        name: _Computed(torch.cat([piece for _, piece in some]), tuple(shard for shard, _ in some))
        for name, some in found.items()
    }


def _comparable(
    computed: dict[str, _Computed], shapes: Mapping[str, tuple[torch.Size, ...]], world: World, pieces: int
) -> Sequence[str]:
    """Return the names of expected values that any rank has computed. Collective.

    Values that cannot be compared are removed from `computed`: outputs with other shapes or calls than
    expected, such as those of some heads or of local experts, and state that each rank has separately, such
    as the residual of a reduction. Outputs that are one of `pieces` equal parts of sequences [b, s, h] stay.
    """

    def is_cut(local: Sequence[torch.Size], expected: Sequence[torch.Size]) -> bool:
        return len(local) == len(expected) and all(
            len(a) == len(b) == 3 and b == (a[0], pieces * a[1], a[2])
            for a, b in zip(local, expected, strict=True)
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


def _plain_first_step(trainer: Trainer, ranks: int) -> tuple[dict[str, _Computed], dict[str, _Computed]]:
    """Compute the first step with a module's own code alone.

    Returns:
        The outputs of its submodules for the first micro-batch of each data rank; loss and gradients.
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
    found |= {name: _number(each) for name, each in numbers.items()}
    return outputs, found


def _describe_reference(expected: _Computed, on_one_rank: _Computed | None) -> str:
    """Return the description of a reference that a module's own code has computed."""
    own = "its own code in plain torch"
    if on_one_rank is None:
        return own
    values, others = (each.values.double().reshape(-1) for each in (expected, on_one_rank))
    bound = TOLERANCE * float(values.abs().nan_to_num().max()) if len(values) else 0.0
    as_one = len(values) == len(others) and torch.allclose(values, others, 0, bound, equal_nan=True)
    return f"the one-rank run, and from {own}," if as_one else f"{own}, as the one-rank run does,"


def _outputs(outputs: Mapping[str, Sequence[Tensor]], data: int) -> dict[str, _Computed]:
    """Return the outputs of submodules on a data rank, with all calls one after the other."""
    where = f" on data rank {data}" if data else ""
    return {
        f"output of {name}{where}": _Computed(
            torch.cat([each.reshape(-1) for each in calls]), calls=tuple(each.shape for each in calls)
        )
        for name, calls in outputs.items()
    }


def _split_calls(values: Tensor, calls: Sequence[torch.Size]) -> list[Tensor]:
    """Split the flat output of several calls into one tensor per call."""
    pieces = values.split([shape.numel() for shape in calls])
    return [piece.view(shape) for piece, shape in zip(pieces, calls, strict=True)]


class _SummedGradients(Hook):
    """Hook that copies this rank's piece of every gradient before clipping."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pieces: list[tuple[Shard, Tensor]] = []

    def before_update(self) -> None:
        """Copy the gradients."""
        self.pieces += [(shard, piece.clone()) for shard, piece in _pieces(self.engine, gradients=True)]


def _pieces(engine: Engine, gradients: bool) -> Iterator[tuple[Shard, Tensor]]:
    """Yield shard and local piece of each parameter (or its gradient), in the order of the forward pass."""
    for bucket in engine.stage.synchronizer.buckets if gradients else engine.stage.buckets:
        flat = bucket.gather_owned(bucket.owned_gradients if gradients else bucket.owned_values)
        for segment in bucket.segments:
            yield segment.parameter.shard, segment.view(flat)


def _is_metric(name: str) -> bool:
    """Return True for the name of a metric of a step, such as its loss."""
    others = ("gradient", "parameter", "statistics", "tokens", "output")
    return not name.startswith(others) and not is_state(name)


def _scale(name: str, expected: Mapping[str, _Computed]) -> float:
    """Return the largest element that a difference is measured against.

    It is that of the tensor itself, with two exceptions. A metric is a mean of terms that may nearly cancel,
    such as scores of either sign, so the largest metric of the same step counts. The softmax computes
    gradients of queries and keys from sums of terms that nearly cancel, and each term is as large as in the
    gradient of the values. So the largest element of the value's tensor counts if it is larger.
    """
    names = {name}
    if name.startswith("gradient") or is_state(name):
        names |= {re.sub(r"\.(query|key)\.", ".value.", name)} & expected.keys()
    if _is_metric(name):
        second = name.endswith(_SECOND_STEP)
        names |= {each for each in expected if _is_metric(each) and each.endswith(_SECOND_STEP) == second}
    values = [expected[each].values for each in names]
    return max((float(each.double().abs().max()) for each in values if each.numel()), default=0.0)
