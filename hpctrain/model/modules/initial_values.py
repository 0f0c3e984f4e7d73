"""Initial values of a module that users bring: those that it gives itself.

Every rank builds the module once in host memory, under random numbers that are functions of the seed alone,
and takes from it, by name, the elements that it owns. So they are equal on every layout, whatever the module
does to make them; for that moment a rank has memory for one copy in the formats that the module chooses.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import signature

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.deck.code import NamedCode
from hpctrain.deck.user_code import import_function, run_user_code
from hpctrain.errors import HpctrainError
from hpctrain.model.initialize import fill_normal
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.module_part import ModulePart
from hpctrain.model.part import ModelPart
from hpctrain.parallel.random import key_of
from hpctrain.parallel.shards import Parameter

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


@dataclass(frozen=True)
class Forms:
    """What a module has to train and to keep: shapes of parameters and buffers by name; names by the first
    one of the same parameter; and the parameters that are trained.
    """

    shapes: Mapping[str, list[int]]
    firsts: Mapping[str, str]
    trained: frozenset[str]

    @staticmethod
    def of(module: nn.Module) -> Forms:
        """Those of a module."""
        known: dict[nn.Parameter, str] = {}
        named = dict(module.named_parameters(remove_duplicate=False))
        firsts = {name: known.setdefault(each, name) for name, each in named.items()}
        every = named | dict(module.named_buffers(remove_duplicate=False))
        shapes = {name: list(each.shape) for name, each in every.items()}
        return Forms(shapes, firsts, frozenset(name for name, each in named.items() if each.requires_grad))


@torch.no_grad()
def first_module(architecture: ModuleArchitecture, seed: int) -> nn.Module:
    """A module in host memory, with the values that a run begins with. HpctrainError where it, or what
    changes its values, makes others than it is to have.
    """
    with seeded(seed):
        twin = architecture.build(HOST)
        _require_same(Forms.of(architecture.sketch()), Forms.of(twin), architecture.title)
        if architecture.initial is not None:
            _change(twin, architecture.initial)
    return twin


@torch.no_grad()
def initialize_module(
    architecture: ModuleArchitecture,
    parts: Sequence[ModelPart],
    targets: Iterable[tuple[Parameter, Tensor, int]],
    seed: int,
    roughness: float = 0.0,
) -> None:
    """See `initialize_parts`. Errors as in `first_module`."""
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


def _change(twin: nn.Module, code: NamedCode) -> None:
    """Call the user's function that changes the values of a module."""
    short, before = code.title, Forms.of(twin)
    function = import_function(code)
    with suppress(ValueError):  # of which nobody knows what it takes
        try:
            signature(function).bind(twin)
        except TypeError as error:
            sentence = f"model.initial: {short} must take the module as its argument: {error}"
            raise HpctrainError(sentence) from None
    with run_user_code(f"model.initial: {short} fails"):
        function(twin)
    _require_same(before, Forms.of(twin), f"model.initial: {short}")


def _require_same(expected: Forms, found: Forms, subject: str) -> None:
    """Raise HpctrainError where a module has not the parameters and buffers that it is to have."""
    if more := sorted(found.firsts.keys() - expected.firsts.keys()):
        raise HpctrainError(f"{subject}: unexpected parameter {more[0]}")
    for name, shape in expected.shapes.items():
        own, is_parameter = found.shapes.get(name), name in expected.firsts
        kind = "parameter" if is_parameter else "buffer"
        if own is None or is_parameter != (name in found.firsts):
            raise HpctrainError(f"{subject}: missing {kind} {name}")
        if own != shape:
            raise HpctrainError(f"{subject}: {name}: expected shape {shape}, got {own}")
        if is_parameter and found.firsts[name] != (first := expected.firsts[name]):
            raise HpctrainError(f"{subject}: {name}: must be the same parameter as {first}")
        if (name in found.trained) != (name in expected.trained):
            state = "trained" if name in found.trained else "frozen"
            raise HpctrainError(
                f"{subject}: {name}: became {state}, but initialization must change values only (use "
                "the module or model.frozen)"
            )
