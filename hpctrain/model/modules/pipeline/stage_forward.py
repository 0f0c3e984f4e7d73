"""One pass of a module through a pipeline stage.

The module's own code runs from its beginning. Calls that earlier stages compute return what arrived from
them, or zeros if nothing here uses the result. An exception leaves the code after the stage's last block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.errors import HpctrainError
from hpctrain.model.modules.nested_tensors import TensorPlaceholder, map_leaves, tensor_leaves, tensors_of
from hpctrain.model.modules.pipeline.call_order import BlockCall, CallResult, TensorSpec
from hpctrain.model.modules.pipeline.stage_split import StageMessage, StageSlice
from hpctrain.parallel.random import DropoutSource, key_of
from hpctrain.parallel.shards import Parameter


def seed_random_numbers(source: DropoutSource, place: str = "") -> None:
    """Let the random numbers that a module draws from now on depend on seed, step, sample and `place`."""
    name = f"module {source.step} {source.first} {place}".rstrip()
    torch.manual_seed(key_of(source.seed, name) & 0x7FFFFFFFFFFFFFFF)


class ModuleForward:
    """Passes through a part that is a whole module."""

    computing = True
    """True while the module runs code of this part, not code that a part before computes."""

    def run(self, call: Callable[[], Any], source: DropoutSource | None, hidden: Tensor | None) -> Any:
        """Call the module with one micro-batch and return the part's result.

        Args:
            call: Function that calls the module.
            source: Source of random numbers; None if nothing is drawn.
            hidden: Tensor [elements, 1, 1] that the part before has sent; None for the first part.
        """
        assert hidden is None
        if source is not None:
            seed_random_numbers(source)
        return call()

    def call_module(self, name: str, compute: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:  # noqa: ARG002
        """Return the result of a watched module, whose forward method this replaces.

        Args:
            name: Name of the module.
            compute: Its own forward method, or the one that gathers its parameters first.
            arguments: Arguments of the call.
            keywords: Keyword arguments of the call.
        """
        return compute(*arguments, **keywords)


class _StageDone(BaseException):
    """End of a stage's pass. It is no Exception, so that no code of users catches it."""


