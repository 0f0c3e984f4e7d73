"""Choice between compiled functions and torch's for the blocks of a run.

All ranks use the same. A resumed run makes the same choice if its machine can compile. Otherwise it uses
torch's functions, and warns.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from importlib.resources import as_file, files
from zlib import crc32

import torch

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.host.device import on_host
from hpctrain.parallel.kernels.compiler import CompilerError, build_library
from hpctrain.parallel.kernels.function_library import open_library
from hpctrain.parallel.kernels.layer_functions import TORCH, CompiledFunctions, LayerFunctions, agrees

_RESUMED_RUN_USED = "the resumed run used"
_OTHER_BITS = "from here on losses may differ in their last bits"
_OTHERWISE = "functions of another version of hpctrain, compiler or processor"
_LONGEST_RECORD = 100


def compile_functions() -> bytes:
    """Return the library of `parallel/kernels/functions.c` for this processor. Local.

    A new one is compared with torch, which takes about 50 MB of memory until this process ends.

    Raises:
        CompilerError: No compiler makes one that runs here.
    """
    folder = files("hpctrain.parallel.kernels")
    with as_file(folder / "functions.c") as source, as_file(folder / "function_library.py") as program:
        return build_library(source, program, _agrees)


def _agrees(library: bytes) -> bool:
    try:
        return agrees(CompiledFunctions(open_library(library)))
    except (OSError, AttributeError):
        return False


def with_functions(deck: Deck, world: World) -> Deck:
    """Return the deck with the functions that compute its blocks. Collective over all ranks.

    If the deck allows compiled functions, one rank of each node compiles them. All ranks use torch's if this
    fails on one of them, or if the resumed run used them.

    Raises:
        HpctrainError: On all ranks if the deck requires compiled functions on GPUs.
    """
    if deck.machine.compile is False or deck.runtime_choices.functions is not None:
        return deck
    everyone = world.everyone
    if not on_host(world.device):
        if deck.machine.compile == "auto":
            return deck
        raise HpctrainError(
            deck.problem("machine.compile", "is supported on CPUs only (leave it out on GPUs)")
        )
    if obstacle := _obstacle(deck):
        return _with_torch(deck, obstacle)
    content, why = None, ""
    if world.local_rank == 0:
        try:
            content = compile_functions()
        except CompilerError as error:
            why = str(error)
    of_nodes = dict(each for each in everyone.all_gather_object((world.node, content)) if each[1] is not None)
    functions: LayerFunctions = TORCH
    if (library := of_nodes.get(world.node)) is not None:
        why = "the compiled library cannot be loaded"
        with suppress(OSError, AttributeError):
            record = " ".join(sorted({f"{crc32(each):08x}" for each in of_nodes.values()}))[:_LONGEST_RECORD]
            changed = ""
            if deck.runtime_choices.compiled_record not in {None, record}:
                before = _OTHERWISE if deck.runtime_choices.compiled_record else "torch"
                changed = f"{_RESUMED_RUN_USED} {before}: {_OTHER_BITS}"
            functions, why = CompiledFunctions(open_library(library), changed, record), ""
    reasons = [each for each in everyone.all_gather_object(why) if each]
    if reasons or not functions.compiled:
        return _with_torch(deck, reasons[0] if reasons else "no library was built")
    return _with(deck, functions)


def planned_functions(deck: Deck) -> Deck:
    """Return the deck for a plan, in which functions that the run compiles count as compiled. Local.

    With machine.compile = "auto", the machine of the run is assumed to have a compiler.
    """
    if deck.machine.compile is False or deck.runtime_choices.functions is not None or _obstacle(deck):
        return deck
    return _with(deck, CompiledFunctions())


def _obstacle(deck: Deck) -> str:
    """Return why the functions of a deck with machine.compile = "auto" are not compiled; "" if they are.

    With machine.compile = true, `deck/sections/machine.py` refuses these decks.
    """
    if deck.run.threads != 1:
        return f"run.threads = {deck.run.threads}, and compiled functions have one thread"
    if deck.precision.compute == "fp16":
        return "compiled functions compute in fp32 or bf16"
    return "compiled functions support built-in models only" if deck.model.module is not None else ""


def _with_torch(deck: Deck, why: str) -> Deck:
    """Return the deck with torch's functions, and the reason for them, with a warning for a resumed run."""
    warning = f"; {_RESUMED_RUN_USED} compiled ones: {_OTHER_BITS}"
    return _with(deck, LayerFunctions(why + warning * bool(deck.runtime_choices.compiled_record)))


def _with(deck: Deck, functions: LayerFunctions) -> Deck:
    return deck.with_runtime_choices(replace(deck.runtime_choices, functions=functions))


def functions_of(deck: Deck, device: torch.device) -> LayerFunctions:
    """Return the functions of a deck's blocks: torch's if none were compiled for it."""
    chosen = deck.runtime_choices.functions
    allowed = deck.machine.compile is not False and on_host(device)
    return chosen if isinstance(chosen, LayerFunctions) and allowed else TORCH


def record_of(stored: object) -> str:
    """Return the record of functions that a checkpoint stores, from an object of any type."""
    if isinstance(stored, str):
        return stored[:_LONGEST_RECORD]
    return "an earlier version's" if stored is True else ""


def with_stored_functions(deck: Deck, before: Deck, stored: object) -> Deck:
    """Return the deck of a resumed run with the record of the functions that the checkpoint's run used.

    If that run used torch's, they stay, unless the deck requires compiled functions and that run's deck did
    not, or `--set` requires them again.

    Args:
        deck: Deck of the resumed run.
        before: Deck of the checkpoint.
        stored: Record in the checkpoint.
    """
    choices = replace(deck.runtime_choices, compiled_record=record_of(stored))
    overridden = deck.sources.place("machine.compile").override is not None
    required = deck.machine.compile is True and (before.machine.compile is not True or overridden)
    if not choices.compiled_record and not required:
        why = "the resumed run did not compile them (--set machine.compile=true compiles them)"
        choices = replace(choices, functions=LayerFunctions(why))
    return deck.with_runtime_choices(choices)


def describe_functions(deck: Deck, functions: LayerFunctions) -> list[str]:
    """Return the lines in which a run on CPUs describes its functions."""
    if deck.machine.compile is False:
        warning = (
            "block functions are torch's (machine.compile = false); "
            f"{_RESUMED_RUN_USED} compiled ones: {_OTHER_BITS}"
        )
        return [warning] if deck.runtime_choices.compiled_record else []
    if functions.compiled:
        changed = f" ({functions.why})" if functions.why else ""
        return [f"block functions are compiled for this processor{changed}"]
    required = "machine.compile = true, but " if deck.machine.compile is True else ""
    return [f"{required}block functions are torch's: {functions.why}"] if functions.why else []
