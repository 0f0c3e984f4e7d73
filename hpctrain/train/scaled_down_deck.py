"""Scaled-down decks for the layout check.

A built-in family becomes a small model of the same structure. A user's module is built with the arguments of
the table [model.miniature].
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import lcm

from torch import nn

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.planned import META
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.adapters import Adapters
from hpctrain.deck.sections.communication import PowerSgdTable, RoundedTable, SignTable, TopKTable
from hpctrain.deck.sections.latent import LatentTable
from hpctrain.deck.sections.local_steps import LocalStepsTable, has_outer_model
from hpctrain.deck.sections.optimizer import (
    AdafactorTable,
    AdamMiniTable,
    AdamWTable,
    LionTable,
    MuonTable,
    OptimizerTable,
    ScheduleFreeTable,
    SgdTable,
)
from hpctrain.deck.sections.rope_scaling import RopeScaling, rotated_features
from hpctrain.engine.layout.layer_placement import schedule_without_search, split_by_flops
from hpctrain.engine.name_patterns import check_patterns
from hpctrain.errors import HpctrainError
from hpctrain.model.construction import bare_model
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.part import parameter_list
from hpctrain.model.precision import DOUBLE, DOUBLE_FP8
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.split import even_split
from hpctrain.units import format_count

MICRO_BATCHES, MICRO_SIZE = 3, 2
"""Smallest number of micro-batches per step on each data rank, and the number of rows of each.

With three micro-batches, one neither begins nor ends the step: its gradients are added to existing ones, and
the sums are not complete after it.
"""

_HEAD_SIZE, _LAYERS = 8, 2
_FP8_DEVIATION = 7 / 16 / 3.75
"""Standard deviation of initial weights where products are in 8 bits.

Scales are powers of two, with a step at a maximum of 448 / 1024 = 7 / 16. The maximum of a matrix of a
small model is about 3.75 standard deviations. So the maxima of the ranks' parts of a matrix often have other
scales than the maximum of the matrix, and a missing reduction shows.
"""
_EXPERTS, _CHOSEN = 4, 2
_RANK = 3
_RATE, _CLIP = 0.1, 0.1
_EPSILON = 0.01
"""Optimizer epsilon of a scaled-down deck, about the size of its largest gradients after clipping.

