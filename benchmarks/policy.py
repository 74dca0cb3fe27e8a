"""How far the automatic choice is behind the best fixed pair of layouts, over prompts and answers of many lengths.

python benchmarks/policy.py [MODEL] [--workers S] [--prompts N,..] [--answers N,..] [--seconds N] [--no-chat]

Every pair and auto take turns, each run with a fresh made-up prompt. A pair's time is the least of `--blocks` medians
of `--rounds` runs; regret is that of the pair auto chose over that of the best pair. A pair that took `--hopeless`
times as long as the best in the warm-up keeps that one time, and is left out where its tokens alone would take so long.
With `--seconds` each size gets its share of them and sizes that do not fit are left out; Ctrl-C ends the run and keeps
what it has. Then a chat of four turns, the first one long (`--only-chat`: nothing else). Tables, then one line of JSON.

`synthetic` in the place of MODEL: a made-up model so small that cores read 32,768 tokens in seconds.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gearshift.benchmarks.arguments import group_parser, numbers, settings_of
from gearshift.benchmarks.machine import machine_facts
from gearshift.benchmarks.policy_cells import Chat, Grid, chat_facts, measure_chat
from gearshift.benchmarks.policy_parts import LEGEND, parts_lines
from gearshift.benchmarks.synthetic_models import write_model
from gearshift.launch.commands.bench import on_cpu
from gearshift.launch.settings.options import layout_settings
from gearshift.launch.start.session_setup import open_model, open_session

SYNTHETIC = "synthetic"
GOAL_REGRET = 0.02
GOAL_PLAN_MS = 1.0
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
SMALL_ON_CPU = Sizes((128, 512, 2048, 8192, 32768), (1, 32, 128, 1024), (40_000, 1000, 1000, 1000), 128)


def cells_table(cells: Sequence[dict[str, Any]]) -> str:
    """A row a length of prompt, a column a length of answer: the best pair, auto's choice where it differs, regret."""
    return _table(cells, TABLE_LEGEND, _cell_text)


def predicted_table(cells: Sequence[dict[str, Any]]) -> str:
    """How far what auto was predicted to take is from what it took."""
    legend = "auto, predicted against measured, %: all, prompt (its busiest rank's own time), answer"
    return _table(cells, legend, _predicted_text)


def _table(cells: Sequence[dict[str, Any]], legend: str, text: Any) -> str:
    answers = sorted({cell["answer"] for cell in cells})
    head = "".join(f"{f'answer {answer}':>24}" for answer in answers)
    lines = [legend, f"{'prompt':>8}{head}"]
    for prompt in sorted({cell["prompt"] for cell in cells}):
        row = {cell["answer"]: cell for cell in cells if cell["prompt"] == prompt}
        told = [text(row[answer]) if answer in row else "-" for answer in answers]
        lines.append(f"{prompt:>8}" + "".join(f"{words:>24}" for words in told))
    return "\n".join(lines)


def _cell_text(cell: dict[str, Any]) -> str:
    other = "" if cell["chosen"] == cell["best"] else f" ({_short(cell['chosen'])})"
    overlap = "~" if cell["regret"] and cell["within_spread"] else ""
    return f"{_short(cell['best'])}{other} {cell['regret']:.1%}{overlap}"


def _predicted_text(cell: dict[str, Any]) -> str:
    parts = cell["auto"]
    if parts is None:
        return "-"
    all_of_it = _off(parts, "predicted_s", "measured_s")
    prompt = _off(parts, "prefill_predicted_s", "prefill_measured_s")
    busy = _off(parts, "busiest_rank_s", "prefill_measured_s")
    return f"{all_of_it} {prompt} ({busy}) {_off(parts, 'decode_predicted_s', 'decode_measured_s')}"


def _off(parts: dict[str, float], predicted: str, measured: str) -> str:
    return f"{100 * (parts[predicted] / parts[measured] - 1):+.0f}" if parts[measured] > 0 else "-"


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
        "--seconds", type=float, default=None, help="for all sizes together, warm-ups included"
    )
    parser.add_argument("--short-warm-ups", type=int, default=None, help="left out: 2, none on CPU")
    parser.add_argument(
        "--quiet", type=float, default=None,
        help="seconds without a request before the first, in which cards prepare; left out: 15, none on CPU",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=int(time.time()))
    return parser.parse_args()


