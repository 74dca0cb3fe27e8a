"""The remote API's messages: requests from clients (imperative), replies from the coordinator (past tense).

A client numbers its calls as it likes (`call`); every reply to a call repeats the number. A request for text gets an id
of the server's own, told by `Accepted`, and that id names it from then on. What is wrong with a request is answered by
`Refused`; what goes wrong after `Accepted` by `Failed`, or by a `Finished` that carries an error.
"""

from enum import StrEnum
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from .generation_result import GenerationResult
from .ids import Layout, RequestId
from .reports import SampledToken
from .sampling import MAX_BIASES


class RefusalKind(StrEnum):
    """What a refusal or failure is about; the message says the rest."""

    BAD_MESSAGE = "bad_message"  # not a message of this protocol, or over a limit
    PROTOCOL = "protocol"  # the other side speaks another version
    INPUT = "input"  # a value of the request cannot be taken
    DOES_NOT_FIT = "does_not_fit"  # prompt longer than the context
    UNKNOWN_REQUEST = "unknown_request"  # not one of yours, or ended
    STALE = "stale"  # a plan from before a layout switch
    LAYOUT = "layout"  # the group cannot work in these layouts
    BUSY = "busy"  # the queue is full
    SLOW_READER = "slow_reader"  # replies were not read: the client is dropped
    REQUEST_FAILED = "request_failed"  # this request alone
    GROUP_ENDED = "group_ended"  # a worker was lost: no request can be served any more


class GroupState(StrEnum):
    """What a group that clients ask can do for them."""

    LOADING = "loading"  # requests for text are kept, plans and switches refused
    SERVING = "serving"
    FAILED = "failed"


# Parts of messages


