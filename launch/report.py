"""What a run tells when it is over: the line of JSON, and the closing table for a person."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import to_builtins

from ..coordinator.fit.device_memory import DeviceUse
from ..proto.generation_result import (
    DecodeResult,
    FinishReason,
    GenerationResult,
    PrefillResult,
    ShiftFailure,
    ShiftResult,
)
from ..proto.ranges import LayerRange
from ..proto.reports import MemoryReported, SampledToken
from ..proto.words import counted

if TYPE_CHECKING:
    from rich.table import Table

MEBIBYTE = 2**20

_TOLD_ENDS = {
    FinishReason.STOP: "to a stop token or string",
    FinishReason.LENGTH: "to the length limit",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.ERROR: "to an error",
}


class Staged(Protocol):
    """A placement, as far as the layers of each rank's stage go."""

    @property
    def stages(self) -> Sequence[LayerRange]: ...


def run_facts(
    text: str,
    result: GenerationResult,
    placement: Staged,
    start_seconds: float,
    load_seconds: float,
    memory: Sequence[MemoryReported],
    reasoning: str = "",
    uses: Sequence[DeviceUse] = (),
    seed: int | None = None,
) -> dict[str, Any]:
    """The object that `run --json` prints. Seconds, bytes, token counts; lists of ranks are in rank order."""
    facts: dict[str, Any] = {
        "text": text,
        **({"reasoning": reasoning} if reasoning else {}),
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": [token.token for token in result.tokens],
        "finish_reason": str(result.finish_reason),
        **({} if seed is None else {"seed": seed}),
        "prefill": _prefill_facts(result.prefill, placement),
        "policy": [to_builtins(journey) for journey in result.policy],
        "shift": _shift_facts(result.shift, result.shift_failure),
        "decode": _decode_facts(result.decode),
        "start_seconds": start_seconds,
        "load_seconds": load_seconds,
        "memory": [_memory_facts(report, uses) for report in sorted(memory, key=lambda one: one.rank)],
    }
    if any(token.top for token in result.tokens):
        facts["logprobs"] = [_logprob_facts(token) for token in result.tokens]
    if result.restarts:
        facts["restarts"] = result.restarts
    if result.warning is not None:
        facts["warning"] = result.warning
    if result.error is not None:
        facts["error"] = result.error
    return facts


def _prefill_facts(prefill: PrefillResult, placement: Staged) -> dict[str, Any]:
    return {
        "layout": str(prefill.layout),
        "chunks": list(prefill.chunks),
        "seconds": prefill.seconds,
        "tokens_per_second": prefill.tokens_per_second,
        "reason": prefill.reason,
        "chunk_reason": prefill.chunk_reason,
        "stages": [
            {
                "rank": stage.rank,
                "layers": [placement.stages[stage.rank].first, placement.stages[stage.rank].end],
                "busy_seconds": stage.busy_seconds,
                "waiting_seconds": stage.waiting_seconds,
            }
            for stage in prefill.stages
        ],
    }


def _shift_facts(shift: ShiftResult | None, failure: ShiftFailure | None) -> dict[str, Any] | None:
    """Of a shift that was planned and not made: why it was not."""
    if shift is None:
        return None if failure is None else _failure_facts(failure)
    facts: dict[str, Any] = {
        "from": str(shift.source),
        "to": str(shift.to),
        "seconds": shift.seconds,
        "exposed_seconds": shift.exposed_seconds,
        "kv_bytes": shift.kv_bytes,
        "weight_bytes": shift.weight_bytes,
    }
    if shift.hashes_equal is not None:
        facts["hashes_equal"] = shift.hashes_equal
    if shift.moved_again:
        facts["moved_again"] = shift.moved_again
    return facts


def _failure_facts(failure: ShiftFailure) -> dict[str, Any]:
    kind = str(failure.kind)
    return {"from": str(failure.source), "to": str(failure.to), "failed": kind, "reason": failure.reason}


def _decode_facts(decode: DecodeResult) -> dict[str, Any]:
    return {
        "layout": str(decode.layout), "steps": decode.steps, "seconds": decode.seconds,
        "tokens_per_second": decode.tokens_per_second,
    }  # fmt: skip


def _memory_facts(report: MemoryReported, uses: Sequence[DeviceUse]) -> dict[str, int]:
    """Weights and KV as planned and as tracked; with `uses` also the whole of the device's memory."""
    facts = {
        "rank": report.rank,
        "planned_bytes": report.planned_bytes,
        "peak_bytes": report.peak_bytes,
        "anonymous_bytes": report.anonymous_bytes,
    }
    if uses:
        use = uses[report.rank]
        facts |= {"device_planned_bytes": use.planned_bytes, "device_held_bytes": use.held_bytes}
    return facts


