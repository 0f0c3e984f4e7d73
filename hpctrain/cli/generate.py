"""`hpctrain generate`: sample text from a checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.shared_options import PATH

if TYPE_CHECKING:
    from hpctrain.comm.world import World

# Models also generate control characters. On a terminal, their Unicode pictures are printed instead.
PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in b"\t\n"} | {0x7F: 0x2421}
PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


@click.command(name="generate")
@click.argument("target", metavar="RUN_DIR|CHECKPOINT", type=PATH)
@click.option("--prompt", metavar="TEXT", help="Text to continue.  [default: the start of a document]")
@click.option(
    "--prompt-file", metavar="FILE", help="File with the prompt, without its last line end; -: stdin."
)
@click.option(
    "--json-lines",
    metavar="FILE",
    help='File with a line {"prompt": "..."} per prompt; prints JSON lines with "text". -: stdin.',
)
@click.option(
    "--chat",
    is_flag=True,
    help="Treat each prompt as a message of the user, and print only the answer. Uses the chat template.",
)
@click.option(
    "--tokens", default=200, metavar="N", show_default=True, help="Largest number of tokens to generate."
)
@click.option(
    "--temperature",
    default=0.8,
    metavar="T",
    show_default=True,
    help="Sampling temperature; 0: greedy decoding.",
)
@click.option("--top-k", type=int, metavar="K", help="Sample from the K most likely tokens.")
@click.option(
    "--top-p",
    type=float,
    metavar="P",
    help="Sample from the smallest set of tokens with total probability P.",
)
@click.option(
    "--min-p",
    type=float,
    metavar="P",
    help="Sample from tokens at least P times as likely as the most likely one.",
)
@click.option(
    "--repetition-penalty",
    default=1.0,
    metavar="R",
    show_default=True,
    help="Divide the logits of tokens that occur in the text by R (multiply negative ones), as in CTRL.",
)
@click.option(
    "--stop",
    "stops",
    multiple=True,
    metavar="TEXT",
    help="Stop before this text. May be repeated.",
)
@click.option(
    "--seed", type=int, metavar="S", help="Seed; the same seed gives the same text.  [default: random]"
)
@click.option(
    "--tensor",
    type=int,
    metavar="N",
    help="Tensor parallel ranks of each copy of the model; copies share the prompts.  "
    "[default: chosen by size]",
)
@click.option(
    "--pipeline",
    default=1,
    metavar="N",
    show_default=True,
    help="Pipeline stages of each copy of the model, of --tensor ranks each.",
)
@click.option(
    "--device",
    default="auto",
    metavar="NAME",
    show_default=True,
    help="Device that computes: auto (a GPU where torch finds one), cpu, cuda or xpu.",
)
@click.option(
    "--samples", default=1, metavar="N", show_default=True, help="Number of texts to generate per prompt."
)
def command(
    target: Path,
    prompt: str | None,
    prompt_file: str | None,
    json_lines: str | None,
    tensor: int | None,
    pipeline: int,
    chat: bool,
    **options: Any,
) -> None:
    """Generate text with the model of a checkpoint, or of the newest valid checkpoint of a run folder.

    The prompt and its continuation are printed; on a terminal, each token appears when it is generated. A
    text ends early if the model ends a document or a turn, or at a text of --stop. The model sees at most the
    last batch.sequence tokens, as in training. Under mpirun or srun, the model is split over all ranks,
    independent of the layout of its run. If there are many texts and the model is small, each rank holds the
    whole model and continues some of the texts.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.generate.generate_command import GenerateOptions
    from hpctrain.generate.generate_command import generate as generate_texts
    from hpctrain.generate.prompts import PromptOptions
    from hpctrain.generate.sampling import Sampling
    from hpctrain.report.terminal import find_terminal

    device = options.pop("device")
    prompts = PromptOptions(prompt, prompt_file, json_lines)
    generate_options = GenerateOptions(prompts, Sampling(**options), tensor, pipeline, chat)
    output = Output(terminal=find_terminal() is not None)

    def generate(world: World) -> None:
        generate_texts(world, target, generate_options, output.show, live=output.terminal)

    run_verb(generate, device)


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
