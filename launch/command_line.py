"""The `gearshift` command: the one place where errors become a line of text and an exit code."""

import sys
from collections.abc import Sequence

from ..proto.errors import GearshiftError
from .console import complain, show_trace
from .processes.signals import SIGNAL_EXIT_CODES, exit_on_signals
from .processes.standard_streams import READER_IS_GONE, drop_output, open_standard_streams


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process with its exit code."""
    open_standard_streams(output_matters=True)
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = run_command(words)
    if code > SIGNAL_EXIT_CODES:
        drop_output()
    sys.exit(code)


def run_command(words: Sequence[str]) -> int:
    """One command's exit code; what went wrong is a line on stderr."""
    try:
        with exit_on_signals():
            from .commands.application import run_application  # late: a Ctrl-C meanwhile is one as any other

            code = run_application(words)
            sys.stdout.flush()
        return code
    except SystemExit as ending:  # from exit_on_signals, or from stdout where whoever read it has gone
        code = ending.code if isinstance(ending.code, int) else GearshiftError.exit_code
        if code > SIGNAL_EXIT_CODES and code != READER_IS_GONE:  # who would read of it
            complain("interrupted")
        return code
    except GearshiftError as error:
        _explain(error, words, _by_place(str(error), words))
        return error.exit_code
    except Exception as error:  # the last resort: a fault of ours still ends in one clear line
        _explain(error, words, f"internal error: {type(error).__name__}: {error} (--debug shows where)")
        return GearshiftError.exit_code


def _explain(error: Exception, words: Sequence[str], message: str) -> None:
    if _debug_wanted(words):
        show_trace(error)
    complain(message)


def _by_place(message: str, words: Sequence[str]) -> str:
    from .settings.places import told_by_place
    from .settings.user_folders import current_settings

    try:
        return told_by_place(message, current_settings(), words)
    except Exception:  # settings that cannot be read are what is being told about
        return message


def _debug_wanted(words: Sequence[str]) -> bool:
    from .settings.user_folders import current_settings

    try:
        return "--debug" in words or current_settings().switch("debug")
    except Exception:  # settings that cannot be read are what is being told about
        return False