class StageForward(ModuleForward):
    """Passes through one pipeline stage of a module.

    `call_module` returns what the stage before has sent for a call that an earlier stage computes, and runs
    a module that this stage computes. It ends the pass after the last block of the stage.

    Random numbers that a call draws depend on its name, and so do those that are drawn after it. So no stage
    depends on what others draw.

    Args:
        stage: The slice of the pass that this stage computes.
        message: Size of the messages between stages, whose end may be unused.
        device: Device of the part.
        parameters: Parameters of the part.
    """

    def __init__(
        self, stage: StageSlice, message: StageMessage, device: torch.device, parameters: Sequence[Parameter]
    ) -> None:
        self.stage, self.message, self.device = stage, message, device
        self.calls = stage.order.calls
        self.received, self.sent = stage.received, stage.sent
        self.specs = [stage.order.spec(source) for source in self.received]
        self.parameters = parameters
        self._source: DropoutSource | None = None
        self._inside = True  # inside a watched call, or after the pass
        self._call_count = self._position = 0
        self._results: dict[CallResult, Tensor] = {}
        self._zeros: dict[TensorSpec, Tensor] = {}

    @override
    def run(self, call: Callable[[], Any], source: DropoutSource | None, hidden: Tensor | None) -> Any:
        self._source, self._call_count, self._position, anchor = source, 0, 0, None
        if hidden is not None:
            *tensors, anchor = _Unpack.apply(hidden, self.specs)
            self._results = dict(zip(self.received, tensors, strict=True))
        self._seed("")
        self._inside = False
        try:
            return call()
        except _StageDone:
            return self._pack(anchor)
        finally:
            self._inside, self._source = True, None
            self._results, self._zeros = {}, {}

    @override
    def call_module(self, name: str, compute: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if self._inside:
            return compute(*arguments, **keywords)
        number, self._call_count = self._call_count, self._call_count + 1
        if number >= len(self.calls) or self.calls[number].name != name:
            at = "at a different place than in the forward pass from which stages were derived"
            raise HpctrainError(f"{name} is called {at}")
        call = self.calls[number]
        if call.position < 2 * self.stage.span.first:
            result = self._substitute_result(number, call, list(tensors_of((arguments, keywords))))
        else:
            self._seed(name)
            self._inside = True
            result = compute(*arguments, **keywords)
            self._inside = False
            self._store_sent(number, call, result)
            if not self.stage.span.has_head and call.position == 2 * self.stage.span.last - 1:
                raise _StageDone
        self._position = call.position + call.is_block
        self._seed(f"after {name}")
        return result

    @property
    @override
    def computing(self) -> bool:  # type: ignore[override]
        return self._position >= 2 * self.stage.span.first

    def _seed(self, place: str) -> None:
        if self._source is not None:
            seed_random_numbers(self._source, place)

    def _store_sent(self, number: int, call: BlockCall, result: Any) -> None:
        """Store the tensors in a call's result that are sent to the next stage."""
        for tensor, place in zip(tensor_leaves(result), tensor_leaves(call.structure), strict=True):
            source = CallResult(number, place.number)
            if place.is_argument or source not in self.sent:
                continue
            spec = call.specs[place.number]
            if not spec.matches(tensor):
                raise HpctrainError(
                    f"{call.name}: expected {spec}, as in the forward pass from which stages were derived, "
                    f"got {TensorSpec.of(tensor)} (tensors between stages must "
                    "have the same shape and type in all passes, and must not be split over tensor ranks)"
                )
            self._results[source] = tensor.clone() if spec.modified else tensor

    def _substitute_result(self, number: int, call: BlockCall, inputs: Sequence[Tensor]) -> Any:
        """Return the result of a call that an earlier stage computed, with zeros for what was not sent."""

        def tensor(place: TensorPlaceholder) -> Tensor:
            if place.is_argument:
                return inputs[place.number]
            spec, received = call.specs[place.number], self._results.get(CallResult(number, place.number))
            if received is not None:
                return received.clone() if spec.modified else received
            if spec not in self._zeros:
                self._zeros[spec] = torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)
            return self._zeros[spec].detach()

        return map_leaves(call.structure, tensor)

    def _pack(self, anchor: Tensor | None) -> Tensor:
        """Return the tensors that are sent, one after the other, as [elements, 1, 1]."""
        pieces = [self._results[source].reshape(-1).to(self.message.dtype) for source in self.sent]
        if torch.is_grad_enabled() and not any(piece.requires_grad for piece in pieces):
            # A backward pass must run even so, because other stages wait for it.
            trained = [parameter for parameter in self.parameters if parameter.requires_grad]
            pieces += [p.reshape(-1)[:0].to(self.message.dtype) for p in trained[:1]]
            pieces += [anchor] if anchor is not None else []
        return _join(pieces, self.message.elements, self.message.dtype, self.device).view(-1, 1, 1)


class _Unpack(torch.autograd.Function):
    """Inverse of `StageForward._pack`: the tensors that a stage has received, as views of one flat tensor.

    A further, empty tensor is the anchor: the backward pass of the stage always runs through it, so that the
    gradient of the flat tensor exists. Backward packs the gradients.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
        ctx.specs, ctx.shape, ctx.dtype = specs, hidden.shape, hidden.dtype
        ctx.set_materialize_grads(False)
        flat, start = hidden.reshape(-1), 0
        tensors = []
        for spec in specs:
            piece = flat[start : start + spec.elements].view(spec.shape)
            start += spec.elements
            if spec.dtype != hidden.dtype or hidden.is_meta:
                tensors.append(piece.to(spec.dtype, copy=True))
                continue
            # It has the same memory but is no view for autograd, so that the module may change it in place.
            alias = torch.empty(0, dtype=spec.dtype, device=hidden.device)
            tensors.append(
                alias.set_(piece.untyped_storage(), piece.storage_offset(), piece.size(), piece.stride())
            )
        ctx.mark_non_differentiable(
            *(t for t, spec in zip(tensors, specs, strict=True) if not spec.requires_gradient)
        )
        return (*tensors, hidden.new_empty(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        device = next(gradient.device for gradient in gradients if gradient is not None)
        pieces = [
            torch.zeros(spec.elements, dtype=ctx.dtype, device=device)
            if gradient is None or not spec.requires_gradient
            else gradient.reshape(-1).to(ctx.dtype)
            for gradient, spec in zip(gradients, ctx.specs, strict=False)
        ]
        return _join(pieces, ctx.shape.numel(), ctx.dtype, device).view(ctx.shape), None


def _join(pieces: Sequence[Tensor], elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return flat tensors one after the other, followed by zeros up to a number of elements."""
    missing = elements - sum(piece.numel() for piece in pieces)
    padding = [torch.zeros(missing, dtype=dtype, device=device)] if missing else []
    joined = [*pieces, *padding]
    return joined[0] if len(joined) == 1 else torch.cat(joined)
