"""What must hold of any trace file: whole JSON, named tracks, stretches that follow or hold one another."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

ROUNDING_MICROSECONDS = 0.002  # the file holds whole nanoseconds, as decimal fractions


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The file's events, checked."""
    data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
    whole = json.loads(data)
    events: list[dict[str, Any]] = whole["traceEvents"]
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    tracks = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    stretches: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            stretches[event["pid"], event["tid"]].append(event)
        else:
            assert event["ph"] == "M"
    assert stretches.keys() <= tracks, "every track has a name"
    assert {process for process, _ in tracks} == processes
    for track, found in stretches.items():
        _check_nesting(track, found)
    return events


def _check_nesting(track: tuple[int, int], stretches: list[dict[str, Any]]) -> None:
    ends: list[float] = []  # of the stretches that are open
    for event in sorted(stretches, key=lambda one: (one["ts"], -one["dur"])):
        assert event["dur"] >= 0, event
        while ends and ends[-1] <= event["ts"] + ROUNDING_MICROSECONDS:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1] + ROUNDING_MICROSECONDS, f"on track {track} {event} crosses another's end"
        ends.append(end)


def total_seconds(events: list[dict[str, Any]], process: int, *names: str) -> float:
    """Of all stretches of these categories."""
    return sum(event["dur"] for event in events if event["pid"] == process and event.get("cat") in names) / 1e6
