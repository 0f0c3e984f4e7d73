"""Whether the functions of a run's blocks are compiled: the same on all its ranks, and after a restart."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from importlib.resources import as_file, files
from time import perf_counter
from zlib import crc32

import torch

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.host.device import on_host
from hpctrain.parallel.compiler import CompilerError, build_library
from hpctrain.parallel.functions import TORCH, CompiledFunctions, LayerFunctions, agrees
from hpctrain.parallel.library import open_library

_RESUMED_RUN_USED = "the resumed run used"
_OTHER_BITS = "from here on losses may differ in their last bits"
_OTHERWISE = "functions of another version of hpctrain, compiler or processor"
_LONGEST_RECORD = 100


def compiled_functions() -> bytes:
    """Return the library of `parallel/functions.c` for this processor. Local.

    Raises:
        CompilerError: No compiler makes one that runs here.
    """
    folder = files("hpctrain.parallel")
    with as_file(folder / "functions.c") as source, as_file(folder / "library.py") as program:
        return build_library(source, program)


def with_functions(deck: Deck, world: World) -> Deck:
    """The deck with what computes its blocks' functions, compiled once a node where it wishes so. Collective.

    Torch does on all ranks where one of them cannot have others, or where it did in a run that is gone on
    with. HpctrainError on all ranks where they compute on GPUs.
    """
    if not deck.machine.compile or deck.runtime_choices.functions is not None:
        return deck
    everyone = world.everyone
    if not on_host(world.device):
        raise HpctrainError(
            deck.problem("machine.compile", "is supported on CPUs only (leave it out on GPUs)")
        )
    began, content, why = perf_counter(), None, ""
    if world.local_rank == 0:
        try:
            content = compiled_functions()
        except CompilerError as error:
            why = str(error)
    of_nodes = dict(each for each in everyone.all_gather_object((world.node, content)) if each[1] is not None)
    functions: LayerFunctions = TORCH
    if (library := of_nodes.get(world.node)) is not None:
        why = "the compiled library cannot be loaded"
        with suppress(OSError, AttributeError):
            record = " ".join(sorted({f"{crc32(each):08x}" for each in of_nodes.values()}))[:_LONGEST_RECORD]
            why_so = f"compiled in {perf_counter() - began:.1f} s"
            if deck.runtime_choices.compiled_record not in {None, record}:
                before = _OTHERWISE if deck.runtime_choices.compiled_record else "torch"
                why_so += f"; {_RESUMED_RUN_USED} {before}: {_OTHER_BITS}"
            functions = CompiledFunctions(open_library(library), why_so, record)
            why = "" if agrees(functions) else "the compiled library does not agree with torch"
    whys = [each for each in everyone.all_gather_object(why) if each]
    if whys or not functions.compiled:
        why = whys[0] if whys else "no library was built"
        left = (
            f"; {_RESUMED_RUN_USED} compiled ones: {_OTHER_BITS}"
            if deck.runtime_choices.compiled_record
            else ""
        )
        functions = LayerFunctions(f"{why}{left}")
    return deck.with_runtime_choices(replace(deck.runtime_choices, functions=functions))


def planned_functions(deck: Deck) -> Deck:
    """The deck for a plan: what its run is to compile is so, but for the library."""
    if not deck.machine.compile or deck.runtime_choices.functions is not None:
        return deck
    return deck.with_runtime_choices(replace(deck.runtime_choices, functions=CompiledFunctions()))


def functions_of(deck: Deck, device: torch.device) -> LayerFunctions:
    """Those of a deck's blocks: torch's where none were compiled for it, as where text is generated."""
    found = deck.runtime_choices.functions
    return found if isinstance(found, LayerFunctions) and deck.machine.compile and on_host(device) else TORCH


def record_of(stored: object) -> str:
    """The record of functions that a checkpoint tells, of whatever is stored there."""
    if isinstance(stored, str):
        return stored[:_LONGEST_RECORD]
    return "an earlier version's" if stored is True else ""


def functions_before(deck: Deck, before: Deck, stored: object) -> Deck:
    """The deck of a run that goes on, with what a checkpoint of a run by the deck `before` tells of its
    functions: torch's stay where that could not have others, unless the wish is made again.
    """
    found = replace(deck.runtime_choices, compiled_record=record_of(stored))
    place = deck.sources.place("machine.compile")
    if before.machine.compile and not found.compiled_record and place.override is None:
        why = "the resumed run did not compile them (--set machine.compile=true compiles them)"
        found = replace(found, functions=LayerFunctions(why))
    return deck.with_runtime_choices(found)


def introduce_functions(deck: Deck, functions: LayerFunctions) -> list[str]:
    """What a run says of them at its start, where there is anything to say."""
    if not deck.machine.compile:
        left = (
            "block functions are torch's (machine.compile = false); "
            f"{_RESUMED_RUN_USED} compiled ones: {_OTHER_BITS}"
        )
        return [left] if deck.runtime_choices.compiled_record else []
    if functions.compiled:
        return [f"block functions are compiled for this processor ({functions.why})"]
    return [f"machine.compile = true, but block functions are torch's: {functions.why}"]
