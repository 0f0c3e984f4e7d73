"""The section [model], and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.deck.activations import ACTIVATIONS, GATED
from hpctrain.deck.families import FamilyName, described_defaults, described_embedding_multiplier
from hpctrain.deck.family import (
    AttentionBias,
    NormKind,
    NormPlacement,
    NormWeight,
    ParallelResidual,
    Positions,
    QueryKeyNorm,
)
from hpctrain.deck.key import PathText, Section, key, table
from hpctrain.deck.presets import PresetName
from hpctrain.deck.problem import DeckProblem, divisors, must_divide, nearest_numbers
from hpctrain.deck.relations import (
    GIVEN,
    AtMost,
    Conflicts,
    Divides,
    HasEffectWith,
    Relations,
    Requires,
)
from hpctrain.deck.sections.adapters import Adapters
from hpctrain.deck.sections.experts import LARGEST_SIZE, MOST_LAYERS, ExpertsTable
from hpctrain.deck.sections.latent import LatentTable
from hpctrain.deck.sections.objective import LANGUAGE_KINDS, SCORE_KINDS
from hpctrain.deck.sections.optimizer import MuonTable
from hpctrain.deck.sections.rope_scaling import RopeScaling, rotated_features
from hpctrain.deck.sources import toml_value
from hpctrain.text import either

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

if TYPE_CHECKING:
    ActivationName = str
else:
    ActivationName = Literal[tuple(ACTIVATIONS)]


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
    family: FamilyName = key(
        'Architecture that decides the defaults of the keys below; Qwen and Mistral are "llama".',
        derived="the preset's, else required",
    )
    layers: int = key(
        "Number of transformer layers.", derived="the preset's, else required", ge=1, le=MOST_LAYERS
    )
    hidden: int = key(
        "Width of the residual stream.", derived="the preset's, else required", ge=1, le=LARGEST_SIZE
    )
    heads: int = key(
        "Number of attention heads, which must divide hidden.",
        derived="the preset's, else required",
        ge=1,
        le=LARGEST_SIZE,
    )
    head_size: int = key(
        "Width of one attention head; if it is given, heads need not divide hidden.",
        derived="hidden / heads",
        ge=1,
        le=LARGEST_SIZE,
    )
    key_value_heads: int = key(
        "Number of key/value heads (GQA), each shared by heads / key_value_heads query heads.",
        derived="heads",
        ge=1,
        le=LARGEST_SIZE,
    )
    positions: Positions = key(
        "Positions: learned vectors, rotated queries and keys, or none but the causal mask.",
        derived=described_defaults("positions"),
    )
    rotary_fraction: float = key(
        "Share of the features of each head that is rotated.",
        derived=described_defaults("rotary_fraction"),
        gt=0,
        le=1,
    )
    rotation_pattern: tuple[bool, ...] = key(
        "Layers that rotate queries and keys, repeated over all: [true, true, false]; [] for all.",
        derived=described_defaults("rotation_pattern"),
        strict=False,
    )
    windows: tuple[int, ...] = key(
        "Window sizes in tokens, own position included, repeated over the layers: [4096, 0]; 0: no window.",
        derived=described_defaults("windows"),
        strict=False,
    )
    query_key_value_clip: float = key(
        "Bound to which queries, keys and values are clamped after their projection; 0 for none.",
        derived=described_defaults("query_key_value_clip"),
        ge=0,
        le=1e6,
    )
    attention_cap: float = key(
        "Bound c of the scores x of attention, which become c tanh(x / c); 0 for none.",
        derived=described_defaults("attention_cap"),
        ge=0,
        le=1e6,
    )
    attention_sinks: bool = key(
        "Whether each head has a learned attention sink: a logit in the softmax without a value (gpt-oss).",
        derived=described_defaults("attention_sinks"),
    )
    norm: NormKind = key("Norm of hidden states: LayerNorm or RMSNorm.", derived=described_defaults("norm"))
    norm_weight: NormWeight = key(
        "Factor of normalized features: a weight, a weight plus one, or none.",
        derived=described_defaults("norm_weight"),
    )
    norm_bias: bool = key("Whether norms have a bias (LayerNorm).", derived=described_defaults("norm_bias"))
    norm_placement: NormPlacement = key(
        "Norms of attention and feed-forward parts: of their inputs, of their outputs, or of both.",
        derived=described_defaults("norm_placement"),
    )
    parallel_residual: ParallelResidual = key(
        "Whether the feed-forward part reads what attention reads, after the same norm or its own.",
        derived=described_defaults("parallel_residual"),
    )
    query_key_norm: QueryKeyNorm = key(
        "Norm of queries and keys: RMSNorm per head or over all heads, or LayerNorm per head.",
        derived=described_defaults("query_key_norm"),
    )
    embedding_multiplier: float = key(
        "Factor of the embeddings of tokens.",
        derived=described_embedding_multiplier(),
        gt=0,
        le=1e6,
    )
    residual_multiplier: float = key(
        "Factor of what attention and feed-forward parts add to hidden states.",
        derived=described_defaults("residual_multiplier"),
        gt=0,
        le=1e6,
    )
    attention_scale: float | None = key(
        "Factor of the products of queries and keys.", None, derived="1 / sqrt(head_size)", gt=0, le=1e6
    )
    logit_multiplier: float = key(
        "Factor of the logits.", derived=described_defaults("logit_multiplier"), gt=0, le=1e6
    )
    logit_cap: float = key(
        "Bound c of the logits x, which become c tanh(x / c); 0 for none.",
        derived=described_defaults("logit_cap"),
        ge=0,
        le=1e6,
    )
    attention_bias: AttentionBias = key(
        "Attention layers with biases: none, those of queries, keys and values (Qwen2), or all four.",
        derived=described_defaults("attention_bias"),
    )
    mlp_bias: bool = key(
        "Whether the linear layers of feed-forward parts have biases.", derived=described_defaults("mlp_bias")
    )
    activation: ActivationName = key(
        f"Activation of the feed-forward part; with a gate: {', '.join(GATED)}.",
        derived=described_defaults("activation"),
    )
    mlp: int = key(
        "Inner width of the feed-forward part.",
        derived="4 hidden; with a gate 8/3 hidden up to a multiple of 256",
        ge=1,
        le=4 * LARGEST_SIZE,
    )
    vocabulary: int | None = key(
        "Size of the vocabulary, at least that of the token file.",
        None,
        unit="tokens",
        derived="the token file's",
        ge=2,
        le=LARGEST_SIZE,
    )
    tied: bool = key(
        "Whether the output layer and the input embedding share their weights.",
        derived=f"{described_defaults('tied')}; false (reward models)",
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
    latent: LatentTable | None = table(
        "Latent attention (DeepSeek): keys and values of all heads follow from a few features.",
        derived="none: each head has keys and values of its own",
    )
    mtp_layers: int = key(
        "Modules of multi-token prediction (DeepSeek-V3); module k learns the token k + 1 positions ahead.",
        0,
        ge=0,
        le=16,
    )
    dropout: float = key("Share of activations dropped in training.", 0.0, ge=0, lt=1)
    rope_base: float = key("Base of the rotary position angles.", 10000.0, gt=0)
    rope_local_base: float | None = key(
        "RoPE base of layers with a window; rope_scaling is not applied there.",
        None,
        derived="none: as in other layers",
        gt=0,
    )
    rope_scaling: RopeScaling | None = table(
        "Scaling of the rotary position angles for longer sequences.", derived="none: not scaled"
    )
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
        le=LARGEST_SIZE,
    )
    base_head_size: int | None = key(
        "Head size of the mup base model: head_size if wider models have more heads, less if heads get "
        "wider.",
        None,
        derived="required by mup at another width, else head_size",
        ge=1,
        le=LARGEST_SIZE,
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
    def rotated_features(self) -> int:
        """Number of features of an attention head that are rotated."""
        if self.latent is not None:
            return self.latent.rotary_size
        return rotated_features(self.head_size, self.rotary_fraction)

    @property
    def has_frozen_parameters(self) -> bool:
        """True if some parameters are not trained: those of model.frozen, or all but those of adapters."""
        return bool(self.frozen) or self.adapters is not None


def source_problems(deck: Deck, source: Mapping[str, object]) -> list[DeckProblem]:
    """Return the problems of keys that contradict the model of `model.from`; empty if there are none.

    The vocabulary may be larger. With learned positions the sequence may be shorter, otherwise it is free.

    Args:
        deck: The deck.
        source: Keys that this model determines, by full name, as a SourceReader returns them. Empty if the
            deck has no such model, or if it was not read; then there are no problems.
    """
    name = f"model.from = {toml_value(deck.model.source)}"
    problems = []
    tables = dict.fromkeys(full.rpartition(".")[0] for full in source)
    missing = [table for table in tables if "." in table and deck.value(table) is None]
    sentence = f"conflicts with {name}, whose model has this table (leave this key out)"
    problems += [DeckProblem(table, sentence) for table in missing]
    for full, own in source.items():
        if full.rpartition(".")[0] in missing:
            continue
        value = deck.value(full)
        if full == "model.vocabulary":
            if isinstance(value, int) and isinstance(own, int) and value < own:
                sentence = f"is smaller than the {own} of {name}, whose vocabulary can only grow"
                problems.append(DeckProblem(full, sentence))
        elif full == "batch.sequence":
            if deck.model.positions == "learned" and isinstance(own, int) and deck.batch.sequence > own:
                sentence = f"is longer than the {own} learned positions of {name}"
                problems.append(DeckProblem(full, sentence, ("model.family",)))
        elif value != own and not (full == "model.tied" and deck.objective.kind in SCORE_KINDS):
            sentence = f"conflicts with {name}, whose model has {toml_value(own)} (leave this key out)"
            problems.append(DeckProblem(full, sentence))
    if source and deck.model.parametrization == "mup" and "model.parametrization" not in source:
        sentence = f'conflicts with {name}, whose model has "standard" (leave this key out)'
        problems.append(DeckProblem("model.parametrization", sentence))
    if source and deck.model.experts and "model.experts.count" not in source:
        problems += _upcycling(deck, name)
    return problems


def _upcycling(deck: Deck, name: str) -> Iterator[DeckProblem]:
    """Yield the problems of a mixture that starts from a dense model, whose function it must keep."""
    model, experts = deck.model, deck.model.experts
    assert experts is not None
    begin = f"because experts start as copies of the feed-forward layers of {name}, a dense model"
    if experts.mlp != model.mlp:
        sentence = f"must be model.mlp = {model.mlp}, {begin}"
        yield DeckProblem("model.experts.mlp", sentence, ("model.mlp", "model.experts.count"))
    if not experts.router_normalize:
        sentence = f"must be true, {begin}, and their weights must add up to 1"
        yield DeckProblem("model.experts.router_normalize", sentence, ("model.experts.count",))
    if experts.router_scale != 1:
        sentence = f"must be 1, {begin}, and their weights must add up to 1"
        yield DeckProblem("model.experts.router_scale", sentence, ("model.experts.count",))
    if experts.shared:
        sentence = f"must be 0, {begin}, and shared experts would add to them"
        yield DeckProblem("model.experts.shared", sentence, ("model.experts.count",))


RELATIONS: Relations = (
    *(
        Requires(f"model.{name}", "model.module", GIVEN)
        for name in ("arguments", "miniature", "blocks", "loss", "initial", "buffers", "plan")
    ),
    Conflicts(
        "model.experts",
        "communication.server.mode",
        because="load balancing requires steps that all ranks make together",
    ),
)

TRANSFORMER_RELATIONS: Relations = (
    Divides("model.key_value_heads", "model.heads"),
    Requires("model.rope_base", "model.positions", ("rotary",)),
    Requires("model.rotation_pattern", "model.positions", ("rotary",)),
    Requires("model.rope_local_base", "model.positions", ("rotary",)),
    (
        Requires("model.norm_bias", "model.norm", ("layer",)),
        Requires("model.norm_bias", "model.norm_weight", ("plain",)),
    ),
    Conflicts("model.norm_weight", "model.norm", ("one_plus",), ("layer",)),
    Conflicts(
        "model.parallel_residual",
        "model.norm_placement",
        ("one_norm", "two_norms"),
        ("after", "both"),
        because="both parts of a block read the normalized hidden states",
    ),
    Conflicts(
        "model.tied", "objective.kind", (True,), SCORE_KINDS, because="a reward model has its own output row"
    ),
    AtMost(
        "model.mtp_layers",
        "batch.sequence",
        below=True,
        because="module k predicts the token k + 1 positions ahead",
    ),
    Requires("model.mtp_layers", "model.positions", ("rotary", "none")),
    Requires("model.mtp_layers", "objective.kind", LANGUAGE_KINDS),
    *(
        Conflicts(
            "model.mtp_layers",
            name,
            other_values=values,
            because=because,
            hint=f"leave {name} out",
        )
        for name, values, because in (
            ("model.parametrization", ("mup",), "scales of the modules have no known rule"),
            ("model.adapters", GIVEN, "adapters train a model whose weights exist"),
            ("model.frozen", None, "the modules train all that is before them"),
            ("model.dropout", None, "the modules' embeddings have no dropout"),
            ("communication.server.mode", GIVEN, "workers compute next-token losses only"),
        )
    ),
    HasEffectWith("model.base_width", "model.parametrization", ("mup",)),
    HasEffectWith("model.base_head_size", "model.parametrization", ("mup",)),
)
"""Relations of keys that a user's own module does not have."""


