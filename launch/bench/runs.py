"""Requests that are timed: pairs of layouts taken in turn on one running group, each with a fresh made-up prompt."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import mean, median

from ...coordinator.chunks.plan import Auto, ChunkRule
from ...coordinator.driver import Driver
from ...coordinator.generation import FinishedEvent, GenerationRequest, TokenEvent
from ...coordinator.one_request import generate
from ...coordinator.policy.policy import Journey, distinct, journeys
from ...coordinator.trace import Stretch, Trace, TraceEvent
from ...proto.errors import RequestFailedError
from ...proto.generation_result import GenerationResult
from ...proto.ids import Layout
from ...proto.sampling import SamplingParameters

GREEDY = SamplingParameters(temperature=0.0)
PLAIN_TOKENS_FROM = 1000  # below lie bytes and control tokens in most vocabularies


@dataclass(frozen=True, slots=True)
class Combination:
    """Layouts of prompt and answer; None: the policy chooses."""

    prefill: Layout | None
    decode: Layout | None

    @property
    def fixed(self) -> bool:
        return self.prefill is not None

    @property
    def name(self) -> str:
        return f"{self.prefill}->{self.decode}" if self.fixed else "auto"


AUTO = Combination(None, None)


def combinations(
    ranks: int, allowed: Sequence[Journey] | None = None, answer_tokens: int | None = None
) -> tuple[Combination, ...]:
    """All fixed ones that so many workers know and (`allowed`) have room for, then auto.

    Of those that do the same work for an answer of so many tokens one.
    """
    steps = 1 if answer_tokens is None else answer_tokens - 1
    pairs = distinct(journeys(ranks, None, None, allowed), steps)
    return (*(Combination(prefill, decode) for prefill, decode in pairs), AUTO)


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One request. `wall_seconds`: from its submission to its last token, the policy's `plan_seconds` included.

    `stretches` are what the ranks did, where that was collected.
    """

    combination: Combination
    round: int
    seed: int
    wall_seconds: float
    plan_seconds: float
    result: GenerationResult
    began_seconds: float = 0.0  # of the coordinator's clock, as the stretches
    stretches: tuple[Stretch, ...] = ()

    @property
    def took(self) -> Combination:
        """The pair that was run: what auto chose, or what was asked for."""
        return Combination(self.result.prefill.layout, self.result.decode.layout)

    @property
    def answer_tokens_per_second(self) -> float | None:
        """Behind the first one; None: there were none."""
        return self.result.decode.tokens_per_second if self.result.decode.steps else None

    @property
    def exposed_seconds(self) -> float:
        return self.result.shift.exposed_seconds if self.result.shift is not None else 0.0

    @property
    def hidden_seconds(self) -> float:
        shift = self.result.shift
        return max(0.0, shift.seconds - shift.exposed_seconds) if shift is not None else 0.0

    @property
    def predicted_seconds(self) -> float | None:
        """What the policy had forecast for the pair that was run."""
        return next(
            (one.seconds for one in self.result.policy if Combination(one.prefill, one.decode) == self.took), None
        )


class StretchCollector:
    """Keeps what ranks do, for one run at a time."""

    def __init__(self) -> None:
        self._found: list[Stretch] = []

    def write(self, event: TraceEvent) -> None:
        if isinstance(event, Stretch):
            self._found.append(event)

    def take(self) -> tuple[Stretch, ...]:
        """All since the last call."""
        found, self._found = self._found, []
        return tuple(found)


def collect_stretches(driver: Driver, trace: Trace | None) -> StretchCollector:
    """From now on all ranks' work is collected: beside the trace that is being written, if there is one."""
    collector = StretchCollector()
    if trace is None:
        driver.follow(Trace(collector.write))
    else:
        trace.also(collector.write)
    return collector


