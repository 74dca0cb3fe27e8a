"""The command line as a user runs it: real processes, watched from outside, each wait bounded."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GEARSHIFT = (sys.executable, "-c", "from gearshift.launch.command_line import main; main()")
TIMEOUT_SECONDS = 120

# The high-water mark of this address space: getrusage's would also count the process that started this one.
_MEASURED = """
import json, sys, time
from pathlib import Path
from gearshift.launch.command_line import run_command
code = run_command(sys.argv[2:])
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
facts = {"cpu_seconds": time.process_time(), "peak_bytes": int(peak.split()[1]) * 1024,
         "torch": "torch" in sys.modules}
Path(sys.argv[1]).write_text(json.dumps(facts))
sys.exit(code)
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one command took, its workers (if any) not counted."""

    error: str  # all of stderr
    cpu_seconds: float
    peak_bytes: int
    torch: bool  # was it imported


def gearshift(*words: str | Path, exit_code: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, which must be `exit_code`."""
    done = subprocess.run(
        [*GEARSHIFT, *map(str, words)], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert done.returncode == exit_code, done.stderr
    return done


def answer(*words: str | Path) -> dict[str, Any]:
    """What `run --json` says; stdout must be that line alone."""
    lines = gearshift("run", *words, "--json", "--threads", "1").stdout.splitlines()
    assert len(lines) == 1
    facts: dict[str, Any] = json.loads(lines[0])
    return facts


def cost(*words: str | Path, exit_code: int) -> Cost:
    """Run a command that starts no worker; what it took."""
    with tempfile.TemporaryDirectory() as folder:
        facts = Path(folder) / "facts.json"
        command = [sys.executable, "-c", _MEASURED, str(facts), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        assert done.returncode == exit_code, done.stderr
        return Cost(done.stderr, **json.loads(facts.read_text()))


def tokens_file(folder: Path, tokens: Sequence[int]) -> Path:
    """A file for `--tokens-file`."""
    path = folder / f"ids-{len(os.listdir(folder))}.json"
    path.write_text(json.dumps(list(tokens)))
    return path
