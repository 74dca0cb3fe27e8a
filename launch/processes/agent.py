"""The process that starts this host's workers through torch's elastic agent, and tells how each of them ended.

It imports torch and what else the workers need, reads its order, and forks them: what takes seconds is done once, and
may be done before the launcher knows what is to run. Until then it has a single thread, as a fork asks for.

SIGTERM is not handled: the agent ends, and the kernel ends its workers (each has tied itself to its parent's death).
"""

import argparse
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ...proto.device_table import CARDS_VARIABLE, CardQuery, cards_as_text
from ...proto.library_environment import set_library_environment
from ...proto.processes import die_with_parent
from .agent_lines import Order
from .forked_workers import ForkedWorkers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workers of the order on stdin; 0 when all of them ended with 0, or none was asked for."""
    options = _parse(arguments)
    die_with_parent(options.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator decides what Ctrl-C means
    set_library_environment(os.environ, options.threads)
    gc.disable()  # what is imported stays; to look for what has gone among it would take a tenth of the time
    cards = None if options.device == "cpu" else CardQuery()
    from .elastic import ForkingAgent  # late: torch reads the environment as it is loaded, and takes seconds

    for module in options.import_ahead:
        with suppress(ImportError, OSError):  # a worker meets it again, and says so in its own log
            importlib.import_module(module)
    if (order := _read_order()) is None:
        return 0
    if cards is not None:
        os.environ[CARDS_VARIABLE] = cards_as_text(cards.result())
    gc.freeze()  # a collection in a worker need not touch, and so copy, the pages of what was imported
    gc.enable()
    agent = ForkingAgent(order, ForkedWorkers(options.report_fd, Path(options.run_folder)))
    return 1 if agent.run().is_failed() else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gearshift.launch.processes.agent")
    parser.add_argument("--run-folder", required=True, help="for the workers' output")
    parser.add_argument("--report-fd", type=int, required=True, help="where AgentLine lines are written")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True, help="CPU threads of each worker")
    parser.add_argument("--device", required=True, help="where the workers compute: auto, cpu or cuda")
    parser.add_argument(
        "--import-ahead", action="append", default=[], help="a module that the workers will import"
    )
    return parser.parse_args(arguments)


def _read_order() -> Order | None:
    """None: the launcher has closed our stdin without one. Workers find nothing there."""
    text = sys.stdin.buffer.read()
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    return msgspec.json.decode(text, type=Order) if text else None


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # all workers have ended: torch's own end would keep the launcher waiting for nothing
