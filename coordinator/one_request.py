"""Runs one request on a driver to its end."""

from collections.abc import Callable, Iterator

from ..proto.reports import SampledToken
from .driver import LOST, Driver
from .generation import Event, FinishedEvent, GenerationRequest, TokenEvent
from .group.talk import POLL_SECONDS


def generate(
    driver: Driver,
    request: GenerationRequest,
    should_stop: Callable[[SampledToken], bool] | None = None,
    interrupted: Callable[[], bool] | None = None,
) -> Iterator[Event]:
    """Run one request to its end: its events as they come, the `FinishedEvent` last.

    `should_stop` sees each token; True ends the answer with that token (a stop string). `interrupted` is asked a few
    times a second; True cancels the request, whose `FinishedEvent` follows soon. A caller that leaves early cancels it
    too.
    """
    request_id = driver.submit(request)
    stopped = finished = cancelled = False
    try:
        while not finished:
            if interrupted is not None and not cancelled and interrupted():
                driver.cancel(request_id)
                cancelled = True
            for event in _step(driver):
                if event.request != request_id or (stopped and isinstance(event, TokenEvent)):
                    continue
                finished = isinstance(event, FinishedEvent)
                if isinstance(event, TokenEvent) and should_stop is not None and should_stop(event.token):
                    stopped = True
                    driver.stop(request_id, event.index + 1)
                yield event
    finally:
        if not finished:
            driver.cancel(request_id)


def _step(driver: Driver) -> list[Event]:
    """One step, of the next group where this one is lost and there is to be one."""
    try:
        return driver.step(POLL_SECONDS)
    except LOST as error:
        driver.restart(error)
        return []
