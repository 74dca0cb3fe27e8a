"""Pieces of an answer as they come: what the model says, and its reasoning before that."""

from dataclasses import dataclass
from enum import StrEnum


class PieceKind(StrEnum):
    """Which of the two a piece belongs to."""

    REASONING = "reasoning"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one kind; never empty where it is handed on."""

    kind: PieceKind
    text: str
