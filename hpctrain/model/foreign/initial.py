"""Initial values of a module that users bring: those that it gives itself.

Every rank builds the module once in host memory, under random numbers that are functions of the seed alone,
and takes from it, by name, the elements that it owns. So they are equal on every layout, whatever the module
does to make them; for that moment a rank has memory for one copy in the formats that the module chooses.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.deck.find import find_function, users_code
from hpctrain.model.foreign.architecture import ModuleArchitecture
from hpctrain.model.foreign.part import ModulePart
from hpctrain.model.initialize import fill_normal
from hpctrain.model.part import Part
from hpctrain.parallel.random import key_of
from hpctrain.parallel.shard import Parameter

HOST = torch.device("cpu")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of torch, numpy and Python are functions of the seed within, and go on as before after
    it.
    """
    key = key_of(seed, "module") & 0x7FFFFFFFFFFFFFFF
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
        yield
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002


@torch.no_grad()
def first_module(architecture: ModuleArchitecture, seed: int) -> nn.Module:
    """A module in host memory, with the values that a run begins with."""
    with seeded(seed):
        twin = architecture.build(HOST)
        if architecture.initial is not None:
            short = architecture.initial.rpartition("/")[2]
            with users_code(f"model.initial: {short} fails"):
                find_function(architecture.initial)(twin)
    return twin


@torch.no_grad()
def initialize_module(
    architecture: ModuleArchitecture,
    parts: Sequence[Part],
    targets: Iterable[tuple[Parameter, Tensor, int]],
    seed: int,
    roughness: float = 0.0,
) -> None:
    """See `initialize_parts`."""
    twin = first_module(architecture, seed)
    values = dict(twin.named_parameters(remove_duplicate=False))
    for parameter, target, offset in targets:
        shard, whole = parameter.shard, values[parameter.shard.name]
        local = whole.reshape(-1) if shard.local == shard.shape else shard.take(whole).reshape(-1)
        piece = local[offset : offset + target.numel()]
        if roughness and parameter.dim() == 1:
            fill_normal(target, offset, parameter.shard, seed, roughness)
            target[: piece.numel()].add_(piece)
        else:
            target.zero_()
            target[: piece.numel()].copy_(piece)
    for part in parts:
        assert isinstance(part, ModulePart)
        part.kept.fill(twin)
