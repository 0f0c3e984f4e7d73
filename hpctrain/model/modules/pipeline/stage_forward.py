"""One pass of a module through a part: what of it is computed there, and what stands in for the rest.

The module's own code runs from its beginning, with calls of what belongs to parts before giving what arrived
of them, or zeros where nothing there uses it, until the last block of the part is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.errors import HpctrainError
from hpctrain.model.modules.nested_tensors import InputReference, Spec, leaves, replaced
from hpctrain.model.modules.pipeline.call_order import BlockCall, Source
from hpctrain.model.modules.pipeline.stage_split import PartPass, Passing
from hpctrain.parallel.random import DropoutSource, key_of
from hpctrain.parallel.shards import Parameter


def seed_draws(source: DropoutSource, place: str = "") -> None:
    """Have what a module draws from a `place` of a pass on be a function of this, seed, step and sample."""
    name = f"module {source.step} {source.first} {place}".rstrip()
    torch.manual_seed(key_of(source.seed, name) & 0x7FFFFFFFFFFFFFFF)


class Passage:
    """Passes of a module all of which a part computes."""

    computing = True
    """Whether what is done now is the part's to compute, not that of a part before."""

    def run(self, call: Callable[[], Any], source: DropoutSource | None, hidden: Tensor | None) -> Any:
        """What the part gives of one micro-batch."""
        assert hidden is None
        if source is not None:
            seed_draws(source)
        return call()

    def called(self, name: str, compute: Callable[..., Any], *given: Any, **named: Any) -> Any:  # noqa: ARG002
        """In the place of the forward method of a watched module."""
        return compute(*given, **named)


class _Left(BaseException):
    """The part is done; no code of the user's is to catch this."""


