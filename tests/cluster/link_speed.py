"""What a slow link costs, measured on the virtual cluster: `make link-bench` (as root).

Two nodes of one rank each train the quickstart's model by exact sums, PowerSGD and DiLoCo, by turns over the
link as it is and over one that `tc tbf` limits to 100 Mbit/s each way. Beside the measured step stands the
one that `hpctrain plan` foretells from the step without the limit: of the link at its own speed, and at the
one that an all-reduce reaches there by itself (`hpctrain bench collectives`). Batches are small, lest
computing hide the link.

With --collectives two nodes of two ranks each sum and gather 64 MiB instead, beside plain MPI on the same
memory, over a link of `--rate` that the ranks of a node share.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from hpctrain.plan.deck_plan import PlanOptions, plan_deck
from hpctrain.plan.forms import PlannedLink
from hpctrain.plan.slow_link import SLOW_STEPS
from hpctrain.report.metric_rows import read_metrics
from hpctrain.text import table
from hpctrain.units import format_bytes, format_count, format_seconds, parse_link
from tests.cluster.cluster import ROOT, Cluster, missing

RANKS = 2
FORMS = {
    "exact": (),
    "powersgd": ("communication.compress=powersgd", "communication.powersgd.rank=4"),
    "diloco": (
        "layout.local_steps.replicas=2",
        "layout.local_steps.steps=20",
        "layout.local_steps.outer=diloco",
    ),
}
BATCH = ("batch.global_size=4", "batch.micro_size=2", "run.evaluate_sequences=2")
HEAD = ("form", "payload per step", "step", "over the link", "planned", "off", "at MPI's speed", "off")
HEAD = (*HEAD, "tokens/s", "over the link")
REDUCED = "8 MB"
"""About what the exact sums of a step are."""
SUMMED = "64 MiB"


def main() -> int:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc writes it")
    parser.add_argument("--link", default="100 Mbit/s", help="the same, as hpctrain does")
    parser.add_argument("--steps", type=int, default=43, help="of each run, the first ones not counted")
    parser.add_argument("--rounds", type=int, default=2, help="by turns, each with all forms")
    parser.add_argument("--deck", default=str(ROOT / "inputs" / "quickstart.toml"))
    parser.add_argument("--collectives", action="store_true", help="time single calls of 2 x 2 ranks instead")
    wish = parser.parse_args()
    why = missing()
    if why is not None:
        print(f"the virtual cluster {why}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="hpctrain-link-"))
    try:
        with Cluster(folder) as cluster:
            cluster.environment["SLURM_PMIX_FENCE"] = "ring"
            if wish.collectives:
                print(collectives(cluster, wish.rate))
                return 0
            rows = measure(cluster, wish)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(table([HEAD, *rows])))
    return 0


def measure(cluster: Cluster, wish: argparse.Namespace) -> list[tuple[str, ...]]:
    """The rows of the table."""
    tokens = cluster.folder / "tokens.h5"
    library = Path(sys.modules["json"].__file__ or "").parents[1]
    hpctrain = ("python", "-m", "hpctrain")
    cluster.run(*hpctrain, "prepare", tokens, library / "email", library / "asyncio", "--glob", "*.py")
    cluster.limit_link("n2", wish.rate)
    reached = mpi_speed(cluster)
    cluster.free_link("n2")
    print(f"an all-reduce of {REDUCED} by itself moves {reached:.1f} Mbit/s each way over {wish.link}")
    base = (f"run.steps={wish.steps}", f"data.tokens={tokens}", "run.evaluate_every=0", "checkpoint.every=0")
    base = (*base, *BATCH, "machine.peak_flops=1e11")
    seconds: dict[tuple[str, bool], list[list[float]]] = {}
    for turn in range(wish.rounds):
        for form, keys in FORMS.items():
            for limited in (False, True):
                if limited:
                    cluster.limit_link("n2", wish.rate)
                run = cluster.folder / f"{form}-{limited}-{turn}"
                settings = [word for key in (*base, *keys, f"run.dir={run}") for word in ("--set", key)]
                started = ("srun", "-N", "2", "-n", "2", "--mpi=pmix", *hpctrain, "run", wish.deck, *settings)
                cluster.run(*started, timeout=1800)
                if limited:
                    cluster.free_link("n2")
                rows = read_metrics(run / "metrics.jsonl")
                seconds.setdefault((form, limited), []).append([row["seconds"] for row in rows])
    found = []
    for form, keys in FORMS.items():
        period = next((int(key.partition("=")[2]) for key in keys if "local_steps" in key), 1)
        free, over = (mean_step(seconds[form, limited], period) for limited in (False, True))
        told = []
        for speed in (wish.link, f"{reached:.3f} Mbit/s"):
            link = PlannedLink(parse_link(speed), free)
            plan = plan_deck(
                Path(wish.deck), RANKS, [*base, *keys], options=PlanOptions(1, with_savings=False, link=link)
            )
            assert plan.traffic.over_link is not None
            planned = plan.traffic.over_link.step.seconds
            told += [format_seconds(planned), f"{100 * (planned / over - 1):+.1f}%"]
        payload = format_bytes(sum(plan.traffic.form_traffic.largest.payload().values()))
        of_step = plan.deck.batch.global_size * plan.deck.batch.sequence
        rates = (format_count(of_step / each) for each in (free, over))
        found.append((form, payload, *map(format_seconds, (free, over)), *told, *rates))
    return found


def collectives(cluster: Cluster, rate: str) -> str:
    """What `hpctrain bench collectives` prints for two nodes of two ranks whose link is of this rate."""
    cluster.limit_link("n2", rate)
    asked = (
        "--operations",
        "all_reduce,reduce_scatter,all_gather",
        "--min-bytes",
        SUMMED,
        "--max-bytes",
        SUMMED,
    )
    started = ("srun", "-N", "2", "-n", "4", "--mpi=pmix", "python", "-m", "hpctrain", "bench", "collectives")
    return cluster.run(*started, *asked, timeout=600).stdout


def mpi_speed(cluster: Cluster) -> float:
    """Mbit/s that pass each way of the link in an all-reduce between two nodes, whatever is lost to it."""
    figures = cluster.folder / "collectives.json"
    asked = ("--operations", "all_reduce", "--min-bytes", REDUCED, "--max-bytes", REDUCED, "--json", figures)
    started = ("srun", "-N", "2", "-n", "2", "--mpi=pmix", "python", "-m", "hpctrain", "bench", "collectives")
    cluster.run(*started, *asked, timeout=600)
    (row,) = json.loads(figures.read_text())["rows"]
    return float(8e-6 * row["bytes"] / row["hpctrain"])


def mean_step(runs: Sequence[Sequence[float]], period: int) -> float:
    """Seconds of a step: of those that end a period and of the others the median each, but the first ones."""
    numbered = [(step, taken) for run in runs for step, taken in enumerate(run, 1) if step > SLOW_STEPS]
    meetings = [taken for step, taken in numbered if step % period == 0]
    others = [taken for step, taken in numbered if step % period]
    return (median(meetings) + (period - 1) * (median(others) if others else 0.0)) / period


if __name__ == "__main__":
    sys.exit(main())
