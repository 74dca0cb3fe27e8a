"""The `gearshift` command: the one place where errors become a line of text and an exit code."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from ..proto.errors import GearshiftError
from .commands import (
    bench,
    calibrate,
    chat,
    config,
    coordinator,
    doctor,
    inspect,
    keys,
    logits,
    perplexity,
    plan,
    run,
    tokenize,
)
from .console import warn
from .processes.signals import SIGNAL_EXIT_CODES, exit_on_signals
from .processes.standard_streams import READER_IS_GONE, open_standard_streams
from .settings.settings import told_unknown, unknown_variables
from .settings.user_folders import current_settings

app = typer.Typer(
    name="gearshift",
    help="GGUF models over several workers: prompts in a layer pipeline, answers in tensor parallel.",
    epilog="Try: gearshift run demo --workers 2 -p 'The capital of France is' -n 40",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", epilog=run.EXAMPLES)(run.run)
app.command("chat", epilog=chat.EXAMPLES)(chat.chat)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.command("logits", epilog=logits.EXAMPLES)(logits.logits)
app.command("perplexity", epilog=perplexity.EXAMPLES)(perplexity.perplexity)
app.command("tokenize", epilog=tokenize.EXAMPLES)(tokenize.tokenize)
app.command("inspect", epilog=inspect.EXAMPLES)(inspect.inspect)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.command("calibrate", epilog=calibrate.EXAMPLES)(calibrate.calibrate)
app.command("coordinator", epilog=coordinator.EXAMPLES)(coordinator.coordinator)
app.command("keys", epilog=keys.EXAMPLES)(keys.keys)
app.command("config", epilog=config.EXAMPLES)(config.config)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gearshift {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (or set GEARSHIFT_DEBUG=1).")
    ] = False,
) -> None:
    """Flags before the command. `--debug` is read by `main`, which sees errors from outside typer."""
    if names := unknown_variables(os.environ):
        warn(told_unknown(names))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process with its exit code."""
    open_standard_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run_command(words))


def run_command(words: Sequence[str]) -> int:
    """One command's exit code; what went wrong is a line on stderr."""
    try:
        with exit_on_signals():
            result = app(args=list(words), prog_name="gearshift", standalone_mode=False)
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except typer.TyperException as error:
        if message := error.format_message():  # empty where typer has shown the help instead
            context = getattr(error, "ctx", None)
            _complain(f"{message} (see {context.command_path if context else 'gearshift'} --help)")
        return error.exit_code
    except SystemExit as ending:  # from exit_on_signals, or from stdout where whoever read it has gone
        code = ending.code if isinstance(ending.code, int) else GearshiftError.exit_code
        if code > SIGNAL_EXIT_CODES and code != READER_IS_GONE:  # who would read of it
            _complain("interrupted")
        return code
    except GearshiftError as error:
        _explain(error, words, str(error))
        return error.exit_code
    except Exception as error:  # the last resort: a fault of ours still ends in one clear line
        _explain(error, words, f"internal error: {type(error).__name__}: {error} (--debug shows where)")
        return GearshiftError.exit_code


def _explain(error: Exception, words: Sequence[str], message: str) -> None:
    if _debug_wanted(words):
        from traceback import print_exception

        print_exception(error)
    _complain(message)


def _debug_wanted(words: Sequence[str]) -> bool:
    try:
        return "--debug" in words or current_settings().switch("debug")
    except GearshiftError:  # settings that cannot be read are what is being told about
        return False


def _complain(message: str) -> None:
    print(f"gearshift: {message}", file=sys.stderr)
