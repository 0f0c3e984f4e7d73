"""What a module keeps beside parameters: on the device, equal on all ranks after a step, in checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from hpctrain.model.modules.module_architecture import kept_buffers
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Shard

KIND = "buffer"
"""The kind of state that buffers are in checkpoints."""


class ModuleBuffers:
    """The buffers of a module that was built without memory, which they get here.

    Those that belong to its state are, after each step, the same on all data ranks: the `first` one's, or
    fractions their `average`. The others are made again by whoever builds the module, and stay each rank's.
    Of a module that a pipeline cuts, those `elsewhere` stay without memory, and another part keeps those that
    are `kept_elsewhere`.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: LayerContext,
        whose: Literal["first", "average"] | None,
        storage: torch.dtype,
        elsewhere: Collection[str] = (),
        kept_elsewhere: Collection[str] = (),
    ) -> None:
        self.module, self.groups, self.whose = module, groups, whose
        of_state = kept_buffers(module)
        self.kept = [name for name in of_state if name not in kept_elsewhere]
        for name, buffer in list(module.named_buffers()):
            if name in elsewhere:
                continue
            in_format = name in of_state and buffer.is_floating_point()
            made = groups.data.empty(tuple(buffer.shape), storage if in_format else buffer.dtype)
            home, last = _home(module, name)
            home._buffers[last] = made
        # A module may hold one tensor under several names, or hold tensors that are no buffers.

    def fill(self, twin: nn.Module) -> None:
        """Take the values of a module that was built with memory, and its tensors that are no buffers."""
        values = dict(twin.named_buffers())
        for name, buffer in self.module.named_buffers():
            if not buffer.is_meta:
                buffer.copy_(values[name])
        others = dict(twin.named_modules())
        for name, module in self.module.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_meta:
                    theirs = getattr(others[name], attribute)
                    vars(module)[attribute] = theirs.to(self.groups.data.device)

    def state(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """Yield the kind, the shard (named as the parameter) and this rank's flat piece of each tensor."""
        present = dict(self.module.named_buffers())
        for name in self.kept:
            buffer = present[name]
            if not buffer.is_contiguous():
                home, last = _home(self.module, name)
                buffer = home._buffers[last] = buffer.contiguous()
            yield KIND, Shard.whole(name, tuple(buffer.shape)), buffer.view(-1)

    def after_update(self, statistics: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        """See UsesStatistics: have all data ranks agree. Collective."""
        group = self.groups.data
        if group.size == 1 or not self.kept:
            return
        present = dict(self.module.named_buffers())
        buffers = [present[name] for name in self.kept]
        values = torch.cat([buffer.detach().reshape(-1).double() for buffer in buffers])
        if self.whose == "average":
            values = group.all_reduce(values) / group.size
        else:
            group.broadcast(values)
        for buffer, piece in zip(buffers, values.split([b.numel() for b in buffers]), strict=True):
            own = piece.view(buffer.shape)
            buffer.copy_(own if buffer.is_floating_point() else own.round())


def _home(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that has a buffer, and its name there."""
    home, _, last = name.rpartition(".")
    return module.get_submodule(home), last
