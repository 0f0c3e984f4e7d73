"""Faults of a layout, to be found by comparing it with one rank.

A fault is planted in the run of the layout alone: the run of one rank, with which it is compared, has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hpctrain.model.attention as attention
import hpctrain.model.router as router
import hpctrain.model.transformer as transformer
import hpctrain.optim.clip as clip
import hpctrain.optim.muon as muon
import hpctrain.parallel.experts as experts
import hpctrain.parallel.fp8.product as fp8_product
import hpctrain.parallel.fp8.quantize as quantize
import hpctrain.parallel.ring_attention as ring
import hpctrain.parallel.vocabulary as vocabulary
import hpctrain.pipeline.execute as execute
import hpctrain.sharding.compression.power as power
import hpctrain.sharding.local_steps as local_steps
import hpctrain.sharding.synchronize as synchronize
import hpctrain.train.step as step_module
from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.data.batches import Batches
from hpctrain.model.foreign.buffers import ModuleBuffers
from hpctrain.model.inputs import Inputs
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.muon import Muon
from hpctrain.optim.optimizer import ResidentOptimizer
from hpctrain.optim.sgd import SGD
from hpctrain.parallel.fp8.history import History
from hpctrain.parallel.linear import ColumnLinear, RowLinear, SplitLinear
from hpctrain.parallel.noted import Noted
from hpctrain.parallel.random import DropoutSource
from hpctrain.sharding.compression.compressed_sum import CodedSum
from hpctrain.sharding.compression.top_k import TopK
from hpctrain.sharding.local_steps import LocalSteps, OuterRule
from hpctrain.sharding.outer import EveryStep
from hpctrain.sharding.reducer import ExactSum
from hpctrain.train.step import Step

Change = Callable[[Tensor], object]
"""Changes a tensor in place."""


class Scene:
    """What is computed now: number of step and micro-batch, from 0, on which rank of the layout."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.in_layout, self.step, self.micro_batch, self.rank = False, 0, -1, 0
        make_step, begin = Step.__call__, Noted.begin

        def follow_step(step: Step, state: Any, *arguments: Any) -> Any:
            world = step.engine.world
            self.in_layout, self.step, self.rank = world.size > 1, state.step, world.rank
            try:
                return make_step(step, state, *arguments)
            finally:
                self.in_layout = False

        def follow_action(statistics: Noted, micro_batch: int | None, *padding: Any) -> None:
            self.micro_batch = -1 if micro_batch is None else micro_batch
            begin(statistics, micro_batch, *padding)

        patch.setattr(Step, "__call__", follow_step)
        patch.setattr(Noted, "begin", follow_action)

    def around(self, owner: Any, name: str, change: Callable[..., Any], when: When | None = None) -> None:
        """Call `change(original, *arguments)` instead of `original(*arguments)` in steps of the layout."""
        is_static = isinstance(vars(owner).get(name), staticmethod)
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if not self.in_layout or (when is not None and not when(self)):
                return original(*arguments, **options)
            return change(original, *arguments, **options)

        self.patch.setattr(owner, name, staticmethod(call) if is_static else call)

    def communicated(self, axis: str, operation: str, change: Change, when: When | None = None) -> None:
        """Change what operations over groups of an axis result in, in steps of the layout."""
        run = Group._run

        def run_and_change(group: Group, call: Any, result: Any) -> Any:
            work = run(group, call, result)
            applies = axis in group.axes and call.operation == operation and isinstance(result, Tensor)
            if not (self.in_layout and applies and result.is_floating_point()):
                return work
            return _Changed(work, change) if when is None or when(self) else work

        self.patch.setattr(Group, "_run", run_and_change)


class _Changed(Work[Any]):
    """An operation whose result is changed when it is waited for."""

    def __init__(self, work: Work[Any], change: Change) -> None:
        self.work, self.change, self.changed = work, change, False

    def wait(self) -> Any:
        """Complete the operation and change its result, once."""
        value = self.work.wait()
        if not self.changed:
            self.changed = True
            with torch.no_grad():
                self.change(value)
        return value

    def test(self) -> bool:
        """Return True if the operation is complete."""
        return self.work.test()

    def proceed(self) -> None:
        """Go on to the next operation."""
        self.work.proceed()


When = Callable[[Scene], bool]


@dataclass(frozen=True)
class LayoutFault:
    """A fault between parts of the program, a `seam`, that shows on two ranks with these `keys` of a deck.

    `module` is the class of `tests/train/wrong_modules.py` that is trained, if it is not a transformer.
    """

    seam: str
    name: str
    keys: tuple[str, ...]
    plant: Callable[[Scene], None]
    module: str = ""


