"""Training of a deck with all combinations of some values (`hpctrain sweep`), here or as jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.errors import EXIT_AGAIN, EXIT_DIFFERENT, EXIT_DONE, HpctrainError, require
from hpctrain.files import require_writable, strict_json, write_text
from hpctrain.host.launcher import launcher_name
from hpctrain.job.batch_job import Job, plan_job
from hpctrain.job.job_options import JobOptions
from hpctrain.report.swept import draw_sweep
from hpctrain.report.terminal import columns
from hpctrain.train.sweep.results import (
    VariantResult,
    best_of,
    find_metric,
    result_lines,
    results_of,
    swept_runs,
)
from hpctrain.train.sweep.slots import make_slots, train_all
from hpctrain.train.sweep.variants import Sweep, SweepVariant, make_sweep, record_runs
from hpctrain.watch.folder import running_job

ShowLine = Callable[[str], None]

_MEMORY_SECTIONS = ("model", "batch", "layout", "memory", "precision", "optimizer", "data", "communication")
"""Sections whose keys change the memory of a run."""


@dataclass(frozen=True)
class SweepTrainingOptions:
    """Options of a sweep on this machine.

    Attributes:
        slots: Number of concurrent runs; None for as many as fit.
        show_only: True to show the results without training.
        picture: File for a picture, if any.
        output: File for the results as JSON, if any.
        metric: Name of the metric by which the best run is chosen, if any.
    """

    slots: int | None
    show_only: bool
    picture: Path | None
    output: Path | None
    metric: str | None


def sweep_deck(
    path: Path,
    arguments: Sequence[str],
    ranks: int,
    name: str | None,
    options: SweepTrainingOptions,
    show: ShowLine,
) -> int:
    """Train all runs of a sweep that are not done on this machine, and show their results.

    Args:
        path: Path of the deck.
        arguments: `--set` arguments, with several values separated by commas.
        ranks: Number of ranks of each run.
        name: Name of the sweep, if any.
        options: Options of the training and the output.
        show: Prints a line.

    Returns:
        The exit code: 0 if all runs are done, 1 if one failed, 75 if some were stopped.

    Raises:
        HpctrainError: A run of the sweep is invalid. It is raised before any run starts.
    """
    picture, output = options.picture, options.output
    for file in (picture, output):
        if file is not None:
            require_writable(file)
    if picture is not None:
        require("matplotlib", "drawing pictures")
    sweep = make_sweep(path, arguments, ranks, name)
    metric = find_metric(sweep, options.metric)
    codes: Mapping[str, int] = {}
    if not options.show_only:
        refuse_ranks(os.environ)
        record_runs(sweep)
        remaining = [each.variant for each in results_of(sweep) if not each.done]
        if len(remaining) < len(sweep.variants):
            show(f"{len(sweep.variants) - len(remaining)} of {len(sweep.variants)} runs are done already")
        remaining = without_running(remaining, show)
        if remaining:
            most = max(each.deck.run.threads for each in remaining)
            free = make_slots(options.slots, ranks, most, _cores(), _gpus(remaining[0].deck.run.device))
            codes = train_all(path, remaining, ranks, free[: len(remaining)], show)
    results = results_of(sweep, codes, metric)
    show("\n".join(result_lines(sweep, results, columns(), metric)))
    if output is not None:
        best = best_of(results, metric)
        summary = {"best": None if best is None else str(best.variant.folder), "figure": options.metric}
        runs = [_result_row(each) | ({} if metric is None else {"figure": each.selected}) for each in results]
        write_text(output, strict_json({**summary, "runs": runs}, indent=1) + "\n")
    if picture is not None:
        words = "" if metric is None else metric.title
        draw_sweep(picture, sweep.folder.name, swept_runs(results), words)
    if options.show_only or all(each.done for each in results):
        return EXIT_DONE
    return EXIT_DIFFERENT if any(each.state in ("failed", "lost") for each in results) else EXIT_AGAIN


def sweep_job(path: Path, arguments: Sequence[str], ranks: int, name: str | None, options: JobOptions) -> Job:
    """Return the array of jobs that trains a sweep, with one task per run, in the folders of `sweep_deck`."""
    nodes = options.nodes[1]
    if ranks % nodes:
        raise HpctrainError(f"--nodes {nodes}: must divide --ranks-each {ranks}")
    sweep = make_sweep(path, arguments, ranks, name)
    record_runs(sweep)
    each = replace(options, ranks_per_node=ranks // nodes)
    jobs = [plan_job(path, variant.settings, each) for variant in _planned(sweep)]
    memories = [job.memory for job in jobs if job.memory is not None]
    settings = tuple(variant.settings for variant in sweep.variants)
    tasks = replace(each, variants=settings, folders=tuple(str(each.folder) for each in sweep.variants))
    return replace(
        jobs[0],
        deck=jobs[0].deck.with_keys(run={"title": sweep.folder.name}),
        options=tasks,
        overrides=(),
        memory=max(memories, default=None),
        warnings=tuple(dict.fromkeys(warning for job in jobs for warning in job.warnings)),
    )


def _planned(sweep: Sweep) -> Sequence[SweepVariant]:
    """Return the runs whose memory must be planned: only one, if all need the same."""
    differ = any(key.partition(".")[0] in _MEMORY_SECTIONS for key in sweep.keys)
    return sweep.variants if differ else sweep.variants[:1]


def refuse_ranks(environment: Mapping[str, str]) -> None:
    """Raise HpctrainError if a launcher has started this process, since a sweep starts ranks itself."""
    launcher = launcher_name(environment)
    if launcher != "none (one process)":
        raise HpctrainError(f"sweep: starts ranks itself (--ranks-each); start it without {launcher}")


def without_running(variants: Sequence[SweepVariant], show: ShowLine) -> list[SweepVariant]:
    """Return the runs that no job trains now, and print the others, which an earlier sweep has started."""
    free = []
    for variant in variants:
        if job := running_job(variant.folder):
            show(f"{variant.name}: is still running ({job}) since an earlier sweep, and is skipped")
        else:
            free.append(variant)
    return free


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _gpus(device: str) -> list[str]:
    """Return the names of the GPUs that runs may use, in the form of the environment variable for them."""
    from hpctrain.host.device import GPU_SELECTORS, visible_gpus

    gpus = visible_gpus()
    if device == "cpu" or not gpus.number:
        return []
    selected = os.environ.get(GPU_SELECTORS[gpus.kind])
    return selected.split(",") if selected else [str(number) for number in range(gpus.number)]


def _result_row(result: VariantResult) -> dict[str, object]:
    return {
        "run": str(result.variant.folder),
        "values": result.variant.values,
        "state": result.state,
        "step": result.step,
        "loss": result.loss,
        "validation_loss": result.validation,
        "tokens_per_s": result.tokens_per_s,
    }
