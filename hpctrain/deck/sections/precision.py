"""The section [precision]: number formats and matrix products in 8 bits, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Section, key
from hpctrain.deck.problem import DeckProblem, multiples
from hpctrain.deck.relations import GIVEN, Conflicts, HasEffectWith, Relations
from hpctrain.deck.sections.experts import has_dense_blocks

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

_LONGEST_HISTORY = 100_000


SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE = 2.0**-14, 2.0**24
"""Bounds of the loss scale."""


class PrecisionSection(Section):
    """Number formats. Master weights and moments are always fp32."""

    compute: Literal["fp32", "bf16", "fp16", "fp8"] = key(
        "Format of weights and activations; fp8: bf16, with linear layers (not experts) multiplying in "
        "8 bits.",
        "fp32",
    )
    gradients: Literal["fp32", "compute"] = key(
        "Format of gradient buffers; compute: the format of precision.compute, half the memory and "
        "communication.",
        "fp32",
    )
    fp8: Literal["tensor", "delayed", "row", "block", "mx"] = key(
        "Scaling granularity: a tensor (delayed: from maxima of earlier steps), a row, or blocks of a row.",
        "delayed",
    )
    fp8_history: int = key(
        "Number of earlier steps whose largest maximum gives the scale (delayed).",
        16,
        unit="steps",
        ge=1,
        le=_LONGEST_HISTORY,
    )
    fp8_gradients: Literal["e5m2", "e4m3"] = key(
        "8-bit format of the gradients of layer outputs; inputs and weights are in E4M3.", "e5m2"
    )
    fp8_exclude: tuple[str, ...] = key(
        'Layers, by name, that multiply in bf16, as embedding and output layer always do: ["blocks.0.*"].',
        (),
        strict=False,
    )
    fp8_watch: int = key(
        "Steps between metrics of the 8-bit quantization error and the scales; 0: none.",
        0,
        unit="steps",
        ge=0,
    )
    fp8_messages: bool = key(
        "Whether sequence_parallel sends inputs (tensor, delayed: gradients too) in 8 bits; results are "
        "the same.",
        False,
    )
    fp8_gather: bool = key(
        "Whether zero = 3 gathers weights in 8 bits (tensor, delayed); results are the same.", False
    )
    initial_loss_scale: float = key(
        "Initial loss scale; all loss scales are from 2^-14 to 2^24 (fp16 only).",
        65536.0,
        ge=SMALLEST_LOSS_SCALE,
        le=LARGEST_LOSS_SCALE,
    )
    loss_scale_window: int = key(
        "Steps without overflow after which the loss scale doubles (fp16 only).", 1000, unit="steps", ge=1
    )

    @property
    def format_name(self) -> str:
        """Name of the format of computation, with the scaling of fp8, such as `bf16` or `fp8 (delayed)`."""
        return f"fp8 ({self.fp8})" if self.compute == "fp8" else self.compute


BLOCK_SIZES = {"block": 128, "mx": 32}
"""Number of elements with a common scale in recipes that scale blocks along a dimension."""

_COMPUTE, _RECIPE, _SERVER = "precision.compute", "precision.fp8", "communication.server.mode"


def _of_fp8(name: str) -> HasEffectWith:
    return HasEffectWith(f"precision.{name}", _COMPUTE, ("fp8",))


RELATIONS: Relations = (
    Conflicts(_COMPUTE, "model.module", ("fp8",), because="only built-in models multiply in 8 bits"),
    Conflicts(
        _COMPUTE,
        _SERVER,
        ("fp16",),
        GIVEN,
        because="its loss scale requires steps that all ranks make together",
    ),
    HasEffectWith("precision.initial_loss_scale", _COMPUTE, ("fp16",)),
    HasEffectWith("precision.loss_scale_window", _COMPUTE, ("fp16",)),
    _of_fp8("fp8"),
    _of_fp8("fp8_gradients"),
    _of_fp8("fp8_exclude"),
    (_of_fp8("fp8_history"), HasEffectWith("precision.fp8_history", _RECIPE, ("delayed",))),
    (_of_fp8("fp8_messages"), HasEffectWith("precision.fp8_messages", "layout.sequence_parallel", (True,))),
    (
        _of_fp8("fp8_gather"),
        HasEffectWith("precision.fp8_gather", "layout.zero", (3,)),
        Conflicts(
            "precision.fp8_gather",
            _RECIPE,
            None,
            ("row", "block", "mx"),
            because="ranks split blocks of elements with a common scale",
            further_keys=(_COMPUTE, "layout.zero"),
        ),
    ),
    (
        _of_fp8("fp8_watch"),
        Conflicts(
            "precision.fp8_watch",
            "communication.server",
            because="workers make steps independently, and no rank has the counts of all workers",
        ),
    ),
)


def precision_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of scales in 8 bits that parameter servers or the layout do not allow.

    There are none unless precision.compute is "fp8". Relations in RELATIONS are checked elsewhere.
    """
    if deck.precision.compute != "fp8":
        return
    if deck.precision.fp8 == "delayed" and deck.communication.server is not None:
        sentence = (
            f'conflicts with {_SERVER} = "{deck.communication.server.mode}": its scales follow steps '
            'that all ranks make together (use "tensor", "row", "block" or "mx")'
        )
        yield DeckProblem(_RECIPE, sentence, (_COMPUTE, "communication.server"))
    if deck.precision.fp8 in BLOCK_SIZES:
        yield from _cuts_within_blocks(deck, BLOCK_SIZES[deck.precision.fp8])


