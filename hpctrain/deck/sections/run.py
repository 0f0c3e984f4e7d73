"""The section [run], and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hpctrain.deck.key import Duration, PathText, Section, Whole, key
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.relations import AtMost, Conflicts, HasEffectWith, Relations
from hpctrain.deck.sections.local_steps import has_outer_model
from hpctrain.deck.sections.machine import MOST_THREADS
from hpctrain.deck.sources import toml_value

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck


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
        "Maximum number of held-out sequences of one evaluation.", 64, unit="sequences", ge=1
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
    threads: int = key("Number of CPU threads of each rank.", 1, ge=1, le=MOST_THREADS)
    device: Literal["auto", "cpu", "cuda", "xpu"] = key(
        "Device that computes; auto: GPUs if there are any; cuda: GPUs of NVIDIA and AMD; xpu: of Intel.",
        "auto",
    )
    trace: bool = key(
        "Record a timeline of every rank, written to trace.json with each checkpoint and drawn by "
        "`hpctrain plot`.",
        False,
    )
    trace_steps: int = key("Number of newest steps that a trace contains.", 3, unit="steps", ge=1)


_TITLE_BYTES = 200  # names of files may have 255 bytes, and some consist of the title and more
_NOISE_SCALE, _MODULE = "run.noise_scale_steps", "model.module"
_INEXACT_COMPRESSIONS = frozenset({"sign", "onebit", "topk", "powersgd"})
"""Compressions whose sums differ from the gradient sums of the step by more than rounding."""

RELATIONS: Relations = (
    AtMost("run.time_margin", "run.time_limit", below=True),
    HasEffectWith("run.trace_steps", "run.trace", (True,)),
    Conflicts(
        "run.tokens",
        "data.dataset",
        because="the samples of a dataset have no tokens",
        hint="use run.steps",
    ),
    Conflicts(_NOISE_SCALE, _MODULE, because="it is supported for built-in models only"),
    Conflicts(
        "run.trace", "communication.server.mode", because="it records steps that all ranks make together"
    ),
)


def title_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problem of a title that cannot be the name of a folder, a file and a job; at most one."""
    title, why = deck.run.title, ""
    if "/" in title or title == "." or ".." in title:
        why = 'is the name of a folder: must not be "." or contain "/" or ".."'
    elif len(title.encode("utf-8", "replace")) > _TITLE_BYTES:
        why = f"is the name of a folder: must have at most {_TITLE_BYTES} bytes"
    elif not title.strip():
        why = "is the name of a folder: must not be blank"
    if why:
        yield DeckProblem("run.title", why, for_new_decks=True)


def length_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of several keys that give the length of the run, at most two.

    Of run.steps, run.tokens and run.epochs, in this order, each one after the first that the deck gives is a
    problem. run.steps, which every deck has, counts as given only if it was written according to
    `deck.sources`, not if it was computed from another key. So it does not count in unpickled decks, which
    have no places.
    """
    run = deck.run
    given = [f"run.{name}" for name in ("tokens", "epochs") if getattr(run, name) is not None]
    if "run.steps" in deck.sources.places and not deck.sources.place("run.steps").note:
        given.insert(0, "run.steps")
    for name in given[1:]:
        sentence = f"conflicts with {given[0]}: both give the length of the run (leave one of them out)"
        yield DeckProblem(name, sentence, (given[0],))


def noise_scale_problems(deck: Deck) -> Iterator[DeckProblem]:
    """Yield the problems of run.noise_scale_steps that do not depend on the number of ranks; none if it is 0.

    These are servers, replicas, compressions, sliced accumulation and layouts with which the noise scale
    cannot be measured.
    """
    if not deck.run.noise_scale_steps:
        return
    layout, keys = deck.layout, deck.communication

    def problem(why: str, *conflicting: str) -> DeckProblem:
        given = " and ".join(f"{name} = {toml_value(deck.value(name))}" for name in conflicting)
        return DeckProblem(_NOISE_SCALE, f"conflicts with {given}, {why} (use 0)", conflicting)

    if keys.server is not None:
        yield problem("whose workers do not make steps together", "communication.server.mode")
        return
    if has_outer_model(deck):
        name = "layout.local_steps." + ("replicas" if layout.replicas > 1 else "outer")
        yield problem("with which gradients are not summed over all data ranks", name)
    if keys.compress in _INEXACT_COMPRESSIONS:
        yield problem("which changes the sums of gradients", "communication.compress")
    if deck.memory.accumulate == "sliced":
        yield problem("with which no rank has the gradient of all of its tokens", "memory.accumulate")
    if layout.context > 1:
        yield problem("whose ranks compute gradients of parts of the same sequences", "layout.context")
    if deck.model.experts:
        for name in ("expert", "expert_tensor", "tensor"):
            if getattr(layout, name) > 1:
                why = "with which gradients of experts come from tokens of several ranks"
                yield problem(why, f"layout.{name}", "model.experts.count")
                break


def noise_scale_world_problems(deck: Deck, data_ranks: int) -> Iterator[DeckProblem]:
    """Yield the problem of a noise scale that cannot be measured on a single data rank; at most one.

    Args:
        deck: The deck.
        data_ranks: Number of data ranks.
    """
    layout, batch = deck.layout, deck.batch
    if not deck.run.noise_scale_steps or data_ranks > 1:
        return
    if layout.tensor > 1 or layout.pipeline > 1:
        sentence = "compares gradients of several data ranks, but the layout has one (use 0)"
        yield DeckProblem(_NOISE_SCALE, sentence, ("layout.data", "layout.tensor", "layout.pipeline"))
    elif batch.global_size <= batch.micro_size:
        sentence = (
            "compares the first micro-batch of a step with all of them, but a step has one (use 0, a smaller "
            "batch.micro_size, or more ranks)"
        )
        yield DeckProblem(_NOISE_SCALE, sentence, ("layout.data", "batch.global_size", "batch.micro_size"))