def _logprob_facts(token: SampledToken) -> dict[str, Any]:
    return {
        "token": token.token,
        "logprob": token.logprob,
        "top": [{"token": token, "logprob": logprob} for token, logprob in token.top],
    }


def reason_lines(result: GenerationResult) -> tuple[str, ...]:
    """Why these layouts and these chunks, with the times that were compared; nothing for a lone worker."""
    prefill = result.prefill
    return (f"layouts: {prefill.reason}", f"chunks: {prefill.chunk_reason}") if len(prefill.stages) > 1 else ()


def phase_table(result: GenerationResult) -> "Table":
    """Per phase: layout, chunks or steps, seconds, tokens a second; the shift between them."""
    from rich.table import Table

    table = Table("phase", "layout", "work", title_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("tok/s", justify="right")
    prefill, shift, decode = result.prefill, result.shift, result.decode
    work = f"{counted(result.prompt_tokens, 'token')} in {chunks_text(prefill.chunks)}"
    table.add_row(
        "prompt", str(prefill.layout), work, f"{prefill.seconds:.3f}", _rate(prefill.tokens_per_second)
    )
    if shift is not None:
        moved = (
            f"{shift.kv_bytes / MEBIBYTE:.2f} MiB of KV, {shift.weight_bytes / MEBIBYTE:.2f} MiB of weights"
        )
        table.add_row("shift", f"{shift.source} to {shift.to}", moved, f"{shift.seconds:.4f}", "")
        hidden = max(0.0, shift.seconds - shift.exposed_seconds)
        table.add_row("", "", "exposed: answer waited, with commit", f"{shift.exposed_seconds:.4f}", "")
        table.add_row("", "", "hidden: behind the prompt's work", f"{hidden:.4f}", "")
        if shift.hashes_equal is not None:
            equal = "equal" if shift.hashes_equal else "DIFFERENT"
            table.add_row("", "", f"keys and values before and after: {equal}", "", "")
    elif result.shift_failure is not None:
        failure = result.shift_failure
        told = f"not made ({failure.kind}): {failure.reason}"
        table.add_row("shift", f"{failure.source} to {failure.to}", told, "", "")
    steps = f"{counted(decode.steps, 'step')}, {_TOLD_ENDS[result.finish_reason]}"
    if result.restarts:
        steps += f", the group started again {counted(result.restarts, 'time')}"
    table.add_row(
        "answer", str(decode.layout), steps, f"{decode.seconds:.3f}", _rate(decode.tokens_per_second)
    )
    return table


def memory_table(
    placement: Staged,
    memory: Sequence[MemoryReported],
    result: GenerationResult,
    uses: Sequence[DeviceUse] = (),
) -> "Table":
    """Per rank: its layers, how long it computed and waited in the prompt, and its memory in MiB.

    Weights and KV as planned and at their peak; the process holds more than these.

    On cards, with `uses`, also all that it was planned to hold of the card and what the driver says it does.
    """
    from rich.table import Table

    table = Table("rank", "layers")
    for column in ("computing, s", "waiting, s", "weights + KV, MiB", "their peak, MiB", "of the process, MiB"):
        table.add_column(column, justify="right")
    on_cards = any(report.device_free_bytes for report in memory) and bool(uses)
    for column in ("card planned, MiB", "card holds, MiB") if on_cards else ():
        table.add_column(column, justify="right")
    times = {stage.rank: stage for stage in result.prefill.stages}
    for report in sorted(memory, key=lambda one: one.rank):
        layers, stage = placement.stages[report.rank], times.get(report.rank)
        spent = ("", "") if stage is None else (f"{stage.busy_seconds:.3f}", f"{stage.waiting_seconds:.3f}")
        sizes = [report.planned_bytes, report.peak_bytes, report.anonymous_bytes]
        if on_cards:
            sizes += [uses[report.rank].planned_bytes, uses[report.rank].held_bytes]
        owned = f"{layers.first}..{layers.end - 1}" if len(layers) else "none"
        table.add_row(str(report.rank), owned, *spent, *(f"{size / MEBIBYTE:,.1f}" for size in sizes))
    return table


def chunks_text(chunks: Sequence[int]) -> str:
    """`8 chunks: 64 x 7, 19`; runs of one length are told once."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and runs[-1][0] == chunk:
            runs[-1][1] += 1
        else:
            runs.append([chunk, 1])
    told = [f"{length} x {count}" if count > 1 else str(length) for length, count in runs]
    shown = told if len(told) <= 6 else [*told[:5], "..."]
    return f"{counted(len(chunks), 'chunk')} ({', '.join(shown)})"


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.1f}" if tokens_per_second else "-"
