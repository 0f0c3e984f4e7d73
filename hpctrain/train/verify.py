"""`verify_layout`: one tiny step on the run's layout and on one rank, compared tensor by tensor.

The model is the deck's in miniature: the same family, heads, layout and dropout, with small heads, two
layers and a short sequence, in fp32, so that any rank can compute it alone and rounding explains next
to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.schema import Deck
from hpctrain.errors import EXIT_INTERNAL, HpctrainError
from hpctrain.parallel.shard import Shard
from hpctrain.train.build import Engine, build_engine
from hpctrain.train.step import Step, StepResult, TrainState

TOLERANCE = 1e-5
"""Largest difference of a tensor over its largest element, in fp32."""

_HEAD_SIZE, _LAYERS, _MICRO_BATCHES, _MICRO_SIZE = 8, 2, 2, 2

_SUMS = (("tensor",), ("context",), ("data",), ("data", "context"), ("context", "tensor"))
"""Axes over which a sum may be missing or doubled, the likeliest first."""


class LayoutError(HpctrainError):
    """The layout does not compute what one rank computes."""

    exit_code = EXIT_INTERNAL


@dataclass(frozen=True)
class Difference:
    """How far one tensor (or the loss, or the norm) is from the one-rank run, and what explains it."""

    name: str
    error: float
    hint: str


def miniature(deck: Deck) -> Deck:
    """The deck with the same layout and a tiny model and batch."""
    layout, model = deck.layout, deck.model
    hidden = model.heads * _HEAD_SIZE
    multiple = layout.tensor * 8
    sequence = 2 * layout.context * layout.tensor * 2
    sections: dict[str, dict[str, object]] = {
        "model": {
            "preset": None,
            "layers": max(_LAYERS, layout.pipeline * layout.chunks),
            "hidden": hidden,
            "mlp": -(-2 * hidden // multiple) * multiple,
            # No multiple of the tensor axis, so that the padding is compared, too.
            "vocabulary": 16 * layout.tensor + 1,
            # Larger than usual, so that every tensor's gradient stands out from rounding.
            "initial_std": 0.1,
        },
        "layout": {"split": None},
        "batch": {"sequence": sequence, "micro_size": _MICRO_SIZE, "ramp_from": 0},
        "precision": {"compute": "fp32"},
        "optimizer": {"clip": 0.0},
        "learning_rate": {"peak": 1e-3, "warmup": 0, "decay": "constant", "reference_batch": 0},
        "communication": {"bucket_bytes": 4096},
        "memory": {"activations": "keep", "activation_format": "exact"},
        "stability": {"check_parameters": True},
    }
    changed = {name: getattr(deck, name).model_copy(update=keys) for name, keys in sections.items()}
    return deck.model_copy(update=changed)


def on_one_rank(deck: Deck) -> Deck:
    """The deck without any layout."""
    layout = {
        "data": None,
        "pipeline": 1,
        "schedule": "1f1b",
        "chunks": 1,
        "split": None,
        "tensor": 1,
        "context": 1,
        "sequence_parallel": False,
        "zero": 0,
        "zero_group": None,
    }
    memory = {"optimizer": "device", "parameters": "device"}
    return deck.model_copy(
        update={
            "layout": deck.layout.model_copy(update=layout),
            "memory": deck.memory.model_copy(update=memory),
        }
    )


def tiny_engine(deck: Deck, world: World, mesh: Mesh) -> tuple[Engine, Step]:
    """Engine and step of a miniature deck, on random tokens of which some are masked."""
    engine = build_engine(deck, world, mesh)
    assert deck.model.vocabulary is not None
    source = SyntheticSource(deck.batch.sequence, deck.model.vocabulary, seed=deck.run.seed, masked=0.2)
    step = Step(engine, Batches(source, deck.run.seed), deck.batch.micro_size, 0.0, deck.run.seed)
    return engine, step


def compare(deck: Deck, world: World, mesh: Mesh) -> list[Difference]:
    """Differences of initial parameters, loss, gradients and norm of a miniature deck's first step.

    Collective; the same list on all ranks, in the order of the computation: parameters, the loss,
    gradients from the last layer to the first, their norm.
    """
    micro_batches = max(_MICRO_BATCHES, mesh.size("pipeline"))
    batch = micro_batches * _MICRO_SIZE * mesh.size("data")
    deck = deck.model_copy(update={"batch": deck.batch.model_copy(update={"global_size": batch})})
    reference: dict[str, Tensor] = {}
    if world.rank == 0:
        reference = _on_one_rank(deck, world, batch)
    engine, step = tiny_engine(deck, world, mesh)
    pieces = {f"parameter {name}": piece for name, _, piece in _pieces(engine, gradients=False)}
    pieces = {name: piece.clone() for name, piece in pieces.items()}
    result = step(TrainState(), batch)
    gradients = {f"gradient of {name}": piece for name, _, piece in _pieces(engine, gradients=True)}
    shards = {shard.name: shard for _, shard, _ in _pieces(engine, gradients=False)}
    differences = []
    for name in world.everyone.broadcast_object(list(reference)):
        whole = _share(reference.get(name), world)
        if name in {"loss", "gradient norm"}:
            value = result.loss if name == "loss" else result.grad_norm
            mine = torch.tensor(value, dtype=torch.float64)
            differences.append(_difference(name, mine, whole, whole, world, mesh, None))
        else:
            scale = _share(reference.get(_scale_of(name)), world)
            shard = shards.get(name.split()[-1])
            piece, expected = torch.empty(0), torch.empty(0)  # of a tensor that another stage holds
            if shard is not None:
                piece = pieces[name] if name in pieces else gradients[name]
                expected = shard.take(whole)
            differences.append(_difference(name, piece, expected, scale, world, mesh, shard))
    engine.close()
    return differences


def verify_layout(deck: Deck, world: World, mesh: Mesh) -> str:
    """Compare and raise LayoutError on all ranks at the first tensor that differs; else a sentence."""
    differences = compare(miniature(deck), world, mesh)
    for difference in differences:
        if not difference.error <= TOLERANCE:
            raise LayoutError(
                f"layout check: {difference.name} differs from the one-rank run by {difference.error:.1e} "
                f"of its largest element (allowed: {TOLERANCE:.0e}); {difference.hint}"
            )
    worst = max(differences, key=lambda difference: difference.error)
    return (
        f"layout checked: {len(differences)} tensors of a tiny step as on one rank; "
        f"largest difference {worst.error:.1e} ({worst.name})"
    )


def _on_one_rank(deck: Deck, world: World, batch: int) -> dict[str, Tensor]:
    """The reference, by name: parameters, loss, gradients, their norm."""
    alone = world.alone()
    engine, step = tiny_engine(on_one_rank(deck), alone, Mesh(alone, {}))
    found = {f"parameter {name}": piece.clone() for name, _, piece in _pieces(engine, gradients=False)}
    result: StepResult = step(TrainState(), batch)
    found["loss"] = torch.tensor(result.loss, dtype=torch.float64)
    gradients = {f"gradient of {name}": piece for name, _, piece in _pieces(engine, gradients=True)}
    found |= dict(reversed(gradients.items()))
    found["gradient norm"] = torch.tensor(result.grad_norm, dtype=torch.float64)
    return found


def _pieces(engine: Engine, gradients: bool) -> Iterator[tuple[str, Shard, Tensor]]:
    """Name, Shard and local piece of every parameter (or its gradient), in the order of the forward pass."""
    for bucket in engine.buckets:
        flat = bucket.whole(bucket.own_gradients if gradients else bucket.own_values)
        for segment in bucket.segments:
            yield segment.parameter.shard.name, segment.parameter.shard, segment.view(flat)


def _share(whole: Tensor | None, world: World) -> Tensor:
    """Rank 0's tensor, on every rank."""
    described = None if whole is None else (list(whole.shape), str(whole.dtype).removeprefix("torch."))
    shape, dtype = world.everyone.broadcast_object(described)
    tensor = torch.empty(shape, dtype=getattr(torch, dtype)) if whole is None else whole.cpu()
    return world.everyone.broadcast(tensor)