def head_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problem of a number or size of attention heads that does not fit other sizes; at most one.

    Without model.head_size, heads have to divide model.hidden. Rotary positions require an even size.
    """
    model, heads_divide = deck.model, "model.head_size" in deck.sources.defaulted
    has_odd_part = model.latent is not None and model.latent.rotary_size % 2 == 1  # it has its own message
    needs_even = model.positions == "rotary" and not has_odd_part
    if not heads_divide and needs_even and model.head_size % 2:
        sentence = f"must be even for rotary positions (use {model.head_size + 1})"
        yield DeckProblem("model.head_size", sentence, ("model.family",))
    elif heads_divide and model.hidden % model.heads:
        sentence = must_divide("model.hidden", model.hidden, model.heads)
        yield DeckProblem("model.heads", sentence, ("model.hidden",))
    elif heads_divide and needs_even and model.hidden // model.heads % 2:
        even = [heads for heads in divisors(model.hidden) if model.hidden // heads % 2 == 0]
        would = f" (use {either(nearest_numbers(model.heads, even))} heads)" if even else ""
        yield DeckProblem(
            "model.heads",
            f"must give an even head size for rotary positions, but model.hidden / model.heads = "
            f"{model.hidden} / {model.heads} = {model.hidden // model.heads}{would}",
            ("model.hidden", "model.family"),
        )


def rotation_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of rotation: an odd number of rotated features, and too long a pattern."""
    model = deck.model
    rotated = rotated_features(model.head_size, model.rotary_fraction)
    if model.positions == "rotary" and model.head_size % 2 == 0 and (rotated % 2 or not rotated):
        sentence = (
            f"must give an even number of rotated features, but model.head_size = {model.head_size} gives "
            f"{rotated} (use {max(2, rotated // 2 * 2) / model.head_size:g})"
        )
        yield DeckProblem("model.rotary_fraction", sentence, ("model.head_size",))
    yield from _long_pattern(deck, "rotation_pattern", "values")


