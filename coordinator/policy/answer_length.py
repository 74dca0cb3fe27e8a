"""How long an answer will be where nobody has said: a running mean of past answers. Pure."""

from dataclasses import dataclass

FIRST_GUESS_TOKENS = 256  # until an answer has ended: a few paragraphs
NEWEST_WEIGHT = 1 / 8  # of the newest answer in the mean: some ten answers are remembered


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """An exponential mean of a group's answers, in tokens. A value: `after` gives the next one."""

    mean: float = float(FIRST_GUESS_TOKENS)
    answers: int = 0

    @property
    def expected_tokens(self) -> int:
        return max(1, round(self.mean))

    def after(self, tokens: int, *, complete: bool) -> "AnswerLengths":
        """With one more answer. One that was cut short says only that it would have been at least so long."""
        if tokens < 1 or (not complete and tokens <= self.mean):
            return self
        weight = max(NEWEST_WEIGHT, 1 / (self.answers + 1))  # the first answer replaces the guess
        return AnswerLengths(self.mean + weight * (tokens - self.mean), self.answers + 1)
