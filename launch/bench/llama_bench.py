"""The same file by llama.cpp's own benchmark, for a row beside ours: started, bounded, read; its errors are told."""

import json
import os
import re
import selectors
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from ...proto.errors import InputError
from ...proto.shown import printable
from ...proto.words import counted

HELP_SECONDS = 60.0  # a CUDA build looks at its devices before it answers
MOST_BYTES = 16 << 20  # of all that it may write: a table is a few thousand
MOST_NANOSECONDS = 1e18
LAST_CHARACTERS = 400  # of what a failed program wrote
ALL_LAYERS = "99"  # on the devices


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One split mode. Seconds of prompt and answer together; `error` says why there are none.

    `answer_tokens_per_second` is the answer behind the prompt: the time of both less that of the prompt alone; None
    where the machine was so busy that this was no longer than that. Times are middle ones of all runs.
    """

    split_mode: str
    wall_seconds: float = 0.0
    low_seconds: float = 0.0
    high_seconds: float = 0.0
    prompt_tokens_per_second: float = 0.0
    answer_tokens_per_second: float | None = None
    build: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """A llama-bench program, as its own help describes it."""

    path: Path
    split_modes: tuple[str, ...]
    further: tuple[str, ...] = ()  # arguments of the user's

    def command(self, split_mode: str, model: str, prompt: int, answer: int, repeats: int) -> tuple[str, ...]:
        """`-n 0`: no answer without a prompt; `-pg`: the answer behind it, as ours is written."""
        asked = ("-m", model, "-p", str(prompt), "-n", "0", "-pg", f"{prompt},{answer}", "-r", str(repeats))
        return (str(self.path), *asked, "-ngl", ALL_LAYERS, "-sm", split_mode, "-o", "json", *self.further)


def find_peer(path: str, further: Sequence[str] = ()) -> Peer:
    """The program, asked for its help. `InputError` where it is none of the kind."""
    program = Path(path)
    if not program.is_file() or not os.access(program, os.X_OK):
        raise InputError(f"--against: {path} is no program that can be run")
    told = _run((str(program.absolute()), "--help"), HELP_SECONDS)
    if isinstance(told, str):
        raise InputError(f"--against: {path} --help {told}")
    text = told.output + told.errors
    found = re.search(r"-sm, *--split-mode +<([^>]*)>", text)
    if found is None or "-pg" not in text:
        raise InputError(f"--against: {path} is no llama-bench with --split-mode and -pg: its help does not name them")
    known = found.group(1).split("|")
    across = "tensor" if "tensor" in known else "row"  # older builds cut matrices by rows only
    modes = tuple(mode for mode in ("layer", across) if mode in known)
    return Peer(program.absolute(), modes, tuple(further))


def run_peer(
    peer: Peer,
    model: str,
    prompt: int,
    answer: int,
    repeats: int,
    timeout_seconds: float,
    told: Callable[[str], None] = lambda line: None,
) -> tuple[PeerRow, ...]:
    """A row for each split mode; one that fails or takes longer than `timeout_seconds` has its error instead."""
    rows = []
    for mode in peer.split_modes:
        told(f"{peer.path.name} -sm {mode}: prompt {prompt}, then answer {answer}, {counted(repeats, 'time')}")
        done = _run(peer.command(mode, model, prompt, answer, repeats), timeout_seconds)
        if isinstance(done, str):
            rows.append(PeerRow(mode, error=done))
            continue
        try:
            rows.append(read_row(mode, done.output, prompt, answer))
        except ValueError as error:
            rows.append(PeerRow(mode, error=f"wrote what cannot be read: {error}"))
    return tuple(rows)


def read_row(split_mode: str, text: str, prompt: int, answer: int) -> PeerRow:
    """From `-o json`: a list of tests. Raises ValueError naming what is missing."""
    try:
        tests = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
        raise ValueError("no list of tests")
    alone, both = _test(tests, prompt, 0), _test(tests, prompt, answer)
    samples = _samples(both)
    prompt_seconds, wall = median(_samples(alone)), median(samples)
    return PeerRow(
        split_mode=split_mode,
        wall_seconds=wall,
        low_seconds=min(samples),
        high_seconds=max(samples),
        prompt_tokens_per_second=prompt / prompt_seconds,
        answer_tokens_per_second=answer / (wall - prompt_seconds) if wall > prompt_seconds else None,
        build=_printable(f"{both.get('build_commit', '')} ({both.get('build_number', '')})"),
    )


def _test(tests: Sequence[dict[str, Any]], prompt: int, answer: int) -> dict[str, Any]:
    for test in tests:
        if (test.get("n_prompt"), test.get("n_gen")) == (prompt, answer):
            return test
    raise ValueError(f"no test of {prompt} prompt and {answer} answer tokens")


def _samples(test: dict[str, Any]) -> list[float]:
    """Seconds of each run, or their mean where it tells no more."""
    mean = _checked_seconds("avg_ns", test.get("avg_ns"))
    told = test.get("samples_ns", [])
    if not isinstance(told, list):
        raise ValueError(f"samples_ns is {str(told)[:40]!r}")
    return [_checked_seconds("samples_ns", value) for value in told] or [mean]


def _checked_seconds(key: str, nanoseconds: object) -> float:
    if isinstance(nanoseconds, bool) or not isinstance(nanoseconds, int | float):
        raise ValueError(f"{key} is {str(nanoseconds)[:40]!r}")
    if not 0 < nanoseconds <= MOST_NANOSECONDS:
        raise ValueError(f"{key} is {nanoseconds:.3g}")
    return nanoseconds / 1e9


def _printable(text: str) -> str:
    """A stranger's words for a terminal, not without end."""
    return printable(text[:LAST_CHARACTERS])


@dataclass(frozen=True, slots=True)
class _Done:
    output: str
    errors: str


def _run(command: Sequence[str], timeout_seconds: float) -> _Done | str:
    """What it wrote, or how it failed. Nothing of it is left, however this ends."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        return f"cannot be started: {error.strerror or error}"
    try:
        output, errors = _read(process, monotonic() + timeout_seconds)
    except TimeoutError:
        return f"took longer than {timeout_seconds:g} s and was ended"
    except OverflowError:
        return f"wrote more than {MOST_BYTES >> 20} MiB and was ended"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: whatever it has started goes with it
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    if process.returncode != 0:
        wrote = _printable(" ".join(errors.decode(errors="replace")[-LAST_CHARACTERS:].split()))
        return f"ended with exit code {process.returncode}: {wrote or 'without a word'}"
    return _Done(output.decode(errors="replace"), errors.decode(errors="replace"))


def _read(process: "subprocess.Popen[bytes]", until: float) -> tuple[bytes, bytes]:
    """All that it writes until it has ended. `TimeoutError`; `OverflowError` where that is too much to hold."""
    if process.stdout is None or process.stderr is None:
        raise ValueError("a program without pipes")
    wrote = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe in wrote:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, until - monotonic()))
            if not ready or monotonic() > until:
                raise TimeoutError
            for key, _ in ready:
                pipe = process.stdout if key.fileobj is process.stdout else process.stderr
                data = os.read(key.fd, 1 << 16)
                wrote[pipe] += data
                if not data:
                    selector.unregister(pipe)
                if sum(map(len, wrote.values())) > MOST_BYTES:
                    raise OverflowError
    try:
        process.wait(max(0.0, until - monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    return bytes(wrote[process.stdout]), bytes(wrote[process.stderr])
