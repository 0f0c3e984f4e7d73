"""The section [machine], and the checks of its keys."""

from __future__ import annotations

from typing import Literal

from hpctrain.deck.key import Bytes, PathText, Section, key
from hpctrain.deck.relations import Conflicts, HasEffectWith, OtherThan, Relations

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
    compile: bool | Literal["auto"] = key(
        "Whether CPUs compute attention, activations, norms and losses by functions compiled at the start.",
        "auto",
    )
    deterministic: bool = key(
        "Whether GPUs add in a fixed order; operations that cannot do so (in modules of users) are an error.",
        True,
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
    prepared_product: Bytes = key(
        "Memory that oneDNN keeps for each matrix product that it has prepared on a CPU, for plans.",
        670_000,
        unit="bytes",
        ge=0,
    )

    @property
    def known_ranks_per_node(self) -> int | None:
        """Ranks per node: the key, or else one rank per GPU of a node; None if neither key says."""
        return self.ranks_per_node or self.gpus_per_node or None


RELATIONS: Relations = (
    Conflicts(
        "machine.products",
        "precision.compute",
        ("onednn",),
        OtherThan("fp32"),
        because="it multiplies fp32 matrices only",
    ),
    Conflicts(
        "machine.products",
        "precision.compute",
        ("fp32", "fp32-onednn"),
        OtherThan("bf16", "fp16"),
        because="it multiplies bf16 and fp16 matrices only",
    ),
    Conflicts(
        "machine.compile",
        "precision.compute",
        (True,),
        ("fp16",),
        because="compiled functions compute in fp32 or bf16",
    ),
    Conflicts(
        "machine.compile",
        "run.threads",
        (True,),
        because="compiled functions have one thread for each rank",
    ),
    Conflicts(
        "machine.compile",
        "run.device",
        (True,),
        ("cuda", "xpu"),
        because="compiled functions run on CPUs only",
    ),
    HasEffectWith("machine.deterministic", "run.device", ("auto", "cuda", "xpu")),
    Conflicts(
        "machine.compile",
        "model.module",
        (True,),
        because="compiled functions support built-in models only",
    ),
    Conflicts("machine.rates", "model.module", because="step times are predicted for built-in models only"),
    HasEffectWith(
        "machine.rates",
        "communication.server.mode",
        (None,),
        because="the step time of parameter servers is not predicted",
    ),
)
