"""Faults that are planted in a trainer, each in its second step: of them two runs are to be told apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.data.batches import Batches
from hpctrain.parallel.tensor import SplitLinear
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.train.hook import Hook, StepDone
from tests.engines import Trainer

STEP = 2
"""In which they are."""

Plant = Callable[[Trainer], None]


def flip(values: Tensor, element: int, bit: int = 28) -> None:
    """Turn one bit of an element of a flat fp32 tensor over: by default one of the exponent."""
    words = values.view(torch.int32)
    words[element] = int(words[element]) ^ (1 << bit)


def found(trainer: Trainer, name: str) -> tuple[Bucket, BucketSegment] | None:
    """A parameter's bucket and place, on ranks that have it."""
    pairs = ((bucket, segment) for bucket in trainer.engine.stage.buckets for segment in bucket.segments)
    return next((pair for pair in pairs if pair[1].parameter.shard.name == name), None)


class _Before(Hook):
    """Does something before the planted step, or at once behind it."""

    def __init__(self, act: Callable[[], None], behind: bool = False) -> None:
        self.act, self.behind = act, behind

    def around_step(self, step: int) -> AbstractContextManager[object]:
        if step == STEP and not self.behind:
            self.act()
        return super().around_step(step)

    def after_step(self, done: StepDone) -> None:
        if done.state.step == STEP and self.behind:
            self.act()


