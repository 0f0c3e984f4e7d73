"""Text of a plan: sentences and tables."""

from __future__ import annotations

from itertools import starmap

from hpctrain.comm.mesh import rank_count, sizes_text
from hpctrain.costs.memory_account import GPU_MEMORY_KINDS, MemoryAccount
from hpctrain.deck.auxiliary_decks import concurrent_texts, is_checkpoint
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.engine.choices.deck_kernels import describe_kernels, kernels_of
from hpctrain.host.device import device_kind, on_host
from hpctrain.plan.auxiliary_memory import REWARD_MODELS
from hpctrain.plan.deck_plan import DeckPlan
from hpctrain.plan.form_text import alternative_lines, form_lines
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.plan.time.advice_text import advice_lines
from hpctrain.plan.time.time_text import COMPARED, time_lines
from hpctrain.report.terminal import columns, fit
from hpctrain.text import counted, fitted, table
from hpctrain.units import format_bytes, format_count

KINDS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "activation": "activations",
    "cache": "cache",
    "buffer": "buffers",
    "other": "other",
    "runtime": "CUDA and NCCL",
    "fragmented": "fragmented",
}
SAVINGS_SHOWN = 4

UNKNOWN = (
    "The memory of activations is unknown and not included, because the module does not run on tensors "
    "without values: {why}."
)


def plan_text(plan: DeckPlan) -> str:
    """Return the text of `hpctrain plan` about a deck."""
    deck, memory = plan.deck, plan.memory
    holder = holder_words(memory, memory.largest.stage).capitalize()
    active = active_words(memory.parameters_total, memory.parameters_active)
    ranks = ", ".join(starmap(_role, memory.roles)) or sizes_text(memory.sizes)
    lines = [
        f"{deck.run.title}: {plan.title}, {format_count(memory.parameters_total)} parameters, {active}"
        f"{deck.precision.format_name}, {counted(plan.ranks, 'rank')} ({ranks}), "
        f"layout.zero = {deck.layout.zero}",
        "",
        *memory_table(memory),
        "",
        f"{holder} needs up to {format_bytes(memory.largest.memory.total)}; {largest_kinds(memory)}.",
        *_sharing_lines(memory),
        *_exchange_lines(memory),
        *_policy_lines(plan),
        *([] if memory.activations_known else [UNKNOWN.format(why=memory.unknown_reason)]),
        _fit_line(plan),
    ]
    if plan.savings:
        rows = [
            (f"  --set {saving.change}", f"-{format_bytes(saving.saved)}", format_bytes(saving.total))
            for saving in plan.savings[:SAVINGS_SHOWN]
        ]
        lines += ["Changes that save most memory, each on its own:", *table(rows)]
    lines += [*form_lines(plan.traffic), *alternative_lines(plan.other_forms)]
    lines += ["", f"Pipeline: {plan.pipeline}."] if plan.pipeline is not None else []
    if plan.step is not None and plan.machine is not None:
        hours = "GPU-hours" if not on_host(device_kind(deck.run.device)) else "rank-hours"
        lines += ["", *time_lines(plan.step, plan.machine, hours)]
    if plan.step is not None and plan.advice is not None:
        lines += advice_lines(plan.step, plan.advice)
    if deck.runtime_choices.kernels_note:
        kernels = kernels_of(deck, device_kind(deck.run.device), memory.sizes["data"])
        kernel_lines = describe_kernels(deck, kernels) or [
            f"matrix products are {deck.runtime_choices.kernels_note}"
        ]
        lines += [f"{line[0].upper()}{line[1:]}." for line in kernel_lines]
    if deck.layout.split == "balanced":
        lines += ['layout.split = "balanced" is measured when the run starts; this plan splits by FLOPs.']
    return "\n".join(line for each in lines for line in fit(each, columns())) + "\n"


def _role(name: str, ranks: int) -> str:
    """Return the name of a role with its number of ranks."""
    return counted(ranks, name.removesuffix("s")) if name.endswith("s") else f"{name} {ranks}"


def memory_table(memory: MemoryPlan) -> list[str]:
    """Return a table of the bytes of one rank of every stage. Equal stages share a line."""
    kinds = kinds_of(*(stage.memory for stage in memory.stages))
    rows = [("memory per rank", "blocks", *kinds.values(), "total")]
    groups: list[tuple[list[int], int, MemoryAccount]] = []
    for stage in memory.stages:
        if groups and groups[-1][1:] == (stage.blocks, stage.memory):
            groups[-1][0].append(stage.stage)
        else:
            groups.append(([stage.stage], stage.blocks, stage.memory))
    for stages, blocks, account in groups:
        name = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}-{stages[-1]}"
        if len(memory.stages) == 1:
            name = "all ranks"
        elif memory.roles:
            name = ", ".join(memory.roles[stage][0] for stage in stages)
        sizes = [_size(memory, account, kind) for kind in kinds]
        rows.append((name, str(blocks), *sizes, format_bytes(account.total)))
    return fitted(rows, (0,), columns())


