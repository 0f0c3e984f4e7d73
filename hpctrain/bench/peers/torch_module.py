"""Wrapper that lets peers train a module which a user brings."""

from __future__ import annotations

from torch import Tensor, nn

from hpctrain.model.modules.initial_values import build_initial_module
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.module_call import find_logits


class TorchModule(nn.Module):
    """Unchanged module of a deck, with the initial weights of a run with this seed."""

    def __init__(self, architecture: ModuleArchitecture, seed: int) -> None:
        super().__init__()
        self.module = build_initial_module(architecture, seed).float()
        self._module_call = architecture.call(self.module)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, seq, vocabulary] of tokens [batch, seq]."""
        logits = find_logits(self._module_call({"tokens": tokens}))
        assert isinstance(logits, Tensor)
        return logits