@contextmanager
def model_file(asked: str) -> Iterator[str]:
    """What was asked for, or a small model that is gone afterwards."""
    if asked != SYNTHETIC:
        yield asked
        return
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "tiny.gguf")
        write_model(path, "tiny", "Q8_0")
        yield path


def usual_sizes(options: argparse.Namespace) -> Sizes:
    if not on_cpu(options.device):
        return ON_CARDS
    return SMALL_ON_CPU if options.model == SYNTHETIC else ON_CPU


def main() -> None:
    options = parse()
    settings = settings_of(options)
    usual = usual_sizes(options)
    if options.short_warm_ups is None:
        options.short_warm_ups = 0 if on_cpu(options.device) else 2
    if options.quiet is None:
        options.quiet = 0.0 if on_cpu(options.device) else 15.0
    chat, chat_answer = options.chat or usual.chat_turns, options.chat_answer or usual.chat_answer
    prompts, answers = options.prompts or usual.prompts, options.answers or usual.answers
    with model_file(options.model) as file:
        opened = open_model(file)
        context = opened.spec.trained_context
        sizes = [
            (prompt, answer) for prompt in prompts for answer in sorted(answers) if prompt + answer <= context
        ]
        sizes = [] if options.only_chat else sizes
        chat_tokens = 0 if options.no_chat else sum(chat) + len(chat) * chat_answer
        wanted = min(context, max([prompt + answer for prompt, answer in sizes] + [chat_tokens]))
        with open_session(opened, settings, layout_settings("auto", "auto"), wanted) as session:
            driver, ranks = session.driver, session.placement.ranks
            record: dict[str, Any] = {
                "benchmark": "policy", "model": opened.spec.name, "workers": ranks, "seed": options.seed,
                "blocks": options.blocks, "rounds": options.rounds, "seconds": options.seconds,
                "warm_up": f"{options.quiet:g} quiet seconds; {options.short_warm_ups} short runs and one of each pair "
                f"for each of {len(sizes)} sizes",
                "link_options": {"no_peer": settings.link_options.no_peer, "throttle_link": options.throttle_link},
                **machine_facts([hello.device for hello in session.cluster.hellos]),
            }  # fmt: skip
            cells: list[dict[str, Any]] = []
            chats: list[Chat] = []
            time.sleep(options.quiet)
            try:
                for cell in Grid(driver, ranks, options).cells(sizes):
                    cells.append(cell.facts())
                    print("\n".join([json.dumps(cells[-1]), *parts_lines(cells[-1])]), flush=True)
                if 0 < chat_tokens <= context:
                    seed = options.seed + 77_000_000
                    for one in measure_chat(driver, ranks, chat, chat_answer, options.blocks, seed):
                        chats.append(one)  # one by one: kept when interrupted
            except KeyboardInterrupt:
                record["interrupted"] = True
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
    print(json.dumps(record | {"chat": chat}), flush=True)


def _tell_cells(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """What the record says of them."""
    print(cells_table(cells))
    print(predicted_table(cells))
    print("\n".join([LEGEND, *(line for cell in cells for line in parts_lines(cell))]))
    worst = max(cells, key=lambda cell: cell["regret"])
    plan_ms = [cell["plan_ms"] for cell in cells]
    most = max(cell["plan_ms_most"] for cell in cells)
    over = [cell for cell in cells if cell["regret"] > GOAL_REGRET]
    clearly = sum(not cell["within_spread"] for cell in over)
    print(
        f"regret over {GOAL_REGRET:.0%} in {len(over)} of {len(cells)} sizes ({clearly} where the runs' ranges do not "
        f"overlap), at most {worst['regret']:.1%} (prompt {worst['prompt']}, answer {worst['answer']})"
    )
    print(
        f"auto itself took {statistics.median(plan_ms):.2f} ms a request in the median of the sizes' medians, "
        f"{max(plan_ms):.2f} in the slowest of these, {most:.2f} at most (goal {GOAL_PLAN_MS:g})"
    )
    return {
        "cells": cells, "worst_regret": worst["regret"], "over_goal": len(over), "over_goal_clearly": clearly,
        "plan_ms_median": statistics.median(plan_ms), "plan_ms_most_of_medians": max(plan_ms), "plan_ms_most": most,
    }  # fmt: skip


if __name__ == "__main__":
    main()
