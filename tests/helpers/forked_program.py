"""What a forked worker runs in tests: GEARSHIFT_TEST_ENDINGS has a way to end for each rank, with commas between."""

import json
import os
import signal
import sys
import threading
from pathlib import Path


def facts() -> dict[str, object]:
    """What this process is, as others see it."""
    return {
        "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
        "name": Path("/proc/self/comm").read_text().strip(),
        "words": sys.argv[1:],
        "parent": os.getppid(),
        "session": os.getsid(0) == os.getpid(),
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd"))[
            :-1
        ],  # the last one lists them
        "addition": os.environ["ADDED"],
    }


def end(way: str) -> None:
    match way:
        case "return":
            print(json.dumps(facts()), file=sys.stderr)
        case "two":
            sys.exit(2)
        case "words":
            sys.exit("these are the last words")
        case "raise":
            raise ArithmeticError("the numbers are off")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stay":
            threading.Event().wait(120)
        case "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            threading.Event().wait(120)


if __name__ == "__main__":
    end(os.environ["GEARSHIFT_TEST_ENDINGS"].split(",")[int(os.environ["RANK"])])
