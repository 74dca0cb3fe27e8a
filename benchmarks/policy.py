"""How far the automatic choice is behind the best fixed pair of layouts, over prompts and answers of many lengths.

python benchmarks/policy.py [MODEL] [--workers S] [--prompts N,..] [--answers N,..] [--seconds N] [--no-chat]

Every pair and auto take turns, each run with a fresh made-up prompt. A pair's time is the least of `--blocks` medians
of `--rounds` runs; regret is that of the pair auto chose over that of the best pair. A pair that took `--hopeless`
times as long as the best in the warm-up keeps that one time, and is left out where its tokens alone would take so long.
Then a chat of four turns, the first one long (`--only-chat`: nothing else). Tables, then one line of JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gearshift.benchmarks.arguments import group_parser, numbers, settings_of
from gearshift.benchmarks.machine import machine_facts
from gearshift.coordinator.driver import Driver
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
from gearshift.launch.commands.bench import on_cpu
from gearshift.launch.settings.options import layout_settings
from gearshift.launch.start.session_setup import open_model, open_session

GOAL_REGRET = 0.02
GOAL_PLAN_MS = 1.0
FAIR_ANSWER = 16  # tokens, from which on an answer tells a pair's pace
SHORT_ANSWER = 4
TABLE_LEGEND = (
    "best pair (auto's choice where another), regret; lt: layer->tensor; ~: the runs' ranges overlap"
)


@dataclass(frozen=True)
class Sizes:
    """What is measured where nothing is asked for."""

    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    chat_turns: tuple[int, ...]  # new tokens of each turn
    chat_answer: int


ON_CARDS = Sizes((128, 512, 2048, 8192, 32768), (1, 16, 128, 1024), (40_000, 1000, 1000, 1000), 128)
ON_CPU = Sizes((128, 512, 2048), (1, 16, 64), (1600, 40, 40, 40), 16)


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
            "predicted_s": statistics.median(predicted) if predicted else None,
            "plan_ms": 1e3 * statistics.median(run.plan_seconds for run in auto),
            "seconds": times,
        }


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


def warm_up(
    driver: Driver, fixed: Sequence[Combination], prompt: int, answer: int, options: argparse.Namespace, paces: Paces,
    seed: int,
) -> list[TimedRun]:  # fmt: skip
    """One run of each pair, but of those whose answers alone would be hopeless.

    On cards kernels are launched one by one in the first run of a size and captured in the second: short answers first.
    """
    interleaved(driver, fixed, options.short_warm_ups, prompt, min(answer, SHORT_ANSWER), seed)
    runs: list[TimedRun] = []
    for one in paces.quickest_first(fixed):
        quickest = min((run.wall_seconds for run in runs), default=0.0)
        if runs and paces.seconds(one, answer) > options.hopeless * quickest:
            continue
        runs += interleaved(driver, [one], 1, prompt, answer, seed + 1000 + len(runs))
        paces.note(runs[-1])
    return runs


def measure_cell(
    driver: Driver, ranks: int, prompt: int, answer: int, options: argparse.Namespace, paces: Paces, seed: int
) -> Cell:
    everything = combinations(ranks, driver.settings.journeys)
    warm = warm_up(driver, everything[:-1], prompt, answer, options, paces, seed)
    quickest = min(run.wall_seconds for run in warm)
    hopeless = [run for run in warm if run.wall_seconds > options.hopeless * quickest]
    serious = [run for run in warm if run not in hopeless]
    taken = (*(one for one in everything if one in {run.combination for run in serious}), AUTO)
    rounds = options.blocks * options.rounds
    if options.cell_seconds is not None:
        each = sum(run.wall_seconds for run in serious) + quickest
        rounds = max(1, min(rounds, int(options.cell_seconds / each)))
    runs = interleaved(driver, taken, rounds, prompt, answer, seed + 2000)
    chosen = auto_choice([run for run in runs if run.combination == AUTO])
    if chosen not in taken:  # then its one cold time, or none, would be held against it
        hopeless = [run for run in hopeless if run.combination != chosen]
        runs += interleaved(driver, [chosen], rounds, prompt, answer, seed + 10_000)
    return Cell(prompt, answer, (*runs, *hopeless), options.blocks)


@dataclass(frozen=True)
class Chat:
    """Seconds of each turn of one conversation, and the pairs that were run."""

    combination: Combination
    round: int
    seconds: tuple[float, ...]
    took: tuple[str, ...]


def measure_chat(
    driver: Driver, ranks: int, new_tokens: Sequence[int], answer: int, rounds: int, seed: int
) -> list[Chat]:
    """Conversations take turns as runs do; the first of each combination warms up and is left out."""
    chats: list[Chat] = []
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
        if number:
            chats.append(Chat(combination, number, tuple(seconds), tuple(took)))
    return chats


def chat_facts(chats: Sequence[Chat], new_tokens: Sequence[int], answer: int) -> dict[str, Any]:
    totals: dict[str, Spread] = {}
    by_turn: dict[str, list[float]] = {}
    for combination in dict.fromkeys(chat.combination for chat in chats):
        mine = [chat for chat in chats if chat.combination == combination]
        totals[combination.name] = Spread.of(sum(chat.seconds) for chat in mine)
        columns = zip(*(chat.seconds for chat in mine), strict=True)
        by_turn[combination.name] = [statistics.median(column) for column in columns]
    fixed = {name: spread.low for name, spread in totals.items() if name != AUTO.name}
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


def cells_table(cells: Sequence[dict[str, Any]]) -> str:
    """A row a length of prompt, a column a length of answer: the best pair, auto's choice where it differs, regret."""
    answers = sorted({cell["answer"] for cell in cells})
    head = "".join(f"{f'answer {answer}':>18}" for answer in answers)
    lines = [TABLE_LEGEND, f"{'prompt':>8}{head}"]
    for prompt in sorted({cell["prompt"] for cell in cells}):
        row = {cell["answer"]: cell for cell in cells if cell["prompt"] == prompt}
        told = [_cell_text(row[answer]) if answer in row else "-" for answer in answers]
        lines.append(f"{prompt:>8}" + "".join(f"{text:>18}" for text in told))
    return "\n".join(lines)


