"""`hpctrain bench`: benchmarks against other programs for the same task."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from hpctrain.bench.peers.training_peers import TRAINING_PEERS
from hpctrain.cli.shared_options import PATH, set_option

if TYPE_CHECKING:
    from hpctrain.comm.world import World


@click.group(name="bench")
def command() -> None:
    """Run a benchmark."""


Number = TypeVar("Number", int, float)

deck_argument = click.argument("deck", type=PATH)
COUNT = click.IntRange(1)
rounds_option = click.option(
    "--rounds", default=5, show_default=True, type=COUNT, help="Rounds; each round measures all variants."
)
device_option = click.option("--device", default="auto", show_default=True, help="Device, as in run.device.")
results_option = click.option("--json", "path", type=PATH, help="Also write the results to this file.")


def run_bench(measure: Callable[[World], None], *files: Path | None, device: str | None = None) -> NoReturn:
    """Run a benchmark on all ranks after rank 0 has checked its output files. Collective.

    Args:
        measure: Function that measures and prints the results.
        files: Files for the results; None for one that is not written.
        device: Device, as `run_verb` takes it.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.files import require_writable

    def verb(world: World) -> None:
        world.ledger.activity = "measuring"
        with world.agreement():
            for file in files if world.rank == 0 else ():
                if file is not None:
                    require_writable(file)
        measure(world)

    run_verb(verb, device)


@command.command()
@click.option("--min-bytes", default="1 KiB", show_default=True, help="Size of the smallest tensor.")
@click.option("--max-bytes", default="256 MiB", show_default=True, help="Size of the largest tensor.")
@click.option(
    "--operations",
    default="all",
    show_default=True,
    help="Operations, separated by commas, e.g. all_reduce,reduce.",
)
@click.option("--gloo", is_flag=True, help="Also measure the gloo backend of torch.distributed.")
@results_option
def collectives(min_bytes: str, max_bytes: str, operations: str, gloo: bool, path: Path | None) -> None:
    """Measure all collectives, compared with mpi4py on numpy arrays, under mpirun or srun."""
    from hpctrain.bench.collective_speed import bench_collectives

    def verb(world: World) -> None:
        bench_collectives(world, operations, min_bytes, max_bytes, gloo, path)

    run_bench(verb, path, device="cpu")


@command.command()
@deck_argument
@set_option()
@click.option("--steps", default=5, show_default=True, type=COUNT, help="Steps per variant and round.")
@rounds_option
@click.option("--no-sync", is_flag=True, help="Also measure ranks that do not communicate.")
@click.option(
    "--data-parallel", is_flag=True, help="Also measure the same global batch with data parallelism only."
)
@click.option(
    "--against",
    multiple=True,
    type=click.Choice([*TRAINING_PEERS]),
    metavar="PEER",
    help=f"Also measure another program with gloo (hpctrain/bench/README.md): {', '.join(TRAINING_PEERS)}.",
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar='"KEY=VALUE ..."',
    help="Also measure the deck with these overrides, e.g. layout.zero=3. May be repeated.",
)
@click.option(
    "--only",
    metavar="NAME",
    help="Measure only this variant, with its peak memory: deck, no-sync, the overrides of a variant, ...",
)
@click.option("--memory", is_flag=True, help="Also measure the peak memory of each variant in new processes.")
@results_option
def train(deck: Path, overrides: tuple[str, ...], path: Path | None, **values: Any) -> None:
    """Measure the training step of DECK on random tokens: tokens/s, MFU, time by phase."""
    from hpctrain.bench.training_speed import TrainingBenchOptions, bench_train

    run_bench(lambda world: bench_train(world, deck, overrides, TrainingBenchOptions(**values), path), path)


@command.command()
@click.option(
    "--machine",
    metavar="FILE",
    help="Rates of this machine from `hpctrain calibrate`.  [default: measured first]",
)
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Measure only this deck, e.g. 17m-fp32-tensor. May be repeated.",
)
@click.option("--steps", default=1, show_default=True, type=COUNT, help="Steps per deck and round.")
@device_option
@rounds_option
@results_option
def plan(
    machine: str | None, only: tuple[str, ...], steps: int, device: str, rounds: int, path: Path | None
) -> None:
    """Compare the measured step times of twelve decks on two ranks with those of `hpctrain plan`."""
    from hpctrain.bench.plan_accuracy import bench_plan

    run_bench(lambda world: bench_plan(world, machine, only, steps, rounds, path), path, device=device)


