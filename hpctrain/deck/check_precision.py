"""Checks of number formats: keys of fp8 and fp16, and kernels of matrix products."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.deck.check_mixture import dense_blocks
from hpctrain.deck.precision import PrecisionSection
from hpctrain.deck.problem import DeckProblem, multiples
from hpctrain.deck.schema import Deck
from hpctrain.text import either

_COMPUTE, _RECIPE = ("precision.compute",), ("precision.fp8",)

_OF_FP16 = ("initial_loss_scale", "loss_scale_window")

_OF_FP8 = ("fp8", "fp8_history", "fp8_gradients", "fp8_exclude", "fp8_messages", "fp8_gather", "fp8_watch")

ONE_SCALE = ("tensor", "delayed")
"""Recipes in which a matrix has a single scale."""

KERNEL_FORMATS = {"onednn": ("fp32",), "fp32": ("bf16", "fp16"), "fp32-onednn": ("bf16", "fp16")}
"""Formats that a value of `machine.products` supports, if it does not support all."""

BLOCK_SIZES = {"block": 128, "mx": 32}
"""Number of elements with a common scale in recipes that scale blocks along a dimension."""


def precision_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of the number formats of a deck, among them keys that have no effect."""
    keys, server = deck.precision, deck.communication.server
    said = f'precision.compute = "{keys.compute}"'
    yield from _products(deck, said)
    yield from _compile(deck, said)
    if keys.compute != "fp16":
        yield from _in_vain(keys, _OF_FP16, said, _COMPUTE)
    if keys.compute != "fp8":
        yield from _in_vain(keys, _OF_FP8, said, _COMPUTE)
        return
    if keys.fp8_messages and not deck.layout.sequence_parallel:
        sentence = "has no effect without layout.sequence_parallel = true (leave it out)"
        yield DeckProblem("precision.fp8_messages", sentence, ("layout.sequence_parallel",), no_effect=True)
    if keys.fp8_gather and deck.layout.zero != 3:
        sentence = "has no effect without layout.zero = 3 (leave it out)"
        yield DeckProblem("precision.fp8_gather", sentence, ("layout.zero",), no_effect=True)
    elif keys.fp8_gather and keys.fp8 not in ONE_SCALE:
        sentence = (
            f'does not go with precision.fp8 = "{keys.fp8}": slices divide elements with a common scale, and '
            'the transposed matrix has other scales ("tensor" and "delayed" have one scale a matrix)'
        )
        yield DeckProblem("precision.fp8_gather", sentence, (*_COMPUTE, *_RECIPE, "layout.zero"))
    if keys.fp8 != "delayed":
        yield from _in_vain(keys, ("fp8_history",), f'precision.fp8 = "{keys.fp8}"', _RECIPE)
    elif server is not None:
        sentence = (
            f'does not go with communication.server.mode = "{server.mode}": its scales follow steps '
            'that all ranks make together ("tensor", "row", "block" or "mx" would do)'
        )
        yield DeckProblem("precision.fp8", sentence, (*_COMPUTE, "communication.server"))
    if keys.fp8_watch and server is not None:
        sentence = (
            f'must be 0 with communication.server.mode = "{server.mode}": workers make steps by '
            "themselves, and nobody has the counts of all"
        )
        yield DeckProblem("precision.fp8_watch", sentence, ("communication.server",))
    if keys.fp8 in BLOCK_SIZES:
        yield from _cuts_within_blocks(deck, BLOCK_SIZES[keys.fp8])


def _products(deck: Deck, said: str) -> Iterator[DeckProblem]:
    """Yield the problem of a kernel that does not multiply matrices of the deck's format."""
    products, compute = deck.machine.products, deck.precision.compute
    if compute not in KERNEL_FORMATS.get(products, (compute,)):
        own = either([f'"{name}"' for name, of in KERNEL_FORMATS.items() if compute in of] + ['"auto"'])
        formats = either([f'"{name}"' for name in KERNEL_FORMATS[products]])
        sentence = f"multiplies matrices of precision.compute = {formats}, not those of {said} ({own} would)"
        yield DeckProblem("machine.products", sentence, _COMPUTE)


def _compile(deck: Deck, said: str) -> Iterator[DeckProblem]:
    """Yield the problem of compiled functions that the deck does not compute."""
    if not deck.machine.compile:
        return
    if deck.precision.compute == "fp16":
        sentence = f"does not go with {said}: its functions are of fp32 and bf16 (leave it out)"
        yield DeckProblem("machine.compile", sentence, _COMPUTE)
    if deck.run.threads > 1:
        sentence = f"does not go with run.threads = {deck.run.threads}: its functions have one thread a rank"
        yield DeckProblem("machine.compile", f"{sentence} (more ranks would do)", ("run.threads",))
    if deck.run.device.startswith("cuda"):
        sentence = f'has no effect with run.device = "{deck.run.device}" (leave it out)'
        yield DeckProblem("machine.compile", sentence, ("run.device",), no_effect=True)


def _in_vain(
    keys: PrecisionSection, names: tuple[str, ...], said: str, other_keys: tuple[str, ...]
) -> Iterator[DeckProblem]:
    """Yield the problems of keys that are given and have no effect."""
    for name in names:
        if getattr(keys, name) != PrecisionSection.model_fields[name].default:
            sentence = f"has no effect with {said} (leave it out)"
            yield DeckProblem(f"precision.{name}", sentence, other_keys, no_effect=True)


def _cuts_within_blocks(deck: Deck, block: int) -> Iterator[DeckProblem]:
    """Yield the problems of a layout that divides a block of elements with one scale between ranks.

    Scales, and losses with them, would depend on the layout.
    """
    model, layout, batch = deck.model, deck.layout, deck.batch
    tensor, context = layout.tensor, layout.context
    recipe = f'precision.fp8 = "{deck.precision.fp8}", whose scales are of blocks of {block}'
    sizes = {
        "model.heads x model.head_size": model.heads * model.head_size,
        "model.key_value_heads x model.head_size": model.key_value_heads * model.head_size,
    }
    sizes |= {"model.mlp": model.mlp} if dense_blocks(deck) else {}
    if model.experts is not None and model.experts.shared:
        sizes["model.experts.shared x model.experts.mlp"] = model.experts.shared * model.experts.mlp
    for name, size in sizes.items():
        unit = block * tensor
        if tensor > 1 and size % unit:
            sentence = (
                f"cuts {name} = {size}, which must be a multiple of {block} x layout.tensor = {unit} with "
                f'{recipe} ({multiples(size, unit)} would; "tensor", "delayed" and "row" do not ask '
                "for it)"
            )
            others = (*_COMPUTE, *_RECIPE, *name.split(" x "))
            yield DeckProblem("layout.tensor", sentence, others)
    pieces = 2 * context if layout.context_form == "ring" else context
    unit = block * pieces
    tokens = batch.micro_size * batch.sequence
    if context > 1 and tokens % unit:
        sentence = (
            f"cuts batch.micro_size x batch.sequence = {tokens} into {pieces} pieces, each of which must be "
            f'a multiple of {block} with {recipe} ({multiples(tokens, unit)} in all would; "tensor", '
            '"delayed" and "row" do not ask for it)'
        )
        others = (*_COMPUTE, *_RECIPE, "batch.micro_size", "batch.sequence", "layout.context_form")
        yield DeckProblem("layout.context", sentence, others)
