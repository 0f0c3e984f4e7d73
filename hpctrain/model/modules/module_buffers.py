"""Buffers of a user's module: on the device, equal on all ranks after a step, and in checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from hpctrain.model.modules.module_architecture import persistent_buffers
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Shard

BUFFER_KIND = "buffer"
"""Kind of state that buffers have in checkpoints."""


class ModuleBuffers:
    """Buffers of a module that was built on "meta". They are allocated here.

    Persistent buffers are equal on all data ranks after each step. Others are set by the module's own code.

    Args:
        module: The module.
        layer_context: Process groups of this rank's layers.
        agreement: Ranks take the values of the first data rank, or the average of floating-point values.
        storage: dtype of persistent floating-point buffers.
        elsewhere: Buffers of other pipeline stages, which stay on "meta".
        saved_elsewhere: Persistent buffers that another stage writes into checkpoints.
    """

    def __init__(
        self,
        module: nn.Module,
        layer_context: LayerContext,
        agreement: Literal["first", "average"] | None,
        storage: torch.dtype,
        elsewhere: Collection[str] = (),
        saved_elsewhere: Collection[str] = (),
    ) -> None:
        self.module, self.layer_context, self.agreement = module, layer_context, agreement
        of_state = persistent_buffers(module)
        self.persistent = [name for name in of_state if name not in saved_elsewhere]
        for name, buffer in list(module.named_buffers()):
            if name in elsewhere:
                continue
            in_format = name in of_state and buffer.is_floating_point()
            buffer_here = layer_context.data.empty(
                tuple(buffer.shape), storage if in_format else buffer.dtype
            )
            owner, attribute = _owner(module, name)
            owner._buffers[attribute] = buffer_here

    def fill(self, source: nn.Module) -> None:
        """Copy buffers, and tensors that are attributes of modules, from a module that has memory."""
        values = dict(source.named_buffers())
        for name, buffer in self.module.named_buffers():
            if not buffer.is_meta:
                buffer.copy_(values[name])
        others = dict(source.named_modules())
        for name, module in self.module.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_meta:
                    value_there = getattr(others[name], attribute)
                    vars(module)[attribute] = value_there.to(self.layer_context.data.device)

    def state(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """Yield the kind, the shard (named as the parameter) and this rank's flat piece of each tensor."""
        present = dict(self.module.named_buffers())
        for name in self.persistent:
            buffer = present[name]
            if not buffer.is_contiguous():
                owner, attribute = _owner(self.module, name)
                buffer = owner._buffers[attribute] = buffer.contiguous()
            yield BUFFER_KIND, Shard.replicated(name, tuple(buffer.shape)), buffer.view(-1)

    def after_update(self, statistics: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        """Let all data ranks agree on the values. Collective over the data ranks."""
        group = self.layer_context.data
        if group.size == 1 or not self.persistent:
            return
        present = dict(self.module.named_buffers())
        buffers = [present[name] for name in self.persistent]
        values = torch.cat([buffer.detach().reshape(-1).double() for buffer in buffers])
        if self.agreement == "average":
            values = group.all_reduce(values) / group.size
        else:
            group.broadcast(values)
        for buffer, piece in zip(buffers, values.split([b.numel() for b in buffers]), strict=True):
            agreed_values = piece.view(buffer.shape)
            buffer.copy_(agreed_values if buffer.is_floating_point() else agreed_values.round())


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that has a buffer, and the buffer's name there."""
    owner, _, attribute = name.rpartition(".")
    return module.get_submodule(owner), attribute
