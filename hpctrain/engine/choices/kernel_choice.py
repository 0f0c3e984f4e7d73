"""Choice of the kernels of matrix products by measurement at the start of a run.

All ranks use the same kernels. Choices are cached for other runs on the same type of processor, and stored in
checkpoints, so that a resumed run computes the same bits. Small products use the library, because measuring
them says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.planned import PlannedMesh
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.deck_kernels import matmul_name, measures_kernels, pass_shape_of_name
from hpctrain.engine.choices.function_choice import choose_functions
from hpctrain.engine.choices.measured_products import products_of
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.errors import HpctrainError
from hpctrain.host.device import device_kind, on_host
from hpctrain.host.processor import processor_identity
from hpctrain.model.precision import Precision
from hpctrain.parallel.kernels.choice_cache import cache_file, known_kernels, read_cache, write_cache
from hpctrain.parallel.kernels.matmul_kernels import KERNELS
from hpctrain.parallel.kernels.timing import MatmulPass, candidates, measure, quickest


def choose_kernels(deck: Deck, world: World, mesh: Mesh) -> Deck:
    """Return the deck with its choice of kernels and functions for a mesh. Collective over all ranks.

    Choices that the deck already has, such as those of a checkpoint, stay. Then cached ones count, and
    what is missing is measured.

    Raises:
        HpctrainError: On all ranks if the deck names a kernel that some ranks do not have.
    """
    deck = choose_functions(deck, world)
    storage, requested = Precision.of(deck).product, deck.machine.products
    has_choice = on_host(world.device) and deck.precision.compute != "fp8"
    available = {kernel.name for kernel in candidates(storage)} if has_choice else {"library"}
    common = set.intersection(*world.everyone.all_gather_object(available))
    if requested != "auto" and requested not in common:
        have = ", ".join(f'"{name}"' for name in KERNELS if name in common)
        sentence = f"is not available on all ranks for {deck.precision.format_name} (available: {have})"
        raise HpctrainError(deck.problem("machine.products", sentence))
    measured = len(common) > 1 and measures_kernels(deck, world.device)
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
        ranks: Number of all ranks of the plan, from which the layout and so the shapes of products follow.
    """
    device = device_kind(deck.run.device)
    if not measures_kernels(deck, device):
        return deck
    mesh = PlannedMesh(axis_sizes(deck, ranks), 0, ranks, device=device)
    needed = {each.shape for each in products_of(deck, mesh, device)}
    cached = {
        name: kernel
        for name, kernel in read_cache().get(processor_identity(deck.run.threads), {}).items()
        if pass_shape_of_name(name, deck) in needed
    }
    missing = needed - {pass_shape_of_name(name, deck) for name in cached}
    origins = [f"from {cache_file()}"] if cached else []
    origins += ["assumed to use the library until a run has measured them"] if missing else []
    return deck.with_runtime_choices(
        replace(deck.runtime_choices, kernels=cached, kernels_note="; others ".join(origins))
    )


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
