"""Which kernels compute the products of a run: found at its start, and the same on all its ranks.

What was measured is kept for other runs on such processors, and stored in the run's checkpoints, so that what
goes on from one has the same bits. Products that are small are the library's: there measuring tells nothing.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from hpctrain.comm.device import on_host
from hpctrain.comm.processor import processor_identity
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.layer_times import alone
from hpctrain.errors import HpctrainError
from hpctrain.files import parse_json, read_text
from hpctrain.model.build import bare_model, build_parts
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.kernel_times import Measured, candidates, measure, quickest
from hpctrain.parallel.kernels import KERNELS, PASSES, Pass
from hpctrain.parallel.linear import SplitLinear
from hpctrain.parallel.vocabulary import VocabularyHead, chunk_rows

LEAST_FLOPS = 1 << 25
"""Of a product that is measured: a millisecond or so."""

FILE = "products.json"

_FILE_BYTES, _MOST_SHAPES, _MOST_PROCESSORS = 1 << 20, 500, 20
_LONGEST = 1000  # characters of a name in the file

_WORDS: Mapping[Pass, str] = {
    "forward": "forward",
    "logits": "logits",
    "input_gradient": "input gradients",
    "weight_gradient": "weight gradients",
}


def choose_kernels(
    deck: Deck,
    world: World,
    groups: LayerGroups,
    shape: ModelShape,
    before: object = None,
) -> None:
    """Choose what computes the products of the layers that are made with these groups. Collective.

    `before` is what the run that is gone on with had chosen, by `Kernels.record`. HpctrainError on all ranks
    where the deck names a kernel that some do not have.
    """
    storage, wish = Precision.of(deck).product, deck.machine.products
    chosen = on_host(world.device) and deck.precision.compute != "fp8"
    here = {kernel.name for kernel in candidates(storage)} if chosen else {"library"}
    common = set.intersection(*world.everyone.all_gather_object(here))
    kernels = groups.kernels
    if wish != "auto":
        if wish not in common:
            have = ", ".join(f'"{name}"' for name in KERNELS if name in common)
            sentence = f"is not what all ranks can multiply {deck.precision.words} with ({have} would do)"
            raise HpctrainError(deck.problem("machine.products", sentence))
        return
    wanted = (
        {} if len(common) == 1 else {_name(each, deck): each for each in products_of(deck, shape, groups)}
    )
    if not wanted:
        return
    identity = "; ".join(sorted(set(world.everyone.all_gather_object(processor_identity()))))
    sources = {"taken over": _kept(before)}
    if world.rank == 0:
        sources[f"as kept in {cache_file()}"] = read_cache().get(identity, {})
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
    kernels.why = " and ".join(why)
    kernels.record = {name: found[name] for name in wanted}
    kernels.chosen = {(m.kind, m.outputs, m.inputs): KERNELS[found[name]] for name, m in wanted.items()}


def products_of(deck: Deck, shape: ModelShape, groups: LayerGroups) -> list[Measured]:
    """The different products of a micro-batch in the whole model, as a rank computes them, but small ones."""
    spans = alone(bare_model(shape).layers).values()
    layers = (layer for span in spans for part in build_parts(shape, groups, [span]) for layer in part.layers)
    tokens = deck.batch.micro_size * shape.sequence // groups.context.size
    found = dict.fromkeys(each for layer in layers for each in _products(layer, tokens))
    return [each for each in found if each.flops >= LEAST_FLOPS]


def _products(layer: torch.nn.Module, tokens: int) -> Iterator[Measured]:
    """The passes of a layer's Products."""
    for module in layer.modules():
        if isinstance(module, SplitLinear | VocabularyHead):
            head = isinstance(module, VocabularyHead)
            outputs, inputs = module.product.shape
            rows = chunk_rows(tokens, outputs, gpu=False) if head else tokens
            other: Pass = "forward" if head else "logits"
            for kind in PASSES:
                if kind != other:
                    yield Measured(kind, rows, outputs, inputs)


def _name(each: Measured, deck: Deck) -> str:
    sums = " in 16 bits" if deck.precision.gradients == "compute" and deck.precision.compute != "fp32" else ""
    size = f"{each.rows} x {each.outputs} x {each.inputs}"
    return f"{_WORDS[each.kind]}{sums}, {deck.precision.compute}, {size}"


def _measured(deck: Deck, world: World, missing: Mapping[str, Measured], common: set[str]) -> dict[str, str]:
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
    """Where choices are kept for all runs of a user: $XDG_CACHE_HOME/hpctrain, or ~/.cache/hpctrain."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given) if given.startswith("/") else Path(os.environ.get("HOME", "")) / ".cache"
    return folder / "hpctrain" / FILE


def read_cache() -> dict[str, dict[str, str]]:
    """By processor the choices that are kept, by name; nothing where there is no such file.

    Anybody may have written it: only what could have been kept counts.
    """
    with suppress(OSError, ValueError):
        rows = parse_json(read_text(cache_file(), _FILE_BYTES))
        if isinstance(rows, dict):
            newest = list(rows.items())[-_MOST_PROCESSORS:]
            return {name: _kept(kept) for name, kept in newest if len(name) <= _LONGEST}
    return {}


def write_cache(identity: str, found: Mapping[str, str]) -> None:
    """Keep choices beside those that are kept, the newest last, if there is a place for it."""
    path, kept = cache_file(), read_cache()
    of_this = {**kept.pop(identity, {})}
    for name, choice in found.items():
        of_this.pop(name, None)
        of_this[name] = choice
    kept[identity] = dict(list(of_this.items())[-_MOST_SHAPES:])
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


def _kept(found: object) -> dict[str, str]:
    """What of it may be choices by name."""
    rows = list(found.items())[-_MOST_SHAPES:] if isinstance(found, Mapping) else []
    return {
        name: how for name, how in rows if isinstance(how, str) and how in KERNELS and len(name) <= _LONGEST
    }


def introduce_kernels(deck: Deck, groups: LayerGroups) -> list[str]:
    """What a run says of them at its start, where there is anything to say."""
    kernels = groups.kernels
    if deck.machine.products != "auto":
        return [f'products are computed by "{deck.machine.products}" (machine.products)']
    if not kernels.chosen:
        return []
    passes = []
    for kind, words in _WORDS.items():
        counts = Counter(kernel.name for (each, *_), kernel in kernels.chosen.items() if each == kind)
        if counts:
            by = (f"{name}" + (f" ({count})" if len(counts) > 1 else "") for name, count in counts.items())
            passes.append(f"{words} {', '.join(by)}")
    return [f"products are computed by: {'; '.join(passes)} ({kernels.why})"]


def as_before(deck: Deck, state: Mapping[str, Any]) -> Deck:
    """The deck of a run that goes on: by the library, unless the deck says otherwise, where it was begun when
    there was nothing to choose.
    """
    if "products" in state or "machine.products" in deck.sources.places:
        return deck
    return deck.with_keys(machine={"products": "library"})


def found_before(deck: Deck, before: Deck, state: Mapping[str, Any]) -> dict[str, Any]:
    """What a run by the deck `before` had measured, of its `state`: its pipeline's split, where
    the layout is the same, and what computes products.
    """
    split = state.get("split") if deck.layout == before.layout else None
    return {"split": split, "products": state.get("products")}