def _cell_text(cell: dict[str, Any]) -> str:
    other = "" if cell["chosen"] == cell["best"] else f" ({_short(cell['chosen'])})"
    overlap = "~" if cell["regret"] and cell["within_spread"] else ""
    return f"{_short(cell['best'])}{other} {cell['regret']:.1%}{overlap}"


def _short(name: str) -> str:
    return "".join(word[0] for word in name.split("->"))


def parse() -> argparse.Namespace:
    parser = group_parser(__doc__)
    parser.add_argument("--prompts", type=numbers, default=None)
    parser.add_argument("--answers", type=numbers, default=None)
    parser.add_argument("--blocks", type=int, default=5, help="medians, the best of which counts")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each median")
    parser.add_argument("--hopeless", type=float, default=4.0)
    parser.add_argument("--chat", type=numbers, default=None, help="new tokens of each turn")
    parser.add_argument("--chat-answer", type=int, default=None)
    parser.add_argument("--no-chat", action="store_true")
    parser.add_argument("--only-chat", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=None, help="for all sizes' rounds together; one at least"
    )
    parser.add_argument("--short-warm-ups", type=int, default=None, help="left out: 2, none on CPU")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    return parser.parse_args()


def main() -> None:
    options = parse()
    settings = settings_of(options)
    opened = open_model(options.model)
    usual = ON_CPU if on_cpu(options.device) else ON_CARDS
    context = opened.spec.trained_context
    chat, chat_answer = options.chat or usual.chat_turns, options.chat_answer or usual.chat_answer
    prompts, answers = options.prompts or usual.prompts, options.answers or usual.answers
    sizes = [
        (prompt, answer) for prompt in prompts for answer in sorted(answers) if prompt + answer <= context
    ]
    if options.only_chat:
        sizes = []
    options.cell_seconds = options.seconds / len(sizes) if options.seconds is not None and sizes else None
    if options.short_warm_ups is None:
        options.short_warm_ups = 0 if on_cpu(options.device) else 2
    paces = Paces()
    chat_tokens = 0 if options.no_chat else sum(chat) + len(chat) * chat_answer
    wanted = max([prompt + answer for prompt, answer in sizes] + [chat_tokens])
    with open_session(opened, settings, layout_settings("auto", "auto"), min(context, wanted)) as session:
        driver, ranks = session.driver, session.placement.ranks
        record: dict[str, Any] = {
            "benchmark": "policy", "model": opened.spec.name, "workers": ranks, "seed": options.seed,
            "blocks": options.blocks, "rounds": options.rounds, "seconds": options.seconds,
            "warm_up": f"{options.short_warm_ups} short runs and one of each pair, for each size",
            "link_options": {"no_peer": settings.link_options.no_peer, "throttle_link": options.throttle_link},
            **machine_facts([hello.device for hello in session.cluster.hellos]),
        }  # fmt: skip
        cells = []
        for index, (prompt, answer) in enumerate(sizes):
            cell = measure_cell(driver, ranks, prompt, answer, options, paces, options.seed + 100_000 * index)
            cells.append(cell.facts())
            print(json.dumps(cells[-1]), flush=True)
        chats = []
        if 0 < chat_tokens <= context:
            chats = measure_chat(driver, ranks, chat, chat_answer, options.blocks, options.seed + 77_000_000)
    _tell(record, cells, chat_facts(chats, chat, chat_answer) if chats else None)


def _tell(record: dict[str, Any], cells: list[dict[str, Any]], chat: dict[str, Any] | None) -> None:
    if cells:
        record |= _tell_cells(cells)
    if chat is not None:
        print(f"chat of {chat['new_tokens']} new tokens, {chat['answer']} answered each, seconds by turn:")
        for name, seconds in chat["by_turn"].items():
            total = chat["totals"][name]
            turn_text = " ".join(f"{one:9.3f}" for one in seconds)
            print(
                f"{name:>16} {turn_text}   all {total['median']:.3f} ({total['low']:.3f} - {total['high']:.3f})"
            )
        print(
            f"auto took {', '.join(chat['auto_took'])}; {chat['regret']:+.1%} against the best pair, {chat['best']}"
        )
    print(json.dumps(record | {"chat": chat}))


def _tell_cells(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """What the record says of them."""
    print(cells_table(cells))
    worst = max(cells, key=lambda cell: cell["regret"])
    plan_ms = [cell["plan_ms"] for cell in cells]
    over = sum(cell["regret"] > GOAL_REGRET for cell in cells)
    print(
        f"regret over {GOAL_REGRET:.0%} in {over} of {len(cells)} sizes, at most {worst['regret']:.1%} "
        f"(prompt {worst['prompt']}, answer {worst['answer']}); auto itself took {statistics.median(plan_ms):.2f} ms "
        f"a request, at most {max(plan_ms):.2f} (goal {GOAL_PLAN_MS:g})"
    )
    return {
        "cells": cells, "worst_regret": worst["regret"], "over_goal": over,
        "plan_ms_median": statistics.median(plan_ms), "plan_ms_most": max(plan_ms),
    }  # fmt: skip


if __name__ == "__main__":
    main()
