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

_LARGEST = 10_000_000  # of a model's sizes: beyond any model, and small enough to search for divisors
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
    dir: PathText = key("Folder of the run; made if it is not there.", derived="runs/<title>", min_length=1)
    steps: int = key(
        "Optimizer steps of the whole run.",
        unit="steps",
        derived="what run.tokens or run.epochs take, else required",
        ge=1,
    )
    tokens: Whole | None = key(
        "Instead of steps, tokens of the whole run: 1e9 has the fewest steps that take so many.",
        None,
        unit="tokens",
        derived="none: run.steps",
        ge=1,
        le=10**18,
    )
    epochs: float | None = key(
        "Instead of steps, times through the data, which is counted: it becomes run.steps.",
        None,
        derived="none: run.steps",
        gt=0,
    )
    seed: int = key("Seed of initial parameters, sample order and dropout.", 1234, ge=0, lt=2**63)
    log_every: int = key("A line in the log every so many steps.", 10, unit="steps", ge=1)
    evaluate_every: int = key(
        "Loss on the held-out part, and on sets [[evaluation]], every so many steps; 0: only at the end.",
        0,
        unit="steps",
        ge=0,
    )
    evaluate_sequences: int = key(
        "Held-out sequences of one evaluation, at most.", 64, unit="sequences", ge=1
    )
    patience: int = key(
        "The run ends after so many evaluations without a lower loss of what checkpoint.keep_best "
        "names; 0: not.",
        0,
        ge=0,
    )
    noise_scale_steps: int = key(
        "Steps over which the gradient noise scale, a batch worth its tokens, is averaged; 0: not measured.",
        0,
        unit="steps",
        ge=0,
    )
    time_limit: Duration | None = key(
        "Before the run has taken this long it stops in good order, to be resumed; Slurm's limit counts too.",
        None,
        unit="seconds",
        derived="none",
        gt=0,
    )
    time_margin: Duration | None = key(
        "Kept free before the time limit, besides the time of a step and a checkpoint.",
        None,
        unit="seconds",
        derived="1 min, at most a tenth of the limit",
        ge=0,
    )
    threads: int = key("Threads of each rank for computing on the CPU.", 1, ge=1, le=_MOST_THREADS)
    device: Literal["auto", "cpu", "cuda"] = key(
        "Where to compute; auto: on GPUs where every rank has one.", "auto"
    )
    trace: bool = key(
        "Record what every rank does when, into trace.json with each checkpoint; `hpctrain plot` draws it.",
        False,
    )
    trace_steps: int = key(
        "Steps that a trace holds: the newest, so that it does not grow with the run.", 3, unit="steps", ge=1
    )


class ExpertsTable(Section):
    """Mixtures of experts: a router sends each token to some of the experts of a block."""

    count: int = key("Experts of a mixture.", ge=1, le=_MOST_EXPERTS)
    per_token: int = key("Experts that each token goes to.", 2, ge=1, le=_MOST_EXPERTS)
    mlp: int = key("Inner width of an expert.", derived="model.mlp", ge=1, le=4 * _LARGEST)
    shared: int = key("Experts that every token goes to besides.", 0, ge=0, le=_MOST_EXPERTS)
    every: int = key("Every so many-th block is a mixture.", 1, unit="blocks", ge=1, le=_MOST_LAYERS)
    dense_first: int = key("First blocks that are dense.", 0, unit="blocks", ge=0, le=_MOST_LAYERS)
    router: Literal["softmax", "sigmoid"] = key(
        "What makes probabilities of a router's logits: among experts, or of each by itself.", "softmax"
    )
    router_normalize: bool = key("Whether the weights of a token's experts add up to one.", True)
    router_scale: float = key("Factor of these weights.", 1.0, gt=0)
    router_groups: int = key(
        "Groups of experts, of which the router chooses first, by the sum of each one's best two.", 1, ge=1
    )
    router_groups_per_token: int = key("Groups that each token's experts may come from.", 1, ge=1)
    router_dtype: Literal["fp32", "compute"] = key(
        "Format of the router's product; compute: that of precision.compute.", "fp32"
    )
    router_z_loss: float = key(
        "Weight of the squared log-partition function of the router in the loss (ST-MoE); 0: none.",
        0.0,
        ge=0,
        le=1,
    )
    balance: Literal["loss", "bias", "none"] = key(
        "What evens the experts' load out: a loss, or a bias of the choice (DeepSeek-V3).", "loss"
    )
    balance_loss: float = key(
        "Weight of the balance loss: experts x sum of share of tokens x mean probability.",
        derived='0.01 with balance = "loss", else 0',
        ge=0,
        le=1000,
    )
    balance_over: Literal["micro_batch", "sequence", "step"] = key(
        "Over which tokens shares are counted for it; step: those of the step before.", "micro_batch"
    )
    balance_rate: float = key("By how much a step changes the bias of an expert.", 0.001, ge=0, le=1)
    capacity: float | None = key(
        "Tokens that an expert takes of a micro-batch, over an even share; the last ones are dropped.",
        None,
        derived="none: all",
        gt=0,
        le=_MOST_EXPERTS,
    )
    record_routing: int = key(
        "First samples of the run, whose experts go into routing.h5, which other runs can follow.",
        0,
        unit="samples",
        ge=0,
        le=1 << 20,
    )


