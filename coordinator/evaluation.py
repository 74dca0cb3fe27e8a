"""Logits of all positions, and perplexity, over a driver."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, isnan, sqrt

import numpy as np
import numpy.typing as npt

from ..proto.errors import LOGITS_ARE_NO_NUMBERS, InputError, RequestFailedError
from ..proto.generation_result import FinishReason, GenerationResult
from ..proto.ids import Layout
from ..proto.words import counted
from .chunks.plan import Auto, ChunkRule
from .driver import Driver
from .generation import FinishedEvent, GenerationRequest, LogitsEvent, ScoresEvent
from .group.talk import POLL_SECONDS
from .one_request import generate


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood; `standard_error` in the same unit as `value`."""

    value: float
    standard_error: float
    windows: int
    scored_tokens: int


def collect_logits(
    driver: Driver,
    ids: Sequence[int],
    prompt_length: int,
    prefill: Layout | None = None,
    decode: Layout | None = None,
    chunk_rule: ChunkRule = Auto(),  # noqa: B008 (frozen)
) -> tuple[npt.NDArray[np.float32], GenerationResult]:
    """f32 [tokens, vocab] of every position: the first `prompt_length` through prefill, the rest as decode steps."""
    if not 1 <= prompt_length <= len(ids):
        given = counted(len(ids), "token")
        raise InputError(f"the prompt length must be between 1 and the {given} given, not {prompt_length}")
    request = GenerationRequest(
        prompt=tuple(ids[:prompt_length]),
        max_tokens=0,
        prefill=prefill,
        decode=decode,
        chunk_rule=chunk_rule,
        forced=tuple(ids[prompt_length:]),
        logits=True,
    )
    vocab = driver.spec.vocab
    rows = np.full((len(ids), vocab), np.nan, dtype=np.float32)
    filled = 0
    result: GenerationResult | None = None
    for event in generate(driver, request):
        if isinstance(event, LogitsEvent):
            part = np.frombuffer(event.rows.data, dtype="<f4").reshape(event.rows.rows, vocab)
            rows[event.rows.start : event.rows.start + event.rows.rows] = part
            filled += event.rows.rows
        elif isinstance(event, FinishedEvent):
            result = event.result
    if result is None or filled != len(ids):
        raise RequestFailedError(f"{filled} of {len(ids)} rows of logits came back")
    return rows, result


def window_targets(window: Sequence[int]) -> tuple[int, ...]:
    """What each position of a window of c tokens is scored on: positions c/2 .. c-2 predict the next token."""
    first = len(window) // 2
    scored = window[first + 1 :]
    return (*(-1,) * first, *scored, -1)


def measure_perplexity(
    driver: Driver,
    ids: Sequence[int],
    window_tokens: int,
    begin_token: int | None,
    prefill: Layout | None = None,
    chunk_rule: ChunkRule = Auto(),  # noqa: B008 (frozen)
    on_window: Callable[[int, int, float], None] | None = None,
) -> Perplexity:
    """Perplexity as llama.cpp defines it: whole windows of the text, each read anew, its second half scored.

    `begin_token` replaces each window's first token (None: the model adds none). What is left after the last whole
    window is not read. `on_window` is told (windows done, windows in all, perplexity so far).
    """
    count = len(ids) // window_tokens if window_tokens >= 3 else 0
    if count == 0:
        raise InputError(
            "perplexity needs windows of 3 tokens or more and a text that fills one: "
            f"{counted(len(ids), 'token')} given for windows of {window_tokens}"
        )
    for index in range(count):
        window = tuple(ids[index * window_tokens : (index + 1) * window_tokens])
        fed = window if begin_token is None else (begin_token, *window[1:])
        driver.submit(
            GenerationRequest(
                prompt=fed,
                max_tokens=0,
                prefill=prefill,
                decode=prefill,
                chunk_rule=chunk_rule,
                targets=window_targets(window),
            )
        )
    losses: list[float] = []
    done = 0
    while done < count:
        for event in driver.step(POLL_SECONDS):
            if isinstance(event, ScoresEvent):
                losses += [-logprob for logprob in event.scores.logprobs]
            elif isinstance(event, FinishedEvent):
                done += 1
                if event.result.finish_reason is not FinishReason.LENGTH:
                    raise RequestFailedError(f"a window failed: {event.result.error}")
                if on_window is not None:
                    on_window(done, count, exp(sum(losses) / len(losses)))
    if any(map(isnan, losses)):
        room = "" if driver.settings.compute_type is None else driver.settings.compute_type.room
        raise RequestFailedError(f"{LOGITS_ARE_NO_NUMBERS} to score by{room}")
    expected = count * (window_tokens - window_tokens // 2 - 1)
    if len(losses) != expected:
        raise RequestFailedError(f"{len(losses)} of {expected} scores came back")
    return _perplexity(np.array(losses), count)


def _perplexity(losses: npt.NDArray[np.float64], windows: int) -> Perplexity:
    mean = float(losses.mean())
    variance = float((losses**2).mean()) - mean * mean
    error = sqrt(max(0.0, variance) / (len(losses) - 1)) if len(losses) > 1 else 0.0
    return Perplexity(exp(mean), error * exp(mean), windows, len(losses))
