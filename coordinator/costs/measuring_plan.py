"""What is timed at start: which chunks, steps and transfers, and in which commands. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...proto.commands import MeasureCosts
from ...proto.model import LayerSpec
from ...proto.past_runs import FEWEST_CACHED, FEWEST_ROWS

Points = tuple[tuple[int, int], ...]

MIB = 1 << 20
BATCHES = (1, 4, 8, 16)  # of the decode steps that are timed
STEP_ROOM = 16  # positions behind the cached tokens of a timed step
TRANSFER_BYTES = (MIB, 16 * MIB)
THOROUGH_ROUNDS = 3
CPU_PASS_PRODUCTS = 75_000_000_000  # multiplications of a timed pass: one or two seconds of a core
LEAST_CHUNK = 32
DEPTH_OF_RUNS = 8 * FEWEST_CACHED  # of three runs, below: a few shapes that a GPU's library compiles kernels for


@dataclass(frozen=True, slots=True)
class Scale:
    """Chunk lengths and depths worth timing on a kind of device, in tokens."""

    chunk: int  # the longest; a quarter of it is the shortest
    chunk_depth: int
    step_depth: int
    deep_step_depth: int
    reduce_bytes: tuple[int, ...]


# A chunk after many others tells what attention costs: the deeper and longer it is, the less noise says of it. At 64
# tokens after 512 it was a twentieth of a CPU's time, and a prompt of 8,192 was foretold at half its time.
CPU_SCALE = Scale(256, 2048, 64, 2048, (4096, 65536, MIB))
CUDA_SCALE = Scale(2048, 32_768, 256, 8192, (4096, 16384, 65536, MIB, 16 * MIB))


@dataclass(frozen=True, slots=True)
class MeasuringPlan:
    """Points to time; see `MeasureCosts` for each field."""

    chunks: Points
    tensor_chunks: Points = ()
    steps: Points = ()
    reduce_bytes: tuple[int, ...] = ()
    transfer_bytes: tuple[int, ...] = ()
    host_copy_bytes: tuple[int, ...] = ()
    rounds: int = 1  # all of it so often; the best counts

    def first_points(self) -> "MeasuringPlan":
        """Its first chunk and step, to see whether costs still hold, and sums, to judge parts not at hand by."""
        return MeasuringPlan(self.chunks[:1], self.tensor_chunks[:1], self.steps[:1], self.reduce_bytes)

    def commands(self) -> Iterator[tuple[str, MeasureCosts]]:
        """What is measured, in words, and the command for it: one after the other."""
        yield "chunks on each rank", MeasureCosts(chunks=self.chunks)
        if self.tensor_chunks:
            yield "chunks under tensor parallelism", MeasureCosts(tensor_chunks=self.tensor_chunks)
        yield "decode steps", MeasureCosts(steps=self.steps)
        if self.reduce_bytes or self.transfer_bytes or self.host_copy_bytes:
            yield (
                "links",
                MeasureCosts(
                    reduce_bytes=self.reduce_bytes,
                    transfer_bytes=self.transfer_bytes,
                    host_copy_bytes=self.host_copy_bytes,
                ),
            )


def measuring_plan(
    device: str,
    ranks: int,
    context_tokens: int,
    max_chunk_tokens: int,
    max_batch: int,
    thorough: bool = False,
    layer_values: int = 0,
) -> MeasuringPlan:
    """Few and short points, as they are timed on every start; `thorough` adds some that show how well they fit.

    All lie within the context and the chunk buffers. `layer_values`: weights of the largest layer, so that a chunk
    through a large one on a CPU does not take seconds.
    """
    scale = CPU_SCALE if device == "cpu" else CUDA_SCALE
    longest = max(1, min(scale.chunk, max_chunk_tokens, context_tokens // 2))
    if device == "cpu" and layer_values:
        longest = min(longest, max(LEAST_CHUNK, CPU_PASS_PRODUCTS // layer_values))
    short = max(1, longest // 4)
    deep = max(0, min(scale.chunk_depth, context_tokens - longest))
    several = 0
    if device != "cpu":
        deep, several = _power_of_two(deep), _depth_of_runs(min(DEPTH_OF_RUNS - 1, context_tokens - short))
    chunks = [(0, short), (0, longest), (deep, longest)]
    if several and short >= FEWEST_ROWS:
        chunks.append((several, short))
    if thorough:
        chunks += [(0, longest // 2), (deep // 2, short), (deep, short)]
    room = max(0, context_tokens - STEP_ROOM)
    shallow, deep_step = min(scale.step_depth, room // 4), min(scale.deep_step_depth, room)
    batches = [batch for batch in BATCHES if batch <= max(1, max_batch)]
    steps = [*((shallow, batch) for batch in batches), (deep_step, 1)]
    alone = ranks == 1
    points = tuple(dict.fromkeys((cached, max(1, tokens)) for cached, tokens in chunks))
    return MeasuringPlan(
        chunks=points,
        tensor_chunks=() if alone else points,
        steps=tuple(dict.fromkeys(steps)),
        reduce_bytes=() if alone else scale.reduce_bytes,
        transfer_bytes=() if alone else TRANSFER_BYTES,
        host_copy_bytes=() if device == "cpu" else TRANSFER_BYTES,
        rounds=THOROUGH_ROUNDS if thorough else 1,
    )


def _power_of_two(most: int) -> int:
    """The greatest up to `most`, or 0: as a past one run at most, so that it tells what attention costs alone."""
    return 1 << (most.bit_length() - 1) if most > 0 else 0


def _depth_of_runs(most: int) -> int:
    """A past of as many runs as one of up to `most` tokens can have, and nothing left over; 0 for fewer than two."""
    depth = _power_of_two(most + FEWEST_CACHED) - FEWEST_CACHED
    return depth if depth > FEWEST_CACHED else 0


def layer_values(layer: LayerSpec, hidden: int) -> int:
    """Weights of a layer's matrices."""
    attention = layer.query_heads * (layer.key_width + layer.value_width)
    attention += layer.kv_heads * (layer.key_width + layer.value_width)
    return hidden * (attention + 3 * layer.feed_forward)
