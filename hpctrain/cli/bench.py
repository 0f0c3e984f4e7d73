"""`hpctrain bench`: benchmarks against other programs for the same task."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from hpctrain.bench.rivals import RIVALS

if TYPE_CHECKING:
    from hpctrain.comm.world import World


@click.group(name="bench")
def command() -> None:
    """Measure how fast things are."""


Number = TypeVar("Number", int, float)

PATH = click.Path(path_type=Path)
deck_file = click.argument("deck", type=PATH)
layout_of_state = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. layout.zero=1."
)
COUNT = click.IntRange(1)
in_rounds = click.option("--rounds", default=5, show_default=True, type=COUNT, help="Rounds, all in turn.")
figures_file = click.option("--json", "path", type=PATH, help="Write the figures to a file too.")


def run_bench(measure: Callable[[World], int | None], *files: Path | None, device: str = "auto") -> NoReturn:
    """Run a benchmark on all ranks after rank 0 has checked its output files. Collective."""
    from hpctrain.comm.verb import run_verb
    from hpctrain.files import require_writable

    def verb(world: World) -> int | None:
        world.ledger.activity = "measuring"
        with world.agreement():
            for file in files if world.rank == 0 else ():
                if file is not None:
                    require_writable(file)
        return measure(world)

    run_verb(verb, device)


@command.command()
@click.option("--min-bytes", default="1 KiB", show_default=True, help="Smallest full tensor.")
@click.option("--max-bytes", default="256 MiB", show_default=True, help="Largest full tensor.")
@click.option(
    "--operations", default="all", show_default=True, help="Comma-separated, e.g. all_reduce,reduce."
)
@click.option("--gloo", is_flag=True, help="Also time torch's gloo.")
@figures_file
def collectives(min_bytes: str, max_bytes: str, operations: str, gloo: bool, path: Path | None) -> None:
    """Time every primitive beside plain mpi4py on numpy arrays, under mpirun or srun."""
    from hpctrain.bench.collectives import bench, print_rows, write_rows

    def verb(world: World) -> None:
        rows = bench(world, operations, min_bytes, max_bytes, gloo)
        with world.agreement():
            if world.rank == 0:
                print_rows(rows, world.size)
                if path is not None:
                    write_rows(rows, world.size, path)

    run_bench(verb, path, device="cpu")


@command.command()
@deck_file
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. layout.tensor=2."
)
@click.option("--steps", default=5, show_default=True, type=COUNT, help="Steps of a variant in each round.")
@in_rounds
@click.option("--no-sync", is_flag=True, help="Also ranks that never communicate, each on its share.")
@click.option("--data-parallel", is_flag=True, help="Also the same global batch over data ranks only.")
@click.option(
    "--against",
    multiple=True,
    type=click.Choice([*RIVALS]),
    metavar="PEER",
    help=f"Also others, over gloo, as hpctrain/bench/README.md tells: {', '.join(RIVALS)}.",
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar='"KEY=VALUE ..."',
    help="Also the deck with these further changes, e.g. layout.zero=3.",
)
@click.option(
    "--only",
    metavar="NAME",
    help="Of all these measure one alone, with its peak memory: deck, no-sync, a variant's changes...",
)
@click.option("--memory", is_flag=True, help="Also each of our own in fresh processes, for its peak memory.")
@figures_file
def train(deck: Path, overrides: tuple[str, ...], path: Path | None, **wish: Any) -> None:
    """Time the training step of DECK on random tokens: tokens/s, MFU, time by phase."""
    from hpctrain.bench.train import TrainingBenchOptions, bench_train

    run_bench(lambda world: bench_train(world, deck, overrides, TrainingBenchOptions(**wish), path), path)


@command.command()
@click.option(
    "--machine",
    metavar="FILE",
    help="Figures of this machine, of `hpctrain calibrate`.  [default: measured before]",
)
@click.option("--only", multiple=True, metavar="NAME", help="Of all decks these alone, e.g. 17m-fp32-tensor.")
@click.option("--steps", default=1, show_default=True, type=COUNT, help="Of each deck in each round.")
@in_rounds
@figures_file
def plan(machine: str | None, only: tuple[str, ...], steps: int, rounds: int, path: Path | None) -> None:
    """Time twelve decks on two ranks beside the seconds that `hpctrain plan` tells of their steps."""
    from hpctrain.bench.plan import bench_plan

    run_bench(lambda world: bench_plan(world, machine, only, steps, rounds, path), path)


@command.command()
@deck_file
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. layout.expert=2."
)
@click.option("--steps", default=1, show_default=True, type=COUNT, help="Of each thing in each round.")
@in_rounds
@figures_file
def mixture(deck: Path, overrides: tuple[str, ...], steps: int, rounds: int, path: Path | None) -> None:
    """Time DECK's mixtures of experts: spread over ranks and not, beside a dense layer, and exchanges."""
    from hpctrain.bench.mixture import bench_mixture

    run_bench(lambda world: bench_mixture(world, deck, overrides, steps, rounds, path), path)


