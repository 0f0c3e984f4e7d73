"""`hpctrain sweep`: train a deck with every combination of some values, here or as an array of jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
    result_lines,
    results_of,
    swept_runs,
    wanted_figure,
)
from hpctrain.train.sweep.slots import slots_of, train_all
from hpctrain.train.sweep.variants import Sweep, SweepVariant, make_sweep, record
from hpctrain.watch.folder import running_job

Told = Callable[[str], None]

_OF_MEMORY = ("model", "batch", "layout", "memory", "precision", "optimizer", "data", "communication")
"""Sections on whose keys it depends how much a run holds."""


def sweep_deck(
    path: Path,
    arguments: Sequence[str],
    ranks: int,
    slots: int | None,
    name: str | None,
    show_only: bool,
    picture: Path | None,
    output: Path | None,
    figure: str | None,
    show: Told,
) -> int:
    """Train all runs of a sweep on this machine, but those that are done, and `show` what came of them; the
    exit code: 0 where all are done, 1 where one failed, 75 where some were stopped. With `show_only` nothing
    is trained, and it is 0. The best run is that with the least `figure`. HpctrainError with all that is
    wrong with a run, before any begins.
    """
    for file in (picture, output):
        if file is not None:
            require_writable(file)
    if picture is not None:
        require("matplotlib", "drawing pictures")
    sweep = make_sweep(path, arguments, ranks, name)
    wanted = wanted_figure(sweep, figure)
    codes: Mapping[str, int] = {}
    if not show_only:
        refuse_ranks(os.environ)
        record(sweep)
        left = [each.variant for each in results_of(sweep) if not each.done]
        if len(left) < len(sweep.variants):
            show(f"{len(sweep.variants) - len(left)} of {len(sweep.variants)} runs are done already")
        left = without_running(left, show)
        if left:
            most = max(each.deck.run.threads for each in left)
            free = slots_of(slots, ranks, most, _cores(), _gpus(left[0].deck.run.device))
            codes = train_all(path, left, ranks, free[: len(left)], show)
    results = results_of(sweep, codes, wanted)
    show("\n".join(result_lines(sweep, results, columns(), wanted)))
    if output is not None:
        best = best_of(results, wanted)
        told = {"best": None if best is None else str(best.variant.folder), "figure": figure}
        runs = [_told(each) | ({} if wanted is None else {"figure": each.wanted}) for each in results]
        write_text(output, strict_json({**told, "runs": runs}, indent=1) + "\n")
    if picture is not None:
        words = "" if wanted is None else wanted.title
        draw_sweep(picture, sweep.folder.name, swept_runs(results), words)
    if show_only or all(each.done for each in results):
        return EXIT_DONE
    return EXIT_DIFFERENT if any(each.state in ("failed", "lost") for each in results) else EXIT_AGAIN


def sweep_job(path: Path, arguments: Sequence[str], ranks: int, name: str | None, options: JobOptions) -> Job:
    """The array of jobs that trains a sweep, a task of it a run, whose folders are those of `sweep_deck`."""
    nodes = options.nodes[1]
    if ranks % nodes:
        raise HpctrainError(f"--nodes {nodes}: must divide --ranks-each {ranks}")
    sweep = make_sweep(path, arguments, ranks, name)
    record(sweep)
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
    """The runs whose memory is to be planned: one, where all hold as much."""
    differ = any(key.partition(".")[0] in _OF_MEMORY for key in sweep.keys)
    return sweep.variants if differ else sweep.variants[:1]


def refuse_ranks(environment: Mapping[str, str]) -> None:
    """HpctrainError where a launcher has started this process: it starts ranks itself."""
    launcher = launcher_name(environment)
    if launcher != "none (one process)":
        raise HpctrainError(f"sweep: starts ranks itself (--ranks-each); start it without {launcher}")


def without_running(variants: Sequence[SweepVariant], show: Told) -> list[SweepVariant]:
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
    """Names of the GPUs that runs may use, as the variable that selects among them has them."""
    from hpctrain.host.device import GPU_SELECTORS, visible_gpus

    gpus = visible_gpus()
    if device == "cpu" or not gpus.number:
        return []
    selected = os.environ.get(GPU_SELECTORS[gpus.kind])
    return selected.split(",") if selected else [str(number) for number in range(gpus.number)]


def _told(result: VariantResult) -> dict[str, object]:
    return {
        "run": str(result.variant.folder),
        "values": result.variant.values,
        "state": result.state,
        "step": result.step,
        "loss": result.loss,
        "validation_loss": result.validation,
        "tokens_per_s": result.tokens_per_s,
    }