@command.command()
@deck_argument
@set_option("layout.expert=2")
@click.option("--steps", default=1, show_default=True, type=COUNT, help="Steps per variant and round.")
@rounds_option
@results_option
def mixture(deck: Path, overrides: tuple[str, ...], steps: int, rounds: int, path: Path | None) -> None:
    """Measure the mixture layers of DECK, with and without expert parallelism, and a dense layer."""
    from hpctrain.bench.mixture_speed import bench_mixture

    run_bench(lambda world: bench_mixture(world, deck, overrides, steps, rounds, path), path)


@command.command()
@deck_argument
@set_option("machine.compile=true")
@click.option("--prompts", default=32, show_default=True, type=COUNT, help="Number of texts to continue.")
@click.option(
    "--tokens", default=128, show_default=True, type=COUNT, help="Number of tokens to generate per text."
)
@rounds_option
@results_option
def generate(deck: Path, overrides: tuple[str, ...], path: Path | None, **values: int) -> None:
    """Measure greedy decoding with and without a key and value cache, compared with transformers."""
    from hpctrain.bench.generation_speed import bench_generate

    run_bench(lambda world: bench_generate(world, deck, overrides, output=path, **values), path, device="cpu")


@command.command()
@deck_argument
@set_option("layout.zero=1")
@rounds_option
@results_option
def offload(deck: Path, overrides: tuple[str, ...], rounds: int, path: Path | None) -> None:
    """Measure the update of optimizer state in files, compared with disk and processor alone."""
    from hpctrain.bench.offload_speed import bench_offload

    run_bench(lambda world: bench_offload(world, deck, overrides, rounds, path), path)


@command.command()
@deck_argument
@set_option("layout.zero=1")
@rounds_option
@click.option(
    "--against", type=click.Choice(["dcp"]), help="Also measure torch.distributed.checkpoint with gloo."
)
@click.option(
    "--dir",
    "folder",
    default=".",
    show_default=True,
    type=PATH,
    help="Folder for temporary files.",
)
@click.option("--warm", is_flag=True, help="Read files that may be in the page cache.")
@results_option
def checkpoint(
    deck: Path, overrides: tuple[str, ...], path: Path | None, against: str | None, **values: Any
) -> None:
    """Measure saving and loading a checkpoint, compared with plain files of the same ranks."""
    from hpctrain.bench.checkpoint_speed import CheckpointBenchOptions, bench_checkpoint

    options = CheckpointBenchOptions(dcp=against == "dcp", **values)
    run_bench(lambda world: bench_checkpoint(world, deck, overrides, options, path), path)


@command.command()
@deck_argument
@set_option("run.steps=100")
@click.option(
    "--only", multiple=True, metavar="FORM", help="Measure only this form, e.g. exact. May be repeated."
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar='"KEY=VALUE ..."',
    help="Also train the deck with these overrides, e.g. layout.local_steps.format=int8.",
)
@results_option
def communication(
    deck: Path,
    overrides: tuple[str, ...],
    only: tuple[str, ...],
    variants: tuple[str, ...],
    path: Path | None,
) -> None:
    """Train DECK with each form of communication, and compare bytes sent and validation loss."""
    from hpctrain.bench.communication_forms import bench_communication

    run_bench(lambda world: bench_communication(world, deck, overrides, only, variants, path), path)


@command.command()
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="MxNxK",
    help="Shape: M tokens, N outputs, K inputs. May be repeated.  [default: those of a small block]",
)
@device_option
@rounds_option
@results_option
def fp8(shapes: tuple[str, ...], device: str, rounds: int, path: Path | None) -> None:
    """Measure the three products of a matrix layer in 8 bits with every recipe, compared with bf16."""
    from hpctrain.bench.fp8_speed import SHAPES, bench_fp8

    run_bench(lambda world: bench_fp8(world, shapes or SHAPES, rounds, path), path, device=device)


@command.command()
@click.option("--sequence", default=4096, show_default=True, type=COUNT, help="Number of positions.")
@click.option("--window", type=COUNT, help="Window.  [default: a quarter of the sequence]")
@click.option("--heads", default=8, show_default=True, type=COUNT, help="Number of heads.")
@click.option("--kv-heads", type=COUNT, help="Heads of keys and values.  [default: as many as --heads]")
@click.option("--head-size", default=64, show_default=True, type=COUNT, help="Features of a head.")
@click.option(
    "--format", "form", default="fp32", show_default=True, type=click.Choice(["fp32", "bf16"]), help="Format."
)
@device_option
@rounds_option
@results_option
def attention(device: str, rounds: int, path: Path | None, **values: Any) -> None:
    """Measure attention with a window, compared with full attention, in processor time on CPUs."""
    from hpctrain.bench.attention_speed import AttentionBenchOptions, bench_attention

    names = "sequence", "window", "heads", "kv_heads", "head_size", "form"
    options = AttentionBenchOptions(*(values[name] for name in names))
    run_bench(lambda world: bench_attention(world, options, rounds, path), path, device=device)