@command.command()
@deck_file
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. machine.compile=true."
)
@click.option("--prompts", default=32, show_default=True, type=COUNT, help="Texts that are continued.")
@click.option("--tokens", default=128, show_default=True, type=COUNT, help="Tokens that each gets.")
@in_rounds
@figures_file
def generate(deck: Path, overrides: tuple[str, ...], path: Path | None, **wish: int) -> None:
    """Time greedy text by DECK's model, with a cache and without, beside transformers' with its cache."""
    from hpctrain.bench.generate import bench_generate

    run_bench(lambda world: bench_generate(world, deck, overrides, output=path, **wish), path, device="cpu")


@command.command()
@deck_file
@layout_of_state
@in_rounds
@figures_file
def offload(deck: Path, overrides: tuple[str, ...], rounds: int, path: Path | None) -> None:
    """Time the update of DECK's optimizer state in files beside disk and processor alone."""
    from hpctrain.bench.offload import bench_offload

    run_bench(lambda world: bench_offload(world, deck, overrides, rounds, path), path)


@command.command()
@deck_file
@layout_of_state
@in_rounds
@click.option("--against", type=click.Choice(["dcp"]), help="Also torch.distributed.checkpoint, over gloo.")
@click.option(
    "--dir",
    "folder",
    default=".",
    show_default=True,
    type=PATH,
    help="Folder for the files, which are removed.",
)
@click.option("--warm", is_flag=True, help="Read what may still be in the page cache.")
@figures_file
def checkpoint(
    deck: Path, overrides: tuple[str, ...], path: Path | None, against: str | None, **wish: Any
) -> None:
    """Time saving and loading DECK's state beside plain files written and read by as many ranks."""
    from hpctrain.bench.checkpoint_speed import CheckpointBenchOptions, bench_checkpoint

    wished = CheckpointBenchOptions(dcp=against == "dcp", **wish)
    run_bench(lambda world: bench_checkpoint(world, deck, overrides, wished, path), path)


@command.command()
@deck_file
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. run.steps=100."
)
@click.option("--only", multiple=True, metavar="FORM", help="Of all forms these alone, e.g. exact.")
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar='"KEY=VALUE ..."',
    help="Also the deck with these changes, e.g. layout.local_steps.format=int8.",
)
@figures_file
def communication(
    deck: Path,
    overrides: tuple[str, ...],
    only: tuple[str, ...],
    variants: tuple[str, ...],
    path: Path | None,
) -> None:
    """Train DECK by each form of communication: bytes sent, validation loss beside that of exact sums."""
    from hpctrain.bench.communication_forms import bench_communication

    run_bench(lambda world: bench_communication(world, deck, overrides, only, variants, path), path)


