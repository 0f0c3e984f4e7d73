"""Recomputation of activations in the backward pass (arXiv 1604.06174, 2205.05198).

Instead of all intermediate tensors, only the inputs of segments of layers are kept. The backward pass of a
segment first repeats its forward pass. "full" has segments of one layer, "sqrt" of sqrt(layers) layers.
"selective" repeats only the core of attention (rotation, softmax and its products), of which it keeps the
operands and the rotary tables. This saves much memory for few FLOPs.
"""

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
from typing_extensions import override

from hpctrain.memory.activation_store import ActivationStore, PackedActivation, SavedSegment, Watch
from hpctrain.model.modules.nested_tensors import tensors_of
from hpctrain.model.shape import Recomputed
from hpctrain.parallel.backward.autograd import BackwardStart
from hpctrain.parallel.backward.saved_policy import LayerPass, SavedPolicy


def segment_size(recompute: Recomputed, layers: int) -> int:
    """Return the number of layers of a segment; 0 if layers keep all that they save."""
    if recompute in {"none", "selective"} or not layers:
        return 0
    if recompute == "full":
        return 1
    return ceil(sqrt(layers)) if recompute == "sqrt" else min(int(recompute), layers)


RecomputeContext = Callable[[], AbstractContextManager[None]]
"""Returns a context in which a recomputation runs, such as one that counts its time."""


class Recompute(SavedPolicy):
    """SavedPolicy that keeps the inputs of segments, or of the core of attention, and recomputes the rest.

    Dropout masks are functions of their position, so no state of random generators is kept. Weight gradients
    may be delayed, and parameters gathered temporarily, within a segment as elsewhere. Set `watch` to be
    called for each tensor that `call` keeps or recomputes.

    Args:
        recompute: Kind of recomputation.
        store: If given, keeps what segments (or blocks, without recomputation) save.
        context: Returns the context in which a recomputation runs.
    """

    def __init__(
        self,
        recompute: Recomputed,
        store: ActivationStore | None = None,
        context: RecomputeContext = nullcontext,
    ) -> None:
        self.recompute, self.store, self.context = recompute, store, context
        self.keeps_core = recompute != "selective"
        self.recomputes_calls = recompute == "full"
        self.rounds_activations = store is not None and store.form != "exact"
        self.watch: Watch | None = None

    @override
    def run(self, layers: Sequence[LayerPass], x: Tensor, shared: Sequence[Tensor] = ()) -> Tensor:
        """Run layers on x. Depending on the settings, activations are recomputed or kept in the store."""
        size = segment_size(self.recompute, len(layers))
        if not torch.is_grad_enabled() or (not size and self.store is None):
            return super().run(layers, x, shared)
        compute = partial(recompute_layers, shared=shared, context=self.context) if size else super().run
        segment: SavedSegment | None = None
        for first in range(0, len(layers), size or 1):
            segment_layers = layers[first : first + (size or 1)]
            if self.store is None:
                x = compute(segment_layers, x)
            else:
                with self.store.saving(x, shared, previous=segment) as segment:
                    x = compute(segment_layers, x)
        return x

    @override
    def call(self, compute: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self.recompute != "full" or not torch.is_grad_enabled():
            return compute(*arguments, **options)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _FreshContext(self._recomputing)

        if self.watch is not None:
            compute = partial(
                _call_and_keep, [self.watch(each) for each in tensors_of((arguments, options))], compute
            )
        # In plans, "meta" tensors report another device in the backward pass, which the check would refuse.
        check = "none" if any(each.is_meta for each in tensors_of((arguments, options))) else "default"
        run = partial(checkpoint, use_reentrant=False, context_fn=contexts, determinism_check=check)
        return run(compute, *arguments, **options)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Context of a recomputation by `call`. It keeps the results of `watch` until its end."""
        watch = self.watch
        with self.context():
            if watch is None:
                yield
                return
            # Call the hooks of torch's checkpoint from these hooks, which replace them.
            pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
            packed: list[PackedActivation] = []

            def pack_and_watch(tensor: Tensor) -> Any:
                packed.append(watch(tensor))
                return pack(tensor)

            with saved_tensors_hooks(pack_and_watch, unpack):
                yield

    @override
    def attend(
        self, compute: Callable[..., Tensor], inputs: Sequence[Tensor], shared: Sequence[Tensor] = ()
    ) -> Tensor:
        if self.keeps_core or not torch.is_grad_enabled():
            return compute(*inputs, *shared)
        result: Tensor = _RecomputeAutograd.apply(compute, self.context, *inputs, *shared)
        return result


class _FreshContext(AbstractContextManager[None]):
    """Context manager that may be entered several times, each time with a new context from `make`.

    This happens if a block computes a gradient in its own forward pass: it is also recomputed for that
    gradient.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._entered = make, list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


def _call_and_keep(
    _: Sequence[PackedActivation], compute: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """Return the result of `compute`. The first argument lives as long as this call can be repeated."""
    return compute(*arguments, **options)


def recompute_layers(
    layers: Sequence[LayerPass], x: Tensor, shared: Sequence[Tensor], context: RecomputeContext
) -> Tensor:
    """Return the output of layers, which are recomputed in the backward pass.

    Args:
        layers: Layers of the segment.
        x: Input.
        shared: Tensors that the layers share.
        context: Returns the context of the recomputation.
    """
    if not x.requires_grad and any(p.requires_grad for layer in layers for p in layer.parameters):
        x = x.detach().requires_grad_()  # so that autograd calls backward

    def compute(x: Tensor, *_: Tensor) -> Tensor:
        for layer in layers:
            x = layer.compute(x)
        return x

    result: Tensor = _RecomputeAutograd.apply(compute, context, x, *shared)
    return result


class _RecomputeAutograd(torch.autograd.Function):
    """`compute(*tensors)` that keeps only the tensors, and is recomputed in the backward pass.

    Unlike torch's checkpoint it saves no state of random generators: dropout masks are functions of seed,
    name and position, so the recomputation has the same ones.
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Tensor], context: RecomputeContext, *tensors: Tensor
    ) -> Tensor:
        ctx.compute, ctx.context = compute, context
        ctx.save_for_backward(*tensors)
        return compute(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(saved, ctx.needs_input_grad[2:], strict=True)
        ]
        with ctx.context(), torch.enable_grad():
            end = BackwardStart(ctx.compute(*tensors))
        end.backward(gradient)
        return (None, None, *(tensor.grad for tensor in tensors))
