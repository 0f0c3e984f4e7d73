"""A module that users bring as its own code has it, for peers."""

from __future__ import annotations

from torch import Tensor, nn

from hpctrain.model.modules.initial_values import build_initial_module
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.module_call import find_logits


class TorchModule(nn.Module):
    """The module of a deck, untouched, with the weights that a run of this seed begins with."""

    def __init__(self, architecture: ModuleArchitecture, seed: int) -> None:
        super().__init__()
        self.module = build_initial_module(architecture, seed).float()
        self._module_call = architecture.call(self.module)

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] -> [b, s, V]."""
        logits = find_logits(self._module_call({"tokens": tokens}))
        assert isinstance(logits, Tensor)
        return logits