def _size(memory: MemoryPlan, account: MemoryAccount, kind: str) -> str:
    """Return the bytes of a kind of memory, or "unknown"."""
    known = memory.activations_known or kind != "activation"
    return format_bytes(account.kinds()[kind]) if known else "unknown"


def comparison_table(plan: MemoryPlan, stage: int, measured: MemoryAccount) -> list[str]:
    """Return a table of the predicted and measured memory of a rank.

    Args:
        plan: Predicted memory of all ranks.
        stage: Pipeline stage of the rank.
        measured: Measured memory of the rank.
    """
    predicted, holder = plan.stages[stage].memory, holder_words(plan, stage)
    rows = [(f"memory of {holder}", *COMPARED)]
    kinds = kinds_of(predicted, measured)
    pairs = [(name, predicted.kinds()[kind], measured.kinds()[kind]) for kind, name in kinds.items()]
    if not plan.activations_known:
        unknown = KINDS["activation"]
        for name, predicted_bytes, measured_bytes in pairs:
            rows.append(
                (
                    name,
                    "unknown" if name == unknown else format_bytes(predicted_bytes),
                    format_bytes(measured_bytes),
                    "",
                )
            )
        return table(rows)
    for name, predicted_bytes, measured_bytes in [*pairs, ("total", predicted.total, measured.total)]:
        ratio = f"{100 * (predicted_bytes - measured_bytes) / measured_bytes:+.1f}%" if measured_bytes else ""
        rows.append((name, format_bytes(predicted_bytes), format_bytes(measured_bytes), ratio))
    return table(rows)


def kinds_of(*accounts: MemoryAccount) -> dict[str, str]:
    """Return the kinds of memory and their names, without kinds of caches and GPUs that no account has."""
    absent = {
        kind
        for kind in {"cache", *GPU_MEMORY_KINDS}
        if not any(account.kinds()[kind] for account in accounts)
    }
    return {kind: name for kind, name in KINDS.items() if kind not in absent}


def holder_words(plan: MemoryPlan, stage: int) -> str:
    """Return how a message names a rank of a stage or role."""
    if plan.roles:
        return f"a rank of the {plan.roles[stage][0]}"
    return f"a rank of stage {stage}" if len(plan.stages) > 1 else "a rank"


def largest_kinds(memory: MemoryPlan) -> str:
    """Return a clause about the two largest kinds of memory of the rank with most memory."""
    largest = memory.largest
    kinds = sorted(largest.memory.kinds().items(), key=lambda item: -item[1])[:2]
    shares = " and ".join(
        f"{KINDS[kind]} ({format_bytes(size)}, {100 * size / largest.memory.total:.0f}%)"
        for kind, size in kinds
    )
    return f"the largest parts are {shares}"


def active_words(parameters: int, active: int) -> str:
    """Return the number of parameters that a token uses, with a comma; "" if it uses all."""
    return f"{format_count(active)} of them active, " if active < parameters else ""


def _sharing_lines(memory: MemoryPlan) -> list[str]:
    """Return a sentence about parameters that ranks of a node share; an empty list if none are shared."""
    largest = max(stage.sharers for stage in memory.stages)
    sentence = f"{largest} ranks of a node share their parameters in memory; each rank counts its part."
    return [sentence] if largest > 1 else []


def _policy_lines(plan: DeckPlan) -> list[str]:
    """Return sentences about the auxiliary models of a policy, and about what is not planned."""
    deck, stage = plan.deck, plan.memory.largest
    if deck.objective.kind not in POLICY_KINDS:
        return []
    auxiliary = [f"{name} {format_bytes(size)}" for name, size in stage.auxiliary_bytes.items()]
    texts = concurrent_texts(deck, rank_count(plan.memory.sizes) // deck.layout.tensor)
    lines = [f"This includes other models: {', '.join(auxiliary)}."] if auxiliary else []
    lines.append(
        f"The cache holds keys and values of {counted(texts, 'answer')} that a copy of the model generates "
        "together. It is smaller if memory is short. While it exists, there are no activations."
    )
    planned = any(REWARD_MODELS in stage.auxiliary_bytes for stage in plan.memory.stages)
    if not planned and any(is_checkpoint(name) for name in deck.policy.reward):
        lines.append("Reward models cannot be read on this machine, so their memory is not included.")
    lines.append(
        "Traffic and step time are those of the training of the policy. Generating and rating answers, and "
        "other models, are not included."
    )
    return lines


def _exchange_lines(memory: MemoryPlan) -> list[str]:
    """Return a sentence about the exchange with experts of other ranks; an empty list if there is none."""
    largest = max(stage.exchanged_bytes for stage in memory.stages)
    if not largest:
        return []
    sentence = "with the experts of other ranks per step, if loads are even"
    return [f"A rank exchanges {format_bytes(largest)} {sentence}."]


def _fit_line(plan: DeckPlan) -> str:
    """Return a sentence that says if the ranks of a node fit into its memory."""
    demand = plan.demand
    if demand is None:
        return (
            "The memory limit is unknown: set machine.memory (for GPUs machine.gpu_memory) to check the plan."
        )
    return f"{'Fits' if demand.fits else 'Does not fit'}: {demand}."
