"""What is asked of the group and what it answers: requests, events, results. Data only."""

from dataclasses import dataclass
from typing import TypeAlias

from ..proto.generation_result import GenerationResult, JourneyForecast
from ..proto.ids import Layout, RequestId
from ..proto.reports import LogitRows, SampledToken, Scores
from ..proto.sampling import SamplingParameters
from ..proto.words import counted
from .chunks.plan import Auto, ChunkRule
from .residency.regret import Regret


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
    sampled: int = 0  # the prompt's last so many were sampled for this answer already, by a group that is gone


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
    forecasts: tuple[JourneyForecast, ...] = ()  # of all journeys that were compared
    regret: Regret | None = None  # where weights lie after this request, if they migrate

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that need not be read."""
        return self.kept.tokens if self.kept is not None else 0

    @property
    def first_layout(self) -> Layout:
        """The layout the request is opened in."""
        return self.kept.layout if self.kept is not None else self.prefill

    @property
    def cut(self) -> str | None:
        """In words, that the context allows less of an answer than was asked for."""
        asked, prompt = self.request.max_tokens, len(self.request.prompt)
        if asked is None or asked <= self.max_tokens:
            return None
        return told_cut(prompt, prompt + self.max_tokens - 1, asked)  # the last token is never fed: it needs no cell

    @property
    def decode_steps(self) -> int:
        """Decode steps at most: the first token comes from the prompt's last chunk."""
        return len(self.request.forced) or max(0, self.max_tokens - 1)

    @property
    def cells(self) -> int:
        """Positions that keys and values are written for at most."""
        return len(self.request.prompt) + self.decode_steps


def told_cut(prompt_tokens: int, context_tokens: int, asked_tokens: int) -> str:
    """Of an answer that is longer than the context holds behind its prompt."""
    held = f"{counted(context_tokens - prompt_tokens + 1, 'token')} of answer, not {asked_tokens}"
    return f"behind a prompt of {counted(prompt_tokens, 'token')} a context of {context_tokens} holds {held}"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """The `index`-th token of the answer (from 0)."""

    request: RequestId
    index: int
    token: SampledToken


@dataclass(frozen=True, slots=True)
class LogitsEvent:
    """Logits of some of a prompt's or a forced answer's positions."""

    request: RequestId
    rows: LogitRows


@dataclass(frozen=True, slots=True)
class ScoresEvent:
    """Log probabilities of some of the targets asked for."""

    request: RequestId
    scores: Scores


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The last event of a request: its slots are free and all ranks have reported."""

    request: RequestId
    result: GenerationResult


Event: TypeAlias = TokenEvent | LogitsEvent | ScoresEvent | FinishedEvent
