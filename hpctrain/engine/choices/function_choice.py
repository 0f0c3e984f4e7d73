"""Choice between compiled functions and torch's for the blocks of a run.

All ranks make the same choice. A resumed run uses compiled functions again if its machine can compile them.
Otherwise it uses torch's functions, and warns.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from zlib import crc32

import torch

from hpctrain.comm.world import World
from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError
from hpctrain.host.c_libraries import CompilerError, build_packaged_library, open_library
from hpctrain.host.device import device_kind, on_host
from hpctrain.parallel.kernels.functions.agreement import agrees
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.layer_functions import TORCH, LayerFunctions

RESUMED_RUN_USED = "the resumed run used"
OTHER_BITS = "from here on losses may differ in their last bits"
_OTHER_FUNCTIONS = "functions of another version of hpctrain, compiler or processor"

LONGEST_RECORD = 100
"""Largest number of characters of the record by which checkpoints identify compiled functions."""


def compile_functions() -> bytes:
    """Return the library of `parallel/kernels/functions/functions.c` for this processor. Local.

    A new one is compared with torch, which takes about 50 MB of memory until this process ends.

    Raises:
        CompilerError: No compiler makes one that runs here.
    """
    return build_packaged_library(
        "hpctrain.parallel.kernels.functions", "functions.c", "function_library.py", _agrees
    )


def _agrees(library: bytes) -> bool:
    try:
        return agrees(CompiledFunctions(open_library(library)))
    except (OSError, AttributeError):
        return False


def libraries_of_nodes(world: World, content: bytes | None) -> dict[int, bytes]:
    """Return the compiled library of each node, which one of its ranks has built, by node. Collective.

    Args:
        world: All ranks.
        content: Contents of the library file that this rank has built; None if it has not, or could not.
    """
    gathered = world.everyone.all_gather_object((world.node, content))
    return {node: library for node, library in gathered if library is not None}


def choose_functions(deck: Deck, world: World) -> Deck:
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
    of_nodes = libraries_of_nodes(world, content)
    functions: LayerFunctions = TORCH
    if (library := of_nodes.get(world.node)) is not None:
        why = "the compiled library cannot be loaded"
        with suppress(OSError, AttributeError):
            record = " ".join(sorted({f"{crc32(each):08x}" for each in of_nodes.values()}))[:LONGEST_RECORD]
            changed = ""
            if deck.runtime_choices.compiled_record not in {None, record}:
                before = _OTHER_FUNCTIONS if deck.runtime_choices.compiled_record else "torch"
                changed = f"{RESUMED_RUN_USED} {before}: {OTHER_BITS}"
            functions, why = CompiledFunctions(open_library(library), changed, record), ""
    reasons = [each for each in everyone.all_gather_object(why) if each]
    if reasons or not functions.compiled:
        return _with_torch(deck, reasons[0] if reasons else "no library was built")
    return _with(deck, functions)


def with_planned_functions(deck: Deck) -> Deck:
    """Return the deck for a plan, in which functions that the run compiles count as compiled. Local.

    With machine.compile = "auto", they are compiled if this machine can compile them.
    """
    if deck.machine.compile is False or deck.runtime_choices.functions is not None or _obstacle(deck):
        return deck
    on_cpu = on_host(device_kind(deck.run.device))
    if deck.machine.compile == "auto" and on_cpu and not can_compile_functions():
        return deck
    return _with(deck, CompiledFunctions())


@cache
def can_compile_functions() -> bool:
    """Return True if `compile_functions` succeeds on this machine. Local."""
    try:
        compile_functions()
    except CompilerError:
        return False
    return True


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
    warning = f"; {RESUMED_RUN_USED} compiled ones: {OTHER_BITS}"
    return _with(deck, LayerFunctions(why + warning * bool(deck.runtime_choices.compiled_record)))


def _with(deck: Deck, functions: LayerFunctions) -> Deck:
    return deck.with_runtime_choices(replace(deck.runtime_choices, functions=functions))


def computed_by_torch(deck: Deck) -> list[str]:
    """Return what torch computes in blocks whose functions are compiled, with the keys that require it.

    Matrix products are not among them.
    """
    model = deck.model
    parts = []
    if ACTIVATIONS[model.activation].kernel is None or model.experts is not None:
        place = "" if ACTIVATIONS[model.activation].kernel is None else " of experts"
        parts.append(f"activations{place} (model.activation = {toml_value(model.activation)})")
    if model.norm_weight == "none":
        parts.append('norms (model.norm_weight = "none")')
    elif model.norm == "layer" and not model.norm_bias:
        parts.append("norms (model.norm_bias = false)")
    if model.query_key_norm not in {"none", "head"}:
        kind = toml_value(model.query_key_norm)
        parts.append(f"norms of queries and keys (model.query_key_norm = {kind})")
    if model.logit_cap:
        parts.append(f"the loss (model.logit_cap = {toml_value(model.logit_cap)})")
    return parts


def functions_of(deck: Deck, device: torch.device) -> LayerFunctions:
    """Return the functions of a deck's blocks: torch's if none were compiled for it."""
    chosen = deck.runtime_choices.functions
    allowed = deck.machine.compile is not False and on_host(device)
    return chosen if isinstance(chosen, LayerFunctions) and allowed else TORCH
