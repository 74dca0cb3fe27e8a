"""The chunks that are in the layer pipeline at the end of the log. Pure."""

from ...proto.commands import Chunk, RunTick
from ...proto.ids import RequestId


class Pipeline:
    """Each tick moves every chunk on by one stage: in tick j stage s runs the chunk that came in in tick j - s."""

    def __init__(self, stages: int) -> None:
        self._chunks: list[Chunk | None] = [None] * stages  # what the last tick ran on each stage

    @property
    def is_due(self) -> bool:
        """A chunk has a stage to come: whatever else is wanted, the next tick runs it there."""
        return any(chunk is not None for chunk in self._chunks[:-1])

    @property
    def requests(self) -> frozenset[RequestId]:
        """Whose chunks have a stage to come."""
        return frozenset(chunk.request for chunk in self._chunks[:-1] if chunk is not None)

    def advance(self, entering: Chunk | None) -> tuple[Chunk | None, ...]:
        """What the next tick runs, by stage; empty where that is nothing."""
        self._chunks = [entering, *self._chunks[:-1]]
        return tuple(self._chunks) if any(chunk is not None for chunk in self._chunks) else ()


def leaving_chunks(tick: RunTick) -> list[Chunk]:
    """Chunks that are through all layers at the end of a tick."""
    leaving = [tick.chunk_of_stage[-1] if tick.chunk_of_stage else None, tick.tensor_chunk]
    return [chunk for chunk in leaving if chunk is not None]
