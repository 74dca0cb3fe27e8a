"""An answer's tokens as text, piece by piece, up to the first stop string.

The text does not depend on how its bytes were cut into tokens: sent in pieces it is what one decoding of all bytes
gives, cut off before the stop.
"""

import codecs
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from ...proto.errors import InputError

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4_096  # of each: what is looked for costs memory a character


def parse_stops(stops: object) -> tuple[str, ...]:
    """Stop strings as a request gives them: None, one string, or up to 16 in a list, each of up to 4,096 characters.

    Raises InputError.
    """
    if stops is None:
        return ()
    if isinstance(stops, str):
        stops = (stops,)
    if not isinstance(stops, list | tuple):
        raise InputError(f"stop strings are a string or a list of strings, not {type(stops).__name__}")
    if len(stops) > MAX_STOPS:
        raise InputError(f"{len(stops)} stop strings are too many: {MAX_STOPS} are possible")
    for position, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise InputError(f"stop string {position} is {type(stop).__name__}, not a string")
        if not stop:
            raise InputError(f"stop string {position} is empty: it would end every answer at once")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise InputError(
                f"stop string {position} has {len(stop)} characters: {MAX_STOP_CHARACTERS} are possible"
            )
    return tuple(stops)


class TextStream:
    """One answer. `feed` each token and send what it returns, then send what `finish` returns.

    Held back are bytes of an unfinished character, and text that may be the start of a stop string. Of a stop string
    nothing is ever sent. The stop that is complete first ends the answer; of two that are complete at the same
    character, the longer. Bytes that are not UTF-8 become U+FFFD, one for each longest bad sequence.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stops: object = None) -> None:
        """`stops` as in `parse_stops`, which raises InputError."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._searches = [_StopSearch.of(stop) for stop in parse_stops(stops)]
        self._held = ""
        self._stop: str | None = None
        self._finished = False

    @property
    def stopped(self) -> bool:
        """A stop string was found: no more text will come."""
        return self._stop is not None

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._stop

    def feed(self, token_id: int) -> str:
        """The text that is certain now; "" after a stop or `finish`."""
        if self.stopped or self._finished:
            return ""
        return self._take(self._decoder.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        """The rest: what was held back, a cut-off character as U+FFFD. A second call gives ""."""
        if self.stopped or self._finished:
            return ""
        self._finished = True
        text = self._take(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _take(self, text: str) -> str:
        if not self._searches:
            return text
        pending = self._held + text
        for position in range(len(self._held), len(pending)):
            complete = self._advance(pending[position])
            if complete is not None:
                self._stop, self._held = complete, ""
                return pending[: position + 1 - len(complete)]
        certain = len(pending) - max(search.matched for search in self._searches)
        self._held = pending[certain:]
        return pending[:certain]

    def _advance(self, character: str) -> str | None:
        """Takes one character; the longest stop string that is now complete."""
        complete = [search.stop for search in self._searches if search.advance(character)]
        return max(complete, key=len, default=None)


@dataclass(slots=True)
class _StopSearch:
    """Knuth, Morris, Pratt: how much of one stop string the text so far ends with, in constant time a character."""

    stop: str
    # [n]: the length of the longest shorter start of the stop that its first n + 1 characters also end with.
    fallbacks: "array[int]"
    matched: int = 0

    @classmethod
    def of(cls, stop: str) -> "_StopSearch":
        fallbacks = array("H", [0])  # 2 bytes each: MAX_STOP_CHARACTERS fit
        matched = 0
        for character in stop[1:]:
            while matched and stop[matched] != character:
                matched = fallbacks[matched - 1]
            matched += stop[matched] == character
            fallbacks.append(matched)
        return cls(stop, fallbacks)

    def advance(self, character: str) -> bool:
        """Takes one character; True when the stop string is complete."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self.fallbacks[self.matched - 1]
        self.matched += self.stop[self.matched] == character
        return self.matched == len(self.stop)
