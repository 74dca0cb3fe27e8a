"""What `gearshift bench` tells: a table, a line on auto, a timeline, a verdict; the same as JSON and CSV. Pure."""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ...proto.words import counted
from ..report import chunks_text
from .llama_bench import PeerRow
from .runs import AUTO, Combination, Spread, TimedRun, Verdict, auto_choice, judge
from .timeline import LEGEND, RankLine, rank_lines

if TYPE_CHECKING:
    from rich.table import Table

CSV_COLUMNS = (
    "program", "combination", "prefill", "decode", "round", "seed", "wall_seconds", "prompt_tokens_per_second",
    "answer_tokens_per_second", "shift_exposed_ms", "shift_hidden_ms", "predicted_seconds", "plan_ms", "chunks",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bench:
    """All that was measured. `runs` hold every combination, auto among them; warm-ups are not among them."""

    model: str
    prompt_tokens: int
    answer_tokens: int
    devices: tuple[str, ...]  # by rank
    runs: tuple[TimedRun, ...]
    peer: tuple[PeerRow, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # of the programs, and types that were computed in

    @property
    def combinations(self) -> tuple[Combination, ...]:
        fixed = dict.fromkeys(run.combination for run in self.runs if run.combination.fixed)
        return (*sorted(fixed, key=lambda one: one.name), AUTO)

    def of(self, combination: Combination) -> tuple[TimedRun, ...]:
        return tuple(run for run in self.runs if run.combination == combination)

    @property
    def best_run(self) -> TimedRun:
        return min(self.runs, key=lambda run: run.wall_seconds)

    @property
    def verdict(self) -> Verdict:
        return judge(self.runs)

    @property
    def timeline(self) -> tuple[RankLine, ...]:
        """Of the best run."""
        best = self.best_run
        return rank_lines(
            best.stretches, len(self.devices), best.began_seconds, best.began_seconds + best.wall_seconds
        )


def verdict_line(verdict: Verdict) -> str:
    """`auto chose layer->tensor: 1.3% behind the best, tensor->tensor`."""
    said = f"auto chose {verdict.chosen.name}"
    if verdict.chosen_rounds < verdict.rounds:
        said = f"auto chose {_told_choices(verdict.choices)}"
        return f"{said}: on average {verdict.mean_regret:.1%} behind the best, {verdict.best.name}"
    if verdict.chosen == verdict.best:
        return f"{said}: the best of the fixed combinations"
    line = f"{said}: {verdict.regret:.1%} behind the best, {verdict.best.name}"
    return f"{line} (their runs overlap)" if verdict.within_spread else line


def auto_line(runs: Sequence[TimedRun]) -> str:
    """What auto chose how often, and its forecast of its usual choice beside what that then took."""
    mine = [run for run in runs if not run.combination.fixed]
    return f"auto: {_told_choices(Counter(run.took for run in mine).most_common())}; {_told_forecast(mine)}"


def told_texts(bench: Bench) -> tuple[str, ...]:
    """What follows the table: what auto chose, the timeline and the verdict; of a choice that varied in one line."""
    timeline, verdict = timeline_text(bench), verdict_line(bench.verdict)
    if bench.verdict.chosen_rounds == bench.verdict.rounds:
        return auto_line(bench.runs), timeline, verdict
    forecast = _told_forecast(bench.of(AUTO))
    return timeline, f"{verdict}; {bench.verdict.chosen.name} was {forecast}"


def _told_choices(choices: Sequence[tuple[Combination, int]]) -> str:
    """`layer->layer in 3 of 5 rounds, tensor->tensor in 2`."""
    (first, times), *others = choices
    rounds = counted(times + sum(more for _, more in others), "round")
    return ", ".join([f"{first.name} in {times} of {rounds}", *(f"{one.name} in {more}" for one, more in others)])


def _told_forecast(mine: Sequence[TimedRun]) -> str:
    """Of what auto took most often."""
    chosen = auto_choice(mine)
    taken = [run for run in mine if run.took == chosen]
    measured = Spread.of(run.wall_seconds for run in taken).median
    forecasts = [run.predicted_seconds for run in taken if run.predicted_seconds is not None]
    if not forecasts:
        return f"measured {measured:.3f} s; {taken[0].result.prefill.reason}"
    predicted = Spread.of(forecasts).median
    policy = 1e3 * Spread.of(run.plan_seconds for run in mine).median
    return (
        f"predicted {predicted:.3f} s, measured {measured:.3f} s ({measured / predicted - 1:+.1%}); "
        f"the policy itself took {policy:.2f} ms"
    )


def bench_table(bench: Bench) -> "Table":
    """Medians; of the whole time also the range."""
    from rich.table import Table

    title = f"prompt {bench.prompt_tokens}, answer {counted(bench.answer_tokens, 'token')}"
    table = Table(title=title, title_justify="left")
    table.add_column("prompt -> answer", no_wrap=True)
    for column in ("all, s", "range", "prompt\ntok/s", "answer\ntok/s", "shift, ms\nexposed", "\nhidden"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("chunks")
    for combination in bench.combinations:
        table.add_row(*_row(combination, bench.of(combination)))
    for peer in bench.peer:
        table.add_row(*_peer_row(peer))
    return table


def _row(combination: Combination, runs: Sequence[TimedRun]) -> list[str]:
    wall = Spread.of(run.wall_seconds for run in runs)
    shifted = any(run.result.shift is not None for run in runs)
    exposed, hidden = (_median_ms(runs, name) if shifted else "-" for name in ("exposed_seconds", "hidden_seconds"))
    several = len({run.took for run in runs}) > 1
    name = combination.name if combination.fixed else f"auto ({'several' if several else runs[0].took.name})"
    return [
        name,
        f"{wall.median:.3f}",
        f"{wall.low:.3f} - {wall.high:.3f}",
        f"{Spread.of(run.result.prefill.tokens_per_second for run in runs).median:,.0f}",
        _answer_rate(runs),
        exposed,
        hidden,
        chunks_text(runs[-1].result.prefill.chunks),
    ]


def _answer_rate(runs: Sequence[TimedRun]) -> str:
    rates = [run.answer_tokens_per_second for run in runs if run.answer_tokens_per_second is not None]
    return f"{Spread.of(rates).median:,.1f}" if rates else "-"


def _median_ms(runs: Sequence[TimedRun], name: str) -> str:
    return f"{1e3 * Spread.of(getattr(run, name) for run in runs).median:.1f}"


def _peer_row(peer: PeerRow) -> list[str]:
    name = f"llama-bench -sm {peer.split_mode}"
    if peer.error:
        return [name, "failed", "", "", "", "", "", peer.error]
    wall = f"{peer.wall_seconds:.3f}", f"{peer.low_seconds:.3f} - {peer.high_seconds:.3f}"
    answer = peer.answer_tokens_per_second
    rates = f"{peer.prompt_tokens_per_second:,.0f}", "-" if answer is None else f"{answer:,.1f}"
    return [name, *wall, *rates, "-", "-", f"build {peer.build}"]


def timeline_text(bench: Bench) -> str:
    """One line a rank, for the best run."""
    best = bench.best_run
    lines = [f"the fastest run, {best.combination.name} in {best.wall_seconds:.3f} s ({LEGEND}):"]
    for rank in bench.timeline:
        whole = max(rank.busy_seconds + rank.waiting_seconds + rank.idle_seconds, 1e-9)
        shares = ", ".join(
            f"{name} {seconds / whole:.0%}"
            for name, seconds in (
                ("busy", rank.busy_seconds), ("waiting", rank.waiting_seconds), ("idle", rank.idle_seconds),
            )
        )  # fmt: skip
        lines.append(f"rank {rank.rank} |{rank.line}| {shares}")
    return "\n".join(lines)


def bench_facts(bench: Bench) -> dict[str, Any]:
    """The object that `bench --json` prints. Times in seconds; all runs, and what is told of them."""
    verdict = bench.verdict
    return {
        "model": bench.model,
        "prompt_tokens": bench.prompt_tokens,
        "answer_tokens": bench.answer_tokens,
        "workers": len(bench.devices),
        "devices": list(bench.devices),
        **bench.versions,
        "combinations": [_combination_facts(one, bench.of(one)) for one in bench.combinations],
        "auto": {
            "chosen": verdict.chosen.name,
            "best": verdict.best.name,
            "regret": verdict.regret,
            "mean_regret": verdict.mean_regret,
            "chosen_rounds": verdict.chosen_rounds,
            "within_spread": verdict.within_spread,
            "told": auto_line(bench.runs),
        },
        "verdict": verdict_line(verdict),
        "timeline": {
            "combination": bench.best_run.combination.name,
            "wall_seconds": bench.best_run.wall_seconds,
            "ranks": [asdict(line) for line in bench.timeline],
        },
        "peer": [asdict(row) for row in bench.peer],
    }


def _combination_facts(combination: Combination, runs: Sequence[TimedRun]) -> dict[str, Any]:
    return {
        "name": combination.name,
        "wall_seconds": asdict(Spread.of(run.wall_seconds for run in runs)),
        "runs": [_run_facts(run) for run in runs],
    }


def _run_facts(run: TimedRun) -> dict[str, Any]:
    return {
        "round": run.round,
        "seed": run.seed,
        "prefill": str(run.took.prefill),
        "decode": str(run.took.decode),
        "wall_seconds": run.wall_seconds,
        "plan_seconds": run.plan_seconds,
        "predicted_seconds": run.predicted_seconds,
        "prompt_tokens_per_second": run.result.prefill.tokens_per_second,
        "answer_tokens_per_second": run.answer_tokens_per_second,
        "shift_exposed_seconds": run.exposed_seconds,
        "shift_hidden_seconds": run.hidden_seconds,
        "chunks": list(run.result.prefill.chunks),
    }


def bench_csv(bench: Bench) -> str:
    """One row a run, then one a split mode of the peer; what does not apply is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for run in bench.runs:
        predicted = "" if run.predicted_seconds is None else f"{run.predicted_seconds:.6f}"
        chunks = " ".join(map(str, run.result.prefill.chunks))
        answer = run.answer_tokens_per_second
        writer.writerow([
            "gearshift", run.combination.name, run.took.prefill, run.took.decode, run.round, run.seed,
            f"{run.wall_seconds:.6f}", f"{run.result.prefill.tokens_per_second:.3f}",
            "" if answer is None else f"{answer:.3f}", f"{1e3 * run.exposed_seconds:.4f}",
            f"{1e3 * run.hidden_seconds:.4f}", predicted, f"{1e3 * run.plan_seconds:.4f}", chunks,
        ])  # fmt: skip
    for row in bench.peer:
        if not row.error:
            answer = row.answer_tokens_per_second
            writer.writerow([
                "llama-bench", row.split_mode, "", "", "", "", f"{row.wall_seconds:.6f}",
                f"{row.prompt_tokens_per_second:.3f}", "" if answer is None else f"{answer:.3f}", "", "", "", "", "",
            ])  # fmt: skip
    return text.getvalue()
