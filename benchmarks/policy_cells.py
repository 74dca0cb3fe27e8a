"""What `policy.py` measures: one length of prompt and answer after another, and whole conversations."""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gearshift.benchmarks.policy_parts import pair_parts
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.generation import GenerationRequest
from gearshift.launch.bench.runs import (
    AUTO,
    Combination,
    Spread,
    TimedRun,
    auto_choice,
    combinations,
    interleaved,
    judge,
    made_up_prompt,
    run_once,
    turns,
)

FAIR_ANSWER = 16  # tokens, from which on an answer tells a pair's pace
SHORT_ANSWER = 4
LEAST_SECONDS = 1.0  # that a round of a size is thought to take, whatever is predicted: short ones need their rounds


@dataclass(frozen=True)
class Cell:
    """One length of prompt and answer."""

    prompt: int
    answer: int
    runs: tuple[TimedRun, ...]
    blocks: int

    def facts(self) -> dict[str, Any]:
        verdict = judge(self.runs, self.blocks)
        auto = [run for run in self.runs if run.combination == AUTO]
        predicted = [run.predicted_seconds for run in auto if run.predicted_seconds is not None]
        times: dict[str, dict[str, float]] = {}
        for run in self.runs:
            mine = [other.wall_seconds for other in self.runs if other.combination == run.combination]
            spread = Spread.of(mine)
            times[run.combination.name] = {
                "median": spread.median, "low": spread.low, "high": spread.high, "runs": len(mine),
            }  # fmt: skip
        return {
            "prompt": self.prompt,
            "answer": self.answer,
            "chosen": verdict.chosen.name,
            "best": verdict.best.name,
            "chosen_s": verdict.chosen_seconds,
            "best_s": verdict.best_seconds,
            "regret": verdict.regret,
            "within_spread": verdict.within_spread,
            "plan_ms": 1e3 * statistics.median(run.plan_seconds for run in auto),
            "plan_ms_most": 1e3 * max(run.plan_seconds for run in auto),
            "predicted_s": statistics.median(predicted) if predicted else None,
            "auto": _parts(auto),
            "pairs": pair_parts(self.runs),
            "seconds": times,
        }


def _parts(runs: Sequence[TimedRun]) -> dict[str, float] | None:
    """Medians over auto's runs, in seconds: predicted and measured, as a whole and by part."""
    rows = []
    for run in runs:
        prefill, decode = run.result.prefill, run.result.decode
        wanted = prefill.layout, decode.layout
        forecast = next((one for one in run.result.policy if (one.prefill, one.decode) == wanted), None)
        if forecast is None:
            continue
        busiest = max(prefill.stages, key=lambda stage: stage.busy_seconds, default=None)
        rows.append({
            "predicted_s": forecast.seconds,
            "measured_s": run.wall_seconds,
            "prefill_predicted_s": forecast.back_seconds + forecast.prefill_seconds,
            "prefill_measured_s": prefill.seconds,
            "busiest_rank_s": busiest.busy_seconds if busiest else 0.0,
            "busiest_rank_waited_s": busiest.waiting_seconds if busiest else 0.0,
            "decode_predicted_s": forecast.exposed_seconds + forecast.decode_seconds,
            "decode_measured_s": decode.seconds,
        })  # fmt: skip
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]} if rows else None


@dataclass
class Paces:
    """Seconds a token that each fixed pair has taken in the longest answer so far."""

    of: dict[Combination, float] = field(default_factory=dict)

    def note(self, run: TimedRun) -> None:
        decode = run.result.decode
        if decode.tokens_per_second > 0 and len(run.result.tokens) >= FAIR_ANSWER:
            self.of[run.combination] = 1 / decode.tokens_per_second

    def quickest_first(self, taken: Sequence[Combination]) -> list[Combination]:
        return sorted(taken, key=lambda one: self.of.get(one, 0.0))

    def seconds(self, one: Combination, answer: int) -> float:
        """Least seconds of such an answer; 0 where nothing is known."""
        return self.of.get(one, 0.0) * answer


