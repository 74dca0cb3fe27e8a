"""Each run has a folder with its workers' output, `agent.log` and `rank-N.log`; the last runs are kept."""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..console import warn

AGENT_LOG = "agent.log"
TOLD = "told"  # a file that marks a temporary folder whose path a user has read
TEMPORARY_PREFIX = "gearshift-run-"
NEW_SECONDS = 60.0  # a folder this young may belong to a run that has not taken its lock yet


def rank_log(folder: Path, rank: int) -> Path:
    """Where a worker's stderr goes."""
    return folder / f"rank-{rank}.log"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`agent_log` is open for the agent and locked as long as a process that inherited it runs.

    `kept`: stays after the run. False where the state folder cannot be written and a temporary one stands in.
    """

    path: Path
    agent_log: BinaryIO
    kept: bool

    def close(self, told: bool) -> None:
        """A temporary folder goes, unless an error has just `told` the user of it."""
        if not self.kept and told:
            (self.path / TOLD).touch()
        self.agent_log.close()
        if not self.kept and not told:
            shutil.rmtree(self.path, ignore_errors=True)

    def discard(self) -> None:
        """The run never was one."""
        self.agent_log.close()
        shutil.rmtree(self.path, ignore_errors=True)


def open_run_folder(logs: Path) -> RunFolder:
    """A new folder in `logs`."""
    path, kept = _new_folder(logs)
    agent_log = (path / AGENT_LOG).open("wb")
    fcntl.flock(agent_log, fcntl.LOCK_SH)
    return RunFolder(path, agent_log, kept)


def sweep_old_runs(logs: Path, kept_runs: int) -> None:
    """Before a new run: of those that have ended the last `kept_runs` - 1 stay."""
    remove_abandoned()
    with suppress(OSError):  # no such folder yet, or none that can be read
        prune(logs, kept_runs - 1)


def prune(logs: Path, kept_runs: int) -> None:
    """Remove the oldest runs above `kept_runs`, leaving those that still run."""
    runs = sorted(path for path in logs.iterdir() if path.is_dir())  # names begin with the time
    for path in runs[: max(0, len(runs) - kept_runs)]:
        if _has_ended(path):
            shutil.rmtree(path, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove temporary folders of ours whose run was killed before it could: no process holds their log any more."""
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        try:
            ours = path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink()
        except OSError:
            continue
        if ours and not (path / TOLD).exists() and _has_ended(path):
            shutil.rmtree(path, ignore_errors=True)


def _new_folder(logs: Path) -> tuple[Path, bool]:
    name = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}-{secrets.token_hex(2)}"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / name).mkdir(mode=0o700)
    except OSError as error:
        warn(f"no logs are kept: cannot write {logs}: {error.strerror or error}")
        return Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX)), False
    return logs / name, True


def _has_ended(run: Path) -> bool:
    """Whether no process holds the run's log. A folder that is being made counts as running."""
    log = run / AGENT_LOG
    try:
        if not log.exists():
            return time.time() - run.stat().st_mtime > NEW_SECONDS
        if not stat.S_ISREG(log.stat().st_mode):
            return True  # no run of ours made it, and opening it may do anything
        file = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # whatever lies there by now: never wait
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(file)
    except OSError:
        return False
    return True
