"""A user's module, or one pipeline stage of it, as a ModelPart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.comm.planned import META
from hpctrain.deck.code import CAUSAL_MODEL
from hpctrain.deck.user_code import run_user_code
from hpctrain.errors import HpctrainError
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.modules.causal_model import sequence_note, stored_config
from hpctrain.model.modules.config_problems import transformers_errors
from hpctrain.model.modules.module_architecture import ModuleArchitecture, plan_of
from hpctrain.model.modules.module_call import set_forward
from hpctrain.model.modules.module_layers import BlockRunner, ModuleLayer
from hpctrain.model.modules.nested_tensors import tensors_of
from hpctrain.model.modules.part_contents import contents_of_part
from hpctrain.model.modules.pipeline.call_order import find_call_order
from hpctrain.model.modules.pipeline.stage_split import StageMessage
from hpctrain.model.modules.tensor_parallel.apply_plan import SplitOutputs, apply_plan
from hpctrain.model.modules.tensor_parallel.parallel_layers import LayerGradientParameter
from hpctrain.model.part import Computed, LayerRange, ModelPart, Unit
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.shards import Parameter


class ModulePart(nn.Module):
    """A user's module, or the stage of it in `span`, as a ModelPart.

    The last part returns what the module returns. Other parts return a flat tensor with all tensors that the
    next part receives. Parameters that a backward pass does not reach have a gradient of zero.

    Args:
        architecture: Architecture of the module.
        layer_context: Process groups and settings of this rank's layers.
        span: Blocks of this part.
        shared_parameters: Parameters of another part on this rank, by name, which this part may also use.

    Attributes:
        names: All names of each parameter. A tied parameter is stored once, under the first of its names.
        module: The module, whose parameters and layers are replaced.
        module_buffers: The buffers of the module.
    """

    def __init__(
        self,
        architecture: ModuleArchitecture,
        layer_context: LayerContext,
        span: LayerRange,
        shared_parameters: Mapping[str, Parameter] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.layer_context, self.span, self.architecture = layer_context, span, architecture
        self.title = architecture.title
        self.residency = ParameterResidency()
        # A run does not use a copy, since closures inside a copied module refer to the original.
        planned = layer_context.tensor.device == META
        self.module = architecture.copy_on_meta() if planned else architecture.build(META)
        tensor = layer_context.tensor.size
        table = json.loads(architecture.plan) if tensor > 1 else None
        plan = plan_of(self.module, table, tensor, layer_context.sequence_parallel)
        self.split = apply_plan(self.module, plan, layer_context, architecture.gather_logits)
        contents = contents_of_part(
            self.module, architecture, layer_context, self.split.partial, span, shared_parameters
        )
        self.names, self.layers, self.forward_pass = contents.names, contents.layers, contents.forward_pass
        self.module_buffers = contents.buffers
        self.layers[0].state_owner = contents.buffers if contents.buffers.persistent else None
        self._gathered = ExitStack()
        forwards = {name: each.forward for name, each in contents.calls.items()}
        for (name, block), layer in zip(contents.blocks.items(), self.layers[1:-1], strict=True):
            forwards[name] = partial(self._run_block, BlockRunner(name, block, layer, layer_context))
        call = self.forward_pass.call_module
        for name, forward in forwards.items():
            set_forward(self.module.get_submodule(name), partial(call, name, forward))
        for number, layer in enumerate(self.layers):
            layer.owner = self, number
        self.blocks = tuple(contents.blocks.values())
        self._module_call = architecture.call(self.module)
        self._visited: set[Parameter] = set()
        self._backward_running = False
        self._recording: bool | None = None
        is_causal_model = architecture.code.target == CAUSAL_MODEL
        self._config = stored_config(json.loads(architecture.arguments)) if is_causal_model else None
        self._sequence_note = sequence_note(self._config or {}, architecture.sequence)
        self._unrecorded: set[str] = set()
        for parameter in self.names:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def units(self) -> Iterator[Unit]:
        """Yield the parameters of each layer in units that are gathered together, each parameter once."""
        return (unit for layer in self.layers for unit in layer.units())

    def forward(self, inputs: ModelInputs, hidden: Tensor | None = None) -> Any:
        """Return the result of the module for the fields that it takes; see ModelPart."""
        recording = torch.is_grad_enabled()
        if self._recording != recording:  # also on the first pass
            self._recording = recording
            self.module.train(recording)
        inputs_text = ", ".join(
            f"{name} of shape {list(inputs.fields[name].shape)}" for name in self._module_call.field_names
        )
        outside = self.layer_context.weight_gradients.outside_run()
        with self._reported_errors(inputs_text), outside, ExitStack() as stack:
            self._gathered = stack
            self._gather_layer(self.layers[0])
            if len(self.layers) == 2:
                self._gather_layer(self.layers[-1])
            checked = self.names if recording and self._discards_writes else ()
            before = [parameter._version for parameter in checked]
            outputs = self.forward_pass.run(partial(self._module_call, inputs.fields), inputs.dropout, hidden)
            self._require_unmodified(before)
        for tensor in tensors_of(outputs):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, hidden))
        return outputs

    def _reported_errors(self, inputs_text: str) -> AbstractContextManager[None]:
        """Return a context manager that reports exceptions of the module's code as errors of the user."""
        if self._config is None:
            return run_user_code(f"{self.title} fails with {inputs_text}")
        return transformers_errors(
            f"{self.title} fails with {inputs_text}{self._sequence_note}", self._config
        )

    def computing(self) -> bool:
        """Return True while the module runs code of this part, not code whose results another part sent."""
        return self.forward_pass.computing

    def predict(self, last: Any, compute: Callable[..., Computed]) -> Computed:
        """Return the result of `compute` for what the module returned."""
        return compute(last if self.split.head is None else SplitOutputs(last, self.split.head))

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        """Return the shape of the tensors that are sent between parts; without a pipeline nothing is sent."""
        if not self.architecture.has_stages:
            return self.architecture.sequence, micro_size, 1
        message = StageMessage.of(find_call_order(replace(self.architecture, micro_size=micro_size)))
        return message.elements, 1, 1

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensors that are sent between parts."""
        if not self.architecture.has_stages:
            return next(iter(self.names)).dtype
        return StageMessage.of(find_call_order(self.architecture)).dtype

    def note_call(self, block: str) -> None:
        """Record a call of a block, given its name, for `_require_recorded`."""
        if torch.is_grad_enabled():
            self._unrecorded.discard(block)  # code that recomputes blocks calls them again in backward
        elif self._recording:
            self._unrecorded.add(block)

    def _require_recorded(self) -> None:
        """Raise HpctrainError if autograd has not seen a block: ZeRO-3 has not gathered it in backward."""
        if self._unrecorded:
            name = sorted(self._unrecorded)[0]
            self._unrecorded.clear()
            raise HpctrainError(
                f"{name}: runs without autograd, in a torch.autograd.Function of {self.title}, which "
                "conflicts with layout.zero = 3 (use layout.zero = 2)"
            )

    def _gather_layer(self, layer: ModuleLayer) -> None:
        """Keep the parameters of an outer layer gathered until the end of the pass."""
        for parameter in layer.gather_keys:
            self._gathered.enter_context(self.residency.in_memory(parameter))

    def _run_block(self, block: BlockRunner, *arguments: Any, **keywords: Any) -> Any:
        """Run a block. After the last one the parameters of the last layer are gathered."""
        result = block(*arguments, **keywords)
        if block.layer is self.layers[-2]:
            self._gather_layer(self.layers[-1])
        return result

    @property
    def _discards_writes(self) -> bool:
        """True if a value that the module writes into a parameter is lost with the next update."""
        return self.residency.gathers or self.architecture.storage not in {torch.float32, torch.float64}

    def _require_unmodified(self, before: Sequence[int]) -> None:
        """Raise HpctrainError if the module has changed a parameter and the change would be lost."""
        for (parameter, (name, *_)), version in zip(self.names.items(), before, strict=bool(before)):
            if parameter._version != version:
                form = str(self.architecture.storage).removeprefix("torch.")
                why = "with layout.zero = 3" if self.residency.gathers else f"in {form}"
                raise HpctrainError(
                    f"{self.title}: changes its parameter {name} in the forward pass; the change is lost "
                    f"{why} (use fp32 and layout.zero = 2)"
                )

    def _on_gradient(self, parameter: Tensor) -> None:
        """Add a gradient that is complete to its buffer. Autograd calls this even if there is no gradient."""
        assert isinstance(parameter, Parameter)
        if not self._backward_running:  # a backward pass of another part, which shares the parameter
            return
        self._visited.add(parameter)
        if (
            parameter.grad is not None
            and isinstance(parameter, LayerGradientParameter)
            and not parameter.lookup_gradients
        ):
            # This gradient comes from uses outside of linear layers, which report their own additions.
            assert parameter.gradient is not None
            parameter.gradient.add_(parameter.grad)
            parameter.grad = None
        if parameter.grad is None:
            self.layer_context.weight_gradients.submit(parameter.mark_gradient_added)
        elif parameter.lookup_gradients and self.span.has_embedding:
            assert parameter.gradient is not None
            parameter.lookup_gradients[0].add_(parameter.grad)
            parameter.grad = None
            parameter.mark_gradient_added()

    def _begin_backward(self, hidden: Tensor | None, gradient: Tensor) -> None:  # noqa: ARG002
        """Let autograd call `_end_backward` at the end of a backward pass from the module's result."""
        if self.layer_context.weight_gradients.running and not self._backward_running:
            self._backward_running = True
            end = partial(self._end_backward, hidden)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end_backward(self, hidden: Tensor | None) -> None:
        """Report parameters that the backward pass did not reach, in the same order on all ranks."""
        self._backward_running = False
        self._require_recorded()
        for parameter in [*self.names][::-1]:
            if parameter.requires_grad and parameter not in self._visited:
                parameter.mark_gradient_added()
        self._visited.clear()
        if hidden is not None and hidden.grad is None:
            hidden.grad = torch.zeros_like(hidden)


def build_module_parts(
    architecture: ModuleArchitecture, layer_context: LayerContext, spans: Sequence[LayerRange]
) -> list[ModelPart]:
    """Build this rank's parts of a module. The first and the last part share tied parameters."""
    parts: list[ModulePart] = []
    for span in spans:
        ends = [part for part in parts if part.span.has_embedding or part.span.has_head]
        shared_parameters = {names[0]: parameter for part in ends for parameter, names in part.names.items()}
        of_both = span.has_embedding or span.has_head
        parts.append(ModulePart(architecture, layer_context, span, shared_parameters if of_both else {}))
    return [*parts]