def made_up_prompt(seed: int, tokens: int, vocab: int) -> tuple[int, ...]:
    """Ids drawn by `seed`, from beyond the vocabulary's special tokens where it is long enough."""
    return tuple(random.Random(seed).choices(range(min(PLAIN_TOKENS_FROM, vocab // 2), vocab), k=tokens))


def run_once(
    driver: Driver,
    combination: Combination,
    prompt: Sequence[int],
    answer_tokens: int,
    *,
    rule: ChunkRule = Auto(),  # noqa: B008 (frozen)
    round_number: int = 0,
    seed: int = 0,
    conversation: str | None = None,
    collector: StretchCollector | None = None,
) -> TimedRun:
    """Answer a prompt by exactly `answer_tokens` greedy tokens. Raises `RequestFailedError` when it cannot be."""
    request = GenerationRequest(
        prompt=tuple(prompt), max_tokens=answer_tokens, sampling=GREEDY, prefill=combination.prefill,
        decode=combination.decode, chunk_rule=rule, conversation=conversation,
    )  # fmt: skip
    began = time.monotonic()
    driver.plan(request)
    planned = time.monotonic() - began
    if collector is not None:
        collector.take()
    began = last = time.monotonic()
    result = None
    for event in generate(driver, request):
        if isinstance(event, TokenEvent):
            last = time.monotonic()
        elif isinstance(event, FinishedEvent):
            result = event.result
    if result is None or result.error is not None:
        raise RequestFailedError("the request ended without a result" if result is None else str(result.error))
    stretches = collector.take() if collector is not None else ()
    return TimedRun(combination, round_number, seed, last - began, planned, result, began, stretches)


def turns(taken: Sequence[Combination], rounds: int) -> Iterator[tuple[int, Combination]]:
    """(round, combination): every round begins with another one, so that none always follows the same one."""
    for number in range(rounds):
        first = number % len(taken)
        for combination in (*taken[first:], *taken[:first]):
            yield number, combination


def interleaved(
    driver: Driver,
    taken: Sequence[Combination],
    rounds: int,
    prompt_tokens: int,
    answer_tokens: int,
    first_seed: int,
    *,
    rule: ChunkRule = Auto(),  # noqa: B008 (frozen)
    collector: StretchCollector | None = None,
    told: Callable[[TimedRun], None] = lambda run: None,
) -> list[TimedRun]:
    """`rounds` runs of each combination in turn; prompt i is drawn by `first_seed` + i. `told` sees each run."""
    seeds = count(first_seed)
    runs = []
    for number, combination in turns(taken, rounds):
        seed = next(seeds)
        prompt = made_up_prompt(seed, prompt_tokens, driver.spec.vocab)
        run = run_once(
            driver, combination, prompt, answer_tokens, rule=rule, round_number=number, seed=seed, collector=collector
        )
        told(run)
        runs.append(run)
    return runs


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the range around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        found = list(values)
        return cls(median(found), min(found), max(found))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The pair that auto chose most often against the best fixed one, by their medians."""

    chosen: Combination
    best: Combination
    chosen_seconds: float
    best_seconds: float
    within_spread: bool  # the ranges of both overlap: another day might swap them
    chosen_rounds: int  # of `rounds`, in which auto chose that pair
    rounds: int
    mean_regret: float  # of all pairs that auto chose, round by round
    choices: tuple[tuple[Combination, int], ...] = ()  # by auto, and how often; the most frequent one first

    @property
    def regret(self) -> float:
        """0.013: 1.3% behind the best."""
        return self.chosen_seconds / self.best_seconds - 1.0


def judge(runs: Sequence[TimedRun], best_of: int = 1) -> Verdict:
    """`runs` of all fixed combinations and of auto.

    Rounds are put into `best_of` blocks; a combination's time is the least of its blocks' medians.
    """
    times = {
        combination: Spread.of(run.wall_seconds for run in runs if run.combination == combination)
        for combination in {run.combination for run in runs if run.combination.fixed}
    }
    least = {combination: least_median(runs, combination, best_of) for combination in times}
    chosen = auto_choice(runs)
    best = min(least, key=lambda combination: (least[combination], combination != chosen))
    overlap = times[chosen].low <= times[best].high
    taken = [run.took for run in runs if not run.combination.fixed]
    behind = [least[took] / least[best] - 1.0 for took in taken if took in least]
    return Verdict(
        chosen, best, least[chosen], least[best], overlap, taken.count(chosen), len(taken), mean(behind),
        tuple(Counter(taken).most_common()),
    )  # fmt: skip


def least_median(runs: Sequence[TimedRun], combination: Combination, blocks: int) -> float:
    """Of one combination's wall seconds, in order of their rounds."""
    mine = sorted((run for run in runs if run.combination == combination), key=lambda run: run.round)
    size = max(1, len(mine) // blocks)
    edges = [*range(0, size * blocks, size)][: len(mine)]
    return min(median(run.wall_seconds for run in mine[first : first + size]) for first in edges)


def auto_choice(runs: Sequence[TimedRun]) -> Combination:
    """What auto took most often."""
    taken = [run.took for run in runs if not run.combination.fixed]
    return max(dict.fromkeys(taken), key=taken.count)