def _cuts_within_blocks(deck: Deck, block: int) -> Iterator[DeckProblem]:
    """Yield the problems of a layout that divides a block of elements with one scale between ranks.

    Scales, and losses with them, would depend on the layout.
    """
    model, layout, batch = deck.model, deck.layout, deck.batch
    tensor, context = layout.tensor, layout.context
    recipe = f'precision.fp8 = "{deck.precision.fp8}", which scales blocks of {block} elements'
    sizes = {
        "model.heads x model.head_size": model.heads * model.head_size,
        "model.key_value_heads x model.head_size": model.key_value_heads * model.head_size,
    }
    if (latent := model.latent) is not None:
        del sizes["model.key_value_heads x model.head_size"]
        # What is left of model.head_size is a multiple then, too.
        sizes["model.heads x model.latent.rotary_size"] = model.heads * latent.rotary_size
        sizes["model.heads x model.latent.value_size"] = model.heads * latent.value_size
    sizes |= {"model.mlp": model.mlp} if has_dense_blocks(deck) else {}
    if model.experts is not None and model.experts.shared:
        sizes["model.experts.shared x model.experts.mlp"] = model.experts.shared * model.experts.mlp
    for name, size in sizes.items():
        unit = block * tensor
        if tensor > 1 and size % unit:
            sentence = (
                f"splits {name} = {size}, which must be a multiple of {block} x layout.tensor = {unit} with "
                f'{recipe} (use {multiples(size, unit)}, or precision.fp8 = "tensor", "delayed" '
                'or "row")'
            )
            others = (_COMPUTE, _RECIPE, *name.split(" x "))
            yield DeckProblem("layout.tensor", sentence, others)
    pieces = 2 * context if layout.context_form == "ring" else context
    unit = block * pieces
    tokens = batch.micro_size * batch.sequence
    if context > 1 and tokens % unit:
        sentence = (
            f"splits batch.micro_size x batch.sequence = {tokens} into {pieces} pieces, each of which must "
            f"be a multiple of {block} with {recipe} (use {multiples(tokens, unit)} in total, or "
            'precision.fp8 = "tensor", "delayed" or "row")'
        )
        others = (_COMPUTE, _RECIPE, "batch.micro_size", "batch.sequence", "layout.context_form")
        yield DeckProblem("layout.context", sentence, others)
