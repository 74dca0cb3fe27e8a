"""The remote API's Python client, blocking and asyncio: `gearshift.Client("tcp://127.0.0.1:5555")`.

    with gearshift.Client("tcp://127.0.0.1:5555") as client:
        for piece in client.generate("Once upon a time", max_tokens=64):
            print(piece, end="", flush=True)

Both kinds may be used from many threads or tasks at a time. A connection that breaks ends all its calls by an error;
the coordinator then ends their requests. Nothing is repeated by itself.
"""

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from .client_answer import AnswerResult, build_generate, layouts_asked, pieces_of, reply_error, result_of
from .client_messages import (
    Accepted,
    AnyReply,
    AskPlan,
    AskStatus,
    Cancel,
    Failed,
    Finished,
    GroupEnded,
    GroupState,
    LayoutSet,
    LayoutStatus,
    Planned,
    Queued,
    Refused,
    SetLayout,
    StatusReported,
    TokensWritten,
)
from .client_wire import ClientWire
from .errors import GearshiftError, ProtocolError
from .ids import Layout, RequestId
from .keys import read_keys
from .pieces import Piece, PieceKind

CONNECT_SECONDS = 30.0
CALL_SECONDS = 60.0  # for the answer to anything but a request for text

R = TypeVar("R")
News = AnyReply | GearshiftError


class Client:
    """Blocking; for any number of threads. `key_file`: the group's, where it has one.

    Raises `ServerLostError` when nobody listens there (a port that refuses is tried for 3 s: a coordinator may just be
    starting) or answers within `timeout_seconds`, `ProtocolError` for another version.
    """

    def __init__(
        self,
        address: str,
        *,
        key_file: str | Path | None = None,
        timeout_seconds: float = CONNECT_SECONDS,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """`tell` hears at once what keeps it waiting, where a port refuses."""
        keys = None if key_file is None else read_keys(Path(key_file))
        self._wire = ClientWire(address, keys, timeout_seconds, tell)
        self.model = self._wire.greeted.model
        self.context_tokens = self._wire.greeted.context_tokens
        self.was_loading = self._wire.greeted.state is GroupState.LOADING  # the model, when this client connected

    def generate(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        ids: Sequence[int] | None = None,
        **options: Any,
    ) -> "Answer":
        """Ask for an answer; returns once the request is accepted, or raises why it is not.

        While the model still loads the request is kept by the coordinator, and this waits. `BusyError`: too many wait.

        Give one of `text`, `messages` (by the model's chat template) and `ids`. `options` are the fields of
        `Generate` and `Sampling` in client_messages.py: max_tokens, temperature, top_k, seed, stop, prefill, ...
        """
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        call = self._wire.call(
            lambda number: build_generate(number, text, messages, ids, options), news.put
        )
        while isinstance(reply := _reply(news.get()), Queued):
            continue  # the model still loads
        return Answer(self, _expect(reply, Accepted), news, call)

    def cancel(self, request: int) -> None:
        """End one of this client's requests; its answer finishes as cancelled. `StaleError` when it is over."""
        self._ask(lambda call: Cancel(call, RequestId(request)))

    def status(self) -> StatusReported:
        """Ranks, queue, memory and layouts. Answered, as "loading", while the model loads, and for a moment as "failed"
        after a worker was lost."""
        return _expect(self._ask(AskStatus), StatusReported)

    def plan(
        self,
        prompt_tokens: int,
        *,
        max_tokens: int | None = None,
        prefill: Layout | str | None = None,
        decode: Layout | str | None = None,
        chunk: str = "auto",
    ) -> Planned:
        """How a prompt of so many tokens would be run now."""
        layouts = layouts_asked(prefill, decode)
        return _expect(self._ask(lambda call: AskPlan(call, prompt_tokens, max_tokens, *layouts, chunk)), Planned)

    def set_layout(self, prefill: Layout | str | None = None, decode: Layout | str | None = None) -> LayoutStatus:
        """Layouts of coming requests that name none (None or "auto": the policy chooses).

        Raises `LayoutRefusedError` with the reason; nothing is changed then. A switch makes earlier plans stale.
        """
        layouts = layouts_asked(prefill, decode)
        return _expect(self._ask(lambda call: SetLayout(call, *layouts)), LayoutSet).layouts

    def close(self) -> None:
        """Disconnect: the coordinator ends what this client still has running. May be called twice."""
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, build: Callable[[int], Any]) -> AnyReply:
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._wire.call(build, news.put)
        try:
            return _reply(news.get(timeout=CALL_SECONDS))
        except queue.Empty:
            raise self._wire.silence(CALL_SECONDS) from None