@command.command()
@click.option("--family", "families", multiple=True, help="Measure only this family. May be repeated.")
@set_option("precision.compute=bf16", key="a deck key of all families")
@device_option
@rounds_option
@results_option
def blocks(
    families: tuple[str, ...], overrides: tuple[str, ...], device: str, rounds: int, path: Path | None
) -> None:
    """Measure the blocks of Llama, Qwen and Gemma, compared with a plain matrix product."""
    from hpctrain.bench.block_speed import bench_blocks

    run_bench(lambda world: bench_blocks(world, families, overrides, rounds, path), path, device=device)


@command.command()
@deck_argument
@set_option("run.steps=100")
@click.option(
    "--widths", default="64,128,256,512,1024", show_default=True, help="Values of model.hidden to compare."
)
@click.option("--steps", default=10, show_default=True, type=COUNT, help="Steps per width.")
@click.option("--seeds", default=1, show_default=True, type=COUNT, help="Number of seeds to average over.")
@click.option(
    "--rates", default="", metavar="RATE,...", help="Also train the deck with each of these learning rates."
)
@click.option("--rate-widths", default="64,128,256", show_default=True, help="Widths of the runs of --rates.")
@click.option("--wider-heads", is_flag=True, help="Use wider heads instead of more heads.")
@click.option("--random-tokens", is_flag=True, help="Use random tokens instead of the token file.")
@click.option("--plot", "picture", type=PATH, metavar="FILE", help="Plot the results as a PNG file.")
@results_option
def mup(
    deck: Path,
    overrides: tuple[str, ...],
    widths: str,
    rates: str,
    rate_widths: str,
    picture: Path | None,
    path: Path | None,
    **values: Any,
) -> None:
    """Compare widths of the model of DECK in muP and the standard parametrization.

    The sizes of values and, with --rates, the best learning rates are compared. The base width is that of the
    deck, or model.base_width. Under mpirun or srun, the runs are distributed over the ranks.
    """
    from hpctrain.bench.mup import WidthBenchOptions, bench_mup

    options = WidthBenchOptions(
        widths=numbers("--widths", widths, int),
        rates=numbers("--rates", rates, float),
        rate_widths=numbers("--rate-widths", rate_widths, int),
        **values,
    )
    run_bench(lambda world: bench_mup(world, deck, overrides, options, path, picture), path, picture)


@command.command()
@deck_argument
@set_option()
@click.option(
    "--from",
    "first",
    default=1e-6,
    show_default=True,
    metavar="RATE",
    help="Learning rate of the first step.",
)
@click.option(
    "--to", "last", default=1.0, show_default=True, metavar="RATE", help="Learning rate of the last step."
)
@click.option("--steps", default=100, show_default=True, metavar="N", help="Largest number of steps.")
@click.option(
    "--window",
    type=int,
    metavar="N",
    help="Number of losses in the moving average.  [default: a tenth of the steps]",
)
@click.option(
    "--figure",
    "metric",
    default="loss",
    show_default=True,
    metavar="NAME",
    help="Use the loss of this evaluation set (as in checkpoint.keep_best) after each step.",
)
@click.option("--plot", "picture", type=PATH, metavar="FILE", help="Plot the losses as a PNG file.")
@results_option
def rate(
    deck: Path, overrides: tuple[str, ...], picture: Path | None, path: Path | None, **values: Any
) -> None:
    """Train DECK with increasing learning rates, and suggest the rate at which the loss falls fastest.

    The training ends when the loss diverges. No checkpoint is written.
    """
    from hpctrain.bench.rate_range import RateBenchOptions, bench_rate

    options = RateBenchOptions(**values)
    run_bench(lambda world: bench_rate(world, deck, overrides, options, path, picture), path, picture)


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Parse distinct positive numbers, separated by commas."""
    try:
        values = tuple(dict.fromkeys(kind(part) for part in text.split(",") if part.strip()))
    except ValueError:
        values = ()
    if (not values and (text.strip() or kind is int)) or not all(0 < number < inf for number in values):
        raise click.BadParameter(
            f"{text!r}: must be positive numbers, separated by commas", param_hint=option
        )
    return values
