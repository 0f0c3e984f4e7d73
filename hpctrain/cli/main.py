"""Command `hpctrain`, which imports only the module of its verb and turns errors into exit codes."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from importlib import import_module
from typing import NoReturn

import click
from typing_extensions import override

from hpctrain import __version__
from hpctrain.comm.error_messages import flush_output, print_problems, to_hpctrain_error
from hpctrain.errors import EXIT_INTERRUPTED, HpctrainError
from hpctrain.host.launcher import launched_rank, launched_size
from hpctrain.text import nearest

# Verb: (the file of its click command, one line of help). Loaded only when called or asked for help.
VERBS = {
    "run": ("run", "Train the model of a deck."),
    "resume": ("resume", "Continue a run from a checkpoint or a run folder."),
    "deck": ("deck", "Print a deck with all defaults, or the reference of all keys."),
    "job": ("job", "Write a batch script for a deck, or submit it."),
    "plan": ("plan", "Predict the memory, traffic and time of a deck."),
    "check": ("check", "Check that a layout computes the same as one rank."),
    "calibrate": ("calibrate", "Measure the rates of this machine for `hpctrain plan`."),
    "prepare": ("prepare", "Tokenize text files into a token file."),
    "plot": ("plot", "Plot the metrics of runs."),
    "report": ("report", "Write an HTML report about runs."),
    "status": ("status", "Show the state and progress of runs."),
    "inspect": ("inspect", "Show, verify or compare checkpoints and token files."),
    "replay": ("replay", "Repeat steps of a run and compare their losses."),
    "compare": ("compare", "Find the first step and tensor in which two runs differ."),
    "evaluate": ("evaluate", "Compute loss and perplexity of a checkpoint."),
    "generate": ("generate", "Generate text with a checkpoint."),
    "export": ("export", "Export a model for Hugging Face transformers."),
    "import": ("import_checkpoint", "Import a model of Hugging Face transformers."),
    "schedule": ("schedule", "Draw, simulate and check a pipeline schedule."),
    "sweep": ("sweep", "Train a deck with all combinations of some values."),
    "bench": ("bench", "Run benchmarks."),
    "guide": ("guide", "Show or search the user guide."),
    "doctor": ("doctor", "Check whether a run can start on this machine."),
}


class Verbs(click.Group):
    """Click group of all verbs. It imports the module of a verb only when that verb is called."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = import_module(f"hpctrain.cli.{VERBS[cmd_name][0]}").command
        assert isinstance(command, click.Command)
        return command

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            verb = nearest(args[0], VERBS)
            hint = f'did you mean "{verb}"?' if verb else f"the verbs are {', '.join(VERBS)}"
            raise click.UsageError(f'unknown verb "{args[0]}": {hint}', ctx)
        return super().resolve_command(ctx, args)

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.command(
    cls=Verbs, subcommand_metavar="VERB ...", context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="hpctrain", message="%(prog)s %(version)s")
def command() -> None:
    """Train transformer language models on MPI ranks.

    Start a verb as one process, or on N ranks with `mpirun -n N hpctrain VERB ...` or srun.

    \b
    Exit codes:
      0    done
      1    a comparison found a difference, a run of a
           sweep failed, or the reader of stdout ended
      2    error in the deck or on the command line
      3    input or output error
      70   hang or internal error
      75   stopped with a checkpoint by a signal, a stop
           file or the time limit: use `resume`
      130  interrupted by Ctrl-C (in a run: by the
           second one)
    """  # noqa: D301  (click looks for the backspace itself)


def main() -> NoReturn:
    """Run the command line and exit with one of the codes in `hpctrain.errors`."""
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")  # None if it was closed
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    atexit.register(gc.freeze)  # makes the garbage collection at exit fast
    try:
        code = command.main(prog_name="hpctrain", standalone_mode=False)
        sys.stdout.flush()
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        if len(sys.argv) < 2:  # its message is the help
            if launched_rank(os.environ) == 0:
                error.show()
            sys.exit(error.exit_code)
        leave(HpctrainError(usage_sentence(error)))
    except (HpctrainError, OSError) as error:
        leave(to_hpctrain_error(error))
    sys.exit(code if isinstance(code, int) else 0)


def usage_sentence(error: click.ClickException) -> str:
    """Return click's message about a command line as one sentence, with the command that shows help."""
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message} (see `{context.command_path} --help`)"


def leave(error: HpctrainError) -> NoReturn:
    """End the process with an error that occurred before MPI was started. Only rank 0 prints it.

    A rank that exits at once could end the job before rank 0 has printed.
    """
    if launched_size(os.environ) > 1:
        from hpctrain.comm.verb import run_verb

        def fail(_: object) -> NoReturn:
            raise error

        run_verb(fail, device="cpu")
    print_problems(error.problems)
    flush_output()
    sys.exit(error.exit_code)