def in_weights(name: str, rank: int = 0, bit: int = 28, behind: bool = False) -> Plant:
    """A bit of a parameter's memory, on one rank, before the step or behind its update."""

    def plant(trainer: Trainer) -> None:
        def act() -> None:
            here = found(trainer, name)
            if here is not None and trainer.world.rank == rank:
                for segment, values, _ in here[0].owned_segments(here[0].owned_values):
                    if segment is here[1] and values.numel():
                        flip(values, values.numel() // 2, bit)

        trainer.hooks.append(_Before(act, behind))

    return plant


def in_gathered(name: str, rank: int) -> Plant:
    """A bit of another rank's slice of a parameter, where this one has gathered it."""

    def plant(trainer: Trainer) -> None:
        def act() -> None:
            here = found(trainer, name)
            if here is not None and trainer.world.rank == rank:
                bucket, segment = here
                assert bucket.values is not None
                flat = segment.view(bucket.values).reshape(-1)
                outside = [
                    i
                    for i in range(flat.numel())
                    if not bucket.owned_slice.start <= segment.start + i < bucket.owned_slice.stop
                ]
                flip(flat, outside[0])

        trainer.hooks.append(_Before(act))

    return plant


def in_moment(name: str, state: str = "exp_avg", rank: int = 0) -> Plant:
    """A bit of the optimizer's state."""

    def plant(trainer: Trainer) -> None:
        def act() -> None:
            if trainer.world.rank != rank:
                return
            for each in trainer.engine.state():
                if each.kind == f"optimizer/{state}" and each.shard.name == name and each.values.numel():
                    assert isinstance(each.values, Tensor)
                    flip(each.values, 1)

        trainer.hooks.append(_Before(act))

    return plant


def in_own_gradient(name: str, rank: int = 0, bit: int = 28) -> Plant:
    """A bit of a rank's own gradient, before it is summed."""

    def plant(trainer: Trainer) -> None:
        here = found(trainer, name)
        if here is None or trainer.world.rank != rank:
            return
        parameter = here[1].parameter
        told, done = parameter.on_gradient_added, list[bool]()

        def added(which):  # type: ignore[no-untyped-def]
            if trainer.state.step == STEP - 1 and not done:
                done.append(True)
                assert parameter.gradient is not None
                flip(parameter.gradient.view(-1), 3, bit)
            assert told is not None
            told(which)

        parameter.on_gradient_added = added

    return plant


def in_sum(name: str, rank: int = 0) -> Plant:
    """A bit of the sum of gradients, as of a message."""

    def plant(trainer: Trainer) -> None:
        here = found(trainer, name)
        if here is None or trainer.world.rank != rank:
            return
        finish = trainer.engine.stage.synchronizer.finish

        def finished() -> None:
            finish()
            if trainer.state.step == STEP - 1:
                bucket, segment = here
                for each, values, _ in bucket.owned_segments(bucket.owned_gradients):
                    if each is segment and values.numel():
                        flip(values, 2)

        trainer.engine.stage.synchronizer.finish = finished  # type: ignore[method-assign]

    return plant


def no_reduction(name: str) -> Plant:
    """The sum of the bucket of a parameter is left out, on all ranks."""

    def plant(trainer: Trainer) -> None:
        here = found(trainer, name)
        if here is None:
            return
        reducer = trainer.engine.stage.synchronizer.reducers[here[0]]
        start = reducer.reduction.start

        def started(gradients: Tensor, sums: Tensor) -> Work[Tensor]:
            if trainer.state.step != STEP - 1:
                return start(gradients, sums)
            if sums.data_ptr() != gradients.data_ptr() and sums.numel() < gradients.numel():
                sums.copy_(gradients[here[0].slice])
            return Work(sums)

        reducer.reduction.start = started  # type: ignore[method-assign]

    return plant


def in_activation(layer: int, rank: int | None = None, bit: int = 26) -> Plant:
    """A bit of what a layer gives, of a stage's layers the one of this number."""

    def plant(trainer: Trainer) -> None:
        if rank is not None and trainer.world.rank != rank:
            return
        done: list[bool] = []

        def hook(_: object, __: object, output: Tensor) -> Tensor:
            if trainer.state.step != STEP - 1 or done:
                return output
            done.append(True)
            changed = output.clone()
            flip(changed.detach().view(-1), 5, bit)
            return changed

        trainer.engine.stage.models[0].layers[layer].register_forward_hook(hook)

    return plant


def other_kernel(name: str) -> Plant:
    """One product of one layer adds in another order: its halves one after the other."""

    def plant(trainer: Trainer) -> None:
        for part in trainer.engine.stage.models:
            for module in part.modules():  # type: ignore[attr-defined]
                if isinstance(module, SplitLinear) and module.weights[0].shard.name == name:
                    product, forward = module.product, module.product.forward

                    def halves(
                        x: Tensor, bias: Tensor | None = None, product=product, forward=forward
                    ) -> Tensor:  # type: ignore[no-untyped-def]
                        if trainer.state.step != STEP - 1:
                            return forward(x, bias)
                        matrix, half = product.weight(), x.shape[-1] // 2
                        y = x[..., :half] @ matrix[:, :half].t() + x[..., half:] @ matrix[:, half:].t()
                        return y if bias is None else y + bias

                    product.forward = halves  # type: ignore[method-assign]

    return plant


def other_rate(factor: float = 1.001) -> Plant:
    """Another learning rate at one step."""

    def plant(trainer: Trainer) -> None:
        engine = trainer.engine
        before = engine.control.learning_rate

        class Other(type(before)):  # type: ignore[misc]
            def at(self, step: int, batch: int) -> float:
                return before.at(step, batch) * (factor if step == STEP - 1 else 1.0)

        engine.control.learning_rate = Other(**vars(before))

    return plant


def other_samples() -> Plant:
    """Other samples at one step."""

    def plant(trainer: Trainer) -> None:
        own = trainer.step.batches
        other = Batches(own.source, 77)

        class Changing(Batches):
            def step(self, first_sample: int, *share: int):  # type: ignore[no-untyped-def, override]
                return (other if trainer.state.step == STEP - 1 else own).step(first_sample, *share)

        trainer.step.batches = Changing(own.source, 1)

    return plant


def other_token() -> Plant:
    """One token of one sample of one step."""

    def plant(trainer: Trainer) -> None:
        step = trainer.step
        read = step.read_share

        def changed(state, batch):  # type: ignore[no-untyped-def]
            found = read(state, batch)
            if state.step == STEP - 1 and step.share[0] == 0:
                first, *rest = found.micro_batches
                fields = dict(first.fields)
                fields["tokens"] = fields["tokens"].clone()
                fields["tokens"][1, 4] = (fields["tokens"][1, 4] + 1) % 61
                found = found._replace(micro_batches=[replace(first, fields=fields), *rest])
            return found

        step.read_share = changed  # type: ignore[method-assign]

    return plant
