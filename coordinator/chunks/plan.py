"""How long the chunks of a prompt are, so that a pipeline of stages reads it soonest. Pure arithmetic.

For S equal stages the makespan is the sum of the chunks' times and S-1 times the longest of them; with
t(L, x) = b + a x + q (2 L x + x²) the sum is m b + W wherever the m - 1 cuts fall, so chunks of equal time are best
and m* = sqrt((S-1) W / b). The plain rule is the same with q = 0: C = sqrt(n (b/a) / (S-1)). Where a past is attended
in runs, cuts that few runs come before are better than others: only the search knows of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, sqrt
from typing import TypeAlias

from ...proto.errors import InputError
from ...proto.words import counted
from ..costs.cost_model import ChunkCost
from .flow_shop import makespans_of_lists
from .one_length import kept_bound, lengths_of_task, longest_of_lengths
from .search import best_chunks, fullest_chunks
from .task import Task, longest_within

MAX_RULE_CHARACTERS = 65_536  # of a rule's text: each number in it takes time to read
DEFAULT_RATIO = 1024.0  # b/a in tokens where nothing was measured; public rigs lie between 290 and 1,024


@dataclass(frozen=True, slots=True)
class Auto:
    """Least makespan from measured costs."""


@dataclass(frozen=True, slots=True)
class Sqrt:
    """The plain square-root rule; `ratio` is b/a in tokens, None the measured one."""

    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Fixed:
    """Chunks as given; the last value repeats until the prompt ends."""

    sizes: tuple[int, ...]


ChunkRule: TypeAlias = Auto | Sqrt | Fixed


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens. `grid` and `minimum` hold for the rules that choose; `max_chunk`, the buffers' size, for all.

    `token_gap_seconds` bounds a tick for the rules that choose: while a prompt is read, whoever is being answered gets
    one token a tick.
    """

    grid: int
    minimum: int
    max_chunk: int
    token_gap_seconds: float = inf

    @classmethod
    def for_device(cls, device: str, max_chunk: int, token_gap_seconds: float = inf) -> "Limits":
        grid, minimum = (32, 64) if device == "cpu" else (256, 512)
        return cls(grid, minimum, max_chunk, token_gap_seconds)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Chunk lengths in tokens, in order; their sum is the prompt."""

    chunks: tuple[int, ...]
    reason: str
    plain_rule_chunk: int | None  # what the plain rule would have taken; None where it has no say


def parse_chunk_rule(text: str, place: str = "chunk") -> ChunkRule:
    """`auto`, `sqrt`, `sqrt:RATIO`, `N` or `N,N,M`; anything else is an `InputError` that names its place."""
    if len(text) > MAX_RULE_CHARACTERS:
        raise InputError(f"{place} has {len(text)} characters: {MAX_RULE_CHARACTERS} are possible")
    name, colon, value = text.strip().partition(":")
    try:
        if name == "auto" and not colon:
            return Auto()
        if name == "sqrt":
            return Sqrt(_positive(float(value)) if colon else None)
        if not all(part.strip().isdecimal() for part in text.split(",")):
            raise ValueError("not a whole number")
        return Fixed(tuple(int(_positive(int(part))) for part in text.split(",")))
    except ValueError as error:
        raise InputError(
            f"{place} takes auto, sqrt, sqrt:RATIO, N or N,N,.. with numbers above 0, not {text[:60]!r}"
        ) from error


def _positive(value: float) -> float:
    if not 0 < value < 1e9:
        raise ValueError("out of range")
    return value


def plan_chunks(
    tokens: int,
    cached: int,
    stages: int,
    rule: ChunkRule,
    costs: Sequence[ChunkCost] | None,
    limits: Limits,
    decode_seconds: float = 0.0,
    together: bool = False,
    before_seconds: float = 0.0,
) -> ChunkPlan:
    """Chunks for a prompt of `tokens` after `cached` ones. `costs` is one a stage, None if not measured.

    One stage: one chunk, capped by the buffers. Each chunk is >= 1 and <= `limits.max_chunk`. `decode_seconds`: of the
    decode step that runs in each tick meanwhile, for requests that are being answered. `together`: the one stage is
    a group of workers in the tensor layout. `before_seconds`: of the time that is told, what first chunks do without.
    """
    if tokens < 1 or cached < 0 or stages < 1 or limits.max_chunk < 1:
        raise ValueError(f"no chunks for {tokens} tokens after {cached} over {stages} stages within {limits}")
    ratio = rule.ratio if isinstance(rule, Sqrt) and rule.ratio is not None else _measured_ratio(costs)
    plain = _plain_chunk(tokens, stages, ratio, limits) if stages > 1 else None
    if isinstance(rule, Fixed):
        return ChunkPlan(_fixed(tokens, rule.sizes, limits.max_chunk), "chunks as asked for", plain)
    if plain is None:
        plan = _one_stage(tokens, cached, costs, limits, decode_seconds)
        who = "tensor layout: all workers read a chunk together; " if together else "one stage: "
        return replace(plan, reason=who + plan.reason)
    if isinstance(rule, Auto) and costs:
        return _auto(tokens, cached, costs, limits, decode_seconds, plain, before_seconds)
    missing = "costs not measured; " if isinstance(rule, Auto) else ""
    reason = f"{missing}sqrt rule with b/a {ratio:.0f}: {counted(plain, 'token')} over {counted(stages, 'stage')}"
    if costs and limits.token_gap_seconds < inf:
        task = _task(tokens, cached, costs, limits, decode_seconds)
        chunks = _repeat(tokens, _within_bound(task, plain))
        return ChunkPlan(chunks, reason + _told_bound(task, limits), plain)
    return ChunkPlan(_repeat(tokens, plain), reason, plain)


def _within_bound(task: Task, plain: int) -> int:
    """Tokens of the longest chunks of one length that keep the latency bound: up to `plain`, else the shortest."""
    if task.past_in_runs:
        lengths = lengths_of_task(task)
        longest = longest_of_lengths(lengths, task.tokens, task.cached, task.costs)
        kept = lengths[longest <= task.longest_seconds * (1 + 1e-9)]
        return int(kept[kept <= plain].max(initial=kept.min()))
    deep = task.cached + task.tokens  # the last one lies deepest
    fits = min(longest_within(cost, deep, task.longest_seconds) for cost in task.costs)
    return min(plain, max(int(fits) // task.grid * task.grid, task.grid)) if fits < task.tokens else plain


def _measured_ratio(costs: Sequence[ChunkCost] | None) -> float:
    if not costs:
        return DEFAULT_RATIO
    per_token = sum(cost.per_token for cost in costs)
    return min(sum(cost.per_chunk for cost in costs) / per_token, 1e9) if per_token > 0 else 1e9


def _plain_chunk(tokens: int, stages: int, ratio: float, limits: Limits) -> int:
    """The square-root rule, rounded up to the grid, then evened out over the chunks it takes."""
    wanted = ceil(sqrt(tokens * ratio / (stages - 1)))
    first = min(max(limits.minimum, _up_to_grid(wanted, limits.grid)), limits.max_chunk)
    count = ceil(tokens / first)
    if count == 1:
        return tokens
    return min(_up_to_grid(ceil(tokens / count), limits.grid), limits.max_chunk)


def _up_to_grid(tokens: int, grid: int) -> int:
    return ceil(tokens / grid) * grid


def _repeat(tokens: int, size: int) -> tuple[int, ...]:
    """Chunks of `size`; the last takes what is left."""
    whole, rest = divmod(tokens, size)
    return (size,) * whole + ((rest,) if rest else ())


def _fixed(tokens: int, sizes: Sequence[int], max_chunk: int) -> tuple[int, ...]:
    chunks: list[int] = []
    left = tokens
    for size in sizes[:-1]:
        if left > 0:
            chunks.append(min(size, max_chunk, left))
            left -= chunks[-1]
    return tuple(chunks) + _repeat(left, min(sizes[-1], max_chunk))


def _auto(
    tokens: int, cached: int, costs: Sequence[ChunkCost], limits: Limits, decode_seconds: float, plain: int,
    before_seconds: float,
) -> ChunkPlan:  # fmt: skip
    """The best list that the search finds, and what the plain rule would have taken."""
    task = _task(tokens, cached, costs, limits, decode_seconds)
    chunks, seconds = best_chunks(task)
    plain_list = _repeat(task.tokens, plain)
    plain_seconds = makespans_of_lists([plain_list], task.cached, task.costs, task.decode_seconds)[0]
    beside = (
        f", {task.decode_seconds * 1e3:.3g} ms of answers in each tick" if task.decode_seconds > 0 else ""
    )
    told, told_plain = seconds - before_seconds, plain_seconds - before_seconds
    reason = (
        f"least time over {counted(len(task.costs), 'stage')}{beside}: {counted(len(chunks), 'chunk')}, "
        f"{told:.3g} s predicted (plain rule: {counted(plain, 'token')}, {told_plain:.3g} s)"
    )
    return ChunkPlan(chunks, reason + _told_bound(task, limits), plain)


def _one_stage(
    tokens: int, cached: int, costs: Sequence[ChunkCost] | None, limits: Limits, decode_seconds: float
) -> ChunkPlan:
    """One chunk, capped by the buffers and the latency bound: every further chunk would cost its b again."""
    if costs is not None and len(costs) == 1 and limits.token_gap_seconds < inf:
        task = _task(tokens, cached, costs, limits, decode_seconds)
        chunks = fullest_chunks(task)
        return ChunkPlan(chunks, counted(len(chunks), "chunk") + _told_bound(task, limits), None)
    return ChunkPlan(_repeat(tokens, limits.max_chunk), "the largest chunk the buffers take", None)


def _task(
    tokens: int, cached: int, costs: Sequence[ChunkCost], limits: Limits, decode_seconds: float
) -> Task:
    """What the search has to keep to.

    A latency bound goes before the least chunk; one that chunks of no length keep is kept as nearly as can be.
    """
    grid = min(limits.grid, limits.max_chunk)
    minimum = min(_up_to_grid(limits.minimum, grid), limits.max_chunk // grid * grid)
    longest = inf
    if limits.token_gap_seconds < inf:
        longest = limits.token_gap_seconds - decode_seconds
        if any(cost.per_run for cost in costs):
            largest = limits.max_chunk // grid * grid
            minimum, longest = kept_bound(tokens, cached, costs, grid, minimum, largest, longest)
        elif _longest_step(tokens, cached, costs, minimum, grid) > longest:
            minimum = grid
            longest = max(longest, _longest_step(tokens, cached, costs, grid, grid))
    return Task(tokens, cached, tuple(costs), grid, minimum, limits.max_chunk, decode_seconds, longest)


def _longest_step(tokens: int, cached: int, costs: Sequence[ChunkCost], size: int, grid: int) -> float:
    """Seconds of the longest of chunks of `size` tokens, the last one; costs have no runs."""
    deep = max(0, cached + tokens - grid)
    return max(cost.seconds(deep, size) for cost in costs)


def _told_bound(task: Task, limits: Limits) -> str:
    if limits.token_gap_seconds == inf:
        return ""
    kept = task.longest_seconds + task.decode_seconds
    missed = (
        f" ({limits.token_gap_seconds * 1e3:.3g} ms cannot be kept)"
        if kept > limits.token_gap_seconds
        else ""
    )
    return f"; no tick above {kept * 1e3:.3g} ms{missed}"
