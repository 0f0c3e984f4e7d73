"""`verify_layout`: two tiny steps on the run's layout and on one rank, compared tensor by tensor.

The model is the deck's in miniature: the same family, heads, layout and dropout, with small heads, two
layers and a short sequence, in fp32, so that any rank can compute it alone and rounding explains next
to nothing. No two of its tensors are alike, so that none can stand in for another unnoticed. The steps are
the run's own: the first one with what watches it, the second one with what was learned in the first, as
the order in which parameters are gathered. Updates are clipped, decayed, and nearly proportional to
gradients, by a large epsilon, so that rounding stays what it is. Replicas that make steps by themselves sum
gradients in these, as in `communication.warmup`: then each of them is to have what one rank has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import Engine, build_engine
from hpctrain.engine.patterns import check_patterns
from hpctrain.engine.place import pipeline_form, split_by_flops
from hpctrain.errors import EXIT_INTERNAL, HpctrainError
from hpctrain.model.build import bare_model
from hpctrain.model.part import parameter_list
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.shard import Shard
from hpctrain.pipeline.split import even_split
from hpctrain.train.hook import Hook
from hpctrain.train.trainer import Trainer

TOLERANCE = 1e-5  # largest difference of a tensor over its largest element, in fp32
ROUGHNESS = 0.2  # standard deviation of what biases and norm weights differ by

_HEAD_SIZE, _LAYERS, _MICRO_BATCHES, _MICRO_SIZE = 8, 2, 2, 2
_EXPERTS, _CHOSEN = 4, 2
_RATE, _EPSILON, _CLIP = 0.1, 1.0, 0.1
_STEPS = 2

_SMOOTH: Mapping[str, Mapping[str, object]] = {
    "lion": {"name": "sgd", "momentum": 0.9},
    "adafactor": {"name": "adam-mini", "beta1": 0.9},
    # More steps make much of the smallest singular values, which are rounding.
    "muon": {"newton_schulz": "fp32", "newton_schulz_steps": 1},
}
"""What stands in for optimizers that make much of rounding, and keeps as much state."""

_SUMS = (("tensor",), ("context",), ("data",), ("data", "context"), ("context", "tensor"))
"""Axes over which a sum may be missing or doubled, the likeliest first."""

_SUMS_OF_EXPERTS = (("expert_data",), ("expert",), ("expert_tensor",))
"""The same of experts' tensors, and after the others of what these share."""


class LayoutError(HpctrainError):
    """The layout does not compute what one rank computes."""

    exit_code = EXIT_INTERNAL


@dataclass(frozen=True)
class LayoutDifference:
    """How far one tensor (or the loss, or the norm) is from the one-rank run, and what explains it."""

    name: str
    error: float
    hint: str

    @property
    def fails(self) -> bool:
        """Whether rounding does not explain it."""
        return not self.error <= TOLERANCE

    def __str__(self) -> str:
        return (
            f"{self.name} differs from the one-rank run by {self.error:.1e} of its largest element "
            f"(allowed: {TOLERANCE:.0e}); {self.hint}"
        )


