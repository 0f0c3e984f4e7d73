"""What a module's own code does that a run on many ranks cannot go with, found by running it by itself.

A pass is the forward pass of one micro-batch in training. The same random numbers and buffers have to give
the same results; what differs is told with what the module has changed of itself, or drawn from elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.data.batches import MicroBatch
from hpctrain.deck.user_code import run_user_code
from hpctrain.model.modules.module_call import ModuleCall
from hpctrain.model.modules.nested_tensors import tensors_of
from hpctrain.objective.objective import LossFunction
from hpctrain.text import counted

_SEED, _OTHER_SEED = 1, 2
_COMPARED = (Tensor, int, float, str, list, tuple, dict)
_MOST_NAMED, _DEEPEST = 3, 8
_EXACT = 1e-6
"""To which sums of losses add up, relative to them; a module may use fp32 within."""


@dataclass(frozen=True)
class ProbeFinding:
    """A sentence; whether what it tells makes runs differ."""

    sentence: str
    fails: bool = True


def probe(
    call: ModuleCall, micro: MicroBatch, losses: Callable[[MicroBatch], LossFunction]
) -> Iterator[ProbeFinding]:
    """All that is found of a module in training, called so on the host, with these `losses` of a micro-batch
    of some samples. Its buffers, and random numbers, are as before when it is over.
    """
    module = call.module
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        yield from _passes(call, micro)
        _restore(module, kept)
        yield from _gradients(call, micro, losses)
        _restore(module, kept)
        yield from _additive(call, micro, losses)
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    _restore(module, kept)


def shared_memory(module: nn.Module) -> Iterator[ProbeFinding]:
    """Parameters that are tied by their memory, which is not theirs any more in a run."""
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        at = parameter.untyped_storage().data_ptr()
        if parameter.numel() and first.setdefault(at, name) != name:
            yield ProbeFinding(
                f"{first[at]} and {name} are two parameters that share memory, but a run trains them "
                "separately: assign one to the other (head.weight = embed.weight)"
            )


def _passes(call: ModuleCall, micro: MicroBatch) -> Iterator[ProbeFinding]:
    """In-place changes, random numbers from elsewhere, and state."""
    module = call.module
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    # Fractions in the format in which the module gets them, so that it gets these themselves, and no copies.
    micro = MicroBatch(call.convert(micro.fields))
    before = _attributes(module)
    given = _copied(micro)
    first = _outputs(call, given, _SEED, _SEED)
    if torch.initial_seed() != _SEED:
        yield ProbeFinding(
            "the forward pass seeds torch's random numbers itself: masks are the same in every pass and on "
            "all data ranks"
        )
    if any(not torch.equal(field, micro.fields[name]) for name, field in given.items()):
        yield ProbeFinding(
            "the forward pass changes its input in place: the loss and other later parts see changed values"
        )
    after = _attributes(module)
    changed = _changed(before, after)
    _restore(module, kept)
    again = _outputs(call, _copied(micro), _SEED, _SEED)
    # What the first pass alone makes, as a weight that is normalized, is no state.
    changing = _changed(after, _attributes(module))
    if not _equal(first, again):
        what = "draws random numbers that torch.manual_seed does not seed, or keeps state outside of buffers"
        if changed:
            what = f"keeps state outside of buffers, which checkpoints do not store: {_some(changed)}"
        yield ProbeFinding(
            f"two forward passes of the same input, seed and buffers differ: the module {what}"
        )
    elif changing:
        sentence = (
            f"a forward pass changes {_some(changing)} outside of buffers, which checkpoints do not store"
        )
        yield ProbeFinding(f"{sentence}; the output did not depend on it here", fails=False)
    else:
        _restore(module, kept)
        other = _outputs(call, _copied(micro), _SEED, _OTHER_SEED)
        if not _equal(first, other):
            yield ProbeFinding(
                "the forward pass draws random numbers from Python or numpy, but a run seeds only torch: "
                "other layouts and resumed runs draw other numbers"
            )
    if any(not each.isfinite().all() for each in first):
        yield ProbeFinding("the output of the forward pass is not finite")


def _gradients(
    call: ModuleCall, micro: MicroBatch, losses: Callable[[MicroBatch], LossFunction]
) -> Iterator[ProbeFinding]:
    """Parameters that get none."""
    module = call.module
    torch.manual_seed(_SEED)
    module.zero_grad(set_to_none=True)
    losses(micro)(call(micro.fields)).total.backward()
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    none = [name for name, each in trained.items() if each.grad is None]
    module.zero_grad(set_to_none=True)
    if none:
        have = "has" if len(none) == 1 else "have"
        zero = "in a run it is zero, and weight decay and moments still apply"
        yield ProbeFinding(f"{_some(none)} {have} no gradient in this pass; {zero}", fails=False)


@torch.no_grad()
def _additive(
    call: ModuleCall, micro: MicroBatch, losses: Callable[[MicroBatch], LossFunction]
) -> Iterator[ProbeFinding]:
    """Losses that are no sums over samples, where the module looks at each by itself."""
    module = call.module
    rows = micro.rows
    batches = [micro, *(_row(micro, number) for number in range(rows))]
    was = module.training
    module.eval()
    given = [call(each.fields) for each in batches]
    module.train(was)
    whole, *parts = (next(tensors_of(each), torch.empty(0)) for each in given)
    if any(each.dim() < 1 or not each.is_floating_point() for each in (whole, *parts)):
        return
    joined = torch.cat(parts)
    if joined.shape != whole.shape or not torch.allclose(joined, whole, rtol=_EXACT, atol=_EXACT):
        return
    metrics = [losses(each)(made).metrics for each, made in zip(batches, given, strict=True)]
    sums = [float(each[0]) for each in metrics]
    apart = sum(sums[1:])
    if abs(sums[0] - apart) > _EXACT * max(map(abs, sums)):
        factor = f"{sums[0] / apart:.4g} times" if apart else "not"
        yield ProbeFinding(
            f"model.loss is not a sum over samples: for {counted(rows, 'sample')} at once it is "
            f"{sums[0]:.6g}, {factor} that for the same one by one: it must return a sum and a count, "
            "not a mean"
        )
    counts = [float(each[1]) for each in metrics if len(each) > 1]
    apart = sum(counts[1:])
    if counts and abs(counts[0] - apart) > _EXACT * max(map(abs, counts)):
        yield ProbeFinding(
            f"the count of model.loss does not grow with samples: for {counted(rows, 'sample')} at once it "
            f"is {counts[0]:.6g}, but {apart:.6g} for the same one by one: it must count the terms of the "
            "sum, so that the loss of a step does not depend on batch.micro_size"
        )


def _copied(micro: MicroBatch) -> dict[str, Tensor]:
    return {name: field.clone() for name, field in micro.fields.items()}


def _row(micro: MicroBatch, number: int) -> MicroBatch:
    return MicroBatch({name: each[number : number + 1] for name, each in micro.fields.items()})


def _outputs(call: ModuleCall, fields: Mapping[str, Tensor], seed: int, others: int) -> list[Tensor]:
    torch.manual_seed(seed)
    random.seed(others)
    np.random.seed(others)  # noqa: NPY002
    with torch.no_grad(), run_user_code("the module fails"):
        return [each.detach().clone() for each in tensors_of(call(fields))]


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(some, others, strict=True)
    )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What modules hold besides parameters, buffers and modules, as far as it can be compared, by name."""
    found: dict[str, Any] = {}
    for name, each in module.named_modules():
        for attribute, value in vars(each).items():
            if not attribute.startswith("_") and isinstance(value, _COMPARED):
                found[f"{name}.{attribute}".lstrip(".")] = _as_it_is(value)
    return found


def _as_it_is(value: Any, depth: int = 0) -> Any:
    """A copy of what can be compared in a value, which changes no more."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if not isinstance(value, _COMPARED) or depth == _DEEPEST:
        return type(value)
    if isinstance(value, dict):
        return {key: _as_it_is(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_it_is(each, depth + 1) for each in value]
    return value


def _same(one: Any, other: Any) -> bool:
    """Whether two such copies are the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and _equal([one], [other])
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(each, other[key]) for key, each in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) or (isinstance(one, float) and isnan(one) and isnan(other))


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    names = {**before, **after}
    return [name for name in names if name not in before or not _same(before[name], after.get(name))]


def _restore(module: nn.Module, kept: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(kept[name])


def _some(names: list[str]) -> str:
    """The first of some names."""
    more = f" and {counted(len(names) - _MOST_NAMED, 'other')}" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
