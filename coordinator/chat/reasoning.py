"""Reasoning told apart from the answer, by the marks that models write around it."""

from collections.abc import Callable

from ...proto.pieces import Piece, PieceKind
from ..tokenizer import Tokenizer

# Opening and closing marks of known families. Where they are control tokens, their text has to be rendered.
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
MARK_TEXTS = tuple(text for pair in MARKS for text in pair)


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends within reasoning: some templates write the opening mark themselves."""
    return prompt.rstrip().endswith(tuple(opening for opening, _ in MARKS))


def bytes_with_marks(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """What tokens add to an answer, the marks of reasoning among it where they are control tokens."""
    ids = tokenizer.vocabulary.ids
    marks = frozenset(ids[text] for text in MARK_TEXTS if text in ids)
    return lambda token: tokenizer.token_bytes(token, render_special=token in marks)


class ReasoningSplit:
    """One answer, piece by piece. The marks are in neither part, nor is the white space around them.

    Reasoning comes first or not at all: a mark further on is text that the model talks about.
    """

    def __init__(self, *, reasons: bool = False) -> None:
        """`reasons`: the prompt has opened the reasoning."""
        self._undecided = not reasons
        self._closings = tuple(closing for _, closing in MARKS) if reasons else ()  # empty: the answer is written
        self._held = ""
        self._trims = reasons  # the white space behind a mark belongs to it

    def feed(self, text: str) -> list[Piece]:
        """What is certain now: text that may be the start of a mark is held back."""
        self._held += text
        return self._take(final=False)

    def finish(self) -> list[Piece]:
        """The rest."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> list[Piece]:
        if self._undecided:
            self._decide(final)
        if self._undecided:
            return []
        pieces = self._reasoning(final) if self._closings else []
        return pieces if self._closings else pieces + self._answer()

    def _decide(self, final: bool) -> None:
        """Whether reasoning is opened, as soon as that is known."""
        start = self._held.lstrip()
        for opening, closing in MARKS:
            if start.startswith(opening):
                self._held, self._closings = start[len(opening) :], (closing,)
                self._undecided, self._trims = False, True
                return
        self._undecided = not final and any(opening.startswith(start) for opening, _ in MARKS)

    def _reasoning(self, final: bool) -> list[Piece]:
        self._trim()
        places = [(place, mark) for mark in self._closings if (place := self._held.find(mark)) != -1]
        if places:
            place, mark = min(places)
            text, self._held = self._held[:place].rstrip(), self._held[place + len(mark) :]
            self._closings, self._trims = (), True
        elif final:
            text, self._held = self._held, ""
        else:
            text = self._held[: len(self._held) - _possible(self._held, self._closings)].rstrip()
            self._held = self._held[len(text) :]
        return [Piece(PieceKind.REASONING, text)] if text else []

    def _answer(self) -> list[Piece]:
        self._trim()
        text, self._held = self._held, ""
        return [Piece(PieceKind.ANSWER, text)] if text else []

    def _trim(self) -> None:
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held


def _possible(text: str, marks: tuple[str, ...]) -> int:
    """The length of the text's longest end that a mark could go on from."""
    lengths = [
        length
        for mark in marks
        for length in range(1, min(len(mark), len(text) + 1))
        if text.endswith(mark[:length])
    ]
    return max(lengths, default=0)
