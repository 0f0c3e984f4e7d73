"""Adapters of a checkpoint by themselves, as the library `peft` has them.

Where one of their matrices holds several of ours side by side, as GPT-2's of queries, keys and values, its
factors hold those of ours, and its rank is the sum of theirs.
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
    """Write the adapters of a checkpoint as a folder for `peft`, complete or not there, in fp32; collective,
    rank 0 writes. `base` is where its user finds the model that they are for.

    Returns what was written, in words. HpctrainError where there are none, or the folder has files.
    """
    group = world.everyone
    structure = examine(checkpoint, group)
    temporary = folder.with_name(f".{folder.name}.tmp")
    found: dict[str, tuple[Tensor, Tensor]] = {}
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
                        if factors := _side_by_side(source, merge, each):
                            found[each.name.removesuffix(".weight")] = factors
                temporary.mkdir(parents=True)
                _write(temporary / _TENSORS, found)
                transposed = any(each.transposed for each in tensors)
                config = _config(adapters, found, base, transposed)
                write_text(temporary / _CONFIG, json.dumps(config, indent=2) + "\n")
                flush_to_disk(temporary)
                temporary.replace(folder)
                flush_to_disk(folder.absolute().parent)
    finally:
        if group.rank == 0 and temporary.exists():
            with suppress(HpctrainError, OSError):
                delete_folder(temporary, _OWN_FILE)
    return f"{folder}: {counted(len(found), 'adapter')}, fp32, for `peft` with the base model {base}"


def _side_by_side(
    source: TensorSource, merge: AdapterMerge, counterpart: Counterpart
) -> tuple[Tensor, Tensor] | None:
    """Return B and A of a Hugging Face matrix, for all native ones in it; None if these have no adapters."""
    found = [(part, merge.factors(source, part.dataset)) for part in counterpart.parts]
    own = [(part, *factors) for part, factors in found if factors is not None]
    if not own:
        return None
    rows, rank = (
        counterpart.shape[::-1][0] if counterpart.transposed else counterpart.shape[0],
        own[0][2].shape[0],
    )
    outer = torch.zeros(rows, rank * len(own))
    for number, (part, b, _) in enumerate(own):
        held, target = part.rows(0, len(b)), outer[:, number * rank : (number + 1) * rank]
        target[held if isinstance(held, slice) else torch.from_numpy(held)] = b
    return outer, torch.cat([a for _, _, a in own])


def _write(path: Path, found: dict[str, tuple[Tensor, Tensor]]) -> None:
    tensors = {}
    for name, (b, a) in found.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b
    described = [NewTensor(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    for name, view in create_tensor_file(path, described):
        view[...] = tensors[name].contiguous().view(torch.int32).numpy().view(view.dtype)


def _config(
    adapters: Adapters, found: dict[str, tuple[Tensor, Tensor]], base: str, transposed: bool
) -> dict[str, Any]:
    """adapter_config.json; a matrix of several of ours has as many times the rank, and alpha."""
    several = {name: len(a) // adapters.rank for name, (_, a) in found.items() if len(a) > adapters.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "target_modules": sorted(found),
        "rank_pattern": {name: times * adapters.rank for name, times in several.items()},
        "alpha_pattern": {name: times * adapters.alpha for name, times in several.items()},
        "fan_in_fan_out": transposed,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
