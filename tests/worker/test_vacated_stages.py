"""A tick that vacates stages: what leaves a layer leaves behind it, keys and values before weights."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gearshift.proto.commands import Chunk, Move, RunTick
from gearshift.proto.ids import Layout, RequestId
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.specs import layer_spec, model_spec
from gearshift.worker.engine import TickOutput
from gearshift.worker.loaded_model import LoadedModel
from gearshift.worker.moves import Lane, LateMoves, MovesUnderWay

REQUEST = RequestId(3)
PLACEMENT = place(model_spec([layer_spec()] * 12), 2)
CHUNK = Chunk(REQUEST, 0, (1,) * 512, sample=True)


class Recorded:
    """Stands for engine, moves and weights of one rank; `events` in order."""

    def __init__(self, last_layers: frozenset[int]) -> None:
        self.events: list[tuple[str, Any]] = []
        self._last_layers = last_layers

    def stage_chunk(
        self, chunk: Chunk, output: TickOutput, groups: Sequence[Sequence[int]], written: Callable[[], None]
    ) -> None:
        for layers in groups:
            self.events.append(("run", list(layers)))
            written()

    def finish_chunk(self, *_: object) -> None:
        self.events.append(("head", None))

    def late_moves(self, moves: Sequence[Move], under_way: MovesUnderWay) -> LateMoves:
        return LateMoves(moves, lambda piece: self.events.append(("move", piece)), lambda: None)

    def check_stage(self) -> None:
        self.events.append(("check", None))

    def vacated_behind(self) -> frozenset[int]:
        return self._last_layers

    def vacate(self, layers: Iterable[int]) -> None:
        self.events.append(("vacate", list(layers)))


def events_of(rank: int, tick: RunTick, last_layers: frozenset[int] = frozenset()) -> list[tuple[str, Any]]:
    recorded: Any = Recorded(last_layers)
    model: Any = SimpleNamespace(
        rank=rank, load=SimpleNamespace(placement=PLACEMENT), engine=recorded, shifter=recorded, moving=recorded
    )
    LoadedModel._run_chunks(model, tick, MovesUnderWay(Lane(SimpleNamespace(type="cpu"))), TickOutput())  # type: ignore[arg-type]
    return recorded.events


def test_weights_may_come_behind_each_group_of_layers_that_the_chunk_has_passed() -> None:
    moves = tuple(Move(REQUEST, Layout.TENSOR, stage, 0, 8) for stage in range(2))  # in two pieces of three layers
    tick = RunTick(1, (None, CHUNK), late_moves=moves, vacated=(1,))
    assert events_of(1, tick, frozenset({7, 9, 11})) == [
        ("check", None),
        ("run", [6, 7]), ("vacate", [6, 7]),
        ("run", [8]), ("move", (0, 2)), ("vacate", [8]),
        ("run", [9]), ("vacate", [9]),
        ("run", [10, 11]), ("move", (1, 2)), ("vacate", [10, 11]),
        ("head", None),
    ]  # fmt: skip


def test_a_stage_without_a_chunk_is_vacated_at_once_and_one_that_is_not_named_never() -> None:
    tick = RunTick(1, (None, CHUNK), vacated=(0, 1))
    assert events_of(0, tick) == [("vacate", [0, 1, 2, 3, 4, 5]), ("head", None)]
    assert events_of(1, RunTick(1, (None, CHUNK)), frozenset({7})) == [
        ("check", None), ("run", [6, 7, 8, 9, 10, 11]), ("head", None),
    ]  # fmt: skip


@pytest.mark.parametrize("blocks", [1, 3, 40])
def test_keys_and_values_leave_in_the_same_pieces_whether_weights_follow_or_not(blocks: int) -> None:
    moves = (Move(REQUEST, Layout.TENSOR, 1, 0, blocks),)
    found = [
        [event for event in events_of(1, tick, frozenset({6, 9})) if event[0] == "move"]
        for tick in (
            RunTick(1, (None, CHUNK), late_moves=moves),
            RunTick(1, (None, CHUNK), late_moves=moves, vacated=(1,)),
        )
    ]
    assert found[0] == found[1]
