"""Choice of the kernels of matrix products by measurement at the start of a run.

All ranks use the same kernels. Choices are cached for other runs on the same type of processor, and stored in
checkpoints, so that a resumed run computes the same bits. Small products use the library, because measuring
them says nothing.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.planned import PlannedMesh
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.deck_kernels import (
    LONGEST_NAME,
    MOST_KNOWN,
    chooses_kernels,
    known_kernels,
    matmul_name,
    matrix_of,
    micro_batch_tokens,
)
from hpctrain.engine.function_choice import with_functions
from hpctrain.engine.groups import make_groups
from hpctrain.engine.layer_times import single_layers
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.errors import HpctrainError
from hpctrain.files import parse_json, read_text, user_cache
from hpctrain.host.device import device_kind, on_host
from hpctrain.host.processor import processor_identity
from hpctrain.memory.layer_bytes.module_trace import trace_layer
from hpctrain.model.construction import architecture_of, build_parts, layer_kinds
from hpctrain.model.modules.module_layers import ModuleLayer
from hpctrain.model.part import Layer, LayerRange
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.kernels.matmul_kernels import KERNELS, PASSES, Pass
from hpctrain.parallel.kernels.timing import MEASUREMENT, MatmulPass, candidates, measure, quickest
from hpctrain.parallel.saved_policy import SavedPolicy
from hpctrain.parallel.tensor import SplitLinear
from hpctrain.parallel.vocabulary import VocabularyHead, chunk_rows
from hpctrain.sharding.replication import MeshQueries

LEAST_FLOPS = 1 << 25
"""Fewest FLOPs of a product that is measured, which take about a millisecond."""

FILE = "products.json"

_FILE_BYTES, _MOST_PROCESSORS = 1 << 20, 20


def choose_kernels(deck: Deck, world: World, mesh: Mesh) -> Deck:
    """Return the deck with its choice of kernels and functions for a mesh. Collective over all ranks.

    Choices that the deck already has, such as those of a checkpoint, stay. Then cached ones count, and
    what is missing is measured.

    Raises:
        HpctrainError: On all ranks if the deck names a kernel that some ranks do not have.
    """
    deck = with_functions(deck, world)
    storage, requested = Precision.of(deck).product, deck.machine.products
    has_choice = on_host(world.device) and deck.precision.compute != "fp8"
    available = {kernel.name for kernel in candidates(storage)} if has_choice else {"library"}
    common = set.intersection(*world.everyone.all_gather_object(available))
    if requested != "auto" and requested not in common:
        have = ", ".join(f'"{name}"' for name in KERNELS if name in common)
        sentence = f"is not available on all ranks for {deck.precision.format_name} (available: {have})"
        raise HpctrainError(deck.problem("machine.products", sentence))
    measured = len(common) > 1 and chooses_kernels(deck, world.device)
    products = products_of(deck, mesh, world.device) if measured else []
    needed = {matmul_name(each, deck): each for each in products}
    if not needed:
        return deck.with_runtime_choices(replace(deck.runtime_choices, kernels={}))
    identity = "; ".join(sorted(set(world.everyone.all_gather_object(processor_identity()))))
    sources = {"as before": known_kernels(deck.runtime_choices.kernels)}
    if world.rank == 0:
        sources[f"from {cache_file()}"] = read_cache().get(identity, {})
    sources = world.everyone.broadcast_object(sources)
    choices: dict[str, str] = {}
    origins = []
    for source, known in sources.items():
        fitting = {
            name: known[name] for name in needed if name not in choices and known.get(name, "") in common
        }
        choices |= fitting
        origins += [source] if fitting else []
    missing = {name: each for name, each in needed.items() if name not in choices}
    if missing:
        start = perf_counter()
        choices |= _measure_kernels(deck, world, missing, common)
        origins.append(f"measured in {perf_counter() - start:.1f} s")
        if world.rank == 0:
            write_cache(identity, {name: choices[name] for name in missing})
    kernels = {name: choices[name] for name in needed}
    return deck.with_runtime_choices(
        replace(deck.runtime_choices, kernels=kernels, kernels_note=" and ".join(origins))
    )


def with_cached_kernels(deck: Deck, ranks: int) -> Deck:
    """Return the deck for a plan with the cached kernels of this type of processor. Local.

    Products that are not in the cache count as the library's.

    Args:
        deck: The deck, with a known vocabulary.
        ranks: Number of ranks of the plan.
    """
    device = device_kind(deck.run.device)
    if not chooses_kernels(deck, device):
        return deck
    mesh = PlannedMesh(axis_sizes(deck, ranks), 0, ranks, device=device)
    needed = {each.matrix for each in products_of(deck, mesh, device)}
    cached = {
        name: kernel
        for name, kernel in read_cache().get(processor_identity(deck.run.threads), {}).items()
        if matrix_of(name, deck) in needed
    }
    missing = needed - {matrix_of(name, deck) for name in cached}
    origins = [f"from {cache_file()}"] if cached else []
    origins += ["assumed to use the library until a run has measured them"] if missing else []
    return deck.with_runtime_choices(
        replace(deck.runtime_choices, kernels=cached, kernels_note="; others ".join(origins))
    )


def products_of(deck: Deck, mesh: MeshQueries, device: torch.device) -> list[MatmulPass]:
    """Return the different matrix products of a micro-batch in the whole model, except small ones."""
    assert deck.model.vocabulary is not None
    groups = make_groups(deck, mesh, SavedPolicy(), device)
    architecture = architecture_of(deck, deck.model.vocabulary)
    spans = [LayerRange.all_of(architecture.block_count)]
    if isinstance(architecture, ModelShape):  # one layer of each kind has all products
        spans = list(single_layers(layer_kinds(architecture)).values())
    layers = (
        layer for span in spans for part in build_parts(architecture, groups, [span]) for layer in part.layers
    )
    products = dict.fromkeys(each for layer in layers for each in _products(layer, micro_batch_tokens(deck)))
    return [each for each in products if each.flops >= LEAST_FLOPS]


def _products(layer: Layer, tokens: int) -> Iterator[MatmulPass]:
    """Yield the passes of a layer's matrix products."""
    for each in layer.multipliers:
        head = isinstance(each, VocabularyHead)
        other: Pass = "forward" if head else "logits"
        for outputs, inputs in each.product.shapes:
            rows = chunk_rows(tokens, outputs, gpu=False) if head else _rows(layer, each, tokens)
            for kind in PASSES:
                if kind != other:
                    yield MatmulPass(kind, rows, outputs, inputs)


