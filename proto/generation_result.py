"""A request's story: what it took and what came of it. The driver makes it, clients are told it as it stands."""

from enum import StrEnum

from msgspec import Struct

from .ids import Layout, Rank
from .reports import SampledToken


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # an end-of-generation token, or a stop string
    LENGTH = "length"  # max_tokens, or the context's end
    CANCELLED = "cancelled"
    ERROR = "error"


class StageTimes(Struct, frozen=True):
    """One rank's seconds over a request's prompt: computing, waiting for the stage before, messages and moves."""

    rank: Rank
    busy_seconds: float
    waiting_seconds: float
    overhead_seconds: float = 0.0  # between its chunks, and with moves


class PrefillResult(Struct, frozen=True):
    """How the prompt was read. Rates count the tokens that were read, not those that were kept from before."""

    layout: Layout
    chunks: tuple[int, ...]  # tokens of the chunks that were read
    seconds: float  # from the first chunk handed out to the first token known here
    tokens_per_second: float
    reason: str
    chunk_reason: str
    stages: tuple[StageTimes, ...]
    cached_tokens: int = 0  # taken over from an earlier request; the chunks begin behind them
    work_seconds: float = 0.0  # that the chunks need, each as long as it took its ranks, if no stage had to wait more


class ShiftResult(Struct, frozen=True):
    """Seconds of the slowest rank; bytes of all ranks together. `hashes_equal` None: not asked for.

    `seconds` were spent on moving. `exposed_seconds` run from the first token to the commit, and hold the messages by
    which ranks agree as well: behind little to move they are the longer ones.
    """

    source: Layout
    to: Layout
    seconds: float
    exposed_seconds: float
    kv_bytes: int
    weight_bytes: int
    hashes_equal: bool | None = None
    moved_again: int = 0  # times that blocks which had arrived damaged were sent once more


class ShiftFailureKind(StrEnum):
    """Why a shift was not made."""

    DECLINED = "declined"  # by a rank, before anything moved
    DAMAGED = "damaged"  # bytes arrived changed, and changed again when they were sent once more
    NO_ROOM = "no room"  # for keys and values in both layouts


class ShiftFailure(Struct, frozen=True):
    """A shift that was planned and not made: the request went on in `source`."""

    kind: ShiftFailureKind
    source: Layout
    to: Layout
    reason: str


class DecodeResult(Struct, frozen=True):
    """How the answer was written, behind its first token."""

    layout: Layout
    steps: int  # that gave a token of the answer, or a forced step's logits
    seconds: float  # from the first token known here to the last
    tokens_per_second: float
    work_seconds: float = 0.0  # that its ticks took the ranks, from the first one's begin to the last one's end


class JourneyForecast(Struct, frozen=True):
    """Seconds that a request was predicted to take in a pair of layouts, in all and by part."""

    prefill: Layout
    decode: Layout
    seconds: float
    back_seconds: float  # kept keys and values, and weights, that would have moved before the prompt
    prefill_seconds: float
    exposed_seconds: float  # that the answer would have waited for the shift
    decode_seconds: float
    constant_seconds: float = 0.0  # whatever is read and written: messages, the policy, the first token's choice


class GenerationResult(Struct, frozen=True):
    """A request's whole story. `decode` holds no step where the answer ended with the first token."""

    prompt_tokens: int
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason
    prefill: PrefillResult
    shift: ShiftResult | None
    decode: DecodeResult
    warning: str | None = None
    error: str | None = None
    policy: tuple[JourneyForecast, ...] = ()  # what was compared; none where nothing was to be chosen
    moved_back: ShiftResult | None = None  # kept keys and values, before the rest of the prompt was read
    shift_failure: ShiftFailure | None = None
    restarts: int = 0  # groups that were lost under it; their reading and writing counts as `decode`'s