@dataclass(frozen=True)
class Grid:
    """All sizes on one running group, within so many seconds if any are named."""

    driver: Driver
    ranks: int
    options: argparse.Namespace
    paces: Paces = field(default_factory=Paces)

    def cells(self, sizes: Sequence[tuple[int, int]]) -> Iterator[Cell]:
        """Each size gets the share of what time is left that it is predicted to need; none that does not fit."""
        options = self.options
        ends = None if options.seconds is None else time.monotonic() + options.seconds
        needs = [self._predicted(*size) for size in sizes]
        for index, (prompt, answer) in enumerate(sizes):
            room = None
            if ends is not None:
                left = ends - time.monotonic()
                room = left * needs[index] / sum(needs[index:])
                if 2 * needs[index] > left:  # the warm-up and a round
                    _tell(f"prompt {prompt}, answer {answer}: left out, {left:.0f} s are left")
                    continue
            began = time.monotonic()
            cell = self._measure(prompt, answer, room, options.seed + 100_000 * index)
            _tell(
                f"{index + 1} of {len(sizes)}: prompt {prompt}, answer {answer}: {len(cell.runs)} runs in "
                f"{time.monotonic() - began:.0f} s"
            )
            yield cell

    def _predicted(self, prompt: int, answer: int) -> float:
        """Seconds of one run of each that is run, as far as costs are known."""
        driver = self.driver
        tokens = made_up_prompt(1, prompt, driver.spec.vocab)
        forecasts = driver.plan(GenerationRequest(tokens, answer)).forecasts
        seconds = [one.seconds for one in forecasts] or [0.0]
        serious = [one for one in seconds if one <= self.options.hopeless * min(seconds)]
        return max(LEAST_SECONDS, sum(serious) + min(seconds))

    def _measure(self, prompt: int, answer: int, room: float | None, seed: int) -> Cell:
        began, options = time.monotonic(), self.options
        *fixed, _ = combinations(self.ranks, self.driver.settings.journeys, answer)
        warm = self._warm_up(fixed, prompt, answer, seed)
        quickest = min(run.wall_seconds for run in warm)
        hopeless = [run for run in warm if run.wall_seconds > options.hopeless * quickest]
        serious = [run for run in warm if run not in hopeless]
        taken = (*(one for one in fixed if one in {run.combination for run in serious}), AUTO)
        rounds = options.blocks * options.rounds
        if room is not None:
            each = sum(run.wall_seconds for run in serious) + quickest
            rounds = max(1, min(rounds, int((room - (time.monotonic() - began)) / each)))
        runs = interleaved(self.driver, taken, rounds, prompt, answer, seed + 2000)
        chosen = auto_choice([run for run in runs if run.combination == AUTO])
        if chosen not in taken:  # then its one cold time, or none, would be held against it
            hopeless = [run for run in hopeless if run.combination != chosen]
            runs += interleaved(self.driver, [chosen], rounds, prompt, answer, seed + 10_000)
        return Cell(prompt, answer, (*runs, *hopeless), options.blocks)

    def _warm_up(self, fixed: Sequence[Combination], prompt: int, answer: int, seed: int) -> list[TimedRun]:
        """One run of each pair, but of those whose answers alone would be hopeless.

        On cards kernels are launched one by one in the first run of a size and captured in the second: short answers
        first.
        """
        options, paces = self.options, self.paces
        interleaved(self.driver, fixed, options.short_warm_ups, prompt, min(answer, SHORT_ANSWER), seed)
        runs: list[TimedRun] = []
        for one in paces.quickest_first(fixed):
            quickest = min((run.wall_seconds for run in runs), default=0.0)
            if runs and paces.seconds(one, answer) > options.hopeless * quickest:
                continue
            runs += interleaved(self.driver, [one], 1, prompt, answer, seed + 1000 + len(runs))
            paces.note(runs[-1])
        return runs


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Chat:
    """Seconds of each turn of one conversation, and the pairs that were run."""

    combination: Combination
    round: int
    seconds: tuple[float, ...]
    took: tuple[str, ...]


def measure_chat(
    driver: Driver, ranks: int, new_tokens: Sequence[int], answer: int, rounds: int, seed: int
) -> Iterator[Chat]:
    """Conversations take turns as runs do; the first of each combination warms up and is left out."""
    for number, combination in turns(combinations(ranks, driver.settings.journeys), 1 + rounds):
        seed += len(new_tokens)
        prompt: tuple[int, ...] = ()
        seconds, took = [], []
        name = f"{combination.name} {number}"
        for turn, tokens in enumerate(new_tokens):
            prompt += made_up_prompt(seed + turn, tokens, driver.spec.vocab)
            run = run_once(driver, combination, prompt, answer, conversation=name)
            prompt += tuple(token.token for token in run.result.tokens)
            seconds.append(run.wall_seconds)
            took.append(run.took.name)
        driver.forget(name)
        _tell(f"chat, {name}: {sum(seconds):.1f} s")
        if number:
            yield Chat(combination, number, tuple(seconds), tuple(took))


def chat_facts(chats: Sequence[Chat], new_tokens: Sequence[int], answer: int) -> dict[str, Any] | None:
    """None where not every combination has had its turn."""
    totals: dict[str, Spread] = {}
    by_turn: dict[str, list[float]] = {}
    for combination in dict.fromkeys(chat.combination for chat in chats):
        mine = [chat for chat in chats if chat.combination == combination]
        totals[combination.name] = Spread.of(sum(chat.seconds) for chat in mine)
        columns = zip(*(chat.seconds for chat in mine), strict=True)
        by_turn[combination.name] = [statistics.median(column) for column in columns]
    fixed = {name: spread.low for name, spread in totals.items() if name != AUTO.name}
    if not fixed or AUTO.name not in totals:
        return None
    best = min(fixed, key=lambda name: fixed[name])
    return {
        "new_tokens": list(new_tokens),
        "answer": answer,
        "totals": {name: vars_of(spread) for name, spread in totals.items()},
        "by_turn": by_turn,
        "auto_took": [chat.took for chat in chats if chat.combination == AUTO][-1],
        "best": best,
        "regret": totals[AUTO.name].low / fixed[best] - 1,
    }


def vars_of(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "low": spread.low, "high": spread.high}
