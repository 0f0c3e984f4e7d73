"""The section [machine], and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Bytes, PathText, Section, key
from hpctrain.deck.problem import DeckProblem
from hpctrain.text import either

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

MOST_THREADS = 4096


class Machine(Section):
    """Properties of the machine, and the use of its processors."""

    peak_flops: float | None = key(
        "Peak floating-point rate of one rank, which counts as 100% MFU.",
        None,
        unit="FLOP/s",
        derived="measured",
        gt=0,
    )
    rates: PathText | None = key(
        "Machine model for predicted times: a built-in name, or a file that `hpctrain calibrate` wrote.",
        None,
        derived="none: times are not predicted",
        min_length=1,
    )
    bind: bool = key(
        "Whether to bind each rank to its share of the node's cores, if the launcher has not bound it.", False
    )
    products: Literal["auto", "library", "onednn", "fp32", "fp32-onednn"] = key(
        "Matrix multiplication on CPUs: the fastest measured, torch's, oneDNN's, or either with fp32 inputs.",
        "auto",
    )
    compile: bool = key(
        "Whether attention, activations, norms and losses run on CPUs as functions compiled at the start.",
        False,
    )
    ranks_per_node: int | None = key(
        "Ranks that `hpctrain job` starts on a node.", None, unit="ranks", derived="gpus_per_node", ge=1
    )
    gpus_per_node: int | None = key(
        "GPUs that `hpctrain job` asks for on a node.", None, unit="GPUs", derived="none", ge=0
    )
    memory: Bytes | None = key(
        "Memory of a node, which limits a run; `hpctrain job` requests this amount.",
        None,
        unit="bytes",
        derived="detected by a run; for a job, 1.25 times the prediction of `hpctrain plan`",
        ge=1,
    )
    gpu_memory: Bytes | None = key(
        "Memory of a GPU, which limits the ranks that share it.",
        None,
        unit="bytes",
        derived="detected by a run",
        ge=1,
    )


KERNEL_FORMATS = {"onednn": ("fp32",), "fp32": ("bf16", "fp16"), "fp32-onednn": ("bf16", "fp16")}
"""Formats that a value of `machine.products` supports, if it does not support all."""


def product_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problem of a kernel that does not multiply matrices of the deck's format."""
    products, compute = deck.machine.products, deck.precision.compute
    if compute not in KERNEL_FORMATS.get(products, (compute,)):
        own = either([f'"{name}"' for name, of in KERNEL_FORMATS.items() if compute in of] + ['"auto"'])
        formats = either([f'"{name}"' for name in KERNEL_FORMATS[products]])
        own_format = f'precision.compute = "{compute}"'
        sentence = (
            f"multiplies matrices of precision.compute = {formats}, not those of {own_format} ({own} would)"
        )
        yield DeckProblem("machine.products", sentence, ("precision.compute",))


def compile_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problem of compiled functions that the deck does not compute."""
    if not deck.machine.compile:
        return
    if deck.precision.compute == "fp16":
        sentence = 'does not go with precision.compute = "fp16": its functions are of fp32 and bf16'
        sentence += " (leave it out)"
        yield DeckProblem("machine.compile", sentence, ("precision.compute",))
    if deck.run.threads > 1:
        sentence = f"does not go with run.threads = {deck.run.threads}: its functions have one thread a rank"
        yield DeckProblem("machine.compile", f"{sentence} (more ranks would do)", ("run.threads",))
    if deck.run.device.startswith("cuda"):
        sentence = f'has no effect with run.device = "{deck.run.device}" (leave it out)'
        yield DeckProblem("machine.compile", sentence, ("run.device",), no_effect=True)