def window_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of windows: of their sizes, their number, and of a base that no layer has."""
    model = deck.model
    wrong = next((window for window in model.windows if window < 0), None)
    if wrong is not None:
        sentence = f"each window must be a positive number of tokens, or 0 for no window (got {wrong})"
        yield DeckProblem("model.windows", sentence)
    elif model.rope_local_base is not None and not any(model.windows):
        sentence = "has no effect without a layer that has a window (set model.windows)"
        yield DeckProblem("model.rope_local_base", sentence, ("model.windows",))
    else:
        yield from _long_pattern(deck, "windows", "windows")


def _long_pattern(deck: Deck, name: str, items: str) -> Iterator[DeckProblem]:
    """Yield the problem of a pattern over layers that a deck gives for more layers than there are.

    The pattern of a preset or of a family may be longer than a model with fewer layers.

    Args:
        deck: The deck.
        name: Name of the pattern in [model].
        items: What the pattern consists of, for the message.
    """
    key = f"model.{name}"
    count, layers, place = len(getattr(deck.model, name)), deck.model.layers, deck.sources.places.get(key)
    if place is not None and not place.note and count > layers:
        sentence = f"has {count} {items}, but model.layers = {layers} (leave the others out)"
        yield DeckProblem(key, sentence, ("model.layers",))


MUP_OPTIMIZERS = ("adafactor", "adam-mini", "adamw", "lion", "muon", "schedule-free", "sgd")
"""Optimizers whose learning rates have a known dependence on the width."""


def parametrization_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of model.parametrization = "mup"; none for "standard".

    These are sizes of the base model that are missing or contradict each other, and an optimizer, or
    parameters that it updates, for which no rule of learning rates is known.
    """
    model, optimizer = deck.model, deck.optimizer.name
    by = ("model.parametrization",)
    if model.parametrization == "standard":
        return
    if model.base_width is None:
        sentence = (
            "requires model.base_width, the width at which learning_rate.peak was tuned (with "
            f"{model.hidden}, the value of model.hidden, muP changes nothing)"
        )
        yield DeckProblem("model.parametrization", sentence, ("model.base_width",))
    elif model.base_head_size is None:
        narrower = max(1, round(model.head_size * model.base_width / model.hidden))
        sentence = (
            f"requires model.base_head_size, the head size of the base model (use {model.head_size} if "
            f"wider models have more heads, {narrower} if they have wider heads)"
        )
        yield DeckProblem("model.base_width", sentence, ("model.base_head_size",))
    elif model.base_width == model.hidden and model.base_head_size != model.head_size:
        sentence = f"must be model.head_size = {model.head_size} with model.base_width = model.hidden"
        yield DeckProblem("model.base_head_size", sentence, ("model.base_width", "model.head_size"))
    if optimizer not in MUP_OPTIMIZERS:
        known = either([f'"{name}"' for name in MUP_OPTIMIZERS])
        sentence = (
            'is unsupported with model.parametrization = "mup": its learning rates have no '
            f"known rule (use {known})"
        )
        yield DeckProblem("optimizer.name", sentence, by)
    if isinstance(rule := deck.optimizer.rule, MuonTable):
        for name in ("embedding.tokens.weight", "embedding.positions.weight", "head.weight", "score.weight"):
            if any(fnmatchcase(name, pattern) for pattern in rule.matrices):
                sentence = (
                    'conflicts with model.parametrization = "mup": the learning rate of '
                    f"{name} has no known rule"
                )
                yield DeckProblem("optimizer.muon.matrices", sentence, by)
                break
    if optimizer == "sgd" and model.query_key_norm == "head":
        sentence = (
            'is unsupported with optimizer.name = "sgd" and model.parametrization = "mup": learning rates '
            'have no known rule (use "all" or "none")'
        )
        yield DeckProblem("model.query_key_norm", sentence, (*by, "optimizer.name"))
