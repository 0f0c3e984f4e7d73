"""`hpctrain prepare OUT.h5 PATH...`: make a token file of text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.shared_options import PATH

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SECONDS_BETWEEN_LINES = 30.0


@click.command(name="prepare")
@click.argument("out", type=PATH)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--glob",
    "globs",
    multiple=True,
    metavar="PATTERN",
    help="Use only matching files of folders, e.g. '*.py'. May be repeated.",
)
@click.option(
    "--tokenizer",
    metavar="bytes|FILE.json|DIR|FILE.h5",
    help="Tokenizer: bytes, a file, a Hugging Face folder, or that of a token file.  [default: bytes]",
)
@click.option(
    "--end-of-document",
    metavar="TOKEN",
    help="Token at the end of each document.  [default: the tokenizer's eos_token]",
)
@click.option(
    "--train-bpe",
    type=int,
    metavar="N",
    help="Train a byte-level BPE tokenizer of N tokens on the text. Writes tokenizer.json next to OUT.",
)
@click.option(
    "--field",
    "--text-key",
    "text_key",
    default="text",
    metavar="NAME",
    show_default=True,
    help="Key or column of the text in rows of JSON and .parquet files.",
)
@click.option(
    "--shard-bytes",
    metavar="SIZE",
    help='Write files OUT-00000.h5, ... of this size, e.g. "100 MB". Documents are not split.',
)
@click.option(
    "--chat", "kind", flag_value="chat", help="Each row is a conversation; its answers are trained on."
)
@click.option(
    "--preferences", "kind", flag_value="preferences", help="Each row has a chosen and a rejected answer."
)
@click.option("--prompts", "kind", flag_value="prompts", help="Each row has a prompt to answer.")
@click.option(
    "--template",
    metavar="NAME|FILE",
    help="Chat template: chatml, llama3, plain, raw, or a Jinja file.  [default: the tokenizer's]",
)
@click.option("--binary", is_flag=True, help="Also use files that are binary or not UTF-8.")
@click.option("--force", "replace", is_flag=True, help="Replace OUT if it exists.")
def command(out: Path, paths: tuple[str, ...], shard_bytes: str | None, **choices: Any) -> None:
    """Tokenize text files and folders into the token file OUT (HDF5), as one process or under mpirun or srun.

    A text file is one document. JSON lines (.jsonl, .ndjson, .jsonlines, .json) have one document per line,
    JSON lists (.json) one per entry, and .parquet files one per row. Files except .parquet may be compressed
    (.gz, .zst).

    Files are read in the given order, and files of a folder, including subfolders, sorted by name. Hidden
    files are skipped. Without --glob, a folder contributes its .txt .text .md .rst .tex .html .py .c .h .cpp
    .jsonl .ndjson .jsonlines and .parquet files. Patterns of --glob: "*.txt" matches in any subfolder,
    "src/**/*.py" at any depth, "*.{c,h}" either extension.

    Skipped files are listed with the reason. A file that is binary (has a zero byte) or not UTF-8 is an error
    if it is named, and is skipped in a folder. With --binary, such files are used byte by byte; with a
    tokenizer other than bytes, and in JSON lines, invalid UTF-8 becomes U+FFFD.

    With --chat, --preferences or --prompts, files have one JSON object per line (or row of a .parquet file)
    with `messages`, or with `prompt` and `response`, `chosen` and `rejected`. A chat template turns them into
    text.

    The output does not depend on the number of ranks. If the command was interrupted, start it again with the
    same arguments and number of ranks: it continues.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World
    from hpctrain.data.prepare_any import prepare_any, result_text
    from hpctrain.units import UnitError, parse_bytes

    try:
        max_bytes = None if shard_bytes is None else parse_bytes(shard_bytes)
    except UnitError as error:
        raise click.UsageError(f"--shard-bytes {shard_bytes}: {error}") from None
    if max_bytes is not None and max_bytes < 1:
        raise click.UsageError(f"--shard-bytes {shard_bytes}: must be at least 1 B")

    def work(world: World) -> None:
        with Display(visible=world.rank == 0) as display:
            options = {"shard_bytes": max_bytes, **choices}
            result = prepare_any(world, out, paths, options, display.say, display.report)
        if world.rank == 0:
            click.echo(result_text(result, in_shards=max_bytes is not None))

    run_verb(work, device="cpu")


class Display:
    """Progress on stderr: a bar on a terminal, and otherwise a line every `SECONDS_BETWEEN_LINES`."""

    def __init__(self, visible: bool) -> None:
        self.visible = visible
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._said = time.monotonic()

    def __enter__(self) -> Display:
        from rich.progress import Progress

        from hpctrain.report.terminal import stderr_console

        console = stderr_console()
        if self.visible and console.is_terminal:
            self._bar = Progress(console=console, transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line on stderr, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            click.echo(line, err=True)

    def report(self, activity: str, done: int, total: int) -> None:
        """Show how much of its share rank 0 has done. The shares of the other ranks are about as large."""
        if self._bar is not None:
            if activity not in self._tasks:
                self._tasks[activity] = self._bar.add_task(activity, total=total)
            self._bar.update(self._tasks[activity], completed=done)
        elif self.visible and time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            click.echo(f"{activity}: {100 * done / max(1, total):.0f}%", err=True)
