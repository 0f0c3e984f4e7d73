"""`hpctrain export CHECKPOINT DIR`: convert a model for Hugging Face's `transformers`."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.shared_options import PATH
from hpctrain.units import UnitError, parse_bytes


@click.command(name="export")
@click.argument("target", metavar="RUN_DIR|CHECKPOINT", type=PATH)
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Number format of the weights.  [default: that of the checkpoint]",
)
@click.option(
    "--max-shard-size",
    default="5 GB",
    metavar="SIZE",
    show_default=True,
    help="Largest size of one file.",
)
@click.option(
    "--adapters",
    metavar="BASE",
    help="Export only the adapters, for `peft`. BASE is the folder or hub name of the base model.",
)
def command(target: Path, folder: Path, dtype: str | None, max_shard_size: str, adapters: str | None) -> None:
    """Export a model for Hugging Face `transformers`.

    The model is that of a checkpoint, or of the newest valid checkpoint of a run folder. DIR must be new or
    empty. It receives safetensors files, config.json and, if the checkpoint has a tokenizer, the tokenizer
    with its chat template. Settings of an imported model are kept, except those that training changed. Under
    mpirun or srun, the ranks share the work.
    """
    from hpctrain.checkpoint.exchange.convert import export_model
    from hpctrain.checkpoint.exchange.peft import export_adapters
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World
    from hpctrain.watch.checkpoint_target import find_checkpoint

    try:
        max_bytes = parse_bytes(max_shard_size)
    except UnitError as error:
        raise UnitError(f"--max-shard-size: {error}") from None

    def work(world: World) -> None:
        checkpoint = find_checkpoint(world, target)
        if adapters is not None:
            sentence = export_adapters(world, checkpoint, folder, adapters)
        else:
            sentence = export_model(world, checkpoint, folder, dtype, max_bytes)
        if world.rank == 0:
            click.echo(sentence)

    run_verb(work, device="cpu")
