"""What costs learn of work, as if nothing could have disturbed it."""

from gearshift.coordinator.costs.refinement import ChunkFit, StepFit
from gearshift.proto.commands import Batch, Chunk


def teach_chunk(fit: ChunkFit, chunk: Chunk, seconds: float) -> None:
    fit.fit.observe(fit.row_of(chunk), seconds)


def teach_steps(fit: StepFit, batch: Batch, seconds: float) -> None:
    """`seconds` of all its steps."""
    fit.fit.observe(fit.row_of(batch), seconds / batch.steps)