class PiecePassage(Passage):
    """Passes of a module of which a part computes a `piece`. What arrives is of a length, of which as much is
    used as there is.

    What a call draws is a function of its name, too, and so is what is drawn after it: no stage depends on
    what others draw.
    """

    def __init__(
        self, piece: PartPass, passing: Passing, device: torch.device, parameters: Sequence[Parameter]
    ) -> None:
        self.piece, self.passing, self.device = piece, passing, device
        self.calls = piece.order.calls
        self.arriving, self.leaving = piece.arriving, piece.leaving
        self.specs = [piece.order.spec(source) for source in self.arriving]
        self.parameters = parameters
        self._source: DropoutSource | None = None
        self._within = True  # a call, or a backward pass
        self._count = self._position = 0
        self._here: dict[Source, Tensor] = {}
        self._blank: dict[Spec, Tensor] = {}

    def run(self, call: Callable[[], Any], source: DropoutSource | None, hidden: Tensor | None) -> Any:
        """See Passage: on a part that does not predict one flat tensor, [elements, 1, 1]."""
        self._source, self._count, self._position, anchor = source, 0, 0, None
        if hidden is not None:
            *tensors, anchor = _Unpack.apply(hidden, self.specs)
            self._here = dict(zip(self.arriving, tensors, strict=True))
        self._seed("")
        self._within = False
        try:
            return call()
        except _Left:
            return self._packed(anchor)
        finally:
            self._within, self._source = True, None
            self._here, self._blank = {}, {}

    @override
    def called(self, name: str, compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if self._within:
            return compute(*given, **named)
        number, self._count = self._count, self._count + 1
        if number >= len(self.calls) or self.calls[number].name != name:
            at = "at a different place than in the forward pass from which stages were derived"
            raise HpctrainError(f"{name} is called {at}")
        call = self.calls[number]
        if call.position < 2 * self.piece.span.first:
            result = self._stand_in(number, call, list(leaves((given, named))))
        else:
            self._seed(name)
            self._within = True
            result = compute(*given, **named)
            self._within = False
            self._keep(number, call, result)
            if not self.piece.span.predicts and call.position == 2 * self.piece.span.last - 1:
                raise _Left
        self._position = call.position + call.is_block
        self._seed(f"after {name}")
        return result

    @property
    @override
    def computing(self) -> bool:  # type: ignore[override]
        return self._position >= 2 * self.piece.span.first

    def _seed(self, place: str) -> None:
        if self._source is not None:
            seed_draws(self._source, place)

    def _keep(self, number: int, call: BlockCall, result: Any) -> None:
        """Keep of what a call gave what leaves the part."""
        form = zip(leaves(result), leaves(call.form), strict=True)
        made = [(tensor, spec) for tensor, spec in form if isinstance(spec, Spec)]
        for leaf, (tensor, spec) in enumerate(made):
            if (source := Source(number, leaf)) not in self.leaving:
                continue
            if not spec.is_of(tensor):
                raise HpctrainError(
                    f"{call.name}: expected {spec}, as in the forward pass from which stages were derived, "
                    f"got {Spec(tuple(tensor.shape), tensor.dtype, True)} (tensors between stages must "
                    "have the same shape and type in all passes, and must not be split over tensor ranks)"
                )
            self._here[source] = tensor.clone() if spec.changed else tensor

    def _stand_in(self, number: int, call: BlockCall, taken: Sequence[Tensor]) -> Any:
        """What a call of a part before gave, as far as it arrived."""
        leaf = -1

        def tensor(each: Spec | InputReference) -> Tensor:
            nonlocal leaf
            if isinstance(each, InputReference):
                return taken[each.number]
            leaf += 1
            arrived = self._here.get(Source(number, leaf))
            if arrived is not None:
                return arrived.clone() if each.changed else arrived
            if each not in self._blank:
                self._blank[each] = torch.zeros(each.shape, dtype=each.dtype, device=self.device)
            return self._blank[each].detach()

        return replaced(call.form, tensor)

    def _packed(self, anchor: Tensor | None) -> Tensor:
        """What leaves, one behind the other."""
        pieces = [self._here[source].reshape(-1).to(self.passing.format) for source in self.leaving]
        missing = self.passing.elements - sum(piece.numel() for piece in pieces)
        if missing:
            pieces.append(torch.zeros(missing, dtype=self.passing.format, device=self.device))
        if torch.is_grad_enabled() and not any(piece.requires_grad for piece in pieces):
            # A backward pass comes by all the same: others wait for it, or parameters that it does not meet.
            trained = [parameter for parameter in self.parameters if parameter.requires_grad]
            pieces += [p.reshape(-1)[:0].to(self.passing.format) for p in trained[:1]]
            pieces += [anchor] if anchor is not None else []
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(-1, 1, 1)


class _Unpack(torch.autograd.Function):
    """Tensors of these forms in one that has them one behind the other; and an empty one."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, specs: Sequence[Spec]) -> tuple[Tensor, ...]:
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
            # Of the same memory, yet no view to autograd: the module may go on with it as with a result.
            own = torch.empty(0, dtype=spec.dtype, device=hidden.device)
            tensors.append(
                own.set_(piece.untyped_storage(), piece.storage_offset(), piece.size(), piece.stride())
            )
        ctx.mark_non_differentiable(*(t for t, spec in zip(tensors, specs, strict=True) if not spec.learns))
        return (*tensors, hidden.new_empty(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        pieces = [
            torch.zeros(spec.elements, dtype=ctx.dtype, device=_device(gradients))
            if gradient is None or not spec.learns
            else gradient.reshape(-1).to(ctx.dtype)
            for gradient, spec in zip(gradients, ctx.specs, strict=False)
        ]
        missing = ctx.shape.numel() - sum(piece.numel() for piece in pieces)
        if missing:
            pieces.append(torch.zeros(missing, dtype=ctx.dtype, device=_device(gradients)))
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(ctx.shape), None


def _device(gradients: Sequence[Tensor | None]) -> torch.device:
    return next(gradient.device for gradient in gradients if gradient is not None)
