"""`hpctrain import DIR OUT.h5`: convert a model of Hugging Face's `transformers`."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.shared_options import PATH


@click.command(name="import")
@click.argument("folder", metavar="DIR", type=PATH)
@click.argument("out", type=PATH)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def command(folder: Path, out: Path, force: bool) -> None:
    """Convert a Hugging Face model in folder DIR to the checkpoint OUT.

    DIR has a config.json and safetensors files of a causal language model. OUT holds the weights in fp32 and,
    if DIR has a tokenizer.json, the tokenizer. The key `[model] from` of a deck names OUT or DIR to start
    training from the model. Under mpirun or srun, the ranks share the work.
    """
    from hpctrain.checkpoint.exchange.convert import import_model
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World

    def work(world: World) -> None:
        sentence = import_model(world, folder, out, force)
        if world.rank == 0:
            click.echo(sentence)

    run_verb(work, device="cpu")
