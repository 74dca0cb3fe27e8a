"""What is asked of the group and what it answers: requests, events, results. Data only."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from ..proto.ids import Layout, Rank, RequestId
from ..proto.reports import LogitRows, SampledToken, Scores
from ..proto.sampling import SamplingParameters
from .chunk_plan import Auto, ChunkRule


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-generation token, or a stop string
    LENGTH = "length"  # max_tokens, or the context's end
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how it is to be answered. Layouts None: the policy chooses.

    `max_tokens` None: up to the context's end; 0: the prompt is read and no token is sampled. `forced` tokens are fed
    to the decode steps after the prompt instead of sampled ones (teacher forcing), and nothing is sampled. `targets`
    (one a prompt token, -1: none) are scored. With `logits` every position's logits are reported.

    `conversation` names whose turn this is: keys and values are kept when the request ends, as long as nobody needs
    their slots, and the next request of the same name reads only what its prompt does not share with them.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: SamplingParameters = SamplingParameters()  # noqa: RUF009 (frozen)
    stop_tokens: frozenset[int] = frozenset()
    prefill: Layout | None = None
    decode: Layout | None = None
    chunk_rule: ChunkRule = Auto()  # noqa: RUF009 (frozen)
    forced: tuple[int, ...] = ()
    logits: bool = False
    targets: tuple[int, ...] = ()
    verify_shift: bool = False  # hash keys and values before and after the shift
    one_step_at_a_time: bool = False  # each step waits for the token before it (grammars)
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """The start of a prompt whose keys and values an earlier request left: `tokens` of them, in `layout`."""

    source: RequestId
    tokens: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A request with all that was decided for it at submission.

    With `kept` only the rest of the prompt is read; `cold` is the plan for the case that the kept sequence is gone by
    the time the request is opened.
    """

    request_id: RequestId
    request: GenerationRequest
    prefill: Layout
    decode: Layout
    chunks: tuple[int, ...]  # tokens
    max_tokens: int  # tokens to sample at most; never past the context
    layout_reason: str = ""
    chunk_reason: str = ""
    kept: KeptPrefix | None = None
    cold: "RequestPlan | None" = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that need not be read."""
        return self.kept.tokens if self.kept is not None else 0

    @property
    def first_layout(self) -> Layout:
        """The layout the request is opened in."""
        return self.kept.layout if self.kept is not None else self.prefill

    @property
    def decode_steps(self) -> int:
        """Decode steps at most: the first token comes from the prompt's last chunk."""
        return len(self.request.forced) or max(0, self.max_tokens - 1)

    @property
    def cells(self) -> int:
        """Positions that keys and values are written for at most."""
        return len(self.request.prompt) + self.decode_steps


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """The `index`-th token of the answer (from 0)."""

    request: RequestId
    index: int
    token: SampledToken


@dataclass(frozen=True, slots=True)
class LogitsEvent:
    request: RequestId
    rows: LogitRows


@dataclass(frozen=True, slots=True)
class ScoresEvent:
    request: RequestId
    scores: Scores


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One rank's seconds over a request's prompt: computing, and waiting for the stage before."""

    rank: Rank
    busy_seconds: float
    waiting_seconds: float


@dataclass(frozen=True, slots=True)
class PrefillResult:
    layout: Layout
    chunks: tuple[int, ...]  # tokens of the chunks that were read
    seconds: float  # from the first chunk handed out to the first token known here
    tokens_per_second: float
    reason: str
    chunk_reason: str
    stages: tuple[StageTimes, ...]
    cached_tokens: int = 0  # taken over from an earlier request; the chunks begin behind them


@dataclass(frozen=True, slots=True)
class ShiftResult:
    """Seconds of the slowest rank; bytes of all ranks together. `hashes_equal` None: not asked for."""

    source: Layout
    to: Layout
    seconds: float
    exposed_seconds: float
    kv_bytes: int
    weight_bytes: int
    hashes_equal: bool | None = None


@dataclass(frozen=True, slots=True)
class DecodeResult:
    layout: Layout
    steps: int  # that gave a token of the answer, or a forced step's logits
    seconds: float  # from the first token known here to the last
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A request's whole story. `decode` holds no step where the answer ended with the first token."""

    prompt_tokens: int
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason
    prefill: PrefillResult
    shift: ShiftResult | None
    decode: DecodeResult
    warning: str | None = None
    error: str | None = None
    moved_back: ShiftResult | None = None  # kept keys and values, before the rest of the prompt was read


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The last event of a request: its slots are free and all ranks have reported."""

    request: RequestId
    result: GenerationResult


Event: TypeAlias = TokenEvent | LogitsEvent | ScoresEvent | FinishedEvent
