"""Which kernels compute the products of a run: found at its start, and the same on all its ranks.

What was measured is kept for other runs on such processors, and stored in the run's checkpoints, so that what
goes on from one has the same bits. Products that are small are the library's: there measuring tells nothing.
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
    are_measured,
    known_kernels,
    matrix_of,
    name_of,
    tokens_of,
)
from hpctrain.engine.functions import with_functions
from hpctrain.engine.layer_times import alone
from hpctrain.engine.sizes import axis_sizes
from hpctrain.engine.stage import make_groups
from hpctrain.errors import HpctrainError
from hpctrain.files import parse_json, read_text, user_cache
from hpctrain.host.device import device_kind, on_host, processor_identity
from hpctrain.model.build import architecture_of, build_parts, layer_kinds
from hpctrain.model.part import Layer, LayerRange
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.kernel_times import MEASUREMENT, MatmulPass, candidates, measure, quickest
from hpctrain.parallel.kernels import KERNELS, PASSES, Pass
from hpctrain.parallel.saved_policy import SavedPolicy
from hpctrain.parallel.vocabulary import VocabularyHead, chunk_rows
from hpctrain.sharding.replication import MeshQueries

LEAST_FLOPS = 1 << 25
"""Of a product that is measured: a millisecond or so."""

FILE = "products.json"

_FILE_BYTES, _MOST_PROCESSORS = 1 << 20, 20


def choose_kernels(deck: Deck, world: World, mesh: Mesh) -> Deck:
    """The deck with the choice of what computes its products on that mesh, and its functions. Collective.

    What was found for it before, as of a run that is gone on with, stands. HpctrainError on all ranks where
    the deck names a kernel that some do not have.
    """
    deck = with_functions(deck, world)
    storage, wish = Precision.of(deck).product, deck.machine.products
    chosen = on_host(world.device) and deck.precision.compute != "fp8"
    here = {kernel.name for kernel in candidates(storage)} if chosen else {"library"}
    common = set.intersection(*world.everyone.all_gather_object(here))
    if wish != "auto" and wish not in common:
        have = ", ".join(f'"{name}"' for name in KERNELS if name in common)
        sentence = f"is not available on all ranks for {deck.precision.format_name} (available: {have})"
        raise HpctrainError(deck.problem("machine.products", sentence))
    asked = len(common) > 1 and are_measured(deck, world.device)
    wanted = {name_of(each, deck): each for each in products_of(deck, mesh, world.device)} if asked else {}
    if not wanted:
        return deck.with_runtime_choices(replace(deck.runtime_choices, kernels={}))
    identity = "; ".join(sorted(set(world.everyone.all_gather_object(processor_identity()))))
    sources = {"as before": known_kernels(deck.runtime_choices.kernels)}
    if world.rank == 0:
        sources[f"from {cache_file()}"] = read_cache().get(identity, {})
    sources = world.everyone.broadcast_object(sources)
    found: dict[str, str] = {}
    why = []
    for source, known in sources.items():
        fitting = {
            name: known[name] for name in wanted if name not in found and known.get(name, "") in common
        }
        found |= fitting
        why += [source] if fitting else []
    missing = {name: each for name, each in wanted.items() if name not in found}
    if missing:
        began = perf_counter()
        found |= _measured(deck, world, missing, common)
        why.append(f"measured in {perf_counter() - began:.1f} s")
        if world.rank == 0:
            write_cache(identity, {name: found[name] for name in missing})
    products = {name: found[name] for name in wanted}
    return deck.with_runtime_choices(
        replace(deck.runtime_choices, kernels=products, kernels_note=" and ".join(why))
    )


def with_kept_kernels(deck: Deck, ranks: int) -> Deck:
    """A deck whose vocabulary is settled with what such processors as this one were found to compute its
    products best by, for a plan: where nothing is kept of them, the library stands in for what is measured.
    """
    device = device_kind(deck.run.device)
    if not are_measured(deck, device):
        return deck
    mesh = PlannedMesh(axis_sizes(deck, ranks), 0, ranks, device=device)
    wanted = {each.matrix for each in products_of(deck, mesh, device)}
    kept = {
        name: kernel
        for name, kernel in read_cache().get(processor_identity(deck.run.threads), {}).items()
        if matrix_of(name, deck) in wanted
    }
    missing = wanted - {matrix_of(name, deck) for name in kept}
    why = [f"from {cache_file()}"] if kept else []
    why += ["assumed to use the library until a run has measured them"] if missing else []
    return deck.with_runtime_choices(
        replace(deck.runtime_choices, kernels=kept, kernels_note="; others ".join(why))
    )


def products_of(deck: Deck, mesh: MeshQueries, device: torch.device) -> list[MatmulPass]:
    """The different products of a micro-batch in the whole model, as a rank computes them, but small ones."""
    assert deck.model.vocabulary is not None
    groups = make_groups(deck, mesh, SavedPolicy(), device)
    made = architecture_of(deck, deck.model.vocabulary)
    spans = [LayerRange.all_of(made.block_count)]
    if isinstance(made, ModelShape):  # one layer of each kind has all that there is
        spans = list(alone(layer_kinds(made)).values())
    layers = (layer for span in spans for part in build_parts(made, groups, [span]) for layer in part.layers)
    found = dict.fromkeys(each for layer in layers for each in _products(layer, tokens_of(deck)))
    return [each for each in found if each.flops >= LEAST_FLOPS]


def _products(layer: Layer, tokens: int) -> Iterator[MatmulPass]:
    """The passes of a layer's Products."""
    for each in layer.multipliers:
        head = isinstance(each, VocabularyHead)
        other: Pass = "forward" if head else "logits"
        for outputs, inputs in each.product.shapes:
            rows = chunk_rows(tokens, outputs, gpu=False) if head else layer.rows(each, tokens)
            for kind in PASSES:
                if kind != other:
                    yield MatmulPass(kind, rows, outputs, inputs)


def _measured(
    deck: Deck, world: World, missing: Mapping[str, MatmulPass], common: set[str]
) -> dict[str, str]:
    """What is quickest on all ranks together, by name. Collective: all measure at the same time, so that what
    they share, as memory, counts.
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
    """File in which choices are kept for all runs of a user, in `user_cache`."""
    return user_cache() / FILE


def read_cache() -> dict[str, dict[str, str]]:
    """By processor the choices that are kept, by name, of this way of measuring; nothing where there is no
    such file.
    """
    here = f"; {MEASUREMENT}"
    return {name.removesuffix(here): kept for name, kept in _kept().items() if name.endswith(here)}


def _kept() -> dict[str, dict[str, str]]:
    """All that is kept, by processor and way of measuring: other versions of this package may have theirs.

    Anybody may have written it: only what could have been kept counts.
    """
    with suppress(OSError, ValueError):
        rows = parse_json(read_text(cache_file(), _FILE_BYTES))
        if isinstance(rows, dict):
            newest = list(rows.items())[-_MOST_PROCESSORS:]
            return {name: known_kernels(kept) for name, kept in newest if len(name) <= LONGEST_NAME}
    return {}


def write_cache(identity: str, found: Mapping[str, str]) -> None:
    """Keep choices beside those that are kept, the newest last, if there is a place for it."""
    path, kept, key = cache_file(), _kept(), f"{identity}; {MEASUREMENT}"
    of_this = {**kept.pop(key, {})}
    for name, choice in found.items():
        of_this.pop(name, None)
        of_this[name] = choice
    kept[key] = dict(list(of_this.items())[-MOST_KNOWN:])
    text = json.dumps(dict(list(kept.items())[-_MOST_PROCESSORS:]), indent=1)
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