A larger epsilon hides faults of what an optimizer divides by: with 1.0, exchanging the second moments of
rows changes no tensor by more than the tolerance. A much smaller one turns rounding into updates.
"""

_STEPS = 2
_SEQUENCE = 16
_WINDOW = 3
_MOST_PARAMETERS = 50_000_000


def _smooth_rule(rule: OptimizerTable) -> tuple[str, OptimizerTable]:
    """Return name and table of an optimizer with as much state that does not magnify rounding errors."""
    match rule:
        case LionTable():
            return "sgd", SgdTable(momentum=0.9)
        case AdafactorTable():
            return "adam-mini", AdamMiniTable(beta1=0.9, epsilon=_EPSILON)
        case SgdTable():
            return "sgd", rule
        case MuonTable():
            # More steps make much of the smallest singular values, which are rounding.
            changes = {"newton_schulz": "fp32", "newton_schulz_steps": 1, "epsilon": _EPSILON}
            return "muon", rule.model_copy(update=changes)
    names = {AdamWTable: "adamw", AdamMiniTable: "adam-mini", ScheduleFreeTable: "schedule-free"}
    return names[type(rule)], rule.model_copy(update={"epsilon": _EPSILON})


def scale_down_family(deck: Deck) -> Deck:
    """Return the deck of a built-in family with a small model and batch, and the same layout."""
    layout, model = deck.layout, deck.model
    layers = max(_LAYERS, layout.pipeline * layout.chunks)
    hidden = model.heads * _HEAD_SIZE
    multiple = layout.tensor * 8
    small = _smoothed(deck).with_keys(
        model={
            "preset": None,
            "layers": layers,
            "frozen": (),
            "hidden": hidden,
            "head_size": _HEAD_SIZE,
            "mlp": -(-2 * hidden // multiple) * multiple,
            # Not a multiple of the tensor axis, so that padding is compared, too.
            "vocabulary": 16 * layout.tensor + 1,
            # Large, so that the gradient of every tensor is well above rounding.
            "initial_std": 0.1,
            **_few_experts(deck),
            **_base(deck, hidden),
            "adapters": _few_adapters(deck),
            "latent": _small_latents(deck),
            "rope_scaling": _few_divisors(deck),
            "rotary_fraction": _even_fraction(deck),
            "windows": _short_windows(deck, layers),
        },
        batch={"sequence": 2 * layout.context * layout.tensor * 2},
    )
    frozen = _matching_parameters(deck, small, deck.model.frozen)
    small = small.with_keys(model={"frozen": () if frozen is None else frozen})
    if not isinstance(rule := small.optimizer.rule, MuonTable):
        return small
    matrices = _matching_parameters(deck, small, rule.matrices)
    if not matrices:  # all are matched, or only blocks that the small model lacks
        matrices = ("*",) if matrices is None else ("blocks.*",)
    return small.with_keys(optimizer={"muon": rule.model_copy(update={"matrices": matrices})})


def batch_of(deck: Deck, mesh: Mesh) -> int:
    """Return the number of samples per step of a scaled-down deck: one less than its micro-batches have rows.

    In a pipeline there is one micro-batch more than stages, so that the pipeline is full and a stage uses the
    buffers of a finished micro-batch again. The last row of the last data rank contains no sample.
    """
    stages = mesh.size("pipeline")
    micro_batches = max(MICRO_BATCHES, stages + 1)
    if deck.layout.schedule == "interleaved":
        micro_batches = -(-micro_batches // stages) * stages
    return micro_batches * MICRO_SIZE * mesh.size("data") - 1


def has_residuals(deck: Deck) -> bool:
    """Return True if the deck compresses gradients with error feedback.

    Then the compressed sum and the residuals of all ranks together are the exact sum.
    """
    form = deck.communication.compression
    if form is None or form.between == "nodes" or deck.model.module is not None or has_outer_model(deck):
        return False
    if isinstance(form, TopKTable):
        _, rule = _smooth_rule(deck.optimizer.rule)
        return not isinstance(rule, SgdTable) or not rule.momentum
    return isinstance(form, RoundedTable | SignTable | PowerSgdTable) and form.error_feedback


def with_fp8_products(deck: Deck, small: Deck) -> Deck:
    """Return the scaled-down deck with the deck's fp8 products, and all other computations in fp64.

    In fp32, rounding depends on the layout, so that a few numbers would be quantized to other fp8 values.
    """
    exclude = _matching_parameters(deck, small, deck.precision.fp8_exclude)
    return small.with_keys(
        model={"initial_std": _FP8_DEVIATION},
        precision={"compute": DOUBLE_FP8, "fp8_exclude": ("*",) if exclude is None else exclude},
        machine={"products": "library", "compile": False},
    )


def with_outer_steps(deck: Deck, small: Deck) -> tuple[Deck, Deck]:
    """Return the scaled-down deck with an outer step after each step, and an equivalent deck for one rank.

    With plain gradient descent, the mean of the replicas' steps equals one step with the mean gradient. An
    outer step with momentum equals a step of Nesterov momentum with the mean gradient.
    """
    keys = deck.layout.local_steps
    assert keys is not None
    every_step = LocalStepsTable(replicas=keys.replicas)
    plain = small.optimizer.with_selection("name", "sgd", SgdTable(), weight_decay=0.0, clip=0.0)
    replicas = small.with_keys(
        optimizer=plain,
        communication={"warmup": 0},
        layout={"local_steps": every_step.with_selection("outer", keys.outer, keys.diloco)},
    )
    if (outer := keys.diloco) is None:
        return replicas, replicas
    step = SgdTable(momentum=outer.momentum, nesterov=outer.momentum > 0)
    rate = {"peak": _RATE * outer.learning_rate}
    return replicas, replicas.with_keys(optimizer={"sgd": step}, learning_rate=rate)


def scale_down(deck: Deck, mesh: Mesh) -> Deck:
    """Return the scaled-down version of any deck, with its pipeline split.

    Raises:
        HpctrainError: A pattern of parameter names does not fit the model, or a module is too large.
    """
    if deck.model.module is not None:
        return _scale_down_module(deck)
    check_patterns(deck, ModelShape.of(deck, deck.model.vocabulary or 2))
    small = scale_down_family(deck)
    return small.with_keys(layout={"split": _matching_split(deck, small.model.layers, mesh)})


def _smoothed(deck: Deck) -> Deck:
    """Return the deck with steps that are clipped, decayed and smooth functions of gradients, in fp32."""
    small = deck.with_keys(
        layout={"split": None},
        batch={"micro_size": MICRO_SIZE, "ramp_from": 0},
        precision={"compute": "fp32"},
        optimizer=deck.optimizer.with_selection("name", *_smooth_rule(deck.optimizer.rule), clip=_CLIP),
        learning_rate={"peak": _RATE, "warmup": 0, "decay": "constant", "reference_batch": 0},
        communication={
            "bucket_bytes": 4096,
            "compress": deck.communication.compress if has_residuals(deck) else "none",
            "warmup": _STEPS,
        },
        memory={"activations": "keep", "activation_format": "exact"},
        stability={"check_parameters": True},
        # Kernels need not be chosen for such small matrices.
        machine={"products": "onednn" if "onednn" in deck.machine.products else "library"},
        run={"noise_scale_steps": 0},
    )
    # Samples contain all tokens of the small vocabulary, not those of a tokenizer.
    return small.with_runtime_choices(replace(small.runtime_choices, tokenizer_tokens=None))


def _scale_down_module(deck: Deck) -> Deck:
    """Return the deck of a user's module in fp64, with the arguments of [model.miniature]."""
    model, layout = deck.model, deck.layout
    arguments = dict(model.arguments or {}) | dict(model.miniature or {})
    sequence = min(deck.batch.sequence, _SEQUENCE * layout.tensor)
    small = _smoothed(deck).with_keys(
        model={"arguments": arguments},
        batch={"sequence": sequence},
        precision={"compute": DOUBLE},
    )
    module = ModuleArchitecture.of(small).build(META)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if parameters > _MOST_PARAMETERS:
        sentence = (
            f"has {format_count(parameters)} parameters, but the comparison in double precision on one rank "
            f"supports at most {format_count(_MOST_PARAMETERS)}: set smaller arguments in the table "
            "[model.miniature]"
        )
        raise HpctrainError(deck.problem("model.module", sentence))
    tables = [each.num_embeddings for each in module.modules() if isinstance(each, nn.Embedding)]
    vocabulary = min(max(tables, default=2), model.vocabulary or sys.maxsize)
    return small.with_keys(model={"vocabulary": vocabulary})


