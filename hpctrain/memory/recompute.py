"""Recomputation: what backward needs is computed again instead of kept (arXiv 1604.06174, 2205.05198)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import ceil, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hpctrain.memory.activations import ActivationStore, PackedActivation, SavedSegment, Watch
from hpctrain.model.foreign.arguments import tensors_of
from hpctrain.model.shape import Recomputed
from hpctrain.parallel.backward import BackwardStart
from hpctrain.parallel.saved_policy import LayerPass, SavedPolicy


def segment_size(recompute: Recomputed, layers: int) -> int:
    """Layers of one segment, of which only the input is kept; 0 where all layers keep what they save."""
    if recompute in {"none", "selective"} or not layers:
        return 0
    if recompute == "full":
        return 1
    return ceil(sqrt(layers)) if recompute == "sqrt" else min(int(recompute), layers)


Within = Callable[[], AbstractContextManager[None]]
"""What surrounds that which is computed again."""


class Recompute(SavedPolicy):
    """Keeps the inputs of segments of layers, or of the core of attention ("selective").

    Dropout's masks are functions of their place, so no random state is needed. Weight gradients may be held
    back, and parameters gathered for a while, inside of a segment as outside. With a `store`, what segments
    (or blocks, where these are kept) save waits there. What is computed again is so `within`. `watch`, if
    set, is told of what `call` keeps, and of what is computed again.
    """

    def __init__(
        self, recompute: Recomputed, store: ActivationStore | None = None, within: Within = nullcontext
    ) -> None:
        self.recompute, self.store, self.within = recompute, store, within
        self.keeps_core = recompute != "selective"
        self.repeats = recompute == "full"
        self.watch: Watch | None = None

    def run(self, layers: Sequence[LayerPass], x: Tensor, shared: Sequence[Tensor] = ()) -> Tensor:
        """All layers of x; each segment again in its backward."""
        size = segment_size(self.recompute, len(layers))
        if not torch.is_grad_enabled() or (not size and self.store is None):
            return super().run(layers, x, shared)
        compute = partial(again, shared=shared, within=self.within) if size else super().run
        segment: SavedSegment | None = None
        for first in range(0, len(layers), size or 1):
            layer = layers[first : first + (size or 1)]
            if self.store is None:
                x = compute(layer, x)
            else:
                with self.store.saving(x, shared, before=segment) as segment:
                    x = compute(layer, x)
        return x

    def call(self, compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """See SavedPolicy; with "full", again in its backward, with the same random numbers."""
        if self.recompute != "full" or not torch.is_grad_enabled():
            return compute(*given, **named)

        def around() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _EachTime(self._again)

        if self.watch is not None:
            compute = partial(_keeping, [self.watch(each) for each in tensors_of((given, named))], compute)
        # In a plan tensors say that they are on a CPU, but not in the backward pass.
        check = "none" if any(each.is_meta for each in tensors_of((given, named))) else "default"
        how: dict[str, Any] = {
            "use_reentrant": False,
            "context_fn": around,
            "determinism_check": check,
        }
        return checkpoint(compute, *given, **how, **named)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """What `call` computes again is so within, and the watch is told of it, all of which is there at the
        end.
        """
        watch = self.watch
        with self.within():
            if watch is None:
                yield
                return
            # Checkpoint's own hooks, which would be hidden by others.
            pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
            there: list[PackedActivation] = []

            def told(tensor: Tensor) -> Any:
                there.append(watch(tensor))
                return pack(tensor)

            with saved_tensors_hooks(told, unpack):
                yield

    def attend(
        self, compute: Callable[..., Tensor], inputs: Sequence[Tensor], shared: Sequence[Tensor] = ()
    ) -> Tensor:
        """The core of attention; with "selective", again in its backward."""
        if self.keeps_core or not torch.is_grad_enabled():
            return compute(*inputs, *shared)
        result: Tensor = _RecomputeAutograd.apply(compute, self.within, *inputs, *shared)
        return result


class _EachTime(AbstractContextManager[None]):
    """What `make` makes, anew each time that it is entered: a block that takes a gradient in its forward pass
    is computed again for that, too.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._entered = make, list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


def _keeping(_: Sequence[PackedActivation], compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What `compute` gives; what is held meanwhile is so for as long as this may be called again."""
    return compute(*given, **named)


def again(layers: Sequence[LayerPass], x: Tensor, shared: Sequence[Tensor], within: Within) -> Tensor:
    """The layers of x, computed again in backward, `within`."""
    if not x.requires_grad and any(p.requires_grad for layer in layers for p in layer.parameters):
        x = x.detach().requires_grad_()  # so that backward comes by

    def compute(x: Tensor, *_: Tensor) -> Tensor:
        for layer in layers:
            x = layer.compute(x)
        return x

    result: Tensor = _RecomputeAutograd.apply(compute, within, x, *shared)
    return result


class _RecomputeAutograd(torch.autograd.Function):
    """`compute(*tensors)`, of which only the tensors are kept; again `within`."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], within: Within, *tensors: Tensor) -> Tensor:
        ctx.compute, ctx.within = compute, within
        ctx.save_for_backward(*tensors)
        return compute(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(saved, ctx.needs_input_grad[2:], strict=True)
        ]
        with ctx.within(), torch.enable_grad():
            end = BackwardStart(ctx.compute(*tensors))
        end.backward(gradient)
        return (None, None, *(tensor.grad for tensor in tensors))
