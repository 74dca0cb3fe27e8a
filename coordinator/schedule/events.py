"""What a scheduler tells of its requests."""

from dataclasses import dataclass
from typing import TypeAlias

from ...proto.ids import RequestId
from ..generation import LogitsEvent, ScoresEvent, TokenEvent
from .session import Session


@dataclass(frozen=True, slots=True)
class Started:
    """A request's `OpenRequest` is in the log."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class PromptRead:
    """The tick in which the prompt's last chunk left the last stage is done."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Ended:
    """The request's slots are free and every rank has reported: `session` is final."""

    session: Session


SchedulerEvent: TypeAlias = Started | PromptRead | TokenEvent | LogitsEvent | ScoresEvent | Ended
