"""Tensors of a model of `transformers`: those that the module has, and those that its files have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cached_property
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpctrain.checkpoint.exchange.assembled_tensor import AssembledTensor, Index
from hpctrain.checkpoint.exchange.safetensors_folder import CONFIG, TensorFolder, TensorInfo
from hpctrain.deck.user_code import run_user_code
from hpctrain.errors import HpctrainError
from hpctrain.text import either

_BLOCK = re.compile(r".*?\.\d+\.")
"""Prefix of the names of all tensors of a block, such as "model.layers.3."."""

_NUMBER = re.compile(r"\.(\d+)(?=\.)")
"""Number of a block or expert in the name of a tensor."""

_BUFFER_PATTERNS = (
    r"rotary_emb\.inv_freq$",
    r"(^|\.)position_ids$",
    r"\.(attn|attention)\.(bias|masked_bias|causal_mask)$",  # causal masks of GPT-J, GPT-Neo and CodeGen
)
"""Patterns of the names of buffers that files of older versions have. Models compute their values."""

_LAYER_COUNTS = ("layers", "n_layer")
"""Suffixes of the keys of a config.json that give a number of layers."""


def state_shapes(module: nn.Module) -> dict[str, Index]:
    """Return the shape of each dataset of a module: parameters by their first names, persistent buffers."""
    kept = module.state_dict(keep_vars=True)
    shapes = {f"/model/{name}": tuple(each.shape) for name, each in module.named_parameters()}
    buffers = {f"/buffer/{name}": tuple(each.shape) for name, each in module.named_buffers() if name in kept}
    return shapes | buffers


def parameter_names(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter of a module by its first one."""
    first: dict[nn.Parameter, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(first.setdefault(parameter, name), []).append(name)
    return names


def integer_types(module: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of each dataset of a module that holds integers, such as a table of hash values."""
    buffers = ((f"/buffer/{name}", each.dtype) for name, each in module.named_buffers())
    return {dataset: dtype for dataset, dtype in buffers if not dtype.is_floating_point}


def file_tensors(module: nn.Module, shapes: Mapping[str, Index]) -> dict[str, AssembledTensor]:
    """Return the tensors of a model's files, made of datasets, as `save_pretrained` writes them.

    Args:
        module: The model, on "meta".
        shapes: Its datasets, as `state_shapes` returns them.

    Raises:
        HpctrainError: The conversion of this architecture changes tensors in a way that is unsupported.
    """
    state: dict[str, Any] = {}
    names, tied = parameter_names(module), getattr(module, "all_tied_weights_keys", None) or {}
    for dataset, shape in shapes.items():
        first = dataset.split("/", 2)[2]
        untied = (name for name in names.get(first, ()) if name not in tied)
        state[next(untied, first)] = AssembledTensor.of(dataset, shape)
    ignored = getattr(module, "_keys_to_ignore_on_save", None) or ()
    state = {name: each for name, each in state.items() if name not in ignored}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # version 4 stores what its modules have
        return state
    with _conversion_errors(module):
        converted: dict[str, AssembledTensor] = revert_weight_conversion(module, state)  # type: ignore[arg-type]
        boxes = [box for each in converted.values() for box in each.boxes]
        if any(prod(box.shape) != prod(box.source_shape) for box in boxes):
            raise NotImplementedError("its files reorder the elements of a dim in a way that is unsupported")
    return converted


class ModuleFolder(TensorFolder):
    """Folder of a model of `transformers`, seen as the tensors that its module has.

    Args:
        folder: The folder.
        module: The model, on "meta".

    Raises:
        HpctrainError: The conversion of this architecture changes tensors in a way that is unsupported.
    """

    def __init__(self, folder: TensorFolder, module: nn.Module) -> None:
        self._folder = folder
        self._config: Any = getattr(module, "config", None)
        self._module = module
        self._known = {*module.state_dict(keep_vars=True)}
        self._ignored = _ignored_names(module)
        shapes = {name: each.shape for name, each in folder.tensors.items()}
        self._assembled = _module_tensors(module, shapes)
        super().__init__(folder.path, {name: self._describe(each) for name, each in self._assembled.items()})

    @override
    def read(self, name: str, start: Index, shape: Index) -> Tensor:
        return self._assembled[name].read(start, shape, self._folder.read)

    @property
    def ties_embeddings(self) -> bool:
        """True if the model's config.json says that the output layer is the embedding."""
        return bool(getattr(self._config, "tie_word_embeddings", False))

    def unknown_tensors(self) -> tuple[list[str], list[str]]:
        """Return the tensors of the files that the module does not have.

        Returns:
            Messages about those that `transformers` would report, and the names of those that it ignores,
            such as modules of multi-token prediction that its class leaves out.
        """
        problems: list[str] = []
        ignored: list[str] = []
        for name, described in self.tensors.items():
            if name in self._known or 0 in described.shape:
                continue
            if self._ignored(name):
                ignored.append(name)
                continue
            file, cause = self.path / described.file, "" if problems else self._unknown_cause(name)
            problems.append(f"{file}: {name}: in this file, but not in the model of {CONFIG}{cause}")
        return problems, ignored

    def _unknown_cause(self, name: str) -> str:
        """Return the key of the model's config.json that leaves a tensor out, as the end of a message."""
        for found in _NUMBER.finditer(name):
            prefix = name[: found.start()]
            in_files = _block_numbers(self._folder.tensors, prefix)
            in_model = len(_block_numbers(self._known, prefix))
            if int(found[1]) not in _block_numbers(self._known, prefix) and len(in_files) != in_model:
                values = {} if self._config is None else self._config.get_text_config().to_dict()
                keys = [key for key in values if key.endswith(_LAYER_COUNTS) and values[key] == in_model]
                return f", where {keys[0]} = {in_model}, but the files have {len(in_files)}" if keys else ""
        key = self._switch(name)
        return f", where {key}" if key else ""

    def likely_cause(self, tensor: str, shape: Index) -> str:
        """Return the keys of the model's config.json that probably cause a mismatch, as the end of a message.

        If a tensor has another shape, these are the keys with sizes that only the required shape has. If all
        tensors of a block are missing, they are the keys for the number of layers. If another tensor is
        missing, it is the key that switches it on.

        Args:
            tensor: Name of a tensor that is missing or has another shape.
            shape: Shape that the model requires.

        Returns:
            The keys and their values in parentheses; "" if there are none.
        """
        sizes = _config_sizes(self._config)
        if tensor in self.tensors:
            required = set(shape) - set(self.tensors[tensor].shape)
            keys = [key for key, size in sizes.items() if size in required]
        else:
            block = _BLOCK.match(tensor)
            is_block_missing = block and not any(name.startswith(block[0]) for name in self.tensors)
            if not is_block_missing:
                key = self._switch(tensor)
                return f" ({key} in {CONFIG})" if key else ""
            keys = [key for key in sizes if key.endswith(_LAYER_COUNTS)]
        return f" ({either(f'{key} = {sizes[key]}' for key in keys)} in {CONFIG})" if keys else ""

    def _switch(self, tensor: str) -> str:
        """Return the true or false key without which the model has a tensor, or has it not; "" if unknown."""
        for key, names in self._switched_names.items():
            if (tensor in names) != (tensor in _state_names(self._module)):
                return f"{key} = {getattr(self._config, key)}"
        return ""

    @cached_property
    def _switched_names(self) -> dict[str, set[str]]:
        """Names of the tensors of the model with the opposite value of each true or false key, by key."""
        found: dict[str, set[str]] = {}
        values: dict[str, Any] = {} if self._config is None else self._config.to_dict()
        for key, value in values.items():
            if isinstance(value, bool):
                config, model_class = deepcopy(self._config), cast("Any", type(self._module))
                with suppress(HpctrainError), run_user_code(key), torch.device("meta"):
                    setattr(config, key, not value)
                    found[key] = _state_names(model_class._from_config(config))
        return found

    def _describe(self, tensor: AssembledTensor) -> TensorInfo:
        first = self._folder.tensors[tensor.boxes[0].source]
        return TensorInfo(first.kind, tensor.shape, first.file)


def _state_names(module: nn.Module) -> set[str]:
    """Return the names of a module's parameters and persistent buffers, a shared one by its first name."""
    return {dataset.split("/", 2)[2] for dataset in state_shapes(module)}


def _ignored_names(module: nn.Module) -> Callable[[str], bool]:
    """Return a function that is true for tensors of files that a model of `transformers` ignores silently.

    They are buffers that it computes, and names that match the patterns of its class.
    """
    buffers = {name for name, _ in module.named_buffers()}
    patterns = [*_BUFFER_PATTERNS, *(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())]
    expression = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return lambda name: name in buffers or expression.search(name) is not None


def _block_numbers(names: Iterable[str], prefix: str) -> set[int]:
    """Return the numbers that follow a prefix in names, which may have it after those of outer modules."""
    expression = re.compile(rf"(?:.*\.)?{re.escape(prefix)}\.(\d+)\.")
    return {int(found[1]) for name in names if (found := expression.match(name))}


def _module_tensors(module: nn.Module, files: Mapping[str, Index]) -> dict[str, AssembledTensor]:
    """Return the tensors of a module, made of those of files. Others keep the name that the file has."""
    leaves = {name: AssembledTensor.of(name, shape) for name, shape in files.items()}
    known = module.state_dict(keep_vars=True)
    prefix = getattr(module, "base_model_prefix", "")
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:  # version 4
        return {_prefixed(name, known, prefix): each for name, each in leaves.items()}
    changes: Any = get_model_conversion_mapping(module)  # type: ignore[arg-type]
    renamings = [each for each in changes if isinstance(each, WeightRenaming)]
    converters = [each for each in changes if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, AssembledTensor] = {}
    collected: dict[str, Any] = {}
    for name in sorted(files, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = name, None
        if pattern is None or renamed not in known:
            _add_tensor(found, renamed if renamed in known else name, leaves[name])
            continue
        converter = collected.setdefault(renamed, deepcopy(of_pattern[pattern]))
        converter.add_tensor(renamed, name, pattern, leaves[name])
    for name, converter in collected.items():
        with _conversion_errors(module):
            made = converter.convert(name, model=module, config=module.config)
        for key, each in made.items():
            _add_tensor(found, key, each[0] if isinstance(each, list) else each)
    return found


def _add_tensor(tensors: dict[str, AssembledTensor], name: str, tensor: AssembledTensor) -> None:
    """Add a tensor under its name in the module.

    Raises:
        HpctrainError: The files have another tensor for this name. `transformers` would silently take one.
    """
    if (other := tensors.get(name)) is not None:
        sources = f"{other.boxes[0].source} and {tensor.boxes[0].source}"
        raise HpctrainError(f"{sources}: both are in the files, for one tensor of the model; remove one")
    tensors[name] = tensor


def _config_sizes(config: Any) -> dict[str, int]:
    """Return the sizes in the configuration of a model of `transformers`, by key.

    They include products of `head_dim` and a number of heads, which are features of projections, and numbers
    of positions with the two unused ones of BART and its descendants.
    """
    values: dict[str, Any] = {} if config is None else config.get_text_config().to_dict()
    numbers = {key: each for key, each in values.items() if isinstance(each, int) and each > 0}
    sizes = {key: each for key, each in numbers.items() if each > 1 and not key.endswith("_token_id")}
    head = sizes.get("head_dim", 0)
    counts = {key: count for key, count in numbers.items() if head and key.endswith("_heads")}
    lengths = {f"{key} + 2": each + 2 for key, each in sizes.items() if key.endswith("position_embeddings")}
    return sizes | {f"{key} * head_dim": count * head for key, count in counts.items()} | lengths


@contextmanager
def _conversion_errors(module: nn.Module) -> Iterator[None]:
    """Turn errors of a conversion that an AssembledTensor does not support into an HpctrainError."""
    try:
        yield
    except (TypeError, AttributeError, NotImplementedError) as error:
        kind = type(module).__name__
        raise HpctrainError(f"{kind}: the layout of its weights in files is unsupported: {error}") from error


def _prefixed(name: str, known: Mapping[str, Any], prefix: str) -> str:
    """Return the name that a module has for a tensor of a file with or without the prefix of its body."""
    names = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
    return next((each for each in names if each in known), name)
