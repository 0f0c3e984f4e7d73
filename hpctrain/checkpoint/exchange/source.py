"""Sources of initial weights: Hugging Face folders and checkpoints, from which each rank reads its pieces."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint.agree import first_difference, raise_on_all_ranks
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, examine
from hpctrain.checkpoint.exchange.hugging_face.architectures import (
    HEAD,
    HuggingFaceArchitecture,
    architecture_of,
)
from hpctrain.checkpoint.exchange.hugging_face.config_keys import Config, size_text
from hpctrain.checkpoint.exchange.hugging_face.config_reader import shape_of
from hpctrain.checkpoint.exchange.hugging_face.tensor_names import (
    ROUTER_BIAS,
    Counterpart,
    StackRule,
    TensorPart,
    counterparts,
)
from hpctrain.checkpoint.exchange.hugging_face.training_noise import ignored_training_keys_note
from hpctrain.checkpoint.exchange.module_source import folder_module_keys, stored_module_keys
from hpctrain.checkpoint.exchange.prediction_modules import (
    copied_tensors,
    has_entries_of_modules,
    is_copy,
    with_stored_modules,
    without_modules,
)
from hpctrain.checkpoint.exchange.quantization import dequantized
from hpctrain.checkpoint.exchange.safetensors_folder import (
    CONFIG,
    PICKLES,
    TYPES,
    TensorFolder,
    open_folder,
    read_json,
    refuse_pickle,
)
from hpctrain.checkpoint.exchange.size_causes import Differences, layer_number, likely_cause
from hpctrain.checkpoint.exchange.tokenizer_files import folder_tokenizer, tokenizer_of_folder
from hpctrain.checkpoint.exchange.upcycle import dense_entries
from hpctrain.checkpoint.finite import require_finite
from hpctrain.checkpoint.load import in_types, load
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.checkpoint.stored_tokenizer import TOKENIZER, stored_settings, tokenizer_state
from hpctrain.checkpoint.tensor_ranges import Index, TensorRange, boxes_of
from hpctrain.checkpoint.tensor_source import BUFFER_BYTES
from hpctrain.comm.world import World
from hpctrain.data.epochs import EpochReader
from hpctrain.data.tokenizer_settings import TokenizerSettings
from hpctrain.deck.families import CHOICES
from hpctrain.deck.sections.adapters import Adapters
from hpctrain.deck.sections.rope_scaling import scaling_values
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError, require_exists
from hpctrain.model.construction import bare_model
from hpctrain.model.part import parameter_list
from hpctrain.model.shape import Head, ModelShape
from hpctrain.model.width_scaling import STANDARD
from hpctrain.parallel.adapter import is_adapter
from hpctrain.parallel.scalar_head import NAME as SCORE
from hpctrain.sharding.state import MASTER, MODEL
from hpctrain.text import counted, either

_ROWS = {
    "embedding.tokens.weight": "vocabulary",
    "head.weight": "vocabulary",
    "embedding.positions.weight": "sequence",
}
"""Tensors whose numbers of rows may differ between source and run, and the field of ModelShape with it."""

EMBEDDING = "/model/embedding.tokens.weight"
"""Dataset of the vectors of tokens."""


@dataclass(frozen=True)
class ModelFolder:
    """Hugging Face folder, seen as native tensors in fp32.

    Attributes:
        folder: The folder.
        shape: Shape of its model.
        shapes: Global shapes of the native datasets.
        parts: Parts of tensors of the folder that make up each dataset, by the leading index of the piece.
        The
            index () means the complete dataset. Pieces of a vector have their first element as index.
    """

    folder: TensorFolder
    shape: ModelShape
    shapes: Mapping[str, Index]
    parts: Mapping[str, Mapping[Index, tuple[Counterpart, TensorPart]]]

    def read(self, dataset: str, start: Index, shape: Index) -> Tensor:
        """Return the box `shape` at `start` of a native tensor."""
        parts = self.parts[dataset]
        if () in parts:
            return self._read(*parts[()], start, shape)
        values = torch.empty(shape)
        if all(part.start is not None for _, part in parts.values()):
            for (begin,), (counterpart, part) in parts.items():
                first, last = max(begin, start[0]), min(begin + part.shape[0], start[0] + shape[0])
                if first < last:
                    piece = self._read(counterpart, part, (first - begin,), (last - first,))
                    values[first - start[0] : last - start[0]] = piece
            return values
        depth = len(next(iter(parts)))
        for offset in np.ndindex(*shape[:depth]):
            index = tuple(int(s + n) for s, n in zip(start, offset, strict=False))
            values[offset] = self._read(*parts[index], start[depth:], shape[depth:])
        return values

    def dtype(self, dataset: str) -> torch.dtype:  # noqa: ARG002
        """Return the dtype of a dataset, which is fp32 for all of them."""
        return torch.float32

    def require_equal_copies(self, rank: int, ranks: int, modules: bool = True) -> None:
        """Compare copies of the embedding and of the output layer in the files with these, if there are any.

        Args:
            rank: Rank that calls this, which compares every `ranks`-th piece.
            ranks: Number of ranks that call this.
            modules: True to compare also the copies that modules of multi-token prediction have.

        Raises:
            HpctrainError: A copy differs.
        """
        if self.shape.tied and not self._is_copy_of(HEAD, EMBEDDING, rank, ranks):
            raise HpctrainError(
                f"{self.folder.path / self.folder.tensors[HEAD].file}: {HEAD}: differs from the embedding "
                f"that {CONFIG} ties it to; set tie_word_embeddings to false there, or remove the tensor"
            )
        for copy in copied_tensors(self.shape, self.shapes) if modules else ():
            dataset = copy.parts[0].dataset
            if not self._is_copy_of(copy.name, dataset, rank, ranks):
                layer = "embedding" if dataset == EMBEDDING else "output layer"
                raise HpctrainError(
                    f"{self.folder.path / self.folder.tensors[copy.name].file}: {copy.name}: differs from "
                    f"the {layer} of the model, which modules of multi-token prediction share"
                )

    def _is_copy_of(self, name: str, dataset: str, rank: int, ranks: int) -> bool:
        """Return True if no file has a tensor `name`, or this rank's pieces of it equal `dataset`'s."""
        copy = self.folder.tensors.get(name)
        if copy is None:
            return True
        rows, width = size = self.shapes[dataset]
        if copy.shape != size or copy.kind not in TYPES:
            return False
        step = max(1, BUFFER_BYTES // 4 // width)
        for first in range(rank * step, rows, ranks * step):
            start, piece = (first, 0), (min(step, rows - first), width)
            values = self.folder.read_finite(name, start, piece).float()
            if not torch.equal(values, self.read(dataset, start, piece)):
                return False
        return True

    def _read(self, counterpart: Counterpart, part: TensorPart, start: Index, shape: Index) -> Tensor:
        """Return a box of a native tensor, or of its piece, from the Hugging Face tensor that holds it."""
        if part.expert_order is not None:
            return part.expert_order.read(
                partial(self.folder.read_finite, counterpart.name), start, shape
            ).float()
        if counterpart.flattened:
            width = counterpart.shape[1]
            first, last = start[0] // width, -(-(start[0] + shape[0]) // width)
            flat = (
                self.folder.read_finite(counterpart.name, (first, 0), (last - first, width)).float().flatten()
            )
            features = np.arange(start[0], start[0] + shape[0])
            rows = features if part.order is None else np.asarray(part.rows(start[0], shape[0]))
            return flat[torch.from_numpy(rows - first * width)]
        if part.order is not None:
            rows = np.asarray(part.rows(start[0], shape[0]))
            low, high = int(rows.min()), int(rows.max()) + 1
            extent = (high - low, *shape[1:])
            all_rows = self.folder.read_finite(counterpart.name, (low, *start[1:]), extent).float()
            return all_rows[torch.from_numpy(rows - low)]
        start = (start[0] + part.first, *start[1:])
        if counterpart.transposed:
            return self.folder.read_finite(counterpart.name, start[::-1], shape[::-1]).t().float()
        return self.folder.read_finite(counterpart.name, start, shape).float()


class SourceReader(EpochReader):
    """Reader of the models that decks name in `model.from`."""

    def __call__(self, path: str) -> dict[str, object]:
        """Return the keys of a deck that the model at `path` determines, by full name.

        `causal_model_keys` explains those of a module.

        Raises:
            HpctrainError: There is no model that can be trained.
            InputOutputError: A file cannot be read.
        """
        source = Path(path)
        if _is_checkpoint(source):
            structure = examine(source)
            if keys := stored_module_keys(structure):
                return keys
            shape = stored_shape(structure)
        elif keys := folder_module_keys(source):
            return keys
        else:
            shape = source_shape(source)
        keys = {f"model.{name}": value for name, value in model_keys(shape).items()}
        return keys | {"batch.sequence": shape.sequence}


read_source_keys = SourceReader()


_EXPERT_KEYS = (
    *("count", "per_token", "mlp", "shared", "every", "dense_first", "pattern", "shared_gate", "router_bias"),
    *("router", "router_normalize", "router_scale"),
    *("router_groups", "router_groups_per_token", "router_group_best"),
)
"""Keys of [model.experts] that change what a model computes."""


def model_keys(shape: ModelShape) -> dict[str, object]:
    """Return the keys of [model] that describe a shape, by name."""
    names = ["family", "layers", "hidden", "heads", "key_value_heads", "mlp", "vocabulary", "tied"]
    names += ["head_size", *CHOICES, "embedding_multiplier", "norm_epsilon"]
    names += [name for name in ("attention_scale", "rope_local_base") if getattr(shape, name) is not None]
    scaling = shape.width_scaling
    base = {
        "base_width": round(shape.hidden / scaling.width),
        "base_head_size": round(shape.head_size / scaling.head),
    }
    names += ["rope_base"] if shape.positions == "rotary" else []
    mup_keys = {} if scaling == STANDARD else {"parametrization": "mup", **base}
    keys = {name: getattr(shape, name) for name in names}
    if shape.latent is not None:
        keys |= {f"latent.{name}": value for name, value in shape.latent if value is not None}
    if (experts := shape.experts) is not None:
        keys |= {f"experts.{key}": getattr(experts, key) for key in _EXPERT_KEYS}
        if experts.balance == "bias":  # without a bias in the router, the deck says how the load is balanced
            keys["experts.balance"] = experts.balance
    if shape.rope_scaling is not None:
        keys |= {f"rope_scaling.{name}": value for name, value in scaling_values(shape.rope_scaling).items()}
    return keys | mup_keys


def source_tokenizer(path: Path) -> tuple[str | None, str]:
    """Return the text of the tokenizer of a source and ""; or None and the reason why there is none.

    Raises:
        HpctrainError: There is no such model.
        InputOutputError: A file cannot be read.
    """
    if not _is_checkpoint(path):
        return folder_tokenizer(path)
    text = examine(path).state.get(TOKENIZER)
    return (text, "") if isinstance(text, str) else (None, "it has none")


def source_state(path: Path, vocabulary: int | None) -> dict[str, Any]:
    """Return the state of a source, or only its keys for the tokenizer if the source is a folder.

    Args:
        path: Hugging Face folder or checkpoint. Other paths have no tokenizer.
        vocabulary: Number of tokens of the model, which a tokenizer may not exceed; None if it is unknown.

    Raises:
        HpctrainError: A checkpoint cannot be read.
    """
    if path.is_dir():
        text, settings, _ = tokenizer_of_folder(path, vocabulary)
        return tokenizer_state(text, settings)
    if not _is_checkpoint(path):
        return tokenizer_state(None, TokenizerSettings())
    return dict(examine(path).state)


def training_note(path: Path, dropout: float = 0.0) -> str:
    """Return a note about keys for dropout and noise in a model's config.json, which training ignores.

    Args:
        path: Hugging Face folder, or checkpoint. The latter has a config.json if its model was imported.
        dropout: Value of model.dropout of the run that starts from the model.

    Returns:
        The note; "" if there are no such keys.
    """
    if _is_checkpoint(path):
        config = stored_settings(examine(path).state).file(CONFIG)
        return ignored_training_keys_note(config, f"{path}: {CONFIG}", dropout)
    return ignored_training_keys_note(read_json(path / CONFIG), str(path / CONFIG), dropout)


def source_shape(path: Path) -> ModelShape:
    """Return the shape of the model in a Hugging Face folder or a checkpoint, without reading a tensor."""
    return stored_shape(examine(path)) if _is_checkpoint(path) else _folder_shape(path)


def stored_shape(structure: CheckpointIndex) -> ModelShape:
    """Return the shape that the deck of a checkpoint describes."""
    path = structure.path
    deck = stored_deck(structure.state, path)
    if deck.model.vocabulary is None:
        raise HpctrainError(f"{path}: its deck: model.vocabulary is missing")
    if deck.model.layers > len(structure.datasets):
        tensors = f"the file holds {len(structure.datasets)} tensors"
        raise HpctrainError(f"{path}: its deck: model.layers = {deck.model.layers}, but {tensors}")
    return ModelShape.of(deck, deck.model.vocabulary)


def open_model(path: Path) -> ModelFolder:
    """Open a Hugging Face folder whose tensors are those that its config describes. A local call.

    Raises:
        HpctrainError: Tensors are missing, too many, or of another shape or type, among others as in
            `open_folder` and `shape_of`.
    """
    _folder_shape(path)
    config = read_json(path / CONFIG)
    architecture = architecture_of(config, str(path / CONFIG))
    folder = dequantized(open_folder(path), config, architecture.files.quantization)
    shape, shapes, tensors = _described_model(config, folder)
    differences = _differences(folder, tensors, shape, architecture)
    if differences:

        @cache
        def first_layers(layers: int | None) -> TensorFolder:
            names = (name for name in folder.tensors if layers is None or layer_number(name) < layers)
            return TensorFolder(path, {name: folder.tensors[name] for name in names})

        def compare(changed: Config, layers: int | None) -> Differences:
            other_shape, _, other_tensors = _described_model(changed, folder, layers)
            return _differences(first_layers(layers), other_tensors, other_shape, architecture)

        names = [each.name for each in tensors], folder.tensors
        first, cause = likely_cause(config, architecture, shape, names, compare)
        problem = _problem(folder, first, differences.pop(first)) + cause
        raise first_difference([problem, *(_problem(folder, *each) for each in differences.items())])
    parts: dict[str, dict[Index, tuple[Counterpart, TensorPart]]] = {}
    for each in tensors:
        for part in each.parts:
            index = part.index if part.start is None else (part.start,)
            parts.setdefault(part.dataset, {})[index] = (each, part)
    return ModelFolder(folder, shape, shapes, parts)


def _described_model(
    config: Config, folder: TensorFolder, layers: int | None = None
) -> tuple[ModelShape, dict[str, Index], list[Counterpart]]:
    """Return the shape of the model of a config.json, the shapes of its tensors, and their names in files.

    Args:
        config: Content of the config.json.
        folder: Its folder, whose tensors may have names without a prefix.
        layers: Largest number of layers of the shapes and the names; None for all layers.

    Raises:
        HpctrainError: The config.json is invalid, or describes more layers or experts than there are tensors.
    """
    where, count = folder.path / CONFIG, len(folder.tensors)
    architecture = architecture_of(config, str(where))
    shape = shape_of(config, str(where))
    if layers is None:
        shape = with_stored_modules(shape, config, architecture, folder.tensors, str(where))
    size = size_text(architecture.files.config_sizes["layers"][0], shape.layers, config)
    files = f"the files hold {counted(count, 'tensor')}"
    if shape.layers > count:
        raise HpctrainError(f"{where}: {size}: describes more layers than there are, since {files}")
    mixture, blocks = architecture.files.mixture, len(shape.mixture_blocks)
    has_tensor_per_expert = any(isinstance(rule, StackRule) for rule in architecture.rules)
    experts = 0 if shape.experts is None else shape.experts.count
    if mixture is not None and has_tensor_per_expert and experts * blocks > count:
        size = f"{size}, {size_text(mixture.sizes['count'][0], experts, config)}"
        text = f"{counted(experts, 'expert')} in each of {counted(blocks, 'layer')}"
        raise HpctrainError(f"{where}: {size}: describes {text}, but {files}")
    if layers is not None:
        shape = replace(shape, layers=min(shape.layers, layers))
    shapes = tensor_shapes(shape)
    tensors = counterparts(architecture.rules, shapes, architecture.head_order(shape))
    prefix = architecture.files.prefix
    if not any(name.startswith(prefix) for name in folder.tensors):
        tensors = [replace(each, name=each.name.removeprefix(prefix)) for each in tensors]
    return shape, shapes, tensors


def tensor_shapes(shape: ModelShape) -> dict[str, Index]:
    """Return the global shapes of all tensors of a model by dataset, in its order, then biases of routers."""
    parameters = parameter_list(bare_model(shape))
    shapes = {f"/model/{each.shard.name}": each.shard.shape for each in parameters}
    if shape.experts is not None and shape.experts.balance == "bias":
        for block in shape.mixture_blocks:
            shapes[f"/{ROUTER_BIAS}/blocks.{block}.feed_forward.router.weight"] = (shape.experts.count,)
    return shapes


def load_source(
    path: Path,
    world: World,
    entries: Sequence[TensorRange],
    head: Head = "vocabulary",
    adapters: Adapters | None = None,
) -> ModelShape:
    """Fill entries of a model from other weights, each rank its pieces. Collective.

    If the source has no experts, they are copies of its feed-forward parts (see `upcycle`). Entries stay as
    they are if the source does not have them: rows of a larger vocabulary, padding, biases of routers,
    adapters, and a scalar head that replaces the head of a language model. Positions of the source beyond
    those of the entries are left out. Checksums of a checkpoint are compared.

    Args:
        path: Hugging Face folder or checkpoint.
        world: The ranks.
        entries: Entries `/model/<name>`, and perhaps biases of routers.
        head: Kind of output layer of the model.
        adapters: Adapters of the model; None without them.

    Returns:
        Shape of the source.

    Raises:
        HpctrainError: The source does not fit, as in `source_shape`, `open_model` and `checkpoint.load.load`.
            All ranks raise the same error.
        InputOutputError: Weights cannot be read or are not finite.
    """
    group = world.everyone
    if not _is_checkpoint(path):
        with raise_on_all_ranks(group):
            model = open_model(path)
            _require_head(path, model.shape, head)
            modules = has_entries_of_modules(entries, model.shape)
            model.require_equal_copies(group.rank, group.size, modules)
            source_entries = _source_entries(entries, model.shape)
            with in_types(source_entries, lambda _: "float32") as fp32_entries:
                for entry in fp32_entries:
                    _fill(_with_source_rows(entry, model.shape), model)
        return model.shape
    structure = examine(path, group)
    with raise_on_all_ranks(group):
        shape = stored_shape(structure)
        _require_head(path, shape, head)
        _require_adapters(path, shape, adapters)
    source_entries = [
        _most_exact(_with_source_rows(entry, shape), structure) for entry in _source_entries(entries, shape)
    ]
    kinds = {name: stored.kind for name, stored in structure.datasets.items()}
    left = () if shape.adapters is None else (MODEL,)
    with in_types(source_entries, lambda entry: kinds.get(entry.dataset, entry.kind)) as read_entries:
        strict = head == shape.head and not shape.mtp_layers  # a run need not have its modules
        load(structure, group, read_entries, strict=strict, zero_padding=False, left=left)
        require_finite(group, path, read_entries, "start from an earlier checkpoint, or from another model")
    return shape


def _most_exact(entry: TensorRange, structure: CheckpointIndex) -> TensorRange:
    """Return the entry of the master weights if the checkpoint has them, or else the entry itself."""
    exact = entry.dataset.replace(f"/{MODEL}/", f"/{MASTER}/", 1)
    return replace(entry, dataset=exact) if exact in structure.datasets else entry


def _require_head(path: Path, shape: ModelShape, head: Head) -> None:
    """Raise HpctrainError if the source is a reward model, and the run trains a language model."""
    if shape.head == "scalar" and head == "vocabulary":
        raise HpctrainError(
            f"{path}: is a reward model, whose head computes scores instead of logits; start from the "
            "language model that it was trained from"
        )


def _require_adapters(path: Path, shape: ModelShape, adapters: Adapters | None) -> None:
    """Raise HpctrainError if a source has other adapters than a run."""
    if shape.adapters is not None and shape.adapters != adapters:
        run = "this run has none" if adapters is None else f"this run has {_describe_adapters(adapters)}"
        hint = "`hpctrain export` merges them into the weights"
        raise HpctrainError(f"{path}: has {_describe_adapters(shape.adapters)}, but {run} ({hint})")


def _describe_adapters(adapters: Adapters) -> str:
    """Return the settings of adapters in words."""
    targets = toml_value(adapters.targets)
    return f"adapters of rank {adapters.rank}, alpha {adapters.alpha:g}, targets {targets}"


def _is_checkpoint(path: Path) -> bool:
    """Return True if a path is that of a checkpoint of hpctrain, False for a folder or a file of one."""
    in_folder = path.suffix in (".safetensors", ".json", *PICKLES)
    return not path.is_dir() and (path.is_file() or path.suffix == ".h5") and not in_folder


def _folder_shape(path: Path) -> ModelShape:
    is_hub_name = not path.is_absolute() and len(path.parts) == 2 and not path.parent.exists()
    hub = f"; nothing is downloaded: fetch a model of the hub with `hf download {path} --local-dir FOLDER`"
    require_exists(path, f"file or folder{hub if is_hub_name else ''}")
    refuse_pickle(path)
    if path.is_file():
        raise HpctrainError(f"{path}: is a file; give its folder, which must contain a {CONFIG}")
    if not (path / CONFIG).is_file():
        hint = "; give one of the checkpoints of this run" if (path / "checkpoints").is_dir() else ""
        raise HpctrainError(f"{path}: is not a Hugging Face folder, since it has no {CONFIG}{hint}")
    return shape_of(read_json(path / CONFIG), str(path / CONFIG))


def _source_entries(entries: Sequence[TensorRange], shape: ModelShape) -> list[TensorRange]:
    """Return the entries that a source of this shape has. Experts read from its feed-forward parts."""
    if shape.head == "vocabulary":
        entries = [entry for entry in entries if entry.dataset != f"/model/{SCORE}"]
    if shape.adapters is None:
        entries = [entry for entry in entries if not is_adapter(entry.shard.name)]
    if shape.experts is None:
        entries = [dense for entry in entries for dense in dense_entries(entry)]
    entries = without_modules(entries, shape)
    biased = shape.experts is not None and shape.experts.balance == "bias"
    return [entry for entry in entries if biased or not entry.dataset.startswith(f"/{ROUTER_BIAS}/")]


def _differences(
    folder: TensorFolder,
    tensors: Sequence[Counterpart],
    shape: ModelShape,
    architecture: HuggingFaceArchitecture,
) -> Differences:
    """Return the tensors that only the model of a config.json or only its folder has."""
    differences: Differences = {}
    expected = {each.name: each.shape for each in tensors}
    for name, size in expected.items():
        tensor = folder.tensors.get(name)
        if tensor is None or tensor.shape != size or tensor.kind not in TYPES:
            differences[name] = size, None if tensor is None else tensor.shape
    for name, tensor in folder.tensors.items():
        ignored = re.fullmatch(architecture.files.buffers, name) or (shape.tied and name == HEAD)
        ignored = ignored or 0 in tensor.shape  # such as matrices of 0 shared experts
        if name not in expected and not ignored and not is_copy(name, shape):
            differences[name] = None, tensor.shape
    return differences


def _problem(folder: TensorFolder, name: str, shapes: tuple[Index | None, Index | None]) -> str:
    """Return the message about a tensor with different shapes in the model and in the folder."""
    expected, stored = shapes
    if stored is None:
        size = list(expected or ())
        return f"{folder.path}: {name}: not in these files, expected with shape {size} by {CONFIG}"
    tensor = folder.tensors[name]
    problem = f"has type {tensor.kind}, expected {either(TYPES)}"
    if expected is None:
        problem = f"in this file, but not in the model of {CONFIG}"
    elif expected != stored:
        problem = f"has shape {list(stored)}, expected {list(expected)} by {CONFIG}"
    return f"{folder.path / tensor.file}: {name}: {problem}"


def _with_source_rows(entry: TensorRange, shape: ModelShape) -> TensorRange:
    """Return an entry as a piece of the source's tensor. Further rows of the run are its padding."""
    shard = entry.shard
    if shard.name not in _ROWS:
        return entry
    rows = int(getattr(shape, _ROWS[shard.name]))
    return replace(entry, shard=replace(shard, shape=(rows, *shard.shape[1:])))


def _fill(entry: TensorRange, model: ModelFolder) -> None:
    """Read the values of an entry, without changing padding."""
    assert entry.kind == "float32", entry.kind
    for box in boxes_of(entry):
        for chunk in box.cut(BUFFER_BYTES // 4):
            with chunk.filling(entry.values) as bits:
                bits.view(torch.float32).copy_(model.read(entry.dataset, chunk.start, chunk.shape))