def _base(deck: Deck, hidden: int) -> dict[str, object]:
    """Return the base width and head size of a model of width `hidden`, with the ratios of the deck."""
    model = deck.model
    if model.base_width is None or model.base_head_size is None:
        return {}
    return {
        "base_width": max(1, round(hidden * model.base_width / model.hidden)),
        "base_head_size": max(1, round(_HEAD_SIZE * model.base_head_size / model.head_size)),
    }


def _few_experts(deck: Deck) -> dict[str, object]:
    """Return the keys of the small mixtures: every expert rank has experts, and every router group as well.

    There are dense blocks if the deck has some.
    """
    experts, layout = deck.model.experts, deck.layout
    if experts is None:
        return {}
    chosen = min(experts.per_token, _CHOSEN)
    unit = lcm(layout.expert, experts.router_groups)
    enough = max(_EXPERTS, -(-chosen * experts.router_groups // experts.router_groups_per_token))
    multiple = 4 * lcm(layout.tensor, layout.expert_tensor)
    return {
        "experts.count": min(experts.count, -(-enough // unit) * unit),
        "experts.per_token": chosen,
        "experts.mlp": -(-deck.model.heads * _HEAD_SIZE // multiple) * multiple,
        "experts.shared": min(experts.shared, 1),
        "experts.every": min(experts.every, 2),
        "experts.dense_first": min(experts.dense_first, 1),
        "experts.pattern": _short_pattern(experts.pattern),
    }


def _short_pattern(pattern: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return a pattern of at most two blocks that has the same values."""
    return (pattern[0], not pattern[0]) if len(set(pattern)) > 1 else pattern[:1]


def _few_adapters(deck: Deck) -> Adapters | None:
    """Return adapters of a low rank on the same kinds of matrices, in all blocks."""
    adapters = deck.model.adapters
    if adapters is None:
        return None
    kinds = dict.fromkeys(re.sub(r"^blocks\.[^.]*\.", "", pattern) for pattern in adapters.targets)
    return adapters.model_copy(update={"rank": min(adapters.rank, _RANK), "targets": tuple(kinds)})


def _small_latents(deck: Deck) -> LatentTable | None:
    """Return the sizes of latent attention of the small model, which differ as those of the deck do."""
    latent = deck.model.latent
    if latent is None:
        return None
    values = _HEAD_SIZE - 2 if latent.value_size < deck.model.head_size else _HEAD_SIZE
    queries = None if latent.query_rank is None else _HEAD_SIZE + 2
    return LatentTable(
        key_value_rank=_HEAD_SIZE, query_rank=queries, rotary_size=_HEAD_SIZE // 2, value_size=values
    )


def _few_divisors(deck: Deck) -> RopeScaling | None:
    """Return the scaling of rotary positions, with divisors (longrope) for the small heads."""
    scaling = deck.model.rope_scaling
    if scaling is None or scaling.kind != "longrope":
        return scaling
    latent = _small_latents(deck)
    rotated = rotated_features(_HEAD_SIZE, _even_fraction(deck)) if latent is None else latent.rotary_size
    count = rotated // 2
    divisors = {name: getattr(scaling, name) for name in ("short_factors", "long_factors")}
    few = {name: tuple(each[i * len(each) // count] for i in range(count)) for name, each in divisors.items()}
    return scaling.model_copy(update=few)


def _even_fraction(deck: Deck) -> float:
    """Return the share of rotated features, or one that gives an even number of them in a small model."""
    rotated = rotated_features(_HEAD_SIZE, deck.model.rotary_fraction)
    return deck.model.rotary_fraction if rotated and rotated % 2 == 0 else 0.5


def _short_windows(deck: Deck, layers: int) -> tuple[int, ...]:
    """Return the windows of the small model: one that is shorter than a sequence for each size."""
    windows = deck.model.windows
    sizes = sorted({window for window in windows if window})
    count = min(len(windows), layers)
    spread = [windows[round(i * (len(windows) - 1) / max(1, count - 1))] for i in range(count)]
    return tuple(_WINDOW + sizes.index(window) if window else 0 for window in spread)


def _matching_parameters(deck: Deck, small: Deck, patterns: Sequence[str]) -> tuple[str, ...] | None:
    """Return the parameters of the small model that correspond to matched ones; None for all.

    Its first and last blocks correspond to those of the deck, and the others to some in between.
    """
    model = bare_model(ModelShape.of(small, small.model.vocabulary or 2))
    names = [parameter.shard.name for parameter in parameter_list(model)]
    scale = (deck.model.layers - 1) / (small.model.layers - 1)

    def original(name: str) -> str:
        return re.sub(r"^blocks\.(\d+)\.", lambda block: f"blocks.{round(int(block[1]) * scale)}.", name)

    named = [name for name in names if any(fnmatchcase(original(name), pattern) for pattern in patterns)]
    return tuple(named) if len(named) < len(names) else None


def _matching_split(deck: Deck, blocks: int, mesh: Mesh) -> tuple[int, ...]:
    """Return the number of blocks of each part: 0 if the deck's part has none, else even shares."""
    shape = ModelShape.of(deck, deck.model.vocabulary or 2)
    split = split_by_flops(deck, shape, schedule_without_search(deck, mesh.size("data")))
    some = iter(even_split(blocks, len(split) - split.count(0)))
    return tuple(next(some) if own else 0 for own in split)
