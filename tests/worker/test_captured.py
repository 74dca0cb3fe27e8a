"""When pieces of work are launched, captured and replayed, without a card."""

from collections.abc import Callable
from typing import Any

import pytest

from gearshift.proto.errors import WorkerLostError
from gearshift.worker.model.captured import CaptureError, Graphs, captured, record
from gearshift.worker.model.steps import Work


class NotedPlace:
    """Notes what happens to pieces; a capture does not run them, a replay does."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.fails = False

    def launch(self, work: Work) -> None:
        self.notes.append("launch")
        work()

    def capture(self, work: Work, what: str) -> Work:
        self.notes.append(f"capture {what}")
        if self.fails:
            raise CaptureError(f"{what} could not be captured")
        return lambda: (self.notes.append("replay"), work())[1]


class Graph:
    """torch's own, as far as `record` knows it."""

    def __init__(self, ends: bool = True) -> None:
        self.notes: list[Any] = []
        self._ends = ends

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.notes.append(("begin", pool, capture_error_mode))

    def capture_end(self) -> None:
        self.notes.append("end")
        if not self._ends:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore words")


def raising(error: Exception) -> Work:
    def work() -> None:
        raise error

    return work


def counted() -> tuple[list[int], Callable[[int], Work]]:
    ran: list[int] = []
    return ran, lambda number: lambda: ran.append(number)


def test_a_piece_is_launched_then_captured_then_replayed() -> None:
    place, (ran, piece) = NotedPlace(), counted()
    graphs: Graphs[str] = Graphs(place, 4)
    for _ in range(4):
        graphs.play("a", piece(1))
    assert place.notes == ["launch", "capture a", "replay", "replay", "replay"]
    assert ran == [1, 1, 1, 1], "once each time it is played"
    assert len(graphs) == 1


def test_pieces_of_other_keys_are_warmed_up_and_captured_by_themselves() -> None:
    place, (ran, piece) = NotedPlace(), counted()
    graphs: Graphs[int] = Graphs(place, 4, lambda key: f"piece {key}")
    for key in (1, 2, 1, 2, 2, 1):
        graphs.play(key, piece(key))
    assert ran == [1, 2, 1, 2, 2, 1]
    assert place.notes == ["launch", "launch", "capture piece 1", "replay", "capture piece 2", *["replay"] * 3]


def test_what_comes_beyond_the_bound_is_launched_every_time() -> None:
    place, (ran, piece) = NotedPlace(), counted()
    graphs: Graphs[int] = Graphs(place, 2)
    for key in (1, 2, 3, 3, 3, 1, 2, 3):
        graphs.play(key, piece(key))
    assert ran == [1, 2, 3, 3, 3, 1, 2, 3]
    assert [note for note in place.notes if note.startswith("capture")] == ["capture 1", "capture 2"]
    assert len(graphs) == 2


def test_without_a_card_all_is_launched_as_it_is() -> None:
    ran, piece = counted()
    graphs: Graphs[int] = Graphs(None, 2)
    for _ in range(3):
        graphs.play(1, piece(1))
    captured(None, piece(2), "two")()
    assert ran == [1, 1, 1, 2]
    assert len(graphs) == 0


def test_a_piece_captured_at_once_is_launched_first() -> None:
    place, (ran, piece) = NotedPlace(), counted()
    replay = captured(place, piece(1), "some layers")
    assert place.notes == ["launch", "capture some layers"]
    replay()
    assert ran == [1, 1]


def test_of_a_capture_that_fails_nothing_is_kept() -> None:
    place, (ran, piece) = NotedPlace(), counted()
    graphs: Graphs[str] = Graphs(place, 2)
    graphs.play("a", piece(1))
    place.fails = True
    with pytest.raises(CaptureError, match="a could not be captured"):
        graphs.play("a", piece(1))
    assert len(graphs) == 0
    place.fails = False
    graphs.play("a", piece(1))
    assert ran == [1, 1]
    assert len(graphs) == 1


def test_a_capture_is_of_one_thread_and_uses_the_pool() -> None:
    graph, (ran, piece) = Graph(), counted()
    record(graph, (0, 7), piece(1), "a step")
    assert graph.notes == [("begin", (0, 7), "thread_local"), "end"]
    assert ran == [1]


def test_a_capture_that_fails_is_ended_and_told_by_its_first_cause() -> None:
    graph = Graph(ends=False)
    cause = RuntimeError("CUDA out of memory. Tried to allocate 2 MiB.\nand much more")
    with pytest.raises(CaptureError) as caught:
        record(graph, None, raising(cause), "a decode step of 4 rows")
    assert str(caught.value) == (
        "a decode step of 4 rows could not be captured as a CUDA graph: "
        "RuntimeError: CUDA out of memory. Tried to allocate 2 MiB."
    )
    assert caught.value.__cause__ is cause
    assert graph.notes[-1] == "end", "else the stream would stay in capture"


def test_so_is_one_that_cannot_be_ended() -> None:
    with pytest.raises(CaptureError, match=r"a step could not be captured .* previous error during capture$"):
        record(Graph(ends=False), None, lambda: None, "a step")


def test_a_lost_rank_is_told_as_such() -> None:
    graph = Graph(ends=False)
    with pytest.raises(WorkerLostError, match="rank 1"):
        record(graph, None, raising(WorkerLostError("rank 1 is gone")), "a step")
    assert graph.notes[-1] == "end"
