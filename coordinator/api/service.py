"""What the remote API knows of the group it speaks for. Data only; made once, when the model is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...proto.placement.plan import Placement
from ...proto.reports import Hello
from ...proto.sampling import SamplingParameters
from ..group.load_result import LoadResult
from ..tokenizer import Tokenizer


class RenderedChat(Protocol):
    """A conversation as ids; `reasons` where it leaves the model within its reasoning."""

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def reasons(self) -> bool: ...


class ChatPrompter(Protocol):
    """Renders `messages` by the model's chat template. Raises `InputError`."""

    def prompt(
        self,
        messages: object,
        *,
        tools: Sequence[object] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> RenderedChat: ...


class Joined(Protocol):
    """The workers, whichever start of the group runs."""

    @property
    def hellos(self) -> tuple[Hello, ...]:
        """What they said of themselves, by rank."""


@dataclass(frozen=True, slots=True)
class Service:
    """`sampling` holds the defaults; `chat` None: conversations are refused."""

    model: str
    version: str
    tokenizer: Tokenizer
    placement: Placement
    group: Joined
    loaded: LoadResult
    start_seconds: float
    sampling: SamplingParameters
    chat: ChatPrompter | None = None
