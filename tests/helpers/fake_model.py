"""A model made of arithmetic: what it says next depends on every token before."""


def next_token(history: list[int], vocab: int) -> int:
    """The fake model."""
    return (sum((index + 3) * token for index, token in enumerate(history)) * 31 + 7 * len(history)) % vocab


def expected_answer(prompt: tuple[int, ...], count: int, vocab: int, stops: frozenset[int] = frozenset()) -> list[int]:
    """What a request without a group would be answered with."""
    history = list(prompt)
    answer: list[int] = []
    while len(answer) < count:
        answer.append(next_token(history, vocab))
        history.append(answer[-1])
        if answer[-1] in stops:
            break
    return answer


def logprob(history: list[int], target: int, vocab: int) -> float:
    return -1.0 - ((next_token(history, vocab) + target) % 13) / 13


def logits_row(history: list[int], vocab: int) -> list[float]:
    return [float((next_token(history, vocab) + index) % vocab) for index in range(vocab)]