@command.command()
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="MxNxK",
    help="Of M tokens by a matrix of N outputs and K inputs; by default those of a small block.",
)
@click.option("--device", default="auto", show_default=True, help="As run.device.")
@in_rounds
@figures_file
def fp8(shapes: tuple[str, ...], device: str, rounds: int, path: Path | None) -> None:
    """Time the three products of a matrix in 8 bits, by every recipe and in their parts, beside bf16."""
    from hpctrain.bench.fp8 import SHAPES, bench_fp8

    run_bench(lambda world: bench_fp8(world, shapes or SHAPES, rounds, path), path, device=device)


@command.command()
@deck_file
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. run.steps=100."
)
@click.option(
    "--widths", default="64,128,256,512,1024", show_default=True, help="Values of model.hidden to compare."
)
@click.option("--steps", default=10, show_default=True, type=COUNT, help="Steps at each of them.")
@click.option("--seeds", default=1, show_default=True, type=COUNT, help="Initial models, for a mean.")
@click.option("--rates", default="", metavar="RATE,...", help="Also runs of the deck at each of these rates.")
@click.option("--rate-widths", default="64,128,256", show_default=True, help="Widths of these runs.")
@click.option("--wider-heads", is_flag=True, help="Widen the heads, instead of adding more of them.")
@click.option("--random-tokens", is_flag=True, help="Instead of those of the deck's file.")
@click.option("--plot", "picture", type=PATH, metavar="FILE", help="Draw them, as PNG.")
@figures_file
def mup(
    deck: Path,
    overrides: tuple[str, ...],
    widths: str,
    rates: str,
    rate_widths: str,
    picture: Path | None,
    path: Path | None,
    **wish: Any,
) -> None:
    """Compare widths of DECK's model in muP and the standard parametrization: values, and the best rate.

    Its own width, or model.base_width, is the base. Under mpirun or srun the ranks share the trainings out.
    """
    from hpctrain.bench.mup import WidthBenchOptions, bench_mup

    wished = WidthBenchOptions(
        widths=numbers("--widths", widths, int),
        rates=numbers("--rates", rates, float),
        rate_widths=numbers("--rate-widths", rate_widths, int),
        **wish,
    )
    run_bench(lambda world: bench_mup(world, deck, overrides, wished, path, picture), path, picture)


@command.command()
@deck_file
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. layout.tensor=2."
)
@click.option(
    "--from", "first", default=1e-6, show_default=True, metavar="RATE", help="Rate of the first step."
)
@click.option("--to", "last", default=1.0, show_default=True, metavar="RATE", help="Rate of the last one.")
@click.option(
    "--steps", default=100, show_default=True, metavar="N", help="Steps, if the loss does not diverge."
)
@click.option(
    "--window", type=int, metavar="N", help="Losses of which a smoothed one is the mean.  [default: a tenth]"
)
@click.option(
    "--figure",
    default="loss",
    show_default=True,
    metavar="NAME",
    help="Evaluate a set (as checkpoint.keep_best has it) after each step, and go by that.",
)
@click.option("--plot", "picture", type=PATH, metavar="FILE", help="Draw the losses, as PNG.")
@figures_file
def rate(
    deck: Path, overrides: tuple[str, ...], picture: Path | None, path: Path | None, **wish: Any
) -> None:
    """Train DECK at rising learning rates, and suggest the one at which its loss falls most.

    The training ends where the loss diverges. Nothing of it is kept.
    """
    from hpctrain.bench.rate import RateBenchOptions, bench_rate

    wished = RateBenchOptions(**wish)
    run_bench(lambda world: bench_rate(world, deck, overrides, wished, path, picture), path, picture)


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Parse distinct positive numbers, separated by commas."""
    try:
        found = tuple(dict.fromkeys(kind(part) for part in text.split(",") if part.strip()))
    except ValueError:
        found = ()
    if (not found and (text.strip() or kind is int)) or not all(0 < number < inf for number in found):
        raise click.BadParameter(f"{text!r}: write numbers above 0, separated by commas", param_hint=option)
    return found