class Answer:
    """One accepted request: iterate over its pieces of text as they come, or take the whole `result`.

    Leaving a `with` block before the end cancels the request.
    """

    def __init__(self, client: Client, accepted: Accepted, news: "queue.SimpleQueue[News]", call: int) -> None:
        self.accepted = accepted
        self.request = accepted.request
        self._client = client
        self._news = news
        self._call = call
        self._result: AnswerResult | None = None
        self._failure: GearshiftError | None = None
        self._ready: deque[Piece] = deque()

    def __iter__(self) -> Iterator[str]:
        """The answer's text, piece by piece, without its reasoning: `pieces` gives that too."""
        for piece in self.pieces():
            if piece.kind is PieceKind.ANSWER:
                yield piece.text

    def pieces(self) -> Iterator[Piece]:
        """Pieces that no earlier iteration has taken, reasoning first. Raises what ended the request."""
        while self._ready or self._wait_for_more():
            while self._ready:
                yield self._ready.popleft()

    def result(self) -> AnswerResult:
        """Wait for the end. Raises what ended the request, if it did not finish."""
        for _ in self.pieces():
            pass
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """End it; what is written by then is its result. An answer that has ended is left alone."""
        if self._result is None and self._failure is None:
            self._client._wire.tell(lambda call: Cancel(call, self.request))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _wait_for_more(self) -> bool:
        """False when the answer is over."""
        if self._failure is not None:
            raise self._failure
        if self._result is not None:
            return False
        try:
            news = _reply(self._news.get())
        except GearshiftError as error:
            self._failure = error
            raise
        written = news if isinstance(news, TokensWritten) else _expect(news, Finished)
        self._ready.extend(pieces_of(written))
        if isinstance(written, Finished):
            self._result = result_of(self.accepted, written)
        return True