class Model(Section):
    """The transformer: a preset, which keys change, or family, layers, hidden and heads; or a module."""

    preset: PresetName | None = key(
        "A published shape, whose values fill the keys not given.", None, derived="none"
    )
    source: PathText | None = key(
        "Start from the weights of a Hugging Face folder or checkpoint, whose sizes fill keys not given.",
        None,
        alias="from",
        derived="none: random weights",
        min_length=1,
    )
    family: Literal["gpt2", "llama"] = key(
        "gpt2: learned positions, LayerNorm, biases; llama: RoPE, RMSNorm, no biases.",
        derived="the preset's, else required",
    )
    layers: int = key("Transformer layers.", derived="the preset's, else required", ge=1, le=_MOST_LAYERS)
    hidden: int = key(
        "Width of the residual stream.", derived="the preset's, else required", ge=1, le=_LARGEST
    )
    heads: int = key(
        "Attention heads; must divide hidden.", derived="the preset's, else required", ge=1, le=_LARGEST
    )
    head_size: int = key(
        "Features of one attention head; where it is given, heads need not divide hidden.",
        derived="hidden / heads",
        ge=1,
        le=_LARGEST,
    )
    key_value_heads: int = key(
        "Heads of keys and values, each shared by heads/key_value_heads query heads.",
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
        "Whether output and input embedding are one.", derived="true (gpt2), false (llama, reward models)"
    )
    frozen: tuple[str, ...] = key(
        'Parameters that are not trained, by name; * stands for any text: ["blocks.0.*"].', (), strict=False
    )
    adapters: Adapters | None = table(
        "Low-rank matrices beside those of blocks, which are trained alone (LoRA).",
        derived="none: all parameters are trained",
    )
    experts: ExpertsTable | None = table(
        "Mixture of experts in place of feed-forward layers.", derived="none: all blocks are dense"
    )
    dropout: float = key("Share of activations dropped in training.", 0.0, ge=0, lt=1)
    rope_base: float = key("Base of the rotary position angles (llama).", 10000.0, gt=0)
    norm_epsilon: float = key("Added to the variance in norms.", 1e-5, gt=0)
    initial_std: float = key(
        "Standard deviation of initial weights; residual outputs divide it by sqrt(2 layers).",
        0.02,
        gt=0,
        le=100,
    )
    parametrization: Literal["standard", "mup"] = key(
        "What the width changes; mup: so much that the rate that is best at base_width is best at any width.",
        "standard",
    )
    base_width: int | None = key(
        "Width at which mup changes nothing, and for which learning_rate.peak is the rate of all tensors.",
        None,
        derived="required by mup",
        ge=1,
        le=_LARGEST,
    )
    base_head_size: int | None = key(
        "Features of a head there: this model's where it has more heads, fewer where they are wider.",
        None,
        derived="required by mup at another width, else head_size",
        ge=1,
        le=_LARGEST,
    )

    module: PathText | None = key(
        'A module of your own instead: "FILE.py:FUNCTION", relative to the deck, or "PACKAGE:FUNCTION".',
        None,
        derived="none: a transformer of these sizes",
        min_length=3,
    )
    arguments: dict[str, Any] | None = key(
        "What the function is called with, a table: [model.arguments].", None, derived="nothing"
    )
    miniature: dict[str, Any] | None = key(
        "Other arguments for `check` and --verify-layout, which compute it on one rank, too, in fp64.",
        None,
        derived="those of a run",
    )
    blocks: str | None = key(
        'Its layers in a row, gathered (layout.zero = 3) and computed again one by one: "layers.*".',
        None,
        derived="none: all of it at once",
        min_length=1,
    )
    loss: PathText | None = key(
        "What makes its loss, named as module is: of outputs and batch a sum and a count.",
        None,
        derived="next-token cross-entropy of its logits",
        min_length=3,
    )
    initial: PathText | None = key(
        "What changes the initial values of the module that it is called with, named as module is.",
        None,
        derived="those that the module gives itself",
        min_length=3,
    )
    buffers: Literal["first", "average"] | None = key(
        "Whose its buffers are after a step, of data ranks: the first one's, or their mean.",
        None,
        derived="required where it has any to keep",
    )
    plan: dict[str, Any] | Literal["its own"] | None = key(
        'How tensor ranks split it: a table of patterns ("layers.*.q_proj" = "column"), or "its own".',
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
        "Instead, several in shares: tables [[data.mixture]] with tokens (as above), weight, perhaps name.",
        None,
        derived="none: data.tokens alone",
    )
    dataset: PathText | None = key(
        "Instead, samples for a module of your own: what makes the dataset, named as model.module is.",
        None,
        derived="none: a token file",
        min_length=3,
    )
    arguments: dict[str, Any] | None = key(
        "What that is called with, a table: [data.arguments].", None, derived="nothing"
    )
    collate: PathText | None = key(
        "What makes a batch of a list of its items, named as model.module is: a dict of arrays [b, ...].",
        None,
        derived="none: items of one shape are stacked",
        min_length=3,
    )
    workers: int = key("Processes of each rank that load its items ahead; 0: the rank does.", 0, ge=0, le=256)
    inputs: tuple[str, ...] | None = key(
        "Names in a batch that the module is called with, in this order where it does not take them by name.",
        None,
        derived='all that it takes by name, but "targets" and "labels"',
        strict=False,
    )
    other_tokenizer: bool = key(
        "Take tokens of another tokenizer than that of the weights that a run starts or goes on from.", False
    )
    document_mask: bool = key(
        "Whether documents in a sequence do not see each other, and none predicts what comes behind its end.",
        False,
    )
    pack: bool = key(
        "Whether several conversations share a sequence, each by itself; else each has one.", True
    )
    validation: float = key("Share of the sequences held out for evaluation.", 0.01, ge=0, lt=1)