def _scale_of(name: str) -> str:
    """Whose largest element a difference is measured against: its own tensor's, with one exception.

    Softmax does not see a bias of the keys, so its gradient is nothing but rounding.
    """
    return name.replace(".key.bias", ".query.bias") if name.startswith("gradient") else name


def _difference(
    name: str, mine: Tensor, expected: Tensor, scale: Tensor, world: World, mesh: Mesh, shard: Shard | None
) -> Difference:
    mine = mine.detach().double().cpu()
    expected, largest = expected.double(), max(float(scale.double().abs().max()), 1e-30)

    def worst(values: Tensor) -> float:
        error = (values - expected).abs().max() if values.numel() else torch.zeros(())
        found = torch.stack((error.double(), (~error.isfinite()).double())).nan_to_num(nan=0.0)
        world.everyone.all_reduce(found, "max")
        return float("inf") if found[1] else float(found[0]) / largest

    error = worst(mine)
    if error <= TOLERANCE:
        return Difference(name, error, "")
    what = "" if shard is None else f"split over {', '.join(sorted(shard.split)) or 'no axis'}; "
    for axes in _SUMS:
        group = mesh.group(*axes)
        if group.size == 1:
            continue
        over = f"the {group.name} axis ({group.size} ranks)"
        if worst(group.all_reduce(mine.clone())) <= 10 * TOLERANCE:
            return Difference(name, error, f"{what}a sum over {over} is likely missing")
        if worst(mine / group.size) <= 10 * TOLERANCE:
            return Difference(name, error, f"{what}a sum over {over} is likely doubled")
    return Difference(name, error, f"{what}no single missing or doubled sum explains it")
