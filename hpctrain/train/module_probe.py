"""Tests of a user's module for behavior that a run on many ranks does not support.

The module runs on its own, outside of a run. Two forward passes of one micro-batch with equal random numbers
and buffers must have equal outputs. If they do not, the likely cause is reported: state that the module
changes, or random numbers from another generator.
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
"""Largest relative difference of sums of losses, since a module may compute in fp32."""


@dataclass(frozen=True)
class ProbeFinding:
    """Result of a test of a module: a sentence, and whether `hpctrain check` fails because of it."""

    sentence: str
    fails: bool = True


def probe(
    call: ModuleCall, micro: MicroBatch, losses: Callable[[MicroBatch], LossFunction]
) -> Iterator[ProbeFinding]:
    """Yield the unsupported behavior of a module in training, in passes on the CPU.

    At the end the module's buffers and the random number generators are as before.

    Args:
        call: The module, and how a run calls it.
        micro: Micro-batch of several samples.
        losses: Returns the loss function of a micro-batch.
    """
    module = call.module
    original = {name: buffer.clone() for name, buffer in module.named_buffers()}
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        yield from _find_unrepeatable_passes(call, micro)
        _restore(module, original)
        yield from _find_missing_gradients(call, micro, losses)
        _restore(module, original)
        yield from _find_nonadditive_losses(call, micro, losses)
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    _restore(module, original)


def shared_memory(module: nn.Module) -> Iterator[ProbeFinding]:
    """Yield pairs of parameters that share memory. A run copies parameters, so that they would diverge."""
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        at = parameter.untyped_storage().data_ptr()
        if parameter.numel() and first.setdefault(at, name) != name:
            yield ProbeFinding(
                f"{first[at]} and {name} are two parameters that share memory, but a run trains them "
                "separately: assign one to the other (head.weight = embed.weight)"
            )


def _find_unrepeatable_passes(call: ModuleCall, micro: MicroBatch) -> Iterator[ProbeFinding]:
    """Yield in-place changes of the input, unseeded random numbers, and state outside of buffers."""
    module = call.module
    original = {name: buffer.clone() for name, buffer in module.named_buffers()}
    # After the conversion `call` passes on these tensors without a copy, so that in-place changes are seen.
    micro = MicroBatch(call.convert(micro.fields))
    before = _attributes(module)
    inputs = _copied(micro)
    first = _outputs(call, inputs, _SEED, _SEED)
    if torch.initial_seed() != _SEED:
        yield ProbeFinding(
            "the forward pass seeds torch's random numbers itself: masks are the same in every pass and on "
            "all data ranks"
        )
    if any(not torch.equal(field, micro.fields[name]) for name, field in inputs.items()):
        yield ProbeFinding(
            "the forward pass changes its input in place: the loss and other later parts see changed values"
        )
    after = _attributes(module)
    changed = _changed(before, after)
    _restore(module, original)
    again = _outputs(call, _copied(micro), _SEED, _SEED)
    # Attributes that only the first pass sets, such as a normalized weight, are not state.
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
        _restore(module, original)
        other = _outputs(call, _copied(micro), _SEED, _OTHER_SEED)
        if not _equal(first, other):
            yield ProbeFinding(
                "the forward pass draws random numbers from Python or numpy, but a run seeds only torch: "
                "other layouts and resumed runs draw other numbers"
            )
    if any(not each.isfinite().all() for each in first):
        yield ProbeFinding("the output of the forward pass is not finite")


def _find_missing_gradients(
    call: ModuleCall, micro: MicroBatch, losses: Callable[[MicroBatch], LossFunction]
) -> Iterator[ProbeFinding]:
    """Yield the parameters that get no gradient."""
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
def _find_nonadditive_losses(
    call: ModuleCall, micro: MicroBatch, losses: Callable[[MicroBatch], LossFunction]
) -> Iterator[ProbeFinding]:
    """Yield losses that are not sums over samples, if outputs do not depend on other samples."""
    module = call.module
    rows = micro.rows
    batches = [micro, *(_row(micro, number) for number in range(rows))]
    training = module.training
    module.eval()
    outputs = [call(each.fields) for each in batches]
    module.train(training)
    batch, *samples = (next(tensors_of(each), torch.empty(0)) for each in outputs)
    if any(each.dim() < 1 or not each.is_floating_point() for each in (batch, *samples)):
        return
    joined = torch.cat(samples)
    if joined.shape != batch.shape or not torch.allclose(joined, batch, rtol=_EXACT, atol=_EXACT):
        return
    metrics = [losses(each)(output).metrics for each, output in zip(batches, outputs, strict=True)]
    sums = [float(each[0]) for each in metrics]
    one_by_one = sum(sums[1:])
    if abs(sums[0] - one_by_one) > _EXACT * max(map(abs, sums)):
        factor = f"{sums[0] / one_by_one:.4g} times" if one_by_one else "not"
        yield ProbeFinding(
            f"model.loss is not a sum over samples: for {counted(rows, 'sample')} at once it is "
            f"{sums[0]:.6g}, {factor} that for the same one by one: it must return a sum and a count, "
            "not a mean"
        )
    counts = [float(each[1]) for each in metrics if len(each) > 1]
    one_by_one = sum(counts[1:])
    if counts and abs(counts[0] - one_by_one) > _EXACT * max(map(abs, counts)):
        yield ProbeFinding(
            f"the count of model.loss does not grow with samples: for {counted(rows, 'sample')} at once it "
            f"is {counts[0]:.6g}, but {one_by_one:.6g} for the same one by one: it must count the terms of "
            "the sum, so that the loss of a step does not depend on batch.micro_size"
        )


def _copied(micro: MicroBatch) -> dict[str, Tensor]:
    return {name: field.clone() for name, field in micro.fields.items()}


def _row(micro: MicroBatch, number: int) -> MicroBatch:
    return MicroBatch({name: each[number : number + 1] for name, each in micro.fields.items()})


def _outputs(
    call: ModuleCall, fields: Mapping[str, Tensor], torch_seed: int, other_seed: int
) -> list[Tensor]:
    torch.manual_seed(torch_seed)
    random.seed(other_seed)
    np.random.seed(other_seed)  # noqa: NPY002
    with torch.no_grad(), run_user_code("the module fails"):
        return [each.detach().clone() for each in tensors_of(call(fields))]


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(first, second, strict=True)
    )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return snapshots of the submodules' comparable attributes, by name, without parameters and buffers."""
    attributes: dict[str, Any] = {}
    for name, each in module.named_modules():
        for attribute, value in vars(each).items():
            if not attribute.startswith("_") and isinstance(value, _COMPARED):
                attributes[f"{name}.{attribute}".lstrip(".")] = _snapshot(value)
    return attributes


def _snapshot(value: Any, depth: int = 0) -> Any:
    """Return a deep copy of the comparable parts of a value."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if not isinstance(value, _COMPARED) or depth == _DEEPEST:
        return type(value)
    if isinstance(value, dict):
        return {key: _snapshot(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_snapshot(each, depth + 1) for each in value]
    return value


def _same(one: Any, other: Any) -> bool:
    """Return True if two snapshots are equal."""
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


def _restore(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


def _some(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {counted(len(names) - _MOST_NAMED, 'other')}" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
