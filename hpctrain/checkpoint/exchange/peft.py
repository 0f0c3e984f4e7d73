"""Export of the adapters of a checkpoint in the format of the library `peft`.

If a Hugging Face matrix holds several native ones, as GPT-2's of queries, keys and values, its factors hold
those of all native matrices, and its rank is the sum of their ranks.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.agree import raise_on_all_ranks
from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.exchange.convert import require_new
from hpctrain.checkpoint.exchange.hugging_face.export_choice import architecture_for_export
from hpctrain.checkpoint.exchange.hugging_face.tensor_names import Counterpart, counterparts
from hpctrain.checkpoint.exchange.merge import AdapterMerge
from hpctrain.checkpoint.exchange.safetensors_folder import NewTensor, create_tensor_file, write_text
from hpctrain.checkpoint.exchange.source import stored_shape, tensor_shapes
from hpctrain.checkpoint.stored_tokenizer import stored_settings
from hpctrain.checkpoint.tensor_source import TensorSource, open_tensors
from hpctrain.comm.error_messages import with_final_name
from hpctrain.comm.world import World
from hpctrain.data.tokenizer_settings import MODEL_CONFIG
from hpctrain.deck.sections.adapters import Adapters
from hpctrain.errors import HpctrainError
from hpctrain.files import delete_folder, files_named, flush_to_disk
from hpctrain.text import counted

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_OWN_FILE = files_named(r"adapter_config\.json|adapter_model\.safetensors")
_PREFIX = "base_model.model."


def export_adapters(world: World, checkpoint: Path, folder: Path, base: str) -> str:
    """Write the adapters of a checkpoint as a folder for `peft` in fp32. Collective; rank 0 writes.

    Args:
        world: The ranks.
        checkpoint: The checkpoint.
        folder: The new folder, which is written completely or not at all.
        base: Name or path of the model to which users apply the adapters.

    Returns:
        Message for the user about what was written.

    Raises:
        HpctrainError: The checkpoint has no adapters, or the folder has files.
        InputOutputError: A file cannot be read or written.
    """
    group = world.everyone
    structure = examine(checkpoint, group)
    temporary = folder.with_name(f".{folder.name}.tmp")
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    try:
        with with_final_name(temporary, folder), raise_on_all_ranks(group):
            if group.rank == 0:
                require_new(folder)
                shape = stored_shape(structure)
                adapters = shape.adapters
                if adapters is None:
                    raise HpctrainError(
                        f"{checkpoint}: has no adapters; leave out --adapters to export the whole model"
                    )
                imported = stored_settings(structure.state).file(MODEL_CONFIG)
                architecture, merge = (
                    architecture_for_export(shape, imported),
                    AdapterMerge(structure, adapters),
                )
                tensors = counterparts(
                    architecture.rules,
                    tensor_shapes(replace(shape, adapters=None)),
                    architecture.head_order(shape),
                )
                with open_tensors(structure.path) as source:
                    for each in tensors:
                        if (pair := _joined_factors(source, merge, each)) is not None:
                            factors[each.name.removesuffix(".weight")] = pair
                temporary.mkdir(parents=True)
                _write(temporary / _TENSORS, factors)
                transposed = any(each.transposed for each in tensors)
                config = _config(adapters, factors, base, transposed)
                write_text(temporary / _CONFIG, json.dumps(config, indent=2) + "\n")
                flush_to_disk(temporary)
                temporary.replace(folder)
                flush_to_disk(folder.absolute().parent)
    finally:
        if group.rank == 0 and temporary.exists():
            with suppress(HpctrainError, OSError):
                delete_folder(temporary, _OWN_FILE)
    return f"{folder}: {counted(len(factors), 'adapter')}, fp32, for `peft` with the base model {base}"


def _joined_factors(
    source: TensorSource, merge: AdapterMerge, counterpart: Counterpart
) -> tuple[Tensor, Tensor] | None:
    """Return B and A of a Hugging Face matrix, for all native ones in it; None if these have no adapters."""
    pairs = [(part, merge.factors(source, part.dataset)) for part in counterpart.parts]
    adapted = [(part, *pair) for part, pair in pairs if pair is not None]
    if not adapted:
        return None
    out_features = counterpart.shape[-1 if counterpart.transposed else 0]
    rank = adapted[0][2].shape[0]
    joined = torch.zeros(out_features, rank * len(adapted))
    for number, (part, b, _) in enumerate(adapted):
        rows, target = part.rows(0, len(b)), joined[:, number * rank : (number + 1) * rank]
        target[rows if isinstance(rows, slice) else torch.from_numpy(rows)] = b
    return joined, torch.cat([a for _, _, a in adapted])


def _write(path: Path, factors: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Write the factors B and A of each layer to a file."""
    tensors = {}
    for name, (b, a) in factors.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b
    new_tensors = [NewTensor(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    for name, view in create_tensor_file(path, new_tensors):
        view[...] = tensors[name].contiguous().view(torch.int32).numpy().view(view.dtype)


def _config(
    adapters: Adapters, factors: dict[str, tuple[Tensor, Tensor]], base: str, transposed: bool
) -> dict[str, Any]:
    """Return the content of adapter_config.json. Rank and alpha of joined matrices are sums."""
    joined = {name: len(a) // adapters.rank for name, (_, a) in factors.items() if len(a) > adapters.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "target_modules": sorted(factors),
        "rank_pattern": {name: times * adapters.rank for name, times in joined.items()},
        "alpha_pattern": {name: times * adapters.alpha for name, times in joined.items()},
        "fan_in_fan_out": transposed,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
