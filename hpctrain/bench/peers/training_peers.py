"""Names of the programs that `bench train --against` compares with, and the decks that they cannot train.

The programs are not imported here, so that unsuitable decks are refused before anything runs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

Axis = Literal["data", "tensor", "pipeline", "none"]

KEEP_MEMORY = (("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", str(1 << 62)))
"""Variables with which glibc keeps all freed memory for later allocations. By default it returns large blocks
to the system, which then has to map them again page by page. A threshold instead of 0 is limited to 32
MiB."""


@dataclass(frozen=True)
class TrainingPeer:
    """Program that trains the model of a deck.

    Attributes:
        module: Module of this package whose function `peer` returns the training step.
        axis: Mesh axis along which the ranks are; "none" for a program on one rank.
        environment: Additional environment variables of its processes.
        same_training: True if it trains the global batch from the initial weights of the deck, so that its
            losses must equal those of hpctrain.
    """

    module: str
    axis: Axis
    environment: tuple[tuple[str, str], ...] = ()
    same_training: bool = True


TRAINING_PEERS = MappingProxyType(
    {
        "ddp": TrainingPeer("torch_data", "data"),
        "ddp-kept": TrainingPeer("torch_data", "data", KEEP_MEMORY),
        "ddp-onednn": TrainingPeer("torch_data", "data"),
        "ddp-alone": TrainingPeer("torch_data", "data", same_training=False),
        "zero1": TrainingPeer("torch_data", "data"),
        "fsdp2": TrainingPeer("torch_sharded", "data"),
        "deepspeed": TrainingPeer("torch_sharded", "data"),
        "deepspeed-1": TrainingPeer("torch_sharded", "data"),
        "deepspeed-3": TrainingPeer("torch_sharded", "data"),
        "torch-tensor": TrainingPeer("torch_tensor", "tensor"),
        "torch-sequence": TrainingPeer("torch_tensor", "tensor"),
        "torch-pipeline": TrainingPeer("torch_pipeline", "pipeline"),
        "torch-interleaved": TrainingPeer("torch_pipeline", "pipeline"),
        "torch-zbv": TrainingPeer("torch_pipeline", "pipeline"),
        "transformers-eager": TrainingPeer("mixtral", "none", same_training=False),
        "transformers-grouped": TrainingPeer("mixtral", "none", same_training=False),
    }
)

_PLAIN_VALUES: Mapping[str, object] = MappingProxyType(
    {
        "model.experts.count": None,
        "model.latent.key_value_rank": None,
        "model.norm_weight": "plain",
        "model.norm_placement": "before",
        "model.parallel_residual": "none",
        "model.query_key_norm": "none",
        "model.embedding_multiplier": 1.0,
        "model.residual_multiplier": 1.0,
        "model.attention_scale": None,
        "model.windows": (),
        "model.query_key_value_clip": 0.0,
        "model.attention_cap": 0.0,
        "model.attention_sinks": False,
        "model.logit_multiplier": 1.0,
        "model.logit_cap": 0.0,
        "model.dropout": 0.0,
        "model.parametrization": "standard",
        "model.frozen": (),
        "stability.z_loss": 0.0,
    }
)
"""Values of deck keys that peers in plain torch support."""


def pipeline_parts(name: str, deck: Deck, stages: int) -> int:
    """Return the number of parts into which the pipeline schedule of a peer cuts the model."""
    if name == "torch-pipeline":
        return stages
    return 2 * stages if name == "torch-zbv" else max(2, deck.layout.chunks) * stages


def peer_problems(names: Sequence[str], deck: Deck, ranks: int, on_host: bool) -> list[str]:
    """Return a sentence for each peer that cannot train a deck.

    Args:
        names: Names of the peers, of TRAINING_PEERS.
        deck: The deck.
        ranks: Number of ranks.
        on_host: True if hpctrain computes on CPUs.
    """
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    problems = [f"--against {name}: is given {names.count(name)} times (give it once)" for name in twice]
    # The first problem of a peer is often the reason for its other ones.
    first_problems = {name: next(_problems(name, deck, ranks, on_host), "") for name in names}
    return problems + [f"--against {name}: {text}" for name, text in first_problems.items() if text]


def _problems(name: str, deck: Deck, ranks: int, on_host: bool) -> Iterator[str]:
    """Yield the reasons why a peer cannot train a deck."""
    from hpctrain.deck.sources import toml_value

    peer = TRAINING_PEERS[name]
    if not on_host:
        yield 'runs on the CPU only (use run.device = "cpu")'
    if deck.model.module is not None and peer.module != "torch_data":
        yield "does not support model.module (use ddp, ddp-kept, ddp-onednn or zero1)"
    if peer.axis == "none":
        if ranks > 1:
            yield f"requires one rank, not {ranks}"
        return
    if ranks == 1:
        yield "requires two ranks or more (such as mpirun -n 2)"
    yield from _AXIS_PROBLEMS[peer.axis](name, deck, ranks)
    for key, value in _PLAIN_VALUES.items():
        if deck.value(key) != value:
            supported = "none" if value is None else toml_value(value)
            yield f"{key} = {toml_value(deck.value(key))}: peers in plain torch support {supported} only"
    if deck.communication.emulate is not None:
        link = toml_value(deck.value("communication.emulate"))
        yield f"communication.emulate = {link}: does not delay messages of peers"
    if deck.communication.ranks_per_node is not None:
        count = deck.communication.ranks_per_node
        yield f"communication.ranks_per_node = {count}: does not emulate nodes of peers"
    if deck.precision.compute == "fp16" and not name.startswith("deepspeed"):
        yield 'does not support precision.compute = "fp16" (use "fp32" or "bf16")'
    if name == "ddp-onednn" and deck.precision.compute != "fp32":
        yield (
            f'precision.compute = "{deck.precision.compute}": products in 16 bits always use oneDNN '
            '(use ddp, or precision.compute = "fp32")'
        )
    if name == "ddp-kept" and platform.libc_ver()[0] != "glibc":
        yield "requires glibc as the C library"
    if name.startswith("deepspeed") and find_spec("deepspeed") is None:
        yield "requires DeepSpeed (pip install deepspeed)"


def _data_problems(name: str, deck: Deck, ranks: int) -> Iterator[str]:  # noqa: ARG001
    layout = deck.layout
    for axis in ("tensor", "context", "pipeline"):
        if getattr(layout, axis) > 1:
            yield f"requires layout.{axis} = 1, not {getattr(layout, axis)}"


def _tensor_problems(name: str, deck: Deck, ranks: int) -> Iterator[str]:  # noqa: ARG001
    if deck.layout.tensor != ranks:
        yield f"requires layout.tensor = {ranks}, the number of ranks, not {deck.layout.tensor}"


def _pipeline_problems(name: str, deck: Deck, ranks: int) -> Iterator[str]:
    if deck.layout.pipeline != ranks:
        yield f"requires layout.pipeline = {ranks}, the number of ranks, not {deck.layout.pipeline}"
    count = deck.batch.global_size // deck.batch.micro_size
    if name == "torch-interleaved" and count % ranks:
        yield f"requires a number of micro-batches that is a multiple of the {ranks} stages, not {count}"
    parts = pipeline_parts(name, deck, ranks)
    if parts > deck.model.layers:
        yield f"requires model.layers of at least {parts}, not {deck.model.layers}"


_AXIS_PROBLEMS: Mapping[Axis, Callable[[str, Deck, int], Iterator[str]]] = MappingProxyType(
    {"data": _data_problems, "tensor": _tensor_problems, "pipeline": _pipeline_problems}
)
