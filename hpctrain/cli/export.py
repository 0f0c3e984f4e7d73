"""`hpctrain export CHECKPOINT DIR`: convert a model for Hugging Face's `transformers`."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.units import UnitError, parse_bytes


@click.command(name="export")
@click.argument("target", metavar="RUN_DIR|CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Format.  [default: the checkpoint's]"
)
@click.option(
    "--max-shard-size",
    default="5 GB",
    metavar="SIZE",
    show_default=True,
    help="Tensors of one file, at most.",
)
@click.option(
    "--adapters",
    metavar="BASE",
    help="The adapters alone, for `peft`, beside the model BASE: a folder, or a name of a hub.",
)
def command(target: Path, folder: Path, dtype: str | None, max_shard_size: str, adapters: str | None) -> None:
    """Write the model of a checkpoint, or of the newest good one of a run folder, for `transformers`.

    DIR, new or empty, gets safetensors, config.json and, where the checkpoint has a tokenizer, that with its
    chat template. Imported settings are written unchanged, except those that training changed. Under mpirun
    or srun the ranks share the files.
    """
    from hpctrain.checkpoint.exchange.convert import export_model
    from hpctrain.checkpoint.exchange.peft import export_adapters
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World
    from hpctrain.watch.newest import find_checkpoint

    try:
        most = parse_bytes(max_shard_size)
    except UnitError as error:
        raise UnitError(f"--max-shard-size: {error}") from None

    def work(world: World) -> None:
        checkpoint = find_checkpoint(world, target)
        if adapters is not None:
            sentence = export_adapters(world, checkpoint, folder, adapters)
        else:
            sentence = export_model(world, checkpoint, folder, dtype, most)
        if world.rank == 0:
            click.echo(sentence)

    run_verb(work, device="cpu")
