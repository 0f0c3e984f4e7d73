"""A module that users bring as a ModelPart: its parameters become ours, in place, and its blocks layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.deck.user_code import run_user_code
from hpctrain.errors import HpctrainError
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.modules.module_architecture import META, ModuleArchitecture, plan_of
from hpctrain.model.modules.module_layers import ModuleLayer, RunningBlock
from hpctrain.model.modules.module_trace import traced
from hpctrain.model.modules.nested_tensors import tensors_of
from hpctrain.model.modules.part_contents import hold_all, hold_piece
from hpctrain.model.modules.pipeline.call_order import order_of
from hpctrain.model.modules.pipeline.stage_split import Passing
from hpctrain.model.modules.tensor_parallel.apply_plan import SplitOutputs, split_module
from hpctrain.model.modules.tensor_parallel.parallel_layers import LateParameter
from hpctrain.model.part import Computed, Layer, LayerRange, ModelPart
from hpctrain.parallel.activation_sizes import ActivationSizes
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.shards import Parameter


class ModulePart(nn.Module):
    """A module, or the piece of it that a span says: a ModelPart, whose result is what the module gives, or,
    where other parts follow, all that passes to them, one behind the other.

    `names` are all those of each parameter that it uses: several of one that is tied, which is in memory
    once, under the first of them. Whatever a backward pass does not come to has a gradient of zero. `lent`
    are parameters that another part of the stage has, by name.
    """

    def __init__(
        self,
        architecture: ModuleArchitecture,
        groups: LayerContext,
        span: LayerRange,
        lent: Mapping[str, Parameter] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.groups, self.span, self.architecture = groups, span, architecture
        self.title, self.sequence = architecture.title, architecture.sequence
        self.residency = ParameterResidency()
        # What runs is no copy: functions that a module makes for itself refer to what was copied.
        planned = groups.tensor.device == META
        self.module = architecture.sketch() if planned else architecture.build(META)
        tensor = groups.tensor.size
        given = json.loads(architecture.plan) if tensor > 1 else None
        plan = plan_of(self.module, given, tensor, groups.sequence_parallel)
        self.split = split_module(self.module, plan, groups, architecture.whole_logits)
        if architecture.cut:
            held = hold_piece(self.module, architecture, groups, self.split.partial, span, lent)
        else:
            held = hold_all(self.module, architecture, groups, self.split.partial)
        self.names, self.layers, self.passage = held.names, held.layers, held.passage
        self.kept, self.layers[0].keeps = held.buffers, held.buffers if held.buffers.kept else None
        self._there = ExitStack()
        forwards: dict[str, Callable[..., Any]] = {name: each.forward for name, each in held.calls.items()}
        for (name, block), layer in zip(held.blocks.items(), self.layers[1:-1], strict=True):
            forwards[name] = partial(self._run, RunningBlock(name, block, layer, groups, self._present))
        for name, forward in forwards.items():
            # Who looks for its forward method finds this one first.
            vars(self.module.get_submodule(name))["forward"] = partial(self.passage.called, name, forward)
        for number, layer in enumerate(self.layers):
            layer.traced = partial(traced, self, number)
        self.blocks = tuple(held.blocks.values())
        self._call = architecture.call(self.module)
        self.example = architecture.example
        self._met: set[Parameter] = set()
        self._ends = False
        self._mode: bool | None = None
        for parameter in self.names:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._meet)

    def units(self) -> Iterator[list[list[Parameter]]]:
        """Yield the parameters of each layer in units that are gathered together, each parameter once."""
        return (unit for layer in self.layers for unit in layer.units())

    def forward(self, inputs: ModelInputs, hidden: Tensor | None = None) -> Any:
        """See ModelPart: what the module gives for the fields that it takes; fractions are in its own
        format."""
        recording = torch.is_grad_enabled()
        if self._mode != recording:  # a new one has not been told either
            self._mode = recording
            self.module.train(recording)
        told = ", ".join(f"{name} of shape {list(inputs.fields[name].shape)}" for name in self._call.names)
        apart = self.groups.weight_gradients.apart()
        with run_user_code(f"{self.title} fails with {told}"), apart, ExitStack() as there:
            self._there = there
            self._have(self.layers[0])
            if len(self.layers) == 2:
                self._have(self.layers[-1])
            before = [parameter._version for parameter in self.names] if recording and self._loses else []
            outputs = self.passage.run(partial(self._call, inputs.fields), inputs.dropout, hidden)
            self._require_unwritten(before)
        for tensor in tensors_of(outputs):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, hidden))
        return outputs

    def computing(self) -> bool:
        """Whether what its module does now is this part's to compute: another one's is stood in for."""
        return self.passage.computing

    def run_layer(self, layer: Layer, inputs: ModelInputs, x: Tensor) -> Tensor:
        """See ModelPart: not by itself, as what a block takes only the module knows."""
        raise NotImplementedError

    def predict(self, last: Any, compute: Callable[..., Computed]) -> Computed:
        """See ModelPart: of what the module gives."""
        return compute(last if self.split.head is None else SplitOutputs(last, self.split.head))

    def shared_bytes(self, at: ActivationSizes) -> int:  # noqa: ARG002
        """See ModelPart: told by the first of them."""
        return 0

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        """See ModelPart: of one piece nothing passes."""
        if not self.architecture.cut:
            return self.sequence, micro_size, 1
        passing = Passing.of(order_of(replace(self.architecture, micro_size=micro_size)))
        return passing.elements, 1, 1

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensors that are sent between parts."""
        if not self.architecture.cut:
            return next(iter(self.names)).dtype
        return Passing.of(order_of(self.architecture)).format

    def _have(self, layer: ModuleLayer) -> None:
        """Have the parameters of a layer outside of blocks until the end of the pass."""
        for parameter in layer.held:
            self._there.enter_context(self.residency.in_memory(parameter))

    def _present(self) -> ParameterResidency:
        """How parameters are there: who cuts them says so later."""
        return self.residency

    def _run(self, block: RunningBlock, *given: Any, **named: Any) -> Any:
        """What a block gives; behind the last one all that follows is there."""
        result = block(*given, **named)
        if block.layer is self.layers[-2]:
            self._have(self.layers[-1])
        return result

    @property
    def _loses(self) -> bool:
        """Whether what a module writes into its parameters is lost with the next update."""
        return self.residency.gathers or self.architecture.storage not in {torch.float32, torch.float64}

    def _require_unwritten(self, before: Sequence[int]) -> None:
        """HpctrainError where the module has changed a parameter, and that would be lost."""
        for (parameter, (name, *_)), version in zip(self.names.items(), before, strict=bool(before)):
            if parameter._version != version:
                form = str(self.architecture.storage).removeprefix("torch.")
                why = "with layout.zero = 3" if self.residency.gathers else f"in {form}"
                raise HpctrainError(
                    f"{self.title}: changes its parameter {name} in the forward pass; the change is lost "
                    f"{why} (use fp32 and layout.zero = 2)"
                )

    def _meet(self, parameter: Tensor) -> None:
        """A backward pass has come to all uses of a parameter, even if with no gradient."""
        assert isinstance(parameter, Parameter)
        if not self._ends:  # another part's, of one that both use
            return
        self._met.add(parameter)
        if parameter.grad is not None and isinstance(parameter, LateParameter) and parameter.lookups is None:
            # What is used in other ways, too, is complete when its layers are.
            assert parameter.gradient is not None
            parameter.gradient.add_(parameter.grad)
            parameter.grad = None
        if parameter.grad is None:
            self.groups.weight_gradients.submit(parameter.added)
        elif parameter.lookups is not None and self.span.embeds:
            assert parameter.gradient is not None
            parameter.lookups.add_(parameter.grad)
            parameter.grad = None
            parameter.added()

    def _begin_backward(self, hidden: Tensor | None, gradient: Tensor) -> None:  # noqa: ARG002
        """A backward pass comes from what the module gave: have its end told."""
        if self.groups.weight_gradients.running and not self._ends:
            self._ends = True
            end = partial(self._end_backward, hidden)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end_backward(self, hidden: Tensor | None) -> None:
        """Tell of the parameters that a backward pass did not come to, in one order on all ranks.

        What arrived has a gradient then, too.
        """
        self._ends = False
        for parameter in [*self.names][::-1]:
            if parameter.requires_grad and parameter not in self._met:
                parameter.added()
        self._met.clear()
        if hidden is not None and hidden.grad is None:
            hidden.grad = torch.zeros_like(hidden)


def module_parts(
    architecture: ModuleArchitecture, groups: LayerContext, spans: Sequence[LayerRange]
) -> list[ModelPart]:
    """The parts of a module that a rank has; what the first and the last one of all have in common is one."""
    parts: list[ModulePart] = []
    for span in spans:
        ends = [part for part in parts if part.span.embeds or part.span.predicts]
        lent = {names[0]: own for part in ends for own, names in part.names.items()}
        of_both = span.embeds or span.predicts
        parts.append(ModulePart(architecture, groups, span, lent if of_both else {}))
    return [*parts]