def miniature(deck: Deck) -> Deck:
    """The deck with the same layout and a tiny model and batch."""
    layout, model = deck.layout, deck.model
    layers = max(_LAYERS, layout.pipeline * layout.chunks)
    hidden = model.heads * _HEAD_SIZE
    multiple = layout.tensor * 8
    sequence = 2 * layout.context * layout.tensor * 2
    small = deck.with_keys(
        model={
            "preset": None,
            "layers": layers,
            "frozen": (),
            "hidden": hidden,
            "head_size": _HEAD_SIZE,
            "mlp": -(-2 * hidden // multiple) * multiple,
            # No multiple of the tensor axis, so that the padding is compared, too.
            "vocabulary": 16 * layout.tensor + 1,
            # Larger than usual, so that every tensor's gradient stands out from rounding.
            "initial_std": 0.1,
            **_few_experts(deck),
            **_base(deck, hidden),
        },
        layout={"split": None},
        batch={"sequence": sequence, "micro_size": _MICRO_SIZE, "ramp_from": 0},
        precision={"compute": "fp32"},
        optimizer={"clip": _CLIP, "epsilon": _EPSILON, **_SMOOTH.get(deck.optimizer.name, {})},
        learning_rate={"peak": _RATE, "warmup": 0, "decay": "constant", "reference_batch": 0},
        communication={"bucket_bytes": 4096, "compress": "none", "warmup": _STEPS},
        memory={"activations": "keep", "activation_format": "exact"},
        stability={"check_parameters": True},
        # Nothing is left to choose for so small matrices.
        machine={"products": "onednn" if "onednn" in deck.machine.products else "library"},
        run={"noise_scale_steps": 0},
    )
    frozen = _standing(deck, small, deck.model.frozen)
    small = small.with_keys(model={"frozen": () if frozen is None else frozen})
    if deck.optimizer.name != "muon":
        return small
    matrices = _standing(deck, small, deck.optimizer.matrices)
    if not matrices:  # all are named, or some of blocks alone for which none stands
        matrices = ("*",) if matrices is None else ("blocks.*",)
    return small.with_keys(optimizer={"matrices": matrices})


def _base(deck: Deck, hidden: int) -> dict[str, object]:
    """The keys of a miniature of width `hidden` that is about as many times wider than its base."""
    model = deck.model
    if model.base_width is None or model.base_head_size is None:
        return {}
    return {
        "base_width": max(1, round(hidden * model.base_width / model.hidden)),
        "base_head_size": max(1, round(_HEAD_SIZE * model.base_head_size / model.head_size)),
    }


def _few_experts(deck: Deck) -> dict[str, object]:
    """The keys of a miniature's mixtures: every expert rank has experts, and the router its groups of them.

    Where the deck has dense blocks too, so has the miniature.
    """
    model, layout = deck.model, deck.layout
    if not model.experts:
        return {}
    chosen = min(model.experts_per_token, _CHOSEN)
    unit = lcm(layout.expert, model.router_groups)
    enough = max(_EXPERTS, -(-chosen * model.router_groups // model.router_groups_per_token))
    multiple = 4 * lcm(layout.tensor, layout.expert_tensor)
    return {
        "experts": min(model.experts, -(-enough // unit) * unit),
        "experts_per_token": chosen,
        "expert_mlp": -(-model.heads * _HEAD_SIZE // multiple) * multiple,
        "shared_experts": min(model.shared_experts, 1),
        "expert_every": min(model.expert_every, 2),
        "dense_first": min(model.dense_first, 1),
    }


def _standing(deck: Deck, small: Deck, patterns: Sequence[str]) -> tuple[str, ...] | None:
    """The parameters of a miniature that stand for those of the deck which the patterns name; None for all.

    Its first and last blocks stand for the deck's, those between for some between.
    """
    model = bare_model(ModelShape.of(small, small.model.vocabulary or 2))
    names = [parameter.shard.name for parameter in parameter_list(model)]
    scale = (deck.model.layers - 1) / (small.model.layers - 1)

    def original(name: str) -> str:
        return re.sub(r"^blocks\.(\d+)\.", lambda block: f"blocks.{round(int(block[1]) * scale)}.", name)

    named = [name for name in names if any(fnmatchcase(original(name), pattern) for pattern in patterns)]
    return tuple(named) if len(named) < len(names) else None


def _standing_split(deck: Deck, blocks: int, mesh: Mesh) -> tuple[int, ...]:
    """Of a miniature's blocks those of each part: none where the deck's part has none, else as many."""
    shape = ModelShape.of(deck, deck.model.vocabulary or 2)
    split = split_by_flops(deck, shape, pipeline_form(deck, mesh.size("data")))
    some = iter(even_split(blocks, len(split) - split.count(0)))
    return tuple(next(some) if own else 0 for own in split)


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
        "expert": 1,
        "expert_tensor": 1,
        "sequence_parallel": False,
        "zero": 0,
        "zero_group": None,
        "replicas": 1,
    }
    return deck.with_keys(
        layout=layout,
        memory={"optimizer": "device", "parameters": "device"},
        communication={"local_steps": 1, "outer": "average"},
        run={"noise_scale_steps": 0},
    )


def tiny_trainer(deck: Deck, world: World, mesh: Mesh) -> Trainer:
    """Trainer of a miniature deck, on random tokens of which some are masked."""
    engine = build_engine(deck, world, mesh, roughness=ROUGHNESS)
    assert deck.model.vocabulary is not None
    source = SyntheticSource(deck.batch.sequence, deck.model.vocabulary, seed=deck.run.seed, masked=0.2)
    return Trainer(deck, engine, Batches(source, deck.run.seed))


def compare(deck: Deck, world: World, mesh: Mesh) -> list[LayoutDifference]:
    """Differences of initial parameters, losses, gradients and norms of a miniature deck's first two steps.

    Collective; the same list on all ranks, in the order of the computation: parameters, then of each step
    the loss, gradients from the last layer to the first, their norm, and parameters at the end.
    """
    micro_batches = max(_MICRO_BATCHES, mesh.size("pipeline"))
    deck = deck.with_keys(batch={"global_size": micro_batches * _MICRO_SIZE * mesh.size("data")})
    expected: dict[str, _Computed] = {}
    if world.rank == 0:
        alone = world.alone()
        plain = on_one_rank(deck).with_keys(memory={"recompute": "none"})
        expected = _compute(tiny_trainer(plain, alone, Mesh(alone, {})))
    trainer = tiny_trainer(deck, world, mesh)
    computed = _compute(trainer)
    nothing = _Computed(torch.empty(0), None)  # of a tensor that another stage holds
    differences = []
    for name in world.everyone.broadcast_object(list(expected)):
        shared = _share(expected[name].values if world.rank == 0 else None, world)
        scale = world.everyone.broadcast_object(_scale(name, expected) if world.rank == 0 else 0.0)
        values, shard = computed.get(name, nothing)
        if shard is not None:
            shared = shard.take(shared)
        elif name not in computed:
            shared = torch.empty(0)
        differences.append(_difference(name, values, shared, scale, world, mesh, shard))
    trainer.engine.close()
    return differences


def compare_miniature(deck: Deck, world: World, mesh: Mesh) -> tuple[Deck, list[LayoutDifference]]:
    """The miniature of a deck, and what `compare` finds of it. Collective.

    HpctrainError for patterns that name parameters, where the model itself, not its miniature, refuses them.
    """
    check_patterns(deck, ModelShape.of(deck, deck.model.vocabulary or 2))
    small = miniature(deck)
    small = small.with_keys(layout={"split": _standing_split(deck, small.model.layers, mesh)})
    return small, compare(small, world, mesh)


def verify_layout(deck: Deck, world: World, mesh: Mesh) -> str:
    """Compare and raise LayoutError on all ranks at the first tensor that differs; else a sentence. Errors as
    of `compare_miniature`.
    """
    _, differences = compare_miniature(deck, world, mesh)
    for difference in differences:
        if difference.fails:
            raise LayoutError(f"layout check: {difference}")
    worst = max(differences, key=lambda difference: difference.error)
    return (
        f"layout checked: {len(differences)} tensors of two tiny steps as on one rank; "
        f"largest difference {worst.error:.1e} ({worst.name})"
    )


class _Computed(NamedTuple):
    """A number that all ranks have, or this rank's piece of a tensor."""

    values: Tensor
    shard: Shard | None


def _compute(trainer: Trainer) -> dict[str, _Computed]:
    """By name what `compare` compares, in its order."""
    engine = trainer.engine

    def parameters(when: str) -> dict[str, _Computed]:
        return {
            f"parameter {shard.name}{when}": _Computed(piece.clone(), shard)
            for shard, piece in _pieces(engine, gradients=False)
        }

    sums = _SummedGradients(engine)
    trainer.hooks.append(sums)
    results = parameters("")
    for step in ("", " in the second step"):
        sums.pieces.clear()
        result = trainer.train_step()
        if not sums.pieces:  # the update was skipped
            sums.before_update()
        by_name = [
            (f"gradient of {shard.name}{step}", _Computed(piece, shard)) for shard, piece in sums.pieces
        ]
        results[f"loss{step}"] = _Computed(torch.tensor(result.loss, dtype=torch.float64), None)
        results |= reversed(by_name)
        results[f"gradient norm{step}"] = _Computed(torch.tensor(result.grad_norm, dtype=torch.float64), None)
    return results | parameters(" after both steps")


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
    for bucket in engine.buckets:
        flat = bucket.gathered(bucket.own_gradients if gradients else bucket.own_values)
        for segment in bucket.segments:
            yield segment.parameter.shard, segment.view(flat)


def _share(whole: Tensor | None, world: World) -> Tensor:
    """Rank 0's tensor, on every rank."""
    described = None if whole is None else (list(whole.shape), str(whole.dtype).removeprefix("torch."))
    shape, dtype = world.everyone.broadcast_object(described)
    tensor = torch.empty(shape, dtype=getattr(torch, dtype)) if whole is None else whole.cpu()
    return world.everyone.broadcast(tensor)


def _scale(name: str, expected: Mapping[str, _Computed]) -> float:
    """The largest element that a difference is measured against: its own tensor's, with one exception.

    Gradients of queries and keys go through softmax, where sums of terms as large as those of the values
    nearly cancel: it does not see a bias of the keys, nor much of queries and keys that tell little apart.
    """
    names = {name}
    if name.startswith("gradient"):
        names |= {re.sub(r"\.(query|key)\.", ".value.", name)}
    return max(float(expected[each].values.double().abs().max()) for each in names)


def _difference(
    name: str, mine: Tensor, expected: Tensor, scale: float, world: World, mesh: Mesh, shard: Shard | None
) -> LayoutDifference:
    mine = mine.detach().double().cpu()
    expected, largest = expected.double(), max(scale, 1e-30)

    def worst(values: Tensor) -> float:
        error = (values - expected).abs().max() if values.numel() else torch.zeros(())
        both = torch.stack((error.double(), (~error.isfinite()).double())).nan_to_num(nan=0.0)
        world.everyone.all_reduce(both, "max")
        return float("inf") if both[1] else float(both[0]) / largest

    error = worst(mine)
    if error <= TOLERANCE:
        return LayoutDifference(name, error, "")
    splits = world.everyone.all_gather_object(None if shard is None else sorted(shard.split))
    split = next((each for each in splits if each is not None), None)
    what = "" if split is None else f"split over {', '.join(split) or 'no axis'}; "
    explained = min(10 * TOLERANCE, error / 10)
    of_experts = _SUMS_OF_EXPERTS if "expert" in mesh.sizes else ()
    for axes in (*of_experts, *_SUMS) if split and "expert" in split else (*_SUMS, *of_experts):
        group = mesh.group(*axes)
        if group.size == 1:
            continue
        over = f"the {group.name} axis ({group.size} ranks)"
        if worst(group.all_reduce(mine.clone())) <= explained:
            return LayoutDifference(name, error, f"{what}a sum over {over} is likely missing")
        if worst(mine / group.size) <= explained:
            return LayoutDifference(name, error, f"{what}a sum over {over} is likely doubled")
    factor = _factor(mine, expected, world)
    if worst(mine / factor) <= explained:
        return LayoutDifference(name, error, f"{what}all of it is {factor:.4g} times what it should be")
    return LayoutDifference(name, error, f"{what}no single missing or doubled sum explains it")


def _factor(mine: Tensor, expected: Tensor, world: World) -> float:
    """By which all of a tensor is multiplied, if it is, of what all ranks have of it: by least squares."""
    sums = torch.stack(((mine * expected).sum(), expected.square().sum()))
    products, squares = world.everyone.all_reduce(sums.nan_to_num()).tolist()
    return products / squares if products and squares else 1.0
