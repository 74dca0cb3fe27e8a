"""Answers of a running group for tests, and where two answers part."""

from collections.abc import Sequence

from gearshift.coordinator.driver import Driver
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest, TokenEvent
from gearshift.coordinator.group.talk import POLL_SECONDS
from gearshift.coordinator.one_request import generate
from gearshift.proto.generation_result import GenerationResult
from gearshift.proto.ids import RequestId
from gearshift.proto.reports import SampledToken
from gearshift.proto.sampling import SamplingParameters

GREEDY = SamplingParameters(temperature=0.0, logprobs=5)


def answer(driver: Driver, request: GenerationRequest) -> GenerationResult:
    """The whole story of one request; fails where it ended with an error."""
    results = [event.result for event in generate(driver, request) if isinstance(event, FinishedEvent)]
    assert len(results) == 1
    assert results[0].error is None
    return results[0]


def answer_all(driver: Driver, requests: Sequence[GenerationRequest]) -> list[list[SampledToken]]:
    """All at once; the tokens of each. Fails where one ended with an error."""
    open_ids = [driver.submit(request) for request in requests]
    tokens: dict[RequestId, list[SampledToken]] = {request: [] for request in open_ids}
    left = set(open_ids)
    while left:
        for event in driver.step(POLL_SECONDS):
            if isinstance(event, TokenEvent):
                tokens[event.request].append(event.token)
            elif isinstance(event, FinishedEvent):
                assert event.result.error is None
                left.discard(event.request)
    return [tokens[request] for request in open_ids]


def ids_of(result: GenerationResult) -> tuple[int, ...]:
    return tuple(token.token for token in result.tokens)


def lead(token: SampledToken) -> float:
    """How far the likeliest token lies before the second, in logprob."""
    return token.top[0][1] - token.top[1][1]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index at which two answers part; a missing token counts. None: they are equal."""
    for index in range(max(len(one), len(other))):
        if one[index : index + 1] != other[index : index + 1]:
            return index
    return None
