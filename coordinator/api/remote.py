"""The remote API decided without sockets: a client's message or a driver's event in, replies out.

Clients are told apart by their connection; request ids are the driver's own and mean nothing on another connection.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias, assert_never

from msgspec.structs import replace as replace_fields

from ...proto.channel import ClientPeer
from ...proto.client_messages import (
    Accepted,
    AnyReply,
    AnyRequest,
    AskPlan,
    AskStatus,
    Cancel,
    Cancelled,
    Failed,
    Generate,
    Greet,
    Greeted,
    GroupEnded,
    GroupState,
    LayoutSet,
    LayoutStatus,
    Planned,
    QueueStatus,
    RankPlan,
    RankStatus,
    RefusalKind,
    Refused,
    SetLayout,
    ShiftStatus,
    StatusReported,
)
from ...proto.errors import (
    BusyError,
    DoesNotFitError,
    InputError,
    LayoutRefusedError,
    ProtocolError,
    StaleError,
)
from ...proto.generation_result import ShiftFailureKind
from ...proto.ids import Layout, RequestId
from ...proto.reports import MemoryReported
from ...proto.shown import told
from ..chunks.plan import parse_chunk_rule
from ..driver import Driver
from ..generation import Event, FinishedEvent, GenerationRequest, LogitsEvent, ScoresEvent, TokenEvent
from ..model.file_blame import FileBlame, find_blame, tells_no_numbers
from .answers import Answer
from .loading import MAX_CLIENTS, greet
from .prompts import build_request, open_text, read_prompt, read_values
from .service import Service

MAX_REQUESTS = 1024  # of all clients, waiting and running
MAX_REQUESTS_OF_CLIENT = 256
MAX_CONVERSATIONS_OF_CLIENT = 256
MAX_KEPT_BIASES = 1 << 20  # of all requests: each takes some 130 bytes
MEMORY_SECONDS = 1.0  # for so long a rank's report of its memory is repeated

Outgoing: TypeAlias = tuple[ClientPeer, AnyReply]

_KINDS: tuple[tuple[type[Exception], RefusalKind], ...] = (
    (DoesNotFitError, RefusalKind.DOES_NOT_FIT),
    (StaleError, RefusalKind.STALE),
    (LayoutRefusedError, RefusalKind.LAYOUT),
    (InputError, RefusalKind.INPUT),
    (BusyError, RefusalKind.BUSY),
    (ProtocolError, RefusalKind.PROTOCOL),
)


class RemoteApi:
    """All clients of one group. For one thread only, the driver's.

    An answer that ended over logits that are no numbers is told once it is known whether the model's file is to
    blame; that is looked for beside the group's work, which goes on.
    """

    def __init__(
        self,
        driver: Driver,
        service: Service,
        clock: Callable[[], float] = time.monotonic,
        blame: FileBlame | None = None,
    ) -> None:
        self._driver = driver
        self._service = service
        self._clock = clock
        self._started = clock()
        self._ranks = service.placement.ranks
        settings = driver.settings
        self._layouts: tuple[Layout | None, Layout | None] = (settings.prefill, settings.decode)
        self._epoch = 0
        self._clients: dict[ClientPeer, dict[RequestId, Answer]] = {}
        self._client_of: dict[RequestId, ClientPeer] = {}
        self._conversations: dict[ClientPeer, set[str]] = {}  # names as the driver knows them
        self._memory: tuple[MemoryReported, ...] = ()
        self._memory_at: float | None = None
        self._failure = ""
        self._blame = blame or FileBlame(lambda: find_blame(driver.spec))
        self._unexplained: list[FinishedEvent] = []  # whose client is told once the file was looked at

    @property
    def clients(self) -> tuple[ClientPeer, ...]:
        return tuple(self._clients)

    @property
    def _state(self) -> GroupState:
        return GroupState.FAILED if self._failure else GroupState.SERVING

    # From clients

    def know(self, peers: Iterable[ClientPeer]) -> None:
        """Clients that greeted the group before it could serve."""
        for peer in peers:
            self._clients.setdefault(peer, {})

    def handle(self, peer: ClientPeer, request: AnyRequest) -> list[Outgoing]:
        """One client's message; raises only what ends the group."""
        if peer not in self._clients and len(self._clients) >= MAX_CLIENTS:
            return [(peer, Refused(request.call, RefusalKind.BUSY, f"{MAX_CLIENTS} clients are connected"))]
        self._clients.setdefault(peer, {})
        try:
            return [(peer, self._answer(peer, request))]
        except (InputError, BusyError, ProtocolError) as error:
            kind = next(kind for error_type, kind in _KINDS if isinstance(error, error_type))
            return [(peer, Refused(request.call, kind, told(str(error))))]

    def fault(self, peer: ClientPeer, message: str, call: int | None) -> list[Outgoing]:
        """A frame that is no request: said so, nothing else happens."""
        return [(peer, Refused(call, RefusalKind.BAD_MESSAGE, message))]

    def left(self, peer: ClientPeer) -> None:
        """A client is gone, or was dropped: its requests end."""
        for request in self._clients.pop(peer, {}):
            del self._client_of[request]
            if not self._failure:
                self._driver.cancel(request)
        for conversation in self._conversations.pop(peer, ()):
            self._driver.forget(conversation)

    def _answer(self, peer: ClientPeer, request: AnyRequest) -> AnyReply:
        match request:
            case Greet():
                return self._greet(request)
            case AskStatus():
                return self._status(request.call)
            case _ if self._failure:
                return Refused(request.call, RefusalKind.GROUP_ENDED, self._failure)
            case Generate():
                return self._generate(peer, request)
            case Cancel():
                return self._cancel(peer, request)
            case AskPlan():
                return self._plan(request)
            case SetLayout():
                return self._set_layout(request)
            case _:
                assert_never(request)

    def _greet(self, request: Greet) -> Greeted:
        service, context = self._service, self._driver.settings.context_tokens
        return greet(request, service.version, service.model, context, self._state)

    def _generate(self, peer: ClientPeer, message: Generate) -> Accepted:
        answers = self._clients[peer]
        if len(answers) >= MAX_REQUESTS_OF_CLIENT or len(self._client_of) >= MAX_REQUESTS:
            raise BusyError(f"{len(self._client_of)} requests are waiting or running, {len(answers)} of them yours")
        if message.plan_epoch not in (None, self._epoch):
            raise StaleError(
                f"the plan is of epoch {message.plan_epoch}, before a switch of layouts: the epoch is {self._epoch}"
            )
        self._check_layouts(message.prefill, message.decode)
        vocab, context = self._driver.spec.vocab, self._driver.settings.context_tokens
        tokenizer, values = self._service.tokenizer, read_values(message, self._service, vocab)
        biases = len(values.sampling.logit_bias)
        self._check_biases(biases)
        own_name = None if message.conversation is None else self._own_conversation(peer, message.conversation)
        prompt = read_prompt(message, self._service, vocab, context)
        request = build_request(message, values, prompt, tokenizer, self._layouts, own_name)
        plan = self._driver.plan(request)
        stream, split = open_text(values, prompt, tokenizer)
        request_id = self._driver.submit(request)
        answers[request_id] = Answer(message.call, request_id, stream, split, streamed=message.stream, biases=biases)
        self._client_of[request_id] = peer
        if own_name is not None:
            self._conversations.setdefault(peer, set()).add(own_name)
        return Accepted(
            message.call, request_id, len(request.prompt), plan.prefill, plan.decode, request.sampling.seed
        )

    def _own_conversation(self, peer: ClientPeer, name: str) -> str:
        """The name within this connection: clients share no conversations, whatever they call them."""
        names = self._conversations.get(peer, ())
        own = f"{peer.hex()}/{name}"
        if own not in names and len(names) >= MAX_CONVERSATIONS_OF_CLIENT:
            raise BusyError(f"{len(names)} conversations were begun on this connection")
        return own

    def _check_biases(self, more: int) -> None:
        kept = sum(answer.biases for answers in self._clients.values() for answer in answers.values())
        if kept + more > MAX_KEPT_BIASES:
            raise BusyError(
                f"requests that wait or run name {kept} tokens in logit_bias: with {more} more they would be over the "
                f"limit of {MAX_KEPT_BIASES}"
            )

    def _cancel(self, peer: ClientPeer, message: Cancel) -> Cancelled | Refused:
        if message.request not in self._clients[peer]:
            text = f"you have no request {message.request} that waits or runs"
            return Refused(message.call, RefusalKind.UNKNOWN_REQUEST, text)
        self._driver.cancel(message.request)
        return Cancelled(message.call, message.request)

    def _plan(self, message: AskPlan) -> Planned:
        self._check_layouts(message.prefill, message.decode)
        context = self._driver.settings.context_tokens
        if not 0 < message.prompt_tokens <= context:
            raise DoesNotFitError(f"prompt_tokens must be 1 to {context}, the context, not {message.prompt_tokens}")
        plan = self._driver.plan(
            GenerationRequest(
                prompt=(0,) * message.prompt_tokens,
                max_tokens=message.max_tokens,
                prefill=message.prefill or self._layouts[0],
                decode=message.decode or self._layouts[1],
                chunk_rule=parse_chunk_rule(message.chunk),
            )
        )
        return Planned(
            call=message.call,
            epoch=self._epoch,
            prefill=plan.prefill,
            decode=plan.decode,
            chunks=plan.chunks,
            max_tokens=plan.max_tokens,
            layout_reason=plan.layout_reason,
            chunk_reason=plan.chunk_reason,
            ranks=tuple(self._rank_plan(rank) for rank in range(self._ranks)),
        )

    def _rank_plan(self, rank: int) -> RankPlan:
        placement, loaded = self._service.placement, self._service.loaded
        layers, vocab = placement.stages[rank], placement.vocab[rank]
        return RankPlan(
            rank, layers.first, layers.end, vocab.first, vocab.end, loaded.weight_bytes[rank], loaded.kv_bytes[rank]
        )

    def _set_layout(self, message: SetLayout) -> LayoutSet:
        started = self._driver.settings
        for name, asked, fixed in (
            ("prefill", message.prefill, started.prefill),
            ("decode", message.decode, started.decode),
        ):
            if asked is None and fixed is not None:
                raise LayoutRefusedError(f"the group was started for {name} {fixed} alone: the policy cannot choose")
        self._check_layouts(message.prefill, message.decode)
        self._layouts = (message.prefill, message.decode)
        self._epoch += 1
        return LayoutSet(message.call, self._layout_status())

    def _check_layouts(self, prefill: Layout | None, decode: Layout | None) -> None:
        """`LayoutRefusedError` for what the group has no keys-and-values room for, or no second worker."""
        settings = self._driver.settings
        for name, asked, fixed in (("prefill", prefill, settings.prefill), ("decode", decode, settings.decode)):
            if asked is None:
                continue
            if self._ranks == 1 and asked is Layout.TENSOR:
                raise LayoutRefusedError(f"{name} {asked}: one worker knows the layer layout alone")
            if fixed is not None and asked is not fixed:
                raise LayoutRefusedError(
                    f"{name} {asked}: the group was started with --{name} {fixed}, and its room for keys and values is "
                    "sized for that"
                )

    # Status

    def _status(self, call: int) -> StatusReported:
        settings, service = self._driver.settings, self._service
        self._refresh_memory()
        return StatusReported(
            call=call,
            state=self._state,
            failure=self._failure,
            model=service.model,
            version=service.version,
            context_tokens=settings.context_tokens,
            uptime_seconds=self._clock() - self._started,
            clients=len(self._clients),
            queue=QueueStatus(*self._driver.queue_counts),
            layouts=self._layout_status(),
            shifts=self._shift_status(),
            restarts=self._driver.restarts,
            ranks=tuple(self._rank_status(rank) for rank in range(self._ranks)),
        )

    def _layout_status(self) -> LayoutStatus:
        return LayoutStatus(*self._layouts, self._epoch)

    def _shift_status(self) -> ShiftStatus:
        counts = self._driver.shift_counts
        return ShiftStatus(
            committed=counts.committed,
            damaged=counts.damaged,
            declined=counts.failed.get(ShiftFailureKind.DECLINED, 0),
            given_up=counts.failed.get(ShiftFailureKind.DAMAGED, 0),
            no_room=counts.failed.get(ShiftFailureKind.NO_ROOM, 0),
            last_reason=counts.last_reason,
        )

    def _refresh_memory(self) -> None:
        now = self._clock()
        if not self._failure and (self._memory_at is None or now - self._memory_at > MEMORY_SECONDS):
            self._memory = self._driver.memory()
            self._memory_at = now

    def _rank_status(self, rank: int) -> RankStatus:
        hello, layers = self._service.group.hellos[rank], self._service.placement.stages[rank]
        free, slots = self._driver.kv_slots[rank]
        memory = self._memory[rank] if self._memory else None
        return RankStatus(
            rank=rank,
            host=hello.host,
            pid=hello.pid,
            device=hello.device,
            first_layer=layers.first,
            end_layer=layers.end,
            kv_slots=slots,
            free_kv_slots=free,
            planned_bytes=memory.planned_bytes if memory else 0,
            peak_bytes=memory.peak_bytes if memory else 0,
            anonymous_bytes=memory.anonymous_bytes if memory else 0,
        )

    # From the driver

    def heard(self, events: Iterable[Event]) -> list[Outgoing]:
        """What happened to requests, as replies: tokens of one request in one message, then what has ended."""
        touched: dict[RequestId, Answer] = {}
        endings: list[FinishedEvent] = []
        for event in events:
            peer = self._client_of.get(event.request)
            if peer is None:
                continue  # its client is gone
            answer = self._clients[peer][event.request]
            match event:
                case TokenEvent():
                    touched[event.request] = answer
                    if (kept := answer.token(event)) is not None:
                        self._driver.stop(event.request, kept)
                case FinishedEvent() if tells_no_numbers(event.result.error):
                    self._blame.begin()
                    self._unexplained.append(event)
                case FinishedEvent():
                    endings.append(event)
                case LogitsEvent() | ScoresEvent():
                    continue  # not asked for by this API
                case _:
                    assert_never(event)
        replies: list[Outgoing] = []
        for request, answer in touched.items():
            if (written := answer.take()) is not None:
                replies.append((self._client_of[request], written))
        if self._unexplained and self._blame.ended:
            endings += map(self._explained, self._unexplained)
            self._unexplained.clear()
        for ending in endings:
            if (peer := self._client_of.pop(ending.request, None)) is None:
                continue  # it left while the file was looked at
            answer = self._clients[peer].pop(ending.request)
            seconds = self._service.start_seconds, self._service.loaded.seconds
            replies.append((peer, answer.finish(ending.result, *seconds)))
        return replies

    def _explained(self, ending: FinishedEvent) -> FinishedEvent:
        result = ending.result
        assert result.error is not None
        return replace(ending, result=replace_fields(result, error=self._blame.told(result.error)))

    def end(self, reason: str) -> list[Outgoing]:
        """The group is over: every open request fails, every client is told. Only status is answered from now on."""
        self._failure = reason
        replies: list[Outgoing] = []
        for peer, answers in self._clients.items():
            for request, answer in answers.items():
                replies.append((peer, Failed(answer.call, request, RefusalKind.GROUP_ENDED, reason)))
            answers.clear()
            replies.append((peer, GroupEnded(None, reason)))
        self._client_of.clear()
        return replies