def third(scene: Scene) -> bool:
    """Return True in the third micro-batch."""
    return scene.micro_batch == 2


def third_message(scene: Scene) -> None:
    """Change the last of the three messages that the last stage receives in a step."""
    messages = 0

    def is_third(scene: Scene) -> bool:
        nonlocal messages
        messages += scene.rank == 1
        return messages % 3 == 0 and scene.rank == 1

    scene.communicated("pipeline", "recv", scale(1.1), is_third)


def second_step(scene: Scene) -> bool:
    """Return True in the second step."""
    return scene.step == 1


def on_rank_1(scene: Scene) -> bool:
    """Return True on rank 1."""
    return scene.rank == 1


def zero(values: Tensor) -> None:
    """Lose all of them."""
    values.zero_()


def scale(factor: float) -> Change:
    """Return what multiplies values by a factor."""
    return lambda values: values.mul_(factor)


def swap_halves(values: Tensor) -> None:
    """Exchange the halves of the first dimension."""
    values.copy_(values.roll(len(values) // 2, 0))


def communication(axis: str, operation: str, change: Change, when: When | None = None) -> Plant:
    """Return what changes the results of an operation over an axis."""
    return lambda scene: scene.communicated(axis, operation, change, when)


def instead(owner: Any, name: str, change: Callable[..., Any], when: When | None = None) -> Plant:
    """Return what puts `change` around a function."""
    return lambda scene: scene.around(owner, name, change, when)


def scaled_argument(owner: Any, name: str, number: int, factor: float, when: When | None = None) -> Plant:
    """Return what multiplies an argument of a function by a factor."""

    def change(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        given = list(arguments)
        given[number] = given[number] * factor
        return original(*given, **options)

    return instead(owner, name, change, when)


def scaled_result(owner: Any, name: str, factor: float, when: When | None = None) -> Plant:
    """Return what multiplies the result of a function by a factor."""
    return instead(
        owner, name, lambda original, *given, **options: original(*given, **options) * factor, when
    )


def left_out(owner: Any, name: str, when: When | None = None) -> Plant:
    """Return what leaves out the calls of a function that gives nothing."""
    return instead(owner, name, lambda *_, **__: None, when)


Plant = Callable[[Scene], None]

# What the faults change


def rotary_positions(change: Callable[[Tensor], Tensor], when: When | None = None) -> Plant:
    """Return what rotates as at other positions."""

    def turned(original: Callable[..., None], rotary: Any, positions: Tensor, *rest: Any) -> None:
        original(rotary, change(positions), *rest)

    return instead(attention.Rotary, "__init__", turned, when)


def updated_state(rule: Any, name: str, factor: float, when: When | None = None) -> Plant:
    """Return what multiplies state of an optimizer behind its update."""

    def update(original: Callable[..., None], own: Any, parts: Sequence[Any], *rest: Any) -> None:
        original(own, parts, *rest)
        for part in parts:
            part.state[name].mul_(factor)

    return instead(rule, "update", update, when)


def in_last_update(scene: Scene) -> bool:
    """Return True in the update of the second step on rank 1."""
    return scene.step == 1 and scene.rank == 1


def _read_more_tokens(original: Any, step: Step, micro_batches: Any) -> Any:
    read = original(step, micro_batches)
    return read._replace(predicted=read.predicted + 1)


def _read_own_tokens(original: Any, step: Step, micro_batches: Any) -> Any:
    read = original(step, micro_batches)
    return read._replace(predicted=2 * sum(map(step.engine.objective.count, read.micro_batches)))


def _fillers_predict(original: Any, step: Step, micro_batches: Any) -> Any:
    read = original(step, micro_batches)
    for micro in read.micro_batches:
        micro.fields["targets"][micro.present :] = 1
    return read


def _samples_of_rank_0(original: Any, batches: Batches, first: int, size: int, _: int, *rest: int) -> Any:
    return original(batches, first, size, 0, *rest)


def _mean_of_micro_batches(original: Any, step: Step, micro: Any, given: Tensor, *rest: Any) -> Any:
    count = step.engine.objective.count(micro)
    return original(step, micro, torch.full_like(given, 1 / (6 * max(1, count))), *rest)


def _rounded_gradient(original: Any, layer: SplitLinear, *rest: Any) -> None:
    original(layer, *rest)
    gradient = layer.weights[0].gradient
    if gradient is not None:
        gradient.copy_(gradient.bfloat16())


def _overwritten_gradient(original: Any, layer: SplitLinear, *rest: Any) -> None:
    if layer.weights[0].gradient is not None:
        layer.weights[0].gradient.zero_()
    original(layer, *rest)


def _one_bucket_alone(original: Any, summation: ExactSum, gradients: Tensor, sums: Tensor) -> Any:
    if summation.bucket.segments[0].parameter.shard.name.startswith("blocks.1."):
        return Work(sums)
    return original(summation, gradients, sums)


def _nothing_counted(*_: Any) -> Iterator[Tensor]:
    return iter(())


def _micro_batch_of_first(original: Any, step: Step, state: Any, _: int) -> Any:
    return original(step, state, 0)


def _own_places(original: Any, layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    return original(layer, x, positions - positions.min())


def _mask_of_own_rows(original: Any, source: Any, site: int, positions: Tensor, *rest: Any) -> Tensor:
    return original(source, site, positions - positions.min(), *rest)


def _mask_of_next_site(original: Any, source: Any, site: int, *rest: Any) -> Tensor:
    return original(source, site + 1, *rest)


def _next_row(original: Any, indices: Tensor, weight: Tensor) -> Tensor:
    return original((indices + 1) % len(weight), weight)


def _in_lookup(scene: Scene) -> None:
    functional = SimpleNamespace(embedding=vocabulary.functional.embedding)
    scene.patch.setattr(vocabulary, "functional", functional)
    scene.around(functional, "embedding", _next_row, on_rank_1)


def _lookups_of_third(scene: Scene) -> None:
    original = vocabulary._Lookup.backward

    def backward(ctx: Any, gradient: Tensor) -> Any:
        return original(ctx, gradient * (1.5 if scene.in_layout and third(scene) else 1))

    scene.patch.setattr(vocabulary._Lookup, "backward", staticmethod(backward))


def _reversed_piece(original: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    return original(tokens, positions).flip(0)


def _all_keys(original: Any, source: int, rank: int, half: int) -> Any:
    queries, keys, causal = original(source, rank, half)
    return queries, slice(None) if source < rank else keys, causal


def _one_less(original: Any, place: int, *rest: int) -> int:
    return max(0, original(place, *rest) - 1)


def _swapped_micro_batches(original: Any, own: Any, executor: Any, schedule: Any, batches: Any) -> None:
    original(own, executor, schedule, [batches[0], batches[2], batches[1], *batches[3:]])


def _twice_tied(original: Any, pipeline: Group, own: Tensor) -> Tensor:
    return 2 * original(pipeline, own)


def _reversed_counts(original: Any, own: Any, statistics: Any) -> None:
    original(own, {name: each.flip(0) for name, each in statistics.items()})


def _halved_terms(original: Any, own: Any, *arguments: Any) -> Tensor:
    shape = own.shape
    own.shape = replace(shape, balance_loss=shape.balance_loss * 2)
    weights = original(own, *arguments)
    own.shape = shape
    return weights


def _own_block(original: Any, matrix: Tensor, steps: int) -> Tensor:
    half = len(matrix) // 2
    return torch.cat([original(part.clone(), steps) for part in (matrix[:half], matrix[half:])])


def _by_local_shape(original: Any, own: Any, part: Any, directions: Tensor, rate: float) -> None:
    original(own, part, directions, rate * 1.02)


def _next_count(original: Any, own: Any, parts: Sequence[Any], *rest: Any) -> None:
    for part in parts:
        part.updates.add_(1)
    original(own, parts, *rest)


def _all_decay(original: Any, own: Any, parts: Sequence[Any], *rest: Any) -> None:
    decayed = [replace(part, treatment=part.treatment._replace(decayed=True)) for part in parts]
    original(own, decayed, *rest)


def _other_rate(original: Any, own: Any, rate: float, divisor: float) -> None:
    original(own, rate * 1.001, divisor)


def _own_norm(original: Any, norm: float, limit: float) -> float:
    return original(norm * 0.7, limit)


def _not_remembered(original: Any, own: History, maximum: Tensor) -> None:
    own.maxima.copy_(torch.cat((maximum.reshape(1).to(own.maxima), own.maxima[1:])))


def _remembered_more(original: Any, own: History, maximum: Tensor) -> None:
    original(own, 2 * maximum)


def _clamped(original: Any, values: Tensor, form: Any) -> Tensor:
    return original(values.clamp(-form.largest / 4, form.largest / 4), form)


def _other_form(original: Any, own: Any, kind: str, *rest: Any, **options: Any) -> Any:
    form = own.gradient_form
    own.gradient_form = fp8_product.E4M3
    try:
        return original(own, kind, *rest, **options)
    finally:
        own.gradient_form = form


def _no_residual(original: Any, own: Any, blocks: Any, values: Tensor, encode: Any, feedback: bool) -> Any:
    code = original(own, blocks, values, encode, feedback)
    if feedback:
        values.zero_()
    return code


def _lost_remainder(original: Any, own: TopK) -> Tensor:
    places = original(own)
    own.unsent.mul_(0.9)
    return places


def _own_share(original: Any, own: Any, left: Tensor, right: Tensor, gradients: Tensor, _: float) -> None:
    original(own, left, right, gradients, 1.0)


def _no_momentum(original: Any, own: OuterRule, weights: Tensor, velocity: Any, gradient: Tensor) -> None:
    original(own, weights, None if velocity is None else torch.zeros_like(velocity), gradient)


def _half_of_outer(original: Any, own: LocalSteps, piece: Any, gradient: Tensor, *rest: Any) -> None:
    original(own, piece, gradient.mul_(0.5), *rest)


def _outer_of_rank(original: Any, own: LocalSteps, *rest: Any) -> Any:
    told = original(own, *rest)
    for each in own.outer:
        each.mul_(1.01)
    return told


def _moved_twice(original: Any, parameter: Any) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(2)
    original(parameter)


# The table

TENSOR, SEQUENCE = ("layout.tensor=2",), ("layout.tensor=2", "layout.sequence_parallel=true")
CONTEXT, ULYSSES = ("layout.context=2",), ("layout.context=2", "layout.context_form=all_to_all")
PIPELINE, TIED = ("layout.pipeline=2",), ("layout.pipeline=2", "model.family=gpt2", "model.tied=true")
INTERLEAVED = (*PIPELINE, "layout.schedule=interleaved", "layout.chunks=2", "model.layers=4")
MIXTURE = ("model.experts=4", "model.expert_mlp=24", "model.router_z_loss=0.01")
EXPERT, BIASED = (*MIXTURE, "layout.expert=2"), (*MIXTURE, "layout.expert=2", "model.balance=bias")
SHARES = (*MIXTURE, "model.balance_over=step")
FP8 = ("precision.compute=fp8",)
DELAYED, ONE_SCALE, ROWS = ((*FP8, f"precision.fp8={name}") for name in ("delayed", "tensor", "row"))
GPT2, DROPOUT = ("model.family=gpt2",), ("model.dropout=0.2",)
MUON = ("optimizer.name=muon", "layout.tensor=2")
DILOCO = ("layout.replicas=2", "communication.local_steps=3", "communication.outer=diloco")
AVERAGE = ("layout.replicas=2", "communication.local_steps=3")
INT8, TOP_K, POWER_SGD = ((f"communication.compress={name}",) for name in ("int8", "topk", "powersgd"))

_ADAMW_ON_1 = AdamW, "exp_avg", 0.5, in_last_update

FAULTS = [
    # The kinds of the seven faults by which the check was tried
    LayoutFault(
        "tried", "sum of the third micro-batch", TENSOR, communication("tensor", "all_reduce", zero, third)
    ),
    LayoutFault(
        "tried",
        "message of the third micro-batch",
        PIPELINE,
        third_message,
    ),
    LayoutFault(
        "tried",
        "bias of a router",
        BIASED,
        instead(router.Router, "after_update", _reversed_counts, in_last_update),
    ),
    LayoutFault(
        "tried",
        "shares of a router",
        SHARES,
        instead(router.Router, "after_update", _reversed_counts, in_last_update),
    ),
    LayoutFault(
        "tried",
        "maxima of products in 8 bits",
        DELAYED,
        instead(History, "remember", _remembered_more, in_last_update),
    ),
    LayoutFault(
        "tried", "tokens of uneven micro-batches", (), instead(Step, "prepare", _mean_of_micro_batches)
    ),
    LayoutFault(
        "tried", "rotation at late positions", CONTEXT, rotary_positions(lambda each: each.bfloat16())
    ),
    # Data ranks and ZeRO
    LayoutFault(
        "data", "a bucket that is not summed", (), instead(ExactSum, "start", _one_bucket_alone, second_step)
    ),
    LayoutFault(
        "data",
        "a mean in place of a sum",
        (),
        communication("data", "all_reduce", scale(0.5), lambda s: s.micro_batch >= 0),
    ),
    LayoutFault(
        "data",
        "the other rank's slice of a sum",
        ("layout.zero=1",),
        communication("data", "reduce_scatter", lambda v: v.copy_(v.flip(0))),
    ),
    LayoutFault(
        "data",
        "weights that are published wrong",
        ("layout.zero=1",),
        communication("data", "all_gather", scale(1.01), on_rank_1),
    ),
    LayoutFault(
        "data",
        "weights that are gathered wrong",
        ("layout.zero=3",),
        communication("data", "all_gather", scale(1.01), third),
    ),
    LayoutFault(
        "data",
        "slices of the third micro-batch",
        ("layout.zero=2", "memory.accumulate=sliced"),
        communication("data", "reduce_scatter", zero, third),
    ),
    LayoutFault(
        "data",
        "a norm of one rank's slice",
        ("layout.zero=1",),
        instead(clip, "_counted", _nothing_counted, on_rank_1),
    ),
    LayoutFault("data", "the samples of another rank", (), instead(Batches, "step", _samples_of_rank_0)),
    LayoutFault("data", "tokens of one rank alone", (), instead(Step, "read", _read_own_tokens)),
    LayoutFault(
        "data",
        "masks of another rank",
        DROPOUT,
        lambda s: s.patch.setattr(
            Step, "first_sample", lambda step, state, number: state.samples + number * step.micro_size
        ),
    ),
    LayoutFault("data", "a moment of one rank's slice", ("layout.zero=1",), updated_state(*_ADAMW_ON_1)),
    # Tensor and sequence parallel layers
    LayoutFault(
        "tensor",
        "a bias that each rank adds",
        (*TENSOR, *GPT2),
        scaled_argument(RowLinear, "_add_bias_gradients", 1, 2.0),
    ),
    LayoutFault(
        "tensor",
        "a bias of half its gradient",
        (*TENSOR, *GPT2),
        scaled_argument(ColumnLinear, "_add_bias_gradients", 1, 0.5),
    ),
    LayoutFault(
        "tensor", "pieces in another order", SEQUENCE, communication("tensor", "all_gather", swap_halves)
    ),
    LayoutFault(
        "tensor",
        "pieces of the third micro-batch",
        SEQUENCE,
        communication("tensor", "reduce_scatter", scale(0.9), third),
    ),
    LayoutFault(
        "tensor",
        "norms that are not summed",
        SEQUENCE,
        lambda s: s.patch.setattr(synchronize, "_partial_runs", lambda _: []),
    ),
    LayoutFault(
        "tensor",
        "shared keys that are not summed",
        (*TENSOR, "model.key_value_heads=1"),
        lambda s: s.patch.setattr(synchronize, "_partial_runs", lambda _: []),
    ),
    LayoutFault("tensor", "rows of the next token", TENSOR, _in_lookup),
    LayoutFault(
        "tensor",
        "sums over the vocabulary",
        TENSOR,
        communication("tensor", "all_gather", lambda values: values[1:, 1].mul_(0.9)),
    ),
    LayoutFault(
        "tensor",
        "masks of another rank's rows",
        (*SEQUENCE, *DROPOUT),
        instead(DropoutSource, "mask", _mask_of_own_rows),
    ),
    LayoutFault(
        "tensor",
        "positions of another rank's rows",
        (*SEQUENCE, *GPT2),
        instead(transformer.PositionEmbedding, "forward", _own_places),
    ),
    LayoutFault(
        "tensor", "an update of one rank", TENSOR, instead(ResidentOptimizer, "step", _other_rate, on_rank_1)
    ),
    # Context parallel attention
    LayoutFault("context", "positions that wrap at 128", CONTEXT, rotary_positions(lambda each: each % 128)),
    LayoutFault(
        "context",
        "positions of the own piece",
        ULYSSES,
        rotary_positions(lambda each: each - each.min(), second_step),
    ),
    LayoutFault(
        "context", "positions in 16 bits", CONTEXT, rotary_positions(lambda each: each.half(), second_step)
    ),
    LayoutFault(
        "context",
        "keys of the third micro-batch",
        CONTEXT,
        communication("context", "recv", scale(1.1), third),
    ),
    LayoutFault(
        "context",
        "gradients of keys that stay away",
        CONTEXT,
        lambda s: s.communicated(
            "context", "recv", lambda v: v.zero_() if v.dim() == 5 else None, second_step
        ),
    ),
    LayoutFault("context", "keys that come later", CONTEXT, instead(ring, "_visible", _all_keys)),
    LayoutFault("context", "parts that are not merged", CONTEXT, left_out(ring, "merge")),
    LayoutFault(
        "context", "heads in another order", ULYSSES, communication("context", "all_to_all", swap_halves)
    ),
    LayoutFault(
        "context",
        "heads of the third micro-batch",
        ULYSSES,
        communication("context", "all_to_all", scale(1.1), third),
    ),
    LayoutFault(
        "context",
        "documents that begin elsewhere",
        (*CONTEXT, "data.document_mask=true"),
        instead(ring, "_held", _one_less),
    ),
    LayoutFault(
        "context",
        "tokens in another order",
        CONTEXT,
        instead(execute, "context_piece", _reversed_piece, on_rank_1),
    ),
    LayoutFault(
        "context",
        "learned positions of the own piece",
        (*CONTEXT, *GPT2),
        instead(transformer.PositionEmbedding, "forward", _own_places),
    ),
    # Pipelines
    LayoutFault(
        "pipeline",
        "gradient of the third micro-batch",
        PIPELINE,
        lambda s: s.communicated("pipeline", "recv", scale(0.5), lambda scene: scene.micro_batch >= 1),
    ),
    LayoutFault(
        "pipeline",
        "messages in 16 bits",
        PIPELINE,
        communication("pipeline", "recv", lambda v: v.copy_(v.bfloat16())),
    ),
    LayoutFault(
        "pipeline",
        "messages between chunks",
        INTERLEAVED,
        communication("pipeline", "recv", scale(1.01), second_step),
    ),
    LayoutFault(
        "pipeline", "tied tables that are not summed", TIED, scaled_result(synchronize, "from_other_end", 0.0)
    ),
    LayoutFault(
        "pipeline",
        "tied tables that are summed twice",
        TIED,
        instead(synchronize, "from_other_end", _twice_tied, on_rank_1),
    ),
    LayoutFault(
        "pipeline",
        "micro-batches in another order",
        PIPELINE,
        instead(execute._Pass, "__init__", _swapped_micro_batches, on_rank_1),
    ),
    LayoutFault(
        "pipeline",
        "masks of another block",
        (*PIPELINE, *DROPOUT),
        instead(DropoutSource, "mask", _mask_of_next_site, on_rank_1),
    ),
    LayoutFault(
        "pipeline", "a norm of one stage", PIPELINE, instead(clip, "_counted", _nothing_counted, on_rank_1)
    ),
    LayoutFault(
        "pipeline",
        "an update of one stage",
        PIPELINE,
        instead(ResidentOptimizer, "step", _other_rate, on_rank_1),
    ),
    LayoutFault("pipeline", "moments of one stage", PIPELINE, updated_state(*_ADAMW_ON_1)),
    LayoutFault(
        "pipeline",
        "deferred gradients",
        (*PIPELINE, "layout.schedule=zb-h1"),
        scaled_argument(SplitLinear, "_add_gradients", 1, 0.5, third),
    ),
    # Mixtures of experts
    LayoutFault(
        "expert",
        "gradients that are doubled",
        EXPERT,
        scaled_argument(experts, "add_grouped_gradient", 0, 2.0),
    ),
    LayoutFault(
        "expert",
        "gradients of the third micro-batch",
        EXPERT,
        scaled_argument(experts, "add_grouped_gradient", 0, 0.0, third),
    ),
    LayoutFault(
        "expert",
        "rows of other tokens",
        EXPERT,
        communication("expert", "all_to_all", lambda v: v.copy_(v.roll(1, 0))),
    ),
    LayoutFault(
        "expert",
        "rows of the third micro-batch",
        EXPERT,
        communication("expert", "all_to_all", scale(1.1), third),
    ),
    LayoutFault(
        "expert",
        "a bias of one rank",
        BIASED,
        instead(router.Router, "after_update", _reversed_counts, on_rank_1),
    ),
    LayoutFault("expert", "counts of one rank", BIASED, left_out(Noted, "sum", on_rank_1)),
    LayoutFault("expert", "counts of the third micro-batch", BIASED, left_out(Noted, "sum", third)),
    LayoutFault(
        "expert",
        "a balance loss of twice its weight",
        EXPERT,
        instead(router.Router, "with_terms", _halved_terms),
    ),
    LayoutFault(
        "expert", "rows that fill up are routed", EXPERT, instead(Inputs, "real_rows", lambda *_: None)
    ),
    LayoutFault(
        "expert",
        "features that are not summed",
        (*MIXTURE, "layout.expert_tensor=2"),
        communication("expert_tensor", "reduce_scatter", scale(0.5)),
    ),
    LayoutFault("expert", "moments of one rank's experts", EXPERT, updated_state(*_ADAMW_ON_1)),
    # Products in 8 bits
    LayoutFault(
        "fp8", "scales of one rank", ONE_SCALE, scaled_result(quantize, "scales_of", 16.0, on_rank_1)
    ),
    LayoutFault(
        "fp8", "a smaller range of numbers", ROWS, instead(quantize, "to_format", _clamped, on_rank_1)
    ),
    LayoutFault(
        "fp8",
        "gradients in another format",
        ONE_SCALE,
        instead(fp8_product.QuantizedProduct, "_quantized", _other_form, on_rank_1),
    ),
    LayoutFault("fp8", "maxima of the third micro-batch", DELAYED, left_out(Noted, "most", third)),
    LayoutFault(
        "fp8",
        "maxima that replace each other",
        DELAYED,
        instead(History, "remember", _not_remembered, on_rank_1),
    ),
    LayoutFault(
        "fp8",
        "a history of one rank",
        (*DELAYED, *TENSOR),
        instead(History, "remember", _remembered_more, on_rank_1),
    ),
    LayoutFault(
        "fp8",
        "messages in 8 bits in another order",
        (*ONE_SCALE, *SEQUENCE, "precision.fp8_messages=true"),
        instead(
            fp8_product,
            "gathered",
            lambda original, own, pieces: replace(
                original(own, pieces), values=original(own, pieces).values.flip(0)
            ),
        ),
    ),
    # Gradient accumulation
    LayoutFault(
        "accumulation",
        "a layer's third micro-batch",
        (),
        scaled_argument(SplitLinear, "_add_gradients", 1, 0.0, third),
    ),
    LayoutFault(
        "accumulation",
        "a layer's first micro-batch twice",
        (),
        scaled_argument(SplitLinear, "_add_gradients", 1, 2.0, lambda s: s.micro_batch == 0),
    ),
    LayoutFault(
        "accumulation",
        "gradients that are overwritten",
        (),
        instead(SplitLinear, "_add_gradients", _overwritten_gradient, third),
    ),
    LayoutFault(
        "accumulation",
        "sums in 16 bits",
        (),
        instead(SplitLinear, "_add_gradients", _rounded_gradient, lambda scene: scene.micro_batch == 1),
    ),
    LayoutFault(
        "accumulation",
        "biases of the third micro-batch",
        GPT2,
        scaled_argument(ColumnLinear, "_add_bias_gradients", 1, 0.0, third),
    ),
    LayoutFault("accumulation", "rows that fill up predict", (), instead(Step, "read", _fillers_predict)),
    LayoutFault("accumulation", "a token too many", (), instead(Step, "read", _read_more_tokens)),
    LayoutFault(
        "accumulation",
        "masks of the first micro-batch",
        DROPOUT,
        instead(Step, "dropout_source", _micro_batch_of_first),
    ),
    LayoutFault(
        "accumulation",
        "masks of the third micro-batch",
        (*DROPOUT, "memory.recompute=full"),
        instead(DropoutSource, "mask", _mask_of_next_site, third),
    ),
    LayoutFault("accumulation", "lookups of the third micro-batch", (), _lookups_of_third),
    LayoutFault(
        "accumulation",
        "the loss of the third micro-batch",
        (),
        scaled_argument(Step, "prepare", 2, 0.5, on_rank_1),
    ),
    # Optimizers
    LayoutFault("optimizer", "a count of updates", (), instead(AdamW, "update", _next_count, on_rank_1)),
    LayoutFault("optimizer", "decay of all", (), instead(AdamW, "update", _all_decay, on_rank_1)),
    LayoutFault(
        "optimizer",
        "second moments",
        ("layout.zero=2",),
        updated_state(AdamW, "exp_avg_sq", 0.9, in_last_update),
    ),
    LayoutFault(
        "optimizer",
        "clipping by another norm",
        ("layout.zero=3",),
        instead(step_module, "clip_coefficient", _own_norm, on_rank_1),
    ),
    LayoutFault(
        "optimizer",
        "a rate of one rank",
        ("layout.zero=1",),
        instead(ResidentOptimizer, "step", _other_rate, on_rank_1),
    ),
    LayoutFault(
        "optimizer",
        "matrices that are orthogonal in parts",
        MUON,
        instead(muon, "orthogonalized", _own_block),
    ),
    LayoutFault(
        "optimizer", "the size of a matrix's steps", MUON, instead(Muon, "follow", _by_local_shape, on_rank_1)
    ),
    LayoutFault(
        "optimizer",
        "momentum of a piece of a matrix",
        MUON,
        instead(
            Muon,
            "direction",
            lambda original, own, part, divisor: original(own, part, divisor * 1.01),
            in_last_update,
        ),
    ),
    LayoutFault(
        "optimizer",
        "momentum of one rank",
        ("optimizer.name=sgd", "optimizer.momentum=0.9", "layout.zero=1"),
        updated_state(SGD, "momentum", 0.5, in_last_update),
    ),
    LayoutFault(
        "optimizer",
        "Lion's momentum",
        ("optimizer.name=lion", *PIPELINE),
        updated_state(SGD, "momentum", 0.5, in_last_update),
    ),
    # Replicas and compressed sums
    LayoutFault(
        "replicas", "half of an outer gradient", DILOCO, instead(LocalSteps, "_finish", _half_of_outer)
    ),
    LayoutFault("replicas", "no momentum", DILOCO, instead(OuterRule, "update", _no_momentum)),
    LayoutFault(
        "replicas",
        "an outer model of one rank",
        DILOCO,
        instead(LocalSteps, "after_update", _outer_of_rank, on_rank_1),
    ),
    LayoutFault(
        "replicas",
        "a mean that is not one",
        AVERAGE,
        scaled_argument(OuterRule, "update", 3, 0.9),
    ),
    LayoutFault("replicas", "sums of gradients", AVERAGE, left_out(EveryStep, "before_update")),
    LayoutFault(
        "replicas", "weights that stay a replica's own", AVERAGE, left_out(local_steps, "_write", on_rank_1)
    ),
    LayoutFault("replicas", "what int8 loses", INT8, instead(CodedSum, "_coded", _no_residual)),
    LayoutFault(
        "replicas",
        "what bf16 loses on one rank",
        ("communication.compress=bf16",),
        instead(CodedSum, "_coded", _no_residual, on_rank_1),
    ),
    LayoutFault("replicas", "sums of codes", INT8, scaled_result(CodedSum, "add", 1.01, on_rank_1)),
    LayoutFault(
        "replicas",
        "signs that are added",
        ("communication.compress=sign",),
        scaled_result(CodedSum, "add", 0.9),
    ),
    LayoutFault("replicas", "what is not sent", TOP_K, instead(TopK, "_largest", _lost_remainder)),
    LayoutFault("replicas", "shares of a residual", POWER_SGD, instead(power.Stack, "subtract", _own_share)),
    LayoutFault(
        "replicas",
        "factors that are not orthogonal",
        POWER_SGD,
        instead(
            power,
            "orthonormal",
            lambda original, stacks: [1.1 * each for each in original(stacks)],
            on_rank_1,
        ),
    ),
    # Modules that users bring
    LayoutFault(
        "module",
        "gradients that are moved twice",
        (),
        instead(synchronize, "_move_gradient", _moved_twice),
        "Right",
    ),
    LayoutFault(
        "module",
        "a mean in place of a sum",
        (),
        communication("data", "all_reduce", scale(0.5), lambda s: s.micro_batch >= 0),
        "Right",
    ),
    LayoutFault(
        "module",
        "weights that are gathered wrong",
        ("layout.zero=3",),
        communication("data", "all_gather", scale(1.01), third),
        "Right",
    ),
    LayoutFault(
        "module",
        "slices of sums",
        ("layout.zero=2",),
        communication("data", "reduce_scatter", scale(1.01)),
        "Right",
    ),
    LayoutFault("module", "tokens of one rank alone", (), instead(Step, "read", _read_own_tokens), "Right"),
    LayoutFault("module", "a token too many", (), instead(Step, "read", _read_more_tokens), "Right"),
    LayoutFault(
        "module", "the samples of another rank", (), instead(Batches, "step", _samples_of_rank_0), "Right"
    ),
    LayoutFault("module", "moments of one rank", ("layout.zero=1",), updated_state(*_ADAMW_ON_1), "Right"),
    LayoutFault(
        "module",
        "an update of one rank",
        ("layout.zero=1",),
        instead(ResidentOptimizer, "step", _other_rate, on_rank_1),
        "Right",
    ),
    LayoutFault(
        "module",
        "a norm of one rank's slice",
        ("layout.zero=1",),
        instead(clip, "_counted", _nothing_counted, on_rank_1),
        "Right",
    ),
    LayoutFault(
        "module", "means of micro-batches", (), instead(Step, "prepare", _mean_of_micro_batches), "Right"
    ),
    LayoutFault("module", "buffers of one rank", (), left_out(ModuleBuffers, "after_update"), "Normalized"),
]
"""All faults. Each has another name within its seam."""


@contextmanager
def planted(fault: LayoutFault) -> Iterator[None]:
    """Have a fault in steps of layouts within."""
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(Scene(patch))
        yield
