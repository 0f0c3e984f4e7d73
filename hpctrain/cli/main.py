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
    "resume": ("resume", "Go on from a checkpoint or a run folder."),
    "deck": ("deck", "Print a deck resolved, or the reference of all keys."),
    "job": ("job", "Write a batch script for a deck, or submit it."),
    "plan": ("plan", "Tell what every rank of a deck will hold in memory."),
    "check": ("check", "Tell whether a layout computes what one rank does."),
    "calibrate": ("calibrate", "Measure this machine, for plans."),
    "prepare": ("prepare", "Make a token file of text files."),
    "plot": ("plot", "Draw what runs measured."),
    "report": ("report", "Write a page that tells of runs."),
    "status": ("status", "Tell where runs stand."),
    "inspect": ("inspect", "Tell what a checkpoint holds, verify it, compare two."),
    "replay": ("replay", "Tell whether a run's losses come out again."),
    "compare": ("compare", "Tell where two runs part."),
    "evaluate": ("evaluate", "Tell a checkpoint's loss and perplexity on token files."),
    "generate": ("generate", "Sample text from a checkpoint."),
    "export": ("export", "Write a checkpoint's model for Hugging Face's transformers."),
    "import": ("import_checkpoint", "Make a checkpoint of such a model."),
    "schedule": ("schedule", "Draw, cost and check a pipeline schedule."),
    "sweep": ("sweep", "Train a deck with every combination of some values."),
    "bench": ("bench", "Measure collectives and training."),
    "guide": ("guide", "Show the pages of the user guide, or search them."),
    "doctor": ("doctor", "Tell whether a run could start here, and what is wrong."),
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
            near = nearest(args[0], VERBS)
            hint = f'did you mean "{near}"?' if near else f"the verbs are {', '.join(VERBS)}"
            raise click.UsageError(f'no verb "{args[0]}": {hint}', ctx)
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
    """Train transformer language models over MPI ranks.

    Start a verb alone, or on N ranks with `mpirun -n N hpctrain VERB ...` or srun.

    \b
    Exit codes:
      0    done
      1    a comparison found a difference, a run of a
           sweep failed, or nobody read the output on
      2    a mistake in the deck or the command
      3    input or output failed
      70   a hang or an internal fault
      75   stopped in good order, by a signal, a file or
           the clock: `resume` goes on
      130  ended at once by Ctrl-C: the second one of a
           run, the first one of any other verb
    """  # noqa: D301  (click looks for the backspace itself)


def main() -> NoReturn:
    """Run the command line and leave with the exit code of the design; see `hpctrain.errors`."""
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")  # where it came closed
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    atexit.register(gc.freeze)  # Python would look through all that is loaded before it ends
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
    return message if context is None else f"{message} (`{context.command_path} --help` tells what there is)"


def leave(error: HpctrainError) -> NoReturn:
    """End the process with an error that occurred before MPI was started. Only rank 0 prints it.

    A rank that left at once could take the others with it before any had printed.
    """
    if launched_size(os.environ) > 1:
        from hpctrain.comm.verb import run_verb

        def fail(_: object) -> NoReturn:
            raise error

        run_verb(fail, device="cpu")
    print_problems(error.problems)
    flush_output()
    sys.exit(error.exit_code)
