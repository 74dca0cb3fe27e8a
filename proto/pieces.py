"""Pieces of an answer as they come: what the model says, and its reasoning before that."""

from dataclasses import dataclass
from enum import StrEnum


class PieceKind(StrEnum):
    REASONING = "reasoning"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Piece:
    kind: PieceKind
    text: str