class Sampling(Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are chosen. None: as the coordinator's settings and the model's file say; seed None: a random one."""

    temperature: float | None = None  # 0: greedy
    top_k: int | None = None  # 0: all
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalty_window: int | None = None  # last tokens looked at; -1: all
    logit_bias: Annotated[tuple[tuple[int, float], ...], Meta(max_length=MAX_BIASES)] = ()
    seed: int | None = None
    logprobs: int = 0  # alternatives reported beside each token


class RankStatus(Struct, frozen=True):
    """One worker. Bytes as it last reported them, at most a second ago."""

    rank: int
    host: str
    pid: int
    device: str
    first_layer: int  # of its stage
    end_layer: int
    kv_slots: int
    free_kv_slots: int
    planned_bytes: int
    peak_bytes: int
    anonymous_bytes: int


class QueueStatus(Struct, frozen=True):
    """Requests: waiting for room, open on the workers, ended but not yet freed there."""

    waiting: int
    open: int
    closing: int


class LayoutStatus(Struct, frozen=True):
    """Layouts of requests that name none (None: the policy chooses), and the count of switches so far."""

    prefill: Layout | None
    decode: Layout | None
    epoch: int


class ShiftStatus(Struct, frozen=True):
    """Shifts since the start. `damaged`: commits that found bytes changed, those mended by sending once more included.

    The others are requests that stayed in their layout: a rank `declined`, bytes were damaged twice (`given_up`), or
    there was `no_room`; `last_reason` is of the latest such.
    """

    committed: int = 0
    damaged: int = 0
    declined: int = 0
    given_up: int = 0
    no_room: int = 0
    last_reason: str = ""


class RankPlan(Struct, frozen=True):
    """What one worker holds."""

    rank: int
    first_layer: int
    end_layer: int
    first_vocab: int
    end_vocab: int
    weight_bytes: int
    kv_bytes: int


# Requests


class Request(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all requests."""

    call: int


class Greet(Request, frozen=True):
    """A client's first message. Answered by `Greeted`, or `Refused` for another protocol version."""

    protocol: int
    version: str  # of the client's package


class Generate(Request, frozen=True):
    """Answer a prompt, given by exactly one of `text`, `messages` and `ids`.

    Answered by `Accepted` (by `Queued` before it, while the model loads), then `TokensWritten` where `stream` is set,
    then `Finished` or `Failed`; or by `Refused`. Of an answer to `messages` the reasoning is told apart. `max_tokens`
    None: up to the context's end. `plan_epoch`: refused as stale unless it is still the current one.
    """

    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None  # rendered by the model's chat template
    ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    prefill: Layout | None = None  # None: the group's default
    decode: Layout | None = None
    chunk: str = "auto"
    verify_shift: bool = False
    tools: tuple[dict[str, Any], ...] | None = None  # for the chat template
    template_options: dict[str, Any] = {}
    conversation: str | None = None  # a name within this connection: the next turn reads only what is new
    stream: bool = True
    plan_epoch: int | None = None


class Cancel(Request, frozen=True):
    """End one of this client's requests: answered by `Cancelled`, and its `Finished` follows; or by `Refused`."""

    request: RequestId


class AskStatus(Request, frozen=True):
    """Answered by `StatusReported`. Tells of no prompt and no answer."""


class AskPlan(Request, frozen=True):
    """How a prompt of so many tokens would be run now. Answered by `Planned` or `Refused`."""

    prompt_tokens: int
    max_tokens: int | None = None
    prefill: Layout | None = None
    decode: Layout | None = None
    chunk: str = "auto"


class SetLayout(Request, frozen=True):
    """Layouts for requests that name none, from the next one on (None: the policy chooses).

    Answered by `LayoutSet`, or by `Refused` with the reason and nothing changed. Every switch makes earlier plans
    stale; requests that were accepted before keep their layouts.
    """

    prefill: Layout | None = None
    decode: Layout | None = None


AnyRequest: TypeAlias = Greet | Generate | Cancel | AskStatus | AskPlan | SetLayout


# Replies


class Reply(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all replies. `call` None: the message that is answered could not be read, or there was none."""

    call: int | None


class Greeted(Reply, frozen=True):
    """What the client has reached."""

    protocol: int
    version: str
    model: str
    context_tokens: int
    state: GroupState


class Queued(Reply, frozen=True):
    """A request for text that came while the model still loads: it is kept; `Accepted` or `Refused` follows."""

    reason: str


class Accepted(Reply, frozen=True):
    """A request is in the queue; `request` is its id from now on."""

    request: RequestId
    prompt_tokens: int
    prefill: Layout
    decode: Layout
    seed: int


class TokensWritten(Reply, frozen=True):
    """Tokens of an answer, and the text that is certain since the last such message (it may be empty).

    `reasoning` comes before `text`: it is what the model thinks before it answers `messages`, without its marks.
    """

    request: RequestId
    first: int  # index of the first token in the answer
    tokens: tuple[SampledToken, ...]
    text: str
    reasoning: str = ""


class Finished(Reply, frozen=True):
    """The whole answer: `text` and `reasoning` in full, `result` with the tokens and the story of the request."""

    request: RequestId
    text: str
    rest: str  # text after the last `TokensWritten`
    reasoning: str
    rest_of_reasoning: str
    result: GenerationResult
    start_seconds: float
    load_seconds: float


class Failed(Reply, frozen=True):
    """A request that was accepted will get no `Finished`."""

    request: RequestId
    kind: RefusalKind
    message: str


class Cancelled(Reply, frozen=True):
    """The request is ending; its `Finished` follows."""

    request: RequestId


class StatusReported(Reply, frozen=True):
    """How the group is. `failure` has the cause where it has failed; while it loads no rank is known."""

    state: GroupState
    failure: str
    model: str
    version: str
    context_tokens: int
    uptime_seconds: float
    clients: int
    queue: QueueStatus
    layouts: LayoutStatus
    ranks: tuple[RankStatus, ...]
    shifts: ShiftStatus = ShiftStatus()
    restarts: int = 0  # of the workers, after they were lost


class Planned(Reply, frozen=True):
    """Layouts, chunks (tokens) and their reasons for one prompt; what each rank holds. Valid within `epoch`."""

    epoch: int
    prefill: Layout
    decode: Layout
    chunks: tuple[int, ...]
    max_tokens: int
    layout_reason: str
    chunk_reason: str
    ranks: tuple[RankPlan, ...]


class LayoutSet(Reply, frozen=True):
    """The switch was taken: `layouts` holds from now on, in a new epoch."""

    layouts: LayoutStatus


class Refused(Reply, frozen=True):
    """A call that was not taken; nothing has changed by it."""

    kind: RefusalKind
    message: str


class GroupEnded(Reply, frozen=True):
    """To every client: a worker was lost or the coordinator ends. No further call can be served."""

    reason: str


AnyReply: TypeAlias = (
    Greeted | Queued | Accepted | TokensWritten | Finished | Failed | Cancelled | StatusReported | Planned | LayoutSet
    | Refused | GroupEnded
)
