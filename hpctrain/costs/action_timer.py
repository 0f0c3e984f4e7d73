"""Times of pipeline actions on this machine, without waiting for messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from hpctrain.host.device import synchronize
from hpctrain.model.part import ModelPart
from hpctrain.parallel.backward.autograd import BackwardStart
from hpctrain.parallel.backward.weight_gradients import DeferredGradient, compute_all
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.pipeline.action import Action, Kind
from hpctrain.pipeline.execute import PreparedBatch

Measured = Mapping[tuple[Kind, int], float]
"""Median seconds of a micro-batch by kind of action and chunk."""


class ActionTimer:
    """Runs pipeline actions on parts of a model without messages, and times each of them.

    Random tensors replace the messages of neighbouring stages.

    Attributes:
        models: Parts of the model by chunk.
        queue: Queue of deferred weight gradients.
        batch: Micro-batch of all actions.
        device: Device of the model.
        hidden: Hidden states that replace those of the previous stage.
        gradient: Gradient that replaces that of the next stage.
    """

    def __init__(
        self, models: Sequence[ModelPart], layer_context: LayerContext, batch: PreparedBatch
    ) -> None:
        self.models, self.queue, self.batch = models, layer_context.weight_gradients, batch
        self.device = batch.inputs.positions.device
        size = models[0].hidden_shape(batch.inputs.rows)
        generator = torch.Generator(self.device).manual_seed(1)
        self.hidden = torch.randn(size, generator=generator, device=self.device).to(models[0].dtype)
        self.gradient = self.hidden * 1e-3

    def run(self, actions: Iterable[Action]) -> Measured:
        """Run the actions in their order, and return the median time of each kind and chunk. Local."""
        seconds: dict[tuple[Kind, int], list[float]] = {}
        ends: dict[tuple[int, int], tuple[Tensor | None, BackwardStart, Tensor | None]] = {}
        deferred: dict[tuple[int, int], list[DeferredGradient]] = {}
        for action in actions:
            key = (action.chunk, action.micro_batch)
            start = now(self.device)
            if action.kind == "F":
                ends[key] = self._forward(self.models[action.chunk])
            elif action.kind == "W":
                compute_all(deferred.pop(key))
            else:
                hidden, end, gradient = ends.pop(key)
                with self.queue.backward(deferring=action.kind == "I"):
                    end.backward(gradient)
                if action.kind == "I":
                    deferred[key] = self.queue.take()
                del hidden, end
            seconds.setdefault((action.kind, action.chunk), []).append(now(self.device) - start)
        return {key: median(values) for key, values in seconds.items()}

    def _forward(self, model: ModelPart) -> tuple[Tensor | None, BackwardStart, Tensor | None]:
        """Return the input, the start of the backward pass and its gradient, as the executor does."""
        hidden = None if model.span.has_embedding else self.hidden.detach().requires_grad_()
        if model.span.has_head:
            last = model(self.batch.inputs, hidden)
            return hidden, BackwardStart(model.predict(last, self.batch.losses).total), None
        return hidden, BackwardStart(model(self.batch.inputs, hidden)), self.gradient


def now(device: torch.device) -> float:
    """Return the time at which all work of the device is complete, in seconds."""
    synchronize(device)
    return perf_counter()
