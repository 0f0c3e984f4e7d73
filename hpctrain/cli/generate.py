"""`hpctrain generate`: sample text from a checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

# A model draws control characters, too: a terminal shows them as their pictures and does not obey them.
PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in b"\t\n"} | {0x7F: 0x2421}
PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


@click.command(name="generate")
@click.argument("target", metavar="RUN_DIR|CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--prompt", metavar="TEXT", help="What to continue; without one a document begins.")
@click.option("--prompt-file", metavar="FILE", help="A file with it, but for its last line end; -: stdin.")
@click.option(
    "--json-lines",
    metavar="FILE",
    help='Several: a line {"prompt": "..."} each, of which come lines with "text", too; -: stdin.',
)
@click.option(
    "--chat",
    is_flag=True,
    help="Treat each prompt as a user's message and show only the answer; uses the chat template.",
)
@click.option("--tokens", default=200, metavar="N", show_default=True, help="Tokens to draw, at most.")
@click.option(
    "--temperature", default=0.8, metavar="T", show_default=True, help="0: always the likeliest token."
)
@click.option("--top-k", type=int, metavar="K", help="Draw from the K likeliest tokens only.")
@click.option(
    "--top-p", type=float, metavar="P", help="Draw from the fewest tokens whose probability reaches P."
)
@click.option(
    "--min-p", type=float, metavar="P", help="Draw from tokens at least P times as likely as the likeliest."
)
@click.option(
    "--repetition-penalty",
    default=1.0,
    metavar="R",
    show_default=True,
    help="Divide logits of tokens that the text has by R (negative ones: multiply), as in CTRL.",
)
@click.option(
    "--stop",
    "stops",
    multiple=True,
    metavar="TEXT",
    help="End a text before this; may be given several times.",
)
@click.option(
    "--seed", type=int, metavar="S", help="The same seed gives the same text.  [default: a new one]"
)
@click.option(
    "--tensor",
    type=int,
    metavar="N",
    help="Ranks that share a copy of the model; copies share the prompts.  [default: what suits]",
)
@click.option(
    "--pipeline",
    default=1,
    metavar="N",
    show_default=True,
    help="Stages of --tensor ranks each that share a copy, each some of its layers.",
)
@click.option("--samples", default=1, metavar="N", show_default=True, help="Texts to generate.")
def command(
    target: Path,
    prompt: str | None,
    prompt_file: str | None,
    json_lines: str | None,
    tensor: int | None,
    pipeline: int,
    chat: bool,
    **sampling: Any,
) -> None:
    """Continue a text with the model of a checkpoint, or of the newest good one of a run folder.

    Prints the prompt and what follows, on a terminal while it is drawn; a sample ends early where the model
    ends a document or a turn, or before a text of --stop. The model sees as many of the last tokens as it was
    trained on (batch.sequence). Under mpirun or srun it is split over all ranks, whatever the layout of its
    run, or where there are many texts and it is small, each rank has all of it and continues some of them.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.generate.prompts import PromptOptions
    from hpctrain.generate.sampling import Sampling
    from hpctrain.generate.text import generate
    from hpctrain.report.terminal import find_terminal

    source, drawn = PromptOptions(prompt, prompt_file, json_lines), Sampling(**sampling)
    output = Output(terminal=find_terminal() is not None)
    terminal = output.terminal
    run_verb(
        lambda world: generate(world, target, source, drawn, output.show, terminal, tensor, pipeline, chat)
    )


class Output:
    """Output of text to stdout, piece by piece, in any encoding of stdout."""

    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal

    def show(self, text: str) -> None:
        """Print text. Raises OSError if it cannot be written: BrokenPipeError if the reader has ended."""
        if self.terminal:
            text = text.translate(PICTURES)
        encoding = sys.stdout.encoding or "utf-8"
        try:
            print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)
        except OSError as error:
            # What is left in the buffer must not raise again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise OSError(error.errno, error.strerror, "stdout") from None