def _rows(layer: Layer, multiplier: SplitLinear | VocabularyHead, tokens: int) -> int:
    """Return the number of rows that a part of a layer multiplies for a micro-batch of so many tokens.

    A layer of a user's module may have another number for each token; it is traced.
    """
    if not isinstance(layer, ModuleLayer) or isinstance(trace := trace_layer(layer, None), str):
        return tokens
    per_sample = trace.rows.get(multiplier.product.weights[0].shard.name)
    return tokens if per_sample is None else tokens // layer.sequence * per_sample


def _measure_kernels(
    deck: Deck, world: World, missing: Mapping[str, MatmulPass], common: set[str]
) -> dict[str, str]:
    """Return the kernel with the smallest sum of times over all ranks, by name of the product.

    Collective. All ranks measure at the same time, so that shared resources such as memory count.
    """
    everyone, formats = world.everyone, Precision.of(deck)

    def longest(seconds: float) -> float:
        return float(everyone.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max").item())

    everyone.barrier()
    rows = measure(list(missing.values()), formats.product, formats.gradient, longest)
    names = [name for name in KERNELS if name in common]
    table = torch.tensor([[row[name] for name in names] for row in rows], dtype=torch.float64)
    sums = everyone.all_reduce(table).tolist()
    return {
        name: quickest(dict(zip(names, row, strict=True))) for name, row in zip(missing, sums, strict=True)
    }


def cache_file() -> Path:
    """Return the file that caches the choices of all runs of a user."""
    return user_cache() / FILE


def read_cache() -> dict[str, dict[str, str]]:
    """Return the cached choices of this version of the measurement, by processor and name of the product."""
    suffix = f"; {MEASUREMENT}"
    return {name.removesuffix(suffix): each for name, each in _read_all().items() if name.endswith(suffix)}


def _read_all() -> dict[str, dict[str, str]]:
    """Return all valid choices of the cache, by processor and version of the measurement.

    Other versions of this package have entries of their own.
    """
    with suppress(OSError, ValueError):
        rows = parse_json(read_text(cache_file(), _FILE_BYTES))
        if isinstance(rows, dict):
            newest = list(rows.items())[-_MOST_PROCESSORS:]
            return {name: known_kernels(each) for name, each in newest if len(name) <= LONGEST_NAME}
    return {}


def write_cache(identity: str, choices: Mapping[str, str]) -> None:
    """Add choices to the cache, the newest last. Nothing happens if the cache cannot be written. Local.

    Args:
        identity: Type of processor.
        choices: Kernel by name of the product.
    """
    path, cached, key = cache_file(), _read_all(), f"{identity}; {MEASUREMENT}"
    of_processor = {**cached.pop(key, {})}
    for name, choice in choices.items():
        of_processor.pop(name, None)
        of_processor[name] = choice
    cached[key] = dict(list(of_processor.items())[-MOST_KNOWN:])
    text = json.dumps(dict(list(cached.items())[-_MOST_PROCESSORS:]), indent=1)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with suppress(OSError):
        if not path.is_absolute():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(text + "\n", encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
