"""Every key of the deck: its type, bounds, default, unit and one line of help.

The models are frozen. Keys whose default depends on other keys have none here: `defaults.fill`
writes their values before validation, and `derived` says in words what they will be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, PrivateAttr
from pydantic.fields import FieldInfo

from hpctrain.deck.activations import ACTIVATIONS, DEFAULT_ACTIVATIONS, GATED
from hpctrain.deck.adapters import Adapters
from hpctrain.deck.code import CodeEntry, NamedCode, UntrustedCodeError, code_entries, refusal
from hpctrain.deck.communication import Communication
from hpctrain.deck.evaluation import EvaluationSection
from hpctrain.deck.key import Bytes, Duration, PathText, Section, Whole, key, name_of, table, table_of
from hpctrain.deck.learning_rate import LearningRateSection
from hpctrain.deck.objective import POLICIES, ObjectiveSection
from hpctrain.deck.optimizer import OptimizerSection
from hpctrain.deck.policy import PolicySection
from hpctrain.deck.precision import PrecisionSection
from hpctrain.deck.presets import PresetName
from hpctrain.deck.report import ReportSection
from hpctrain.deck.runtime_choices import RuntimeChoices
from hpctrain.deck.sources import Sources

if TYPE_CHECKING:
    ActivationName = str
else:
    ActivationName = Literal[tuple(ACTIVATIONS)]

_USUAL_ACTIVATIONS = ", ".join(f'"{name}" ({family})' for family, name in DEFAULT_ACTIVATIONS.items())

_LARGEST = 10_000_000  # size of a model: beyond any model, and small enough to search for divisors
_LONGEST = 1_000_000_000
_MOST_LAYERS = 10_000
_MOST_THREADS = 4096
_MOST_EXPERTS = 100_000


class RunSection(Section):
    """The run as a whole."""

    title: str = key(
        "Name of the run, for its folder, jobs and plots; without slashes and double dots.",
        derived="the deck's file name",
        min_length=1,
    )
    dir: PathText = key(
        "Folder of the run, which is created if it does not exist.", derived="runs/<title>", min_length=1
    )
    steps: int = key(
        "Optimizer steps of the whole run.",
        unit="steps",
        derived="from run.tokens or run.epochs, else required",
        ge=1,
    )
    tokens: Whole | None = key(
        "Instead of steps, number of training tokens, such as 1e9; the last step may exceed it.",
        None,
        unit="tokens",
        derived="none: run.steps is used",
        ge=1,
        le=10**18,
    )
    epochs: float | None = key(
        "Instead of steps, number of passes over the training data, from which run.steps is computed.",
        None,
        derived="none: run.steps is used",
        gt=0,
    )
    seed: int = key("Seed of initial parameters, sample order and dropout.", 1234, ge=0, lt=2**63)
    log_every: int = key("Number of steps between two lines of the log.", 10, unit="steps", ge=1)
    evaluate_every: int = key(
        "Steps between evaluations on the held-out part and the sets of [[evaluation]]; 0: only at the end.",
        0,
        unit="steps",
        ge=0,
    )
    evaluate_sequences: int = key(
        "Highest number of held-out sequences of one evaluation.", 64, unit="sequences", ge=1
    )
    patience: int = key(
        "Early stopping: evaluations without a lower loss on the set of checkpoint.keep_best; 0: never stop.",
        0,
        ge=0,
    )
    noise_scale_steps: int = key(
        "Steps over which the gradient noise scale (critical batch size) is averaged; 0: it is not measured.",
        0,
        unit="steps",
        ge=0,
    )
    time_limit: Duration | None = key(
        "Time after which the run writes a checkpoint and stops; a time limit of Slurm applies too.",
        None,
        unit="seconds",
        derived="none",
        gt=0,
    )
    time_margin: Duration | None = key(
        "Reserve before the time limit, in addition to the time of a step and of a checkpoint.",
        None,
        unit="seconds",
        derived="1 min, at most a tenth of the limit",
        ge=0,
    )
    threads: int = key("Number of CPU threads of each rank.", 1, ge=1, le=_MOST_THREADS)
    device: Literal["auto", "cpu", "cuda"] = key(
        "Device that computes; auto: GPUs if every rank has one, else the CPU.", "auto"
    )
    trace: bool = key(
        "Record a timeline of every rank, written to trace.json with each checkpoint and drawn by "
        "`hpctrain plot`.",
        False,
    )
    trace_steps: int = key("Number of newest steps that a trace contains.", 3, unit="steps", ge=1)


class ExpertsTable(Section):
    """Mixtures of experts: a router sends each token to some of the experts of a block."""

    count: int = key("Number of experts of a mixture.", ge=1, le=_MOST_EXPERTS)
    per_token: int = key("Number of experts that each token is routed to (top-k).", 2, ge=1, le=_MOST_EXPERTS)
    mlp: int = key("Inner width of an expert.", derived="model.mlp", ge=1, le=4 * _LARGEST)
    shared: int = key(
        "Number of shared experts, which process every token in addition to its routed experts.",
        0,
        ge=0,
        le=_MOST_EXPERTS,
    )
    every: int = key(
        "Distance of the mixtures in blocks: 1 makes every block a mixture, 2 every second one.",
        1,
        unit="blocks",
        ge=1,
        le=_MOST_LAYERS,
    )
    dense_first: int = key(
        "Number of blocks at the start of the model that are dense.", 0, unit="blocks", ge=0, le=_MOST_LAYERS
    )
    router: Literal["softmax", "sigmoid"] = key(
        "Function that turns the router's logits into probabilities: softmax over experts, or sigmoid "
        "of each one.",
        "softmax",
    )
    router_normalize: bool = key(
        "Whether the weights of a token's experts are normalized to a sum of 1.", True
    )
    router_scale: float = key("Factor by which these weights are multiplied.", 1.0, gt=0)
    router_groups: int = key(
        "Groups of experts; the router first selects groups, by the sum of their two highest scores "
        "(DeepSeek-V3).",
        1,
        ge=1,
    )
    router_groups_per_token: int = key("Number of groups that the router selects for each token.", 1, ge=1)
    router_dtype: Literal["fp32", "compute"] = key(
        "Number format of the router's matrix product; compute: the format of precision.compute.", "fp32"
    )
    router_z_loss: float = key(
        "Weight of the squared log-partition function of the router in the loss (ST-MoE); 0: none.",
        0.0,
        ge=0,
        le=1,
    )
    balance: Literal["loss", "bias", "none"] = key(
        "Load balancing of experts: an auxiliary loss, a bias on the router's scores (DeepSeek-V3), or none.",
        "loss",
    )
    balance_loss: float = key(
        "Weight of the load balancing loss: experts x sum of (share of tokens x mean probability).",
        derived='0.01 with balance = "loss", else 0',
        ge=0,
        le=1000,
    )
    balance_over: Literal["micro_batch", "sequence", "step"] = key(
        "Tokens over which the load balancing loss counts each expert's share; step: those of the "
        "previous step.",
        "micro_batch",
    )
    balance_rate: float = key(
        'Amount by which a step changes the bias of an expert (balance = "bias").', 0.001, ge=0, le=1
    )
    capacity: float | None = key(
        "Capacity factor: an expert takes this many times its even share of a micro-batch and drops the "
        "rest.",
        None,
        derived="none: no token is dropped",
        gt=0,
        le=_MOST_EXPERTS,
    )
    record_routing: int = key(
        "Number of first samples whose routing is recorded in routing.h5, which other runs can replay.",
        0,
        unit="samples",
        ge=0,
        le=1 << 20,
    )


class Model(Section):
    """The model: a preset with changes, a transformer by family, layers, hidden and heads, or a module."""

    preset: PresetName | None = key(
        "Published model whose sizes are the defaults of the keys that are not given.", None, derived="none"
    )
    source: PathText | None = key(
        "Hugging Face folder or checkpoint with the initial weights; its sizes are defaults of keys not "
        "given.",
        None,
        alias="from",
        derived="none: random weights",
        min_length=1,
    )
    family: Literal["gpt2", "llama"] = key(
        "gpt2: learned positions, LayerNorm, biases; llama: RoPE, RMSNorm, no biases.",
        derived="the preset's, else required",
    )
    layers: int = key(
        "Number of transformer layers.", derived="the preset's, else required", ge=1, le=_MOST_LAYERS
    )
    hidden: int = key(
        "Width of the residual stream.", derived="the preset's, else required", ge=1, le=_LARGEST
    )
    heads: int = key(
        "Number of attention heads, which must divide hidden.",
        derived="the preset's, else required",
        ge=1,
        le=_LARGEST,
    )
    head_size: int = key(
        "Width of one attention head; if it is given, heads need not divide hidden.",
        derived="hidden / heads",
        ge=1,
        le=_LARGEST,
    )
    key_value_heads: int = key(
        "Number of key/value heads (GQA), each shared by heads / key_value_heads query heads.",
        derived="heads",
        ge=1,
        le=_LARGEST,
    )
    query_key_norm: Literal["none", "head", "all"] = key(
        "RMSNorm of queries and keys before rotation (llama): none, over each head, over all heads together.",
        "none",
    )
    activation: ActivationName = key(
        f"Activation of the feed-forward part; with a gate: {', '.join(GATED)}.",
        derived=_USUAL_ACTIVATIONS,
    )
    mlp: int = key(
        "Inner width of the feed-forward part.",
        derived="4 hidden; with a gate 8/3 hidden up to a multiple of 256",
        ge=1,
        le=4 * _LARGEST,
    )
    vocabulary: int | None = key(
        "Size of the vocabulary, at least that of the token file.",
        None,
        unit="tokens",
        derived="the token file's",
        ge=2,
        le=_LARGEST,
    )
    tied: bool = key(
        "Whether the output layer and the input embedding share their weights.",
        derived="true (gpt2), false (llama, reward models)",
    )
    frozen: tuple[str, ...] = key(
        'Parameters that are not trained, by name; * stands for any text: ["blocks.0.*"].', (), strict=False
    )
    adapters: Adapters | None = table(
        "Low-rank adapters (LoRA) of the matrices of blocks; only the adapters are trained.",
        derived="none: all parameters are trained",
    )
    experts: ExpertsTable | None = table(
        "Mixture of experts in place of feed-forward layers.", derived="none: all blocks are dense"
    )
    dropout: float = key("Share of activations dropped in training.", 0.0, ge=0, lt=1)
    rope_base: float = key("Base of the rotary position angles (llama).", 10000.0, gt=0)
    norm_epsilon: float = key("Number that norms add to the variance.", 1e-5, gt=0)
    initial_std: float = key(
        "Standard deviation of initial weights; residual outputs divide it by sqrt(2 layers).",
        0.02,
        gt=0,
        le=100,
    )
    parametrization: Literal["standard", "mup"] = key(
        "mup (muP): initialization and rates scale so that the best learning rate is the same for every "
        "width.",
        "standard",
    )
    base_width: int | None = key(
        "Width of the mup base model, for which learning_rate.peak was tuned; mup changes nothing at "
        "this width.",
        None,
        derived="required by mup",
        ge=1,
        le=_LARGEST,
    )
    base_head_size: int | None = key(
        "Head size of the mup base model: head_size if wider models have more heads, less if heads get "
        "wider.",
        None,
        derived="required by mup at another width, else head_size",
        ge=1,
        le=_LARGEST,
    )

    module: PathText | None = key(
        'Instead of a transformer, your own module: "FILE.py:FUNCTION", relative to the deck, or '
        '"PACKAGE:FUNCTION".',
        None,
        derived="none: a transformer of these sizes",
        min_length=3,
    )
    arguments: dict[str, Any] | None = key(
        "Table of keyword arguments for that function: [model.arguments].", None, derived="nothing"
    )
    miniature: dict[str, Any] | None = key(
        "Arguments that make a small module, for `check` and --verify-layout, which compute it in fp64 too.",
        None,
        derived="model.arguments",
    )
    blocks: str | None = key(
        "Consecutive layers of the module, the units of recomputation, gathering (ZeRO-3) and stages: "
        '"layers.*".',
        None,
        derived="none: the whole module",
        min_length=1,
    )
    loss: PathText | None = key(
        "Loss function of the module, named like model.module: outputs and batch give a loss sum and a "
        "count.",
        None,
        derived="next-token cross-entropy of the logits",
        min_length=3,
    )
    initial: PathText | None = key(
        "Function that initializes the module, which is its argument; named like model.module.",
        None,
        derived="the initialization of the module",
        min_length=3,
    )
    buffers: Literal["first", "average"] | None = key(
        "Buffers of the module after a step: those of the first data rank, or the mean over data ranks.",
        None,
        derived="required if the module has persistent buffers",
    )
    plan: dict[str, Any] | Literal["its own"] | None = key(
        'Tensor parallelism of the module: a table of patterns ("layers.*.q_proj" = "column"), or "its own".',
        None,
        derived="required with layout.tensor above 1",
    )

    @property
    def freezes(self) -> bool:
        """True if some parameters are not trained."""
        return bool(self.frozen) or self.adapters is not None


class Data(Section):
    """Training data."""

    tokens: PathText | Annotated[tuple[PathText, ...], Field(strict=False)] = key(
        "Token file of `hpctrain prepare`, or several as one: a list, or a pattern such as *.h5.",
        min_length=1,
    )
    mixture: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] | None = key(
        "Instead of tokens, a weighted mixture: tables [[data.mixture]] with tokens, weight and, "
        "optionally, name.",
        None,
        derived="none: data.tokens alone",
    )
    dataset: PathText | None = key(
        "Instead of tokens, a dataset for your own module: function that makes it, named like model.module.",
        None,
        derived="none: a token file",
        min_length=3,
    )
    arguments: dict[str, Any] | None = key(
        "Table of keyword arguments for the function of data.dataset: [data.arguments].",
        None,
        derived="nothing",
    )
    collate: PathText | None = key(
        "Function that collates a list of items into a dict of arrays [b, ...]; named like model.module.",
        None,
        derived="none: items of equal shape are stacked",
        min_length=3,
    )
    workers: int = key(
        "Loader processes of each rank, which prefetch items; 0: the rank itself loads them.", 0, ge=0, le=256
    )
    inputs: tuple[str, ...] | None = key(
        "Batch entries passed to the module: by name, or in this order if its arguments have other names.",
        None,
        derived='all of its arguments by name, except "targets" and "labels"',
        strict=False,
    )
    other_tokenizer: bool = key(
        "Allow training data of another tokenizer than that of the initial weights or the checkpoint.", False
    )
    document_mask: bool = key(
        "Whether attention stays within a document, and the last token of a document has no target.",
        False,
    )
    pack: bool = key(
        "Whether to pack several conversations into a sequence, masked from each other; false: one each.",
        True,
    )
    validation: float = key("Share of the sequences held out for evaluation.", 0.01, ge=0, lt=1)


class DilocoTable(Section):
    """DiLoCo (arXiv 2311.08105): an outer optimizer with Nesterov momentum."""

    learning_rate: float = key("Learning rate of the outer step.", 0.7, gt=0, le=1000)
    momentum: float = key("Momentum of the outer step.", 0.9, ge=0, lt=1)


class LocalStepsTable(Section):
    """Replicas that make several steps independently between two synchronizations (Local SGD, DiLoCo)."""

    replicas: int = key("Number of replicas, which are groups of data ranks with the same layout.", 1, ge=1)
    steps: int = key("Steps of each replica between two synchronizations.", 1, unit="steps", ge=1)
    outer: Literal["average", "diloco"] = key(
        "Outer step of a synchronization: the mean of weights, or DiLoCo's step towards it.",
        "average",
    )
    fragments: int = key(
        "Parts of the model, made of alternate blocks, that are synchronized in different steps.", 1, ge=1
    )
    delay: int = key(
        "Steps that replicas make while a synchronization is in flight; then it takes effect.",
        0,
        unit="steps",
        ge=0,
    )
    blend: float = key(
        "Share of a replica's own weights that it keeps at a synchronization.", 0.0, ge=0, le=1
    )
    format: Literal["fp32", "bf16", "int8", "int4"] = key(
        "Format of the weight differences that are sent; int8 and int4 have a scale for every 256.", "fp32"
    )
    diloco: DilocoTable | None = table("Keys of the outer optimizer.", chosen_by="outer")

    @property
    def differ(self) -> bool:
        """True if there is an outer model: several replicas, or one with outer steps."""
        return self.replicas > 1 or self.diloco is not None


class Layout(Section):
    """Distribution of the work over ranks: ranks = pipeline x data x context x tensor.

    Expert layers use the same ranks with other axes: pipeline x expert data x expert x expert_tensor.
    `layout = "auto"` in place of the section lets hpctrain choose all of these keys.
    """

    auto: bool = key(
        "Whether hpctrain chooses the keys that are not given, micro_size and recompute: the fastest "
        "that fits.",
        False,
    )
    data: int | None = key(
        "Data-parallel copies of the model, which train on different sequences.",
        None,
        unit="ranks",
        derived="all remaining ranks",
        ge=1,
    )
    tensor: int = key("Ranks that split each layer's weights.", 1, unit="ranks", ge=1)
    context: int = key("Ranks that split each sequence.", 1, unit="ranks", ge=1)
    expert: int = key(
        "Ranks of a stage over which the experts are distributed; data, context and tensor use the same "
        "ranks.",
        1,
        unit="ranks",
        ge=1,
    )
    expert_tensor: int = key("Ranks that split each expert's weights.", 1, unit="ranks", ge=1)
    pipeline: int = key(
        "Stages that split the layers, each of them one rank or more.", 1, unit="stages", ge=1
    )
    schedule: PathText = key(
        "Pipeline schedule: a name of `hpctrain schedule`, or the file of one.", "1f1b", min_length=1
    )
    chunks: int = key(
        "Parts of the model (virtual stages) that each stage holds.",
        derived="2 where the schedule needs two, else 1",
        ge=1,
    )
    split: Annotated[tuple[int, ...], Field(strict=False)] | Literal["balanced"] | None = key(
        'Layers of each part of the model, first to last; "balanced": by the measured time of each kind.',
        None,
        derived="the split with the fewest FLOPs on the stage with the most",
    )
    zero: int = key(
        "State sharded over data and context ranks (ZeRO): 1 optimizer state, 2 gradients too, 3 "
        "parameters too.",
        0,
        ge=0,
        le=3,
    )
    zero_group: int | Literal["node"] | None = key(
        'Ranks over which layout.zero shards, replicated between such groups; "node": the ranks of a node.',
        None,
        unit="ranks",
        derived="all data x context ranks",
    )
    sequence_parallel: bool = key("Whether norms and residuals are split over the tensor ranks too.", False)
    context_form: Literal["ring", "all_to_all"] = key(
        "Attention of context ranks: keys and values pass around a ring, or an all-to-all swaps "
        "sequence for heads.",
        "ring",
    )
    chosen: tuple[str, ...] = key(
        "Keys that auto chose for a run (written by hpctrain); --set layout=auto chooses them again.",
        (),
        strict=False,
    )
    local_steps: LocalStepsTable | None = table(
        "Replicas that train independently for some steps and then exchange weights (Local SGD, DiLoCo).",
        derived="none: gradients are summed over all data ranks in every step",
    )

    @property
    def replicas(self) -> int:
        """Number of replicas that train by themselves; 1 without local steps."""
        return 1 if self.local_steps is None else self.local_steps.replicas

    @property
    def steps_between_syncs(self) -> int:
        """Number of steps between two synchronizations of replicas; 1 without local steps."""
        return 1 if self.local_steps is None else self.local_steps.steps


class Memory(Section):
    """Recomputation and offload of activations, parameters and optimizer state."""

    recompute: int | Literal["none", "full", "selective", "sqrt"] = key(
        "Activation recomputation: every block (full), attention (selective), or groups of N or sqrt(L) "
        "blocks.",
        "none",
        unit="blocks",
    )
    activations: Literal["keep", "host", "disk"] = key(
        "Place of saved activations until backward: kept on the device, host memory (GPUs only) or "
        "offload_dir.",
        "keep",
    )
    activation_format: Literal["exact", "bf16", "int8"] = key(
        "Format of saved activations; bf16 and int8 (a scale for every 256 elements) approximate gradients.",
        "exact",
    )
    keep_gathered: int = key(
        "Blocks of each stage whose parameters stay gathered for a whole step (layout.zero = 3).",
        0,
        unit="blocks",
        ge=0,
    )
    accumulate: Literal["whole", "sliced"] = key(
        "Gradient accumulation (zero = 2, 3); sliced: less memory, more communication, different rounding.",
        "whole",
    )
    optimizer: Literal["device", "host", "disk"] = key(
        "Place of master weights and moments; with host (GPUs only) and disk the CPU computes the update.",
        "device",
    )
    parameters: Literal["device", "host", "disk"] = key(
        "Place of each rank's slices of the parameters (layout.zero = 3).", "device"
    )
    offload_dir: PathText | None = key(
        "Folder on a fast disk for all that is offloaded to disk; the files are deleted when the run ends.",
        None,
        derived="<run.dir>/offload",
        min_length=1,
    )
    offload_buffer: Bytes = key(
        "Size of the buffer through which optimizer state is read from and written to the disk.",
        256_000_000,
        unit="bytes",
        ge=4096,
    )


class Batch(Section):
    """Sizes of batches and sequences."""

    global_size: int = key("Sequences of one optimizer step, over all ranks.", unit="sequences", ge=1)
    micro_size: int = key(
        "Sequences of a micro-batch, which a rank computes at a time.", 1, unit="sequences", ge=1
    )
    sequence: int = key(
        "Length of a sequence.", unit="tokens", derived="the preset's, else required", ge=1, le=_LONGEST
    )
    ramp_from: int = key(
        "Batch size of the first step, and the increment by which it grows to global_size; 0: no ramp.",
        0,
        unit="sequences",
        ge=0,
    )
    ramp_steps: int = key("Steps over which the batch grows.", 0, unit="steps", ge=0)


class CheckpointSection(Section):
    """Checkpoints that a run writes."""

    every: int = key("Steps between checkpoints; 0: only at the end.", 0, unit="steps", ge=0)
    keep: int = key("Number of newest valid checkpoints that are kept.", 2, ge=1)
    keep_every: int = key(
        "Checkpoints of steps that are multiples of this number are never deleted; 0: none.",
        0,
        unit="steps",
        ge=0,
    )
    keep_best: str | None = key(
        'Evaluation set, such as "validation", whose checkpoint of lowest loss is kept and linked as "best".',
        None,
        derived="none",
        min_length=1,
    )
    memory_every: int = key(
        "Steps between copies of the state in memory, from which a run recovers without the disk; 0: none.",
        0,
        unit="steps",
        ge=0,
    )
    mode: Literal["collective", "background"] = key(
        "Whether training waits while a checkpoint is written, or goes on.", "collective"
    )
    buffer: Bytes = key(
        "Memory of each rank for the data being saved; in background mode, for tensors that training "
        "changes.",
        256 << 20,
        unit="bytes",
        ge=1000,
    )
    mirror: bool = key(
        "Whether each rank's state is copied to the memory of a neighbor node, to recover if a node is lost.",
        False,
    )
    mirror_every: int = key("Steps between two updates of that copy.", 10, unit="steps", ge=1)


class Stability(Section):
    """Detection of hangs, divergence, loss spikes and silent data corruption, and recovery from them."""

    hang_seconds: Duration = key(
        "Time without progress after which the job reports what each rank was doing and ends; 0: never.",
        600.0,
        unit="seconds",
        ge=0,
    )
    check_parameters: bool = key(
        "Whether to compare the initial parameters of all data-parallel copies before training.", True
    )
    straggler_factor: float = key(
        "Ranks that compute this many times longer than the median are reported; 0: none (none with NCCL).",
        1.5,
        ge=0,
    )
    z_loss: float = key(
        "Weight of the squared log-partition function in the loss (PaLM); 0: none.", 0.0, ge=0, le=1
    )
    spike: Literal["off", "skip", "rollback"] = key(
        "Reaction to a spike of loss or gradient norm: skip the update, or roll back to an earlier state.",
        "off",
    )
    spike_window: int = key(
        "Number of last steps whose median and deviation define a spike; detection begins after the warm-up.",
        128,
        unit="steps",
        ge=8,
        le=100_000,
    )
    spike_factor: float = key("A spike is this many deviations above the median.", 6.0, gt=1)
    spike_back: int = key(
        "Lowest number of steps that a rollback goes back; the samples of these steps are skipped.",
        100,
        unit="steps",
        ge=1,
    )
    spike_most: int = key(
        "Highest number of spikes of a run; with one more it stops, for you to examine it.", 20, ge=1
    )
    max_skipped_steps: int = key(
        "Consecutive steps without an update, or all steps of a run, that end it with an error (0: never).",
        50,
        unit="steps",
        ge=0,
    )
    corruption: Literal["off", "cheap", "full"] = key(
        "Detection of silent data corruption; cheap: memory, copies, sums; full: matrix products and "
        "messages too.",
        "off",
    )
    corruption_every: int = key(
        "Steps between comparisons of data that several ranks hold copies of.", 10, unit="steps", ge=1
    )
    verify_layout: bool = key(
        "Whether to verify this layout before training: one small step must equal that of a single rank.",
        False,
    )


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


class Deck(Section):
    """A whole deck: the only description of a run. Read with `hpctrain.deck.read`."""

    run: RunSection
    model: Model
    data: Data
    objective: ObjectiveSection
    policy: PolicySection
    evaluation: EvaluationSection
    layout: Layout
    batch: Batch
    optimizer: OptimizerSection
    learning_rate: LearningRateSection
    precision: PrecisionSection
    memory: Memory
    communication: Communication
    checkpoint: CheckpointSection
    stability: Stability
    machine: Machine
    report: ReportSection

    _sources: Sources = PrivateAttr(default_factory=Sources)
    _runtime_choices: RuntimeChoices = PrivateAttr(default_factory=RuntimeChoices)

    def model_post_init(self, context: Any) -> None:
        """Take the `Sources` that were given as the context of the validation."""
        if isinstance(context, Sources):
            self._sources = context

    @property
    def sources(self) -> Sources:
        """Places in which the keys were given."""
        return self._sources

    @property
    def runtime_choices(self) -> RuntimeChoices:
        """Choices that depend on measurements; changed copies of the deck keep them."""
        return self._runtime_choices

    @property
    def untrusted_code(self) -> frozenset[CodeEntry]:
        """Code that the deck names but may not call (see `hpctrain.deck.code`).

        Rewards are left out if the objective uses none, for example if a policy is only evaluated.
        """
        policy = ("policy",) if self.objective.kind in POLICIES else ()
        return self._untrusted_in("model", "data", *policy)

    def code(self, target: str) -> NamedCode:
        """Return the function or class that a key names, with the decision whether it may be called.

        It may be called only if all code that the deck names may be called.

        Args:
            target: Value of the key, such as "train.py:build".
        """
        untrusted = self._untrusted_in("model", "data", "policy")
        return NamedCode(target, refusal(untrusted, self.sources.name) if untrusted else "")

    def _untrusted_in(self, *names: str) -> frozenset[CodeEntry]:
        trusted = self.sources.trusted_code
        if trusted is None:
            return frozenset()
        sections = {name: vars(getattr(self, name)) for name in names}
        return code_entries(sections, self.sources.name) - trusted

    def with_runtime_choices(self, choices: RuntimeChoices) -> Deck:
        """Return the deck with other choices that depend on measurements."""
        changed = self.model_copy()
        changed._runtime_choices = choices
        return changed

    def value(self, name: str) -> object:
        """Return the value of a key by its full name, such as "optimizer.muon.momentum".

        A key of a table that the deck does not have is None.
        """
        value: object = self
        for part in name.split("."):
            if value is None:
                return None
            kind = type(value)
            assert issubclass(kind, BaseModel)
            attributes = {name_of(each, field): each for each, field in kind.model_fields.items()}
            value = getattr(value, attributes[part])
        return value

    def with_keys(self, **sections: Mapping[str, object] | Section) -> Deck:
        """Return the deck with other values of keys, or other sections; nothing is checked."""
        changed = {
            name: keys if isinstance(keys, Section) else getattr(self, name).with_values(keys)
            for name, keys in sections.items()
        }
        return self.model_copy(update=changed)

    def problem(self, name: str, sentence: str) -> str:
        """Return a message about a key, such as `deck.toml:14: layout.tensor = 3: must divide ...`."""
        return self.sources.sentence(name, self.value(name), sentence)


def require_trusted_code(deck: Deck, file: object) -> None:
    """Raise `UntrustedCodeError` if a deck that is stored in `file` names code that may not be called."""
    if untrusted := deck.untrusted_code:
        raise UntrustedCodeError(refusal(untrusted, str(file)))


@cache
def sections() -> Mapping[str, type[Section]]:
    """Return the sections of a deck by name, in the order of the schema."""
    kinds = {name: field.annotation for name, field in Deck.model_fields.items()}
    return MappingProxyType(cast("dict[str, type[Section]]", kinds))


@cache
def tables() -> Mapping[str, type[Section]]:
    """Return all tables of a deck by full name ("optimizer", "optimizer.muon"), each before those in it."""

    def within(name: str, kind: type[Section]) -> Iterator[tuple[str, type[Section]]]:
        yield name, kind
        for attribute, field in kind.model_fields.items():
            if (inner := table_of(field)) is not None:
                yield from within(f"{name}.{name_of(attribute, field)}", inner)

    return MappingProxyType(dict(each for name, kind in sections().items() for each in within(name, kind)))


@cache
def fields(table: str) -> Mapping[str, FieldInfo]:
    """Return the keys of a table, such as "optimizer" or "optimizer.muon", by their names in the deck."""
    kind = tables()[table]
    return MappingProxyType({name_of(each, field): field for each, field in kind.model_fields.items()})


def field_of(key: str) -> FieldInfo | None:
    """Return the field of a key by its full name; None if no table has it."""
    table, _, name = key.rpartition(".")
    return fields(table).get(name) if table in tables() else None
