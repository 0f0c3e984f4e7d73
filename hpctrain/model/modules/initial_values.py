"""Initial values of a user's module: those that its own code computes.

Every rank builds the module once in host memory, with random numbers that depend on the seed alone, and takes
the elements that it owns by name. So the values are equal on every layout. While it builds the module, a rank
needs memory for one copy in the module's own dtypes.
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

from hpctrain.comm.planned import META
from hpctrain.deck.code import NamedCode
from hpctrain.deck.user_code import import_function, run_user_code
from hpctrain.errors import HpctrainError
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.module_part import ModulePart
from hpctrain.model.parameters.initialize import fill_normal
from hpctrain.model.part import ModelPart
from hpctrain.parallel.random import key_of
from hpctrain.parallel.shards import Parameter

HOST = torch.device("cpu")


@contextmanager
def seeded_random_numbers(seed: int) -> Iterator[None]:
    """Seed the random numbers of torch, NumPy and Python inside the context, and restore them afterwards."""
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
class ModuleForm:
    """Parameters and buffers of a module without their values.

    Attributes:
        shapes: Shape of each parameter and buffer, by name.
        first_names: First name of each parameter, by each of its names.
        trained: Names of parameters that require a gradient.
    """

    shapes: Mapping[str, list[int]]
    first_names: Mapping[str, str]
    trained: frozenset[str]

    @staticmethod
    def of(module: nn.Module) -> ModuleForm:
        """Return the names and shapes of the parameters and buffers of a module."""
        known: dict[nn.Parameter, str] = {}
        named = dict(module.named_parameters(remove_duplicate=False))
        first_names = {name: known.setdefault(each, name) for name, each in named.items()}
        tensors = named | dict(module.named_buffers(remove_duplicate=False))
        shapes = {name: list(each.shape) for name, each in tensors.items()}
        trained = frozenset(name for name, each in named.items() if each.requires_grad)
        return ModuleForm(shapes, first_names, trained)


@torch.no_grad()
def build_initial_module(architecture: ModuleArchitecture, seed: int) -> nn.Module:
    """Return a module in host memory with the initial values of a run.

    Args:
        architecture: Architecture of the module.
        seed: Seed of the run, on which all random numbers of the module's own code depend.

    Raises:
        HpctrainError: The module, or the user's function that changes its values, makes other parameters or
            buffers than the architecture has.
    """
    with seeded_random_numbers(seed):
        module = architecture.build(HOST)
        expected = ModuleForm.of(architecture.copy_on_meta())
        _require_same_form(expected, ModuleForm.of(module), architecture.title)
        if architecture.initial is not None:
            _apply_user_function(module, architecture.initial)
    return module


@torch.no_grad()
def initialize_module(
    architecture: ModuleArchitecture,
    parts: Sequence[ModelPart],
    targets: Iterable[tuple[Parameter, Tensor, int]],
    seed: int,
    noise_std: float = 0.0,
) -> None:
    """Fill parameters and buffers with the initial values of the module; see `initialize_parts`.

    Parameters that are loaded are set to zero. Then only the buffers are computed, with no more than one
    parameter of the module in memory at a time.
    """
    loaded = architecture.loaded and not noise_std
    if loaded:
        with _parameters_on_meta():
            module = architecture.build(HOST)
    else:
        module = build_initial_module(architecture, seed)
    values = dict(module.named_parameters(remove_duplicate=False))
    for parameter, target, offset in targets:
        if loaded:
            target.zero_()
            continue
        shard, value = parameter.shard, values[parameter.shard.name]
        local = value.reshape(-1) if shard.local == shard.shape else shard.take(value).reshape(-1)
        piece = local[offset : offset + target.numel()]
        if noise_std and parameter.dim() == 1:
            fill_normal(target, offset, parameter.shard, seed, noise_std)
            target[: piece.numel()].add_(piece)
        else:
            target.zero_()
            target[: piece.numel()].copy_(piece)
    for part in parts:
        assert isinstance(part, ModulePart)
        part.module_buffers.fill(module)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to torch's device "meta" as soon as a module registers it, inside the context."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to(META), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _apply_user_function(module: nn.Module, code: NamedCode) -> None:
    """Call the user's function that changes the values of a module."""
    short, before = code.title, ModuleForm.of(module)
    function = import_function(code)
    with suppress(ValueError):  # the signature of some functions is unknown
        try:
            signature(function).bind(module)
        except TypeError as error:
            sentence = f"model.initial: {short} must take the module as its argument: {error}"
            raise HpctrainError(sentence) from None
    with run_user_code(f"model.initial: {short} fails"):
        function(module)
    _require_same_form(before, ModuleForm.of(module), f"model.initial: {short}")


def _require_same_form(expected: ModuleForm, actual: ModuleForm, subject: str) -> None:
    """Raise HpctrainError if a module has other parameters or buffers than expected."""
    if more := sorted(actual.first_names.keys() - expected.first_names.keys()):
        raise HpctrainError(f"{subject}: unexpected parameter {more[0]}")
    for name, shape in expected.shapes.items():
        shape_there, is_parameter = actual.shapes.get(name), name in expected.first_names
        kind = "parameter" if is_parameter else "buffer"
        if shape_there is None or is_parameter != (name in actual.first_names):
            raise HpctrainError(f"{subject}: missing {kind} {name}")
        if shape_there != shape:
            raise HpctrainError(f"{subject}: {name}: expected shape {shape}, got {shape_there}")
        if is_parameter and actual.first_names[name] != (first := expected.first_names[name]):
            raise HpctrainError(f"{subject}: {name}: must be the same parameter as {first}")
        if (name in actual.trained) != (name in expected.trained):
            state = "trained" if name in actual.trained else "frozen"
            raise HpctrainError(
                f"{subject}: {name}: became {state}, but initialization must change values only (use "
                "the module or model.frozen)"
            )