class DilocoTable(Section):
    """DiLoCo (arXiv 2311.08105): an outer optimizer with Nesterov momentum."""

    learning_rate: float = key("Learning rate of the outer step.", 0.7, gt=0, le=1000)
    momentum: float = key("Momentum of the outer step.", 0.9, ge=0, lt=1)


class LocalStepsTable(Section):
    """Replicas that make several steps by themselves between two synchronizations."""

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

    Experts fold the same ranks in their own way: pipeline x expert data x expert x expert_tensor.
    `layout = "auto"`, in place of the section, has all of it chosen.
    """

    auto: bool = key(
        "Whether keys that are not given, micro_size and recompute too, are chosen: the quickest that fits.",
        False,
    )
    data: int | None = key(
        "Copies that train on different sequences.", None, unit="ranks", derived="fills the rest", ge=1
    )
    tensor: int = key("Ranks that split each layer's weights.", 1, unit="ranks", ge=1)
    context: int = key("Ranks that split each sequence.", 1, unit="ranks", ge=1)
    expert: int = key(
        "Ranks over which the experts are spread: ranks of a stage, which the other axes use too.",
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
        "Parts of the model that each stage holds.", derived="2 where the schedule needs two, else 1", ge=1
    )
    split: Annotated[tuple[int, ...], Field(strict=False)] | Literal["balanced"] | None = key(
        'Layers of each part of the model, first to last; "balanced": by the measured time of each kind.',
        None,
        derived="the heaviest stage is lightest by FLOPs",
    )
    zero: int = key(
        "What is cut over the data and context ranks: 1 optimizer state, 2 gradients too, 3 parameters too.",
        0,
        ge=0,
        le=3,
    )
    zero_group: int | Literal["node"] | None = key(
        'Ranks over which layout.zero cuts, copied across; "node": those of a node.',
        None,
        unit="ranks",
        derived="all data x context ranks",
    )
    sequence_parallel: bool = key("Whether norms and residuals are split over the tensor ranks too.", False)
    context_form: Literal["ring", "all_to_all"] = key(
        "How context ranks attend: keys and values travel a ring, or heads are exchanged for sequence.",
        "ring",
    )
    chosen: tuple[str, ...] = key(
        "Keys that auto chose for a run, which --set layout=auto leaves open again.", (), strict=False
    )
    local_steps: LocalStepsTable | None = table(
        "Replicas that train by themselves for some steps and then exchange weights (Local SGD, DiLoCo).",
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
        "What backward computes again: blocks (full), attention (selective), pieces of N or sqrt(L) blocks.",
        "none",
        unit="blocks",
    )
    activations: Literal["keep", "host", "disk"] = key(
        "Where what blocks save waits for backward: host memory is for GPUs, disk means offload_dir.", "keep"
    )
    activation_format: Literal["exact", "bf16", "int8"] = key(
        "How it is kept: bf16 and int8, with a scale for every 256 elements, make gradients approximate.",
        "exact",
    )
    keep_gathered: int = key(
        "Blocks of each stage that stay gathered through a step (layout.zero = 3).", 0, unit="blocks", ge=0
    )
    accumulate: Literal["whole", "sliced"] = key(
        "Gradients between micro-batches (zero = 2, 3): sliced: less memory, more traffic, other rounding.",
        "whole",
    )
    optimizer: Literal["device", "host", "disk"] = key(
        "Where master weights and moments live: with host (GPUs only) and disk the CPU does the update.",
        "device",
    )
    parameters: Literal["device", "host", "disk"] = key(
        "Where this rank's slices of the parameters live (layout.zero = 3).", "device"
    )
    offload_dir: PathText | None = key(
        "Folder on a fast disk, for what lives there; its files go with the run.",
        None,
        derived="<run.dir>/offload",
        min_length=1,
    )
    offload_buffer: Bytes = key(
        "Memory for optimizer state on its way from and to the disk.", 256_000_000, unit="bytes", ge=4096
    )


class Batch(Section):
    """Size of a step."""

    global_size: int = key("Sequences of one optimizer step, over all ranks.", unit="sequences", ge=1)
    micro_size: int = key("Sequences that a rank computes at a time.", 1, unit="sequences", ge=1)
    sequence: int = key(
        "Length of a sequence.", unit="tokens", derived="the preset's, else required", ge=1, le=_LONGEST
    )
    ramp_from: int = key(
        "Batch of the first step, growing by as many at a time to global_size; 0: no ramp.",
        0,
        unit="sequences",
        ge=0,
    )
    ramp_steps: int = key("Steps over which the batch grows.", 0, unit="steps", ge=0)


class CheckpointSection(Section):
    """Checkpoints that a run writes."""

    every: int = key("A checkpoint every so many steps; 0: only at the end.", 0, unit="steps", ge=0)
    keep: int = key("Newest good checkpoints that are kept.", 2, ge=1)
    keep_every: int = key(
        "Checkpoints of steps that are multiples of this stay for good; 0: none.", 0, unit="steps", ge=0
    )
    keep_best: str | None = key(
        'The set ("validation" is one) of which the checkpoint with the lowest loss stays, linked as "best".',
        None,
        derived="none",
        min_length=1,
    )
    memory_every: int = key(
        "A copy of the state in memory every so many steps, for going back without the disk; 0: none.",
        0,
        unit="steps",
        ge=0,
    )
    mode: Literal["collective", "background"] = key(
        "Whether training waits while a checkpoint is written, or goes on.", "collective"
    )
    buffer: Bytes = key(
        "Memory of a rank for what is being saved; in background mode it holds what changes meanwhile.",
        256 << 20,
        unit="bytes",
        ge=1000,
    )
    mirror: bool = key(
        "Whether a neighbour node has in memory what a rank would write, to go on from if a node is lost.",
        False,
    )
    mirror_every: int = key("With mirror, that is renewed every so many steps.", 10, unit="steps", ge=1)


class Stability(Section):
    """Checks that the ranks agree and go on."""

    hang_seconds: Duration = key(
        "After so long without any sign of life the job reports where each rank is and ends; 0: never.",
        600.0,
        unit="seconds",
        ge=0,
    )
    check_parameters: bool = key(
        "Whether to compare the initial parameters of all copies before training.", True
    )
    straggler_factor: float = key(
        "Ranks that compute this many times as long as the median are named; 0: none (none over NCCL).",
        1.5,
        ge=0,
    )
    z_loss: float = key(
        "Weight of the squared log-partition function in the loss (PaLM); 0: none.", 0.0, ge=0, le=1
    )
    spike: Literal["off", "skip", "rollback"] = key(
        "What a step is for whose loss or gradient norm is far above: an update left out, or a way back.",
        "off",
    )
    spike_window: int = key(
        "Last steps by whose median and deviation spikes are told, once they are behind the warm-up.",
        128,
        unit="steps",
        ge=8,
        le=100_000,
    )
    spike_factor: float = key("Deviations above the median that make a spike.", 6.0, gt=1)
    spike_back: int = key(
        "Steps that a rollback goes back at least; samples since are left out.", 100, unit="steps", ge=1
    )
    spike_most: int = key("Spikes of a run; with one more it stops, to be looked at.", 20, ge=1)
    max_skipped_steps: int = key(
        "Consecutive steps without an update, or all steps of a run, that end it with an error (0: never).",
        50,
        unit="steps",
        ge=0,
    )
    corruption: Literal["off", "cheap", "full"] = key(
        "Look for silent faults: in memory, copies, sums over ranks; full: products and all messages, too.",
        "off",
    )
    corruption_every: int = key(
        "Copies of the same on several ranks are compared every so many steps.", 10, unit="steps", ge=1
    )
    verify_layout: bool = key(
        "Whether to compare one tiny step of this layout with one rank's, before training.", False
    )


class Machine(Section):
    """Properties of the machine, and how its processors are used."""

    peak_flops: float | None = key(
        "Floating-point rate of one rank that counts as 100% MFU.",
        None,
        unit="FLOP/s",
        derived="measured",
        gt=0,
    )
    rates: PathText | None = key(
        "A machine's rates, by which seconds are planned: a published name, or a file of "
        "`hpctrain calibrate`.",
        None,
        derived="no seconds are planned",
        min_length=1,
    )
    bind: bool = key(
        "Whether each rank takes its share of the node's cores, where the launcher has not bound it.", False
    )
    products: Literal["auto", "library", "onednn", "fp32", "fp32-onednn"] = key(
        "What multiplies on a CPU: the quickest as measured, torch's choice, oneDNN (fp32), or either "
        "by way of fp32.",
        "auto",
    )
    compile: bool = key(
        "Whether a CPU computes attention, activations, norms and losses by functions compiled at the start.",
        False,
    )
    ranks_per_node: int | None = key(
        "Ranks that `hpctrain job` starts on a node.", None, unit="ranks", derived="gpus_per_node", ge=1
    )
    gpus_per_node: int | None = key(
        "GPUs that `hpctrain job` asks for on a node.", None, unit="GPUs", derived="none", ge=0
    )
    memory: Bytes | None = key(
        "Memory of a node, into which a run has to fit; `hpctrain job` asks for so much.",
        None,
        unit="bytes",
        derived="what a run finds; for a job, what `hpctrain plan` predicts, and a quarter more",
        ge=1,
    )
    gpu_memory: Bytes | None = key(
        "Memory of a GPU, into which the ranks that use it have to fit.",
        None,
        unit="bytes",
        derived="what a run finds",
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