class AsyncClient:
    """For asyncio: `async with gearshift.AsyncClient(address) as client`. As `Client`, with `await`."""

    def __init__(
        self, address: str, *, key_file: str | Path | None = None, timeout_seconds: float = CONNECT_SECONDS
    ) -> None:
        self._address = address
        self._keys = None if key_file is None else read_keys(Path(key_file))
        self._timeout_seconds = timeout_seconds
        self._opened: ClientWire | None = None

    async def connect(self) -> Self:
        """Connect; done by `async with` too."""
        if self._opened is None:
            self._opened = await asyncio.to_thread(ClientWire, self._address, self._keys, self._timeout_seconds)
        return self

    async def generate(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        ids: Sequence[int] | None = None,
        **options: Any,
    ) -> "AsyncAnswer":
        """As `Client.generate`; iterate with `async for`."""
        news, put = _inbox()
        self._wire.call(
            lambda number: build_generate(number, text, messages, ids, options), put
        )
        while isinstance(reply := _reply(await news.get()), Queued):
            continue
        return AsyncAnswer(self, _expect(reply, Accepted), news)

    async def cancel(self, request: int) -> None:
        """As `Client.cancel`."""
        await self._ask(lambda call: Cancel(call, RequestId(request)))

    async def status(self) -> StatusReported:
        """As `Client.status`."""
        return _expect(await self._ask(AskStatus), StatusReported)

    async def plan(
        self,
        prompt_tokens: int,
        *,
        max_tokens: int | None = None,
        prefill: Layout | str | None = None,
        decode: Layout | str | None = None,
        chunk: str = "auto",
    ) -> Planned:
        """As `Client.plan`."""
        layouts = layouts_asked(prefill, decode)
        reply = await self._ask(lambda call: AskPlan(call, prompt_tokens, max_tokens, *layouts, chunk))
        return _expect(reply, Planned)

    async def set_layout(
        self, prefill: Layout | str | None = None, decode: Layout | str | None = None
    ) -> LayoutStatus:
        """As `Client.set_layout`."""
        layouts = layouts_asked(prefill, decode)
        return _expect(await self._ask(lambda call: SetLayout(call, *layouts)), LayoutSet).layouts

    async def close(self) -> None:
        """As `Client.close`."""
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _wire(self) -> ClientWire:
        if self._opened is None:
            raise ProtocolError("not connected: use `async with`, or `await connect()` first")
        return self._opened

    async def _ask(self, build: Callable[[int], Any]) -> AnyReply:
        news, put = _inbox()
        self._wire.call(build, put)
        try:
            return _reply(await asyncio.wait_for(news.get(), CALL_SECONDS))
        except TimeoutError:
            raise self._wire.silence(CALL_SECONDS) from None


class AsyncAnswer:
    """As `Answer`, with `async for` and `await`. A task that is cancelled while it waits here ends the request."""

    def __init__(self, client: AsyncClient, accepted: Accepted, news: "asyncio.Queue[News]") -> None:
        self.accepted = accepted
        self.request = accepted.request
        self._client = client
        self._news = news
        self._result: AnswerResult | None = None
        self._failure: GearshiftError | None = None
        self._ready: deque[Piece] = deque()

    async def __aiter__(self) -> AsyncIterator[str]:
        """The answer's text, piece by piece, without its reasoning: `pieces` gives that too."""
        async for piece in self.pieces():
            if piece.kind is PieceKind.ANSWER:
                yield piece.text

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces that no earlier iteration has taken, reasoning first. Raises what ended the request."""
        while self._ready or await self._wait_for_more():
            while self._ready:
                yield self._ready.popleft()

    async def result(self) -> AnswerResult:
        """Wait for the end. Raises what ended the request, if it did not finish."""
        async for _ in self.pieces():
            pass
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """End it; what is written by then is its result. An answer that has ended is left alone."""
        if self._result is None and self._failure is None:
            self._client._wire.tell(lambda call: Cancel(call, self.request))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def _wait_for_more(self) -> bool:
        """False when the answer is over."""
        if self._failure is not None:
            raise self._failure
        if self._result is not None:
            return False
        try:
            news = _reply(await self._news.get())
        except GearshiftError as error:
            self._failure = error
            raise
        except asyncio.CancelledError:
            self.cancel()
            raise
        written = news if isinstance(news, TokensWritten) else _expect(news, Finished)
        self._ready.extend(pieces_of(written))
        if isinstance(written, Finished):
            self._result = result_of(self.accepted, written)
        return True


def _inbox() -> "tuple[asyncio.Queue[News], Callable[[News], None]]":
    """A queue of this task's loop, and how another thread puts into it."""
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[News] = asyncio.Queue()

    def put(one: News) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(news.put_nowait, one)

    return news, put


def _reply(news: News) -> AnyReply:
    if isinstance(news, GearshiftError):
        raise news
    if isinstance(news, Refused | Failed | GroupEnded):
        raise reply_error(news)
    return news


def _expect(news: News, kind: type[R]) -> R:
    reply = _reply(news)
    if not isinstance(reply, kind):
        raise ProtocolError(f"the coordinator answered by {type(reply).__name__}, not {kind.__name__}")
    return reply
