"""What the coordinator tells the workers: one frozen class a message, imperative names.

Every command carries its place in one totally ordered log (the channel numbers the frames); a worker runs the log
first in, first out. `RunTick` is the unit of work.
"""

from typing import TypeAlias

from msgspec import Struct

from .ids import ComputeType, Layout, RequestId, WeightSource
from .kv import BundleTable, KvFormat
from .model import ModelSpec
from .placement.plan import Placement
from .sampling import SamplingParameters


class Command(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all commands."""


class Welcome(Command, frozen=True):
    """Answers a `Hello` that was accepted. The worker then waits for `LoadModel`."""


class Refuse(Command, frozen=True):
    """Answers a `Hello` that was not accepted; the worker prints the reason and ends with exit code 2."""

    reason: str


class Redirect(Command, frozen=True):
    """Answers a `Hello` that came to the clients' address: workers are awaited at this port of the same host."""

    port: int


class LinkOptions(Struct, frozen=True):
    """For tests: `no_peer` as between cards without peer access; `bytes_per_second` as over a link no faster."""

    no_peer: bool = False
    bytes_per_second: float | None = None


class OpenLinks(Command, frozen=True):
    """All ranks have joined: meet the others. `hosts[r]` names rank r's host; where all are equal, memory is shared.

    `group` is the launch's token, drawn by the coordinator; it keeps shared memory of two launches apart.
    """

    group: str
    hosts: tuple[str, ...]
    start: int = 0  # how many groups this coordinator has had before
    options: LinkOptions = LinkOptions()


class ProbeMemory(Command, frozen=True):
    """How much memory this rank's device has left now. Before a model is loaded; answered by `MemoryProbed`."""


class LoadModel(Command, frozen=True):
    """Map the files and read this rank's parts. Answered by `LoadProgress` and one `ModelLoaded`."""

    spec: ModelSpec
    placement: Placement
    compute_type: ComputeType | None  # None: the faster on rank 0, measured, told to all by `ModelLoaded`
    kv_format: KvFormat | None  # None: the compute type's own
    context_tokens: int
    kv_slots: tuple[int, ...]  # slots of each rank's arena
    max_chunk_tokens: int
    exact_activations: bool = False  # on GPUs: products of few rows take them as floats, not in int8


class UnloadModel(Command, frozen=True):
    """Give up the loaded model and its memory; another `LoadModel` may follow."""


class MeasureCosts(Command, frozen=True):
    """Time the model's layers on made-up rows, and the links. Answered by `CostsMeasured` from every rank.

    Everything empty is left out. All ranks measure the same at the same time: `chunks` each for itself,
    `tensor_chunks` (all layers under tensor parallelism) and `reduce_bytes` (all-reduces) together, `steps` both ways.
    It writes over KV slots: with no request open.
    """

    chunks: tuple[tuple[int, int], ...] = ()  # (cached tokens L, chunk tokens x)
    tensor_chunks: tuple[tuple[int, int], ...] = ()
    steps: tuple[tuple[int, int], ...] = ()  # (cached tokens of each request, requests)
    reduce_bytes: tuple[int, ...] = ()
    transfer_bytes: tuple[int, ...] = ()  # between neighbours, each way
    host_copy_bytes: tuple[int, ...] = ()  # from host memory to the device; nothing on CPU


class OpenRequest(Command, frozen=True):
    """A request begins. `prompt` holds all its ids (for penalties); KV slots are all granted now.

    Slots of the first `cached_tokens` positions hold their keys and values already, left there by an earlier request:
    the first chunk starts behind them. The prompt's last `sampled` tokens were sampled for this request by a group
    that is gone: the seed's random numbers go on behind theirs.
    """

    request: RequestId
    prompt: tuple[int, ...]
    layout: Layout  # it starts in
    table: BundleTable  # slots in that layout
    sampling: SamplingParameters
    cached_tokens: int = 0
    sampled: int = 0


class Chunk(Struct, frozen=True):
    """A run of prompt tokens that goes through the model together.

    `start` is the position of the first. With `sample`, the last row's logits choose the request's first token.
    With `targets`, the row at each position i scores the token `targets[i]` (-1: none) for perplexity.
    With `logits`, all rows' logits are reported.
    """

    request: RequestId
    start: int
    tokens: tuple[int, ...]
    sample: bool = False
    logits: bool = False
    targets: tuple[int, ...] = ()


class BatchEntry(Struct, frozen=True):
    """One request's place in a decode batch: `position` is the index of the token fed in the first step.

    The fed token is the one sampled last on the devices, or `forced[i]` in step i (teacher forcing).
    """

    request: RequestId
    position: int
    forced: tuple[int, ...] = ()


class Batch(Struct, frozen=True):
    """`steps` decode steps for all entries, in one layout. With `logits`, every row's logits are reported."""

    layout: Layout
    steps: int
    entries: tuple[BatchEntry, ...]
    logits: bool = False


class Move(Struct, frozen=True):
    """Send stage `stage`'s full blocks [first_block, end_block) of a request to their place in `to`.

    To the tensor layout, rank `stage` sends bundle (stage, r) to each rank r; to the layer layout, each rank r sends
    it back to rank `stage`. The target table was given by `PrepareShift`.
    """

    request: RequestId
    to: Layout
    stage: int
    first_block: int
    end_block: int


class RunTick(Command, frozen=True):
    """One entry of the work log.

    Order inside a tick: moves start, chunk and tensor chunk through their layers, late moves start (some layers' as
    soon as the chunk has passed these), head and sampler for what has left the last stage, decode, moves end, frees.

    A stage is vacated when the log's next work for its layers is behind `MigrateWeights` of all migrating layers to the
    tensor layout, from `WeightSource.HOST`: what comes may be copied to where a layer's parts lie as soon as this
    tick's chunk, if there is one for the stage, has passed the layer.
    """

    sequence: int
    chunk_of_stage: tuple[Chunk | None, ...] = ()  # S entries, or none at all: stage s runs entry s
    tensor_chunk: Chunk | None = None  # all ranks together
    decode: tuple[Batch, ...] = ()  # at most one a layout
    moves: tuple[Move, ...] = ()  # of blocks that earlier ticks have written
    late_moves: tuple[Move, ...] = ()  # of those that a prompt's last chunk writes in this one
    frees: tuple[RequestId, ...] = ()
    vacated: tuple[int, ...] = ()  # stages; see above
    spans: bool = False  # report what was done when, for a trace


class ReadClock(Command, frozen=True):
    """Answered by `ClockRead` at once."""


class PrepareShift(Command, frozen=True):
    """A request is to move to another layout; answered by `ShiftPrepared`. Nothing collective happens yet.

    `in_place`: bundles (s, r) and (r, s) change places, slot by slot; each tick with moves has the same blocks of all
    stages.
    """

    request: RequestId
    to: Layout
    table: BundleTable  # slots in the target layout
    in_place: bool = False


class CommitShift(Command, frozen=True):
    """All ranks accepted and all moves are in earlier ticks: from here on the request runs in `to`.

    Unless bytes arrived changed on some rank, which the ranks tell each other here: `ShiftCommitted` or `ShiftDamaged`,
    the same from all.
    """

    request: RequestId
    to: Layout


class AbandonShift(Command, frozen=True):
    """A rank declined, or bytes arrived changed twice: forget the target table; the request stays where it is."""

    request: RequestId


class PrepareMigration(Command, frozen=True):
    """Migrating layers are to come to where `to` needs them; answered by `MigrationPrepared`. Nothing moves yet."""

    to: Layout


class MigrateWeights(Command, frozen=True):
    """Bring the parts of these layers to where `to` needs them, and free what is not needed there: `WeightsMigrated`.

    All ranks have accepted. What the log holds from here on runs these layers in `to` alone. Time and bytes count as
    part of the shift to `to` that `request` has prepared, if any.
    """

    to: Layout
    layers: tuple[int, ...]  # one whole group of proto/placement/migration.py
    source: WeightSource
    request: RequestId | None = None


class HashKv(Command, frozen=True):
    """Report digests of a request's keys and values (first `tokens` positions) in its present layout."""

    request: RequestId
    tokens: int


class ReportMemory(Command, frozen=True):
    """Answered by `MemoryReported`."""


class Shutdown(Command, frozen=True):
    """End with exit code 0."""


AnyCommand: TypeAlias = (
    Welcome | Refuse | Redirect | OpenLinks | ProbeMemory | LoadModel | UnloadModel | MeasureCosts | OpenRequest
    | RunTick | ReadClock | PrepareShift | CommitShift | AbandonShift | PrepareMigration | MigrateWeights | HashKv
    | ReportMemory | Shutdown
)
