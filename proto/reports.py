"""What the workers tell the coordinator: one frozen class a message, names in the past tense."""

from enum import StrEnum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from .ids import ComputeType, Layout, Rank, RequestId
from .kv import KvFormat

Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""What costs are learnt from: a rank's numbers that are none, or below nothing, are refused."""


class Report(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all reports. The sender's rank is in each."""

    rank: Rank


class Hello(Report, frozen=True):
    """First message of a worker."""

    protocol: int
    group: str  # token of the launch: never join another launch's group
    world_size: int
    local_rank: int
    pid: int
    host: str
    device: str  # "cpu" or the CUDA device's name
    torch_version: str
    option_digest: str = ""  # of the options that must be the same on all ranks
    version: str = ""  # of the package
    host_identity: str = ""  # equal for ranks that share memory and a network; "" is taken as `host`
    free_bytes: int = 0  # of the device's memory, before this process took any of a card's; 0: not known
    display: bool = False  # the card drives a display
    pace: str = ""  # what its speed depends on beside the device: ranks alike in both are taken to be equally fast
    compute_type: ComputeType | None = None  # of a card where none is asked for; the oldest card of a group decides


class Heartbeat(Report, frozen=True):
    """Sent by its own thread every second; `sequence` is the last tick finished, -1 before the first."""

    sequence: int


class MemoryProbed(Report, frozen=True):
    """Bytes of the rank's device: a card's, or on the CPU of its host, which the ranks there share.

    `free_bytes` now, with links open and no model loaded. `process_bytes`: what this process holds there already (on
    the CPU its anonymous memory; on a card 0: `Hello.free_bytes` less `free_bytes` tells it).
    """

    free_bytes: int
    process_bytes: int


class LoadProgress(Report, frozen=True):
    """Now and then while a model is read."""

    done_bytes: int
    total_bytes: int


class ModelLoaded(Report, frozen=True):
    """`weight_bytes` and `kv_bytes` are what was allocated. `without_nccl`: the ranks' GPUs reach each other so."""

    seconds: float
    compute_type: ComputeType
    kv_format: KvFormat
    weight_bytes: int
    kv_bytes: int
    without_nccl: bool = False


class KindSeconds(Struct, frozen=True):
    """Seconds of one layer of a kind, in the order of the points asked for.

    `whole`: a chunk through one whole layer of this rank's stage, empty where that has none of this kind. `part`:
    through the rank's own part, without collectives. `together`: under tensor parallelism with them. So for steps.
    """

    layers: tuple[int, ...]  # all of the model's that are alike
    whole: tuple[float, ...] = ()
    part: tuple[float, ...] = ()
    together: tuple[float, ...] = ()
    whole_steps: tuple[float, ...] = ()
    part_steps: tuple[float, ...] = ()
    together_steps: tuple[float, ...] = ()


class TransferSeconds(Struct, frozen=True):
    """Bytes that went from one rank to another, as this end saw it."""

    source: Rank
    target: Rank
    byte_count: int
    seconds: float


class CostsMeasured(Report, frozen=True):
    """Best of a few passes, in seconds.

    One figure for each of the steps asked for, in their order: `hops` makes a stage's result known to all, once a
    stage, `tails` is the head, the choice and its announcement, `heads` the own part of the head alone; `device_steps`
    are whole steps as the device runs them by itself, empty where it does not. `embeds`: the tokens of each of the
    chunks looked up. `past_in_runs`: this rank attends a chunk's past in runs (proto/past_runs.py).
    """

    kinds: tuple[KindSeconds, ...] = ()
    hops: tuple[float, ...] = ()
    tails: tuple[float, ...] = ()
    heads: tuple[float, ...] = ()
    device_steps: tuple[float, ...] = ()
    reduces: tuple[float, ...] = ()
    transfers: tuple[TransferSeconds, ...] = ()
    host_copies: tuple[float, ...] = ()
    embeds: tuple[float, ...] = ()
    past_in_runs: bool = False


class SampledToken(Struct, frozen=True):
    """One chosen token. `top` holds the likeliest (id, logprob), best first."""

    request: RequestId
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None  # NaN logits: the token is meaningless and the request must end


class LogitRows(Struct, frozen=True):
    """f32 little-endian logits of consecutive positions: `rows` x vocab."""

    request: RequestId
    start: int
    rows: int
    data: bytes


class Scores(Struct, frozen=True):
    """Logprobs of a chunk's targets, in order, NaN-free; positions without a target are left out."""

    request: RequestId
    start: int
    logprobs: tuple[float, ...]


class SpanKind(StrEnum):
    """What a rank did for a while. The values are the names that a trace shows."""

    WAIT = "wait"  # for a chunk's rows from the stage before; on the first stage they are looked up
    CHUNK = "chunk"  # this stage's layers over a chunk
    TENSOR_CHUNK = "tensor chunk"  # all layers' own parts over a chunk, collectives included
    HEAD = "head"  # logits of a chunk that has left the last stage, and its sampling
    DECODE = "decode"  # all steps of one batch in one tick
    STEP = "step"  # one of them, inside a DECODE
    MOVES_BEGIN = "moves begin"  # gathering what is sent, posting sends and receives
    MOVES_END = "moves end"  # waiting for what is still under way, and putting it into its slots
    MOVES = "moves"  # from MOVES_BEGIN's start to MOVES_END's end, beside all else of the tick


class Span(Struct, frozen=True):
    """One stretch of a rank's time. `start_seconds` is of the monotonic clock of its host.

    `count`: a chunk's tokens, a batch's requests, or the blocks that move. `request` None: of several.
    """

    kind: SpanKind
    start_seconds: float
    seconds: float
    request: RequestId | None = None
    count: int = 0
    layout: Layout | None = None  # of a batch, or of what moves: where to


class TickFinished(Report, frozen=True):
    """Seconds are this rank's own. Tokens, logits and scores come from the sampler (rank S-1) alone.

    `tokens[i]` are step i's, a chunk's first token before all decode steps. `busy_seconds` were spent computing the
    chunk, `waiting_seconds` in receiving; `decode_seconds` the whole of the decode steps. `spans`: where the tick asks.
    `between_seconds` had passed since the tick before ended; `moving_seconds` went into moves beside the chunk.
    `first_runs`: pieces of work that were launched for the first time, captured or compiled in it.
    """

    sequence: int
    busy_seconds: Seconds
    waiting_seconds: Seconds
    decode_seconds: Seconds
    tokens: tuple[SampledToken, ...] = ()
    logits: tuple[LogitRows, ...] = ()
    scores: tuple[Scores, ...] = ()
    spans: tuple[Span, ...] = ()
    between_seconds: Seconds = 0.0
    moving_seconds: Seconds = 0.0
    first_runs: int = 0


class ClockRead(Report, frozen=True):
    """What this rank's monotonic clock shows, the clock of its spans. One host has one such clock."""

    seconds: float


class ShiftPrepared(Report, frozen=True):
    """This rank can shift the request, or declines and says why."""

    request: RequestId
    accepted: bool
    reason: str = ""


class ShiftCommitted(Report, frozen=True):
    """`exposed_seconds` is what the answer waited for: decode steps may begin behind the commit."""

    request: RequestId
    to: Layout
    seconds: float  # time spent on moves, hidden or not
    exposed_seconds: float  # from the sampling of the first token to the commit
    kv_bytes: int  # received by this rank
    weight_bytes: int


class DamagedMove(Struct, frozen=True):
    """Blocks [first_block, end_block) of bundle (stage, part) that arrived changed."""

    stage: int
    part: int
    first_block: int
    end_block: int


class ShiftDamaged(Report, frozen=True):
    """Answers `CommitShift` where bytes arrived changed on some rank: every rank stays in the layout it was in.

    Decode steps of the request that the log holds before the next `CommitShift` or `AbandonShift` are left out, on
    all ranks alike. `moves` are those that this rank received.
    """

    request: RequestId
    to: Layout
    moves: tuple[DamagedMove, ...]


class MigrationPrepared(Report, frozen=True):
    """This rank can take part in a migration to `to`, or declines and says why.

    `on_host`: it has a copy of all that will come to it, in pinned host memory.
    """

    to: Layout
    accepted: bool
    reason: str = ""
    on_host: bool = False


class WeightsMigrated(Report, frozen=True):
    """The parts of these layers lie where `to` needs them, as far as this rank is concerned."""

    to: Layout
    layers: tuple[int, ...]
    seconds: float
    received_bytes: int  # from whichever source


class KvHashed(Report, frozen=True):
    """`digests[i]` is (layer, kv head, part, hex digest over the rows in position order, keys then values).

    Where parts share a head each has a copy of it, and each copy is hashed: they may differ in their last bits, as
    each was computed by another product.
    """

    request: RequestId
    digests: tuple[tuple[int, int, int, str], ...]


class MemoryReported(Report, frozen=True):
    """Bytes: what the plan says, tracked allocations at their peak, and the process's anonymous memory.

    `planned_bytes` are weights and KV, which is what is tracked. On a card also what its driver had free
    (`torch.cuda.mem_get_info`; `Hello.free_bytes` less it is what this process held there) when torch's allocator had
    reserved the most, and that most; 0 on the CPU.
    """

    planned_bytes: int
    peak_bytes: int
    anonymous_bytes: int
    device_free_bytes: int = 0
    device_reserved_bytes: int = 0


class WorkerFailed(Report, frozen=True):
    """The worker raised and is ending. `user_error` marks what the user can mend (exit code 2)."""

    error: str
    message: str
    traceback: str
    user_error: bool = False


AnyReport: TypeAlias = (
    Hello | Heartbeat | MemoryProbed | LoadProgress | ModelLoaded | CostsMeasured | TickFinished | ClockRead
    | ShiftPrepared | ShiftCommitted | ShiftDamaged | MigrationPrepared | WeightsMigrated
    | KvHashed | MemoryReported | WorkerFailed
)
