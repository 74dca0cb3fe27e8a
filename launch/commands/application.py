"""All commands as one typer application: importing it takes a moment, in which Ctrl-C may come."""

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from ... import __version__
from ..console import complain, warn
from ..settings.settings import told_unknown, unknown_variables
from . import (
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


def run_application(words: Sequence[str]) -> int:
    """One command's exit code. Words that typer does not take are told of here, all other errors are raised."""
    try:
        result = app(args=list(words), prog_name="gearshift", standalone_mode=False)
    except typer.TyperException as error:
        if message := error.format_message():  # empty where typer has shown the help instead
            context = getattr(error, "ctx", None)
            complain(f"{message} (see {context.command_path if context else 'gearshift'} --help)")
        return error.exit_code
    return result if isinstance(result, int) else 0
