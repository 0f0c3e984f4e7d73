"""`hpctrain import DIR OUT.h5`: convert a model of Hugging Face's `transformers`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="import")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def command(folder: Path, out: Path, force: bool) -> None:
    """Make the checkpoint OUT of the model in DIR: config.json and safetensors of GPT-2 or Llama.

    It holds the model alone, in fp32, and the tokenizer where DIR has a tokenizer.json. A deck starts from
    it, or from DIR itself, by `[model] from`. Under mpirun or srun the ranks share the work.
    """
    from hpctrain.checkpoint.exchange.convert import import_model
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World

    def work(world: World) -> None:
        sentence = import_model(world, folder, out, force)
        if world.rank == 0:
            click.echo(sentence)

    run_verb(work, device="cpu")
