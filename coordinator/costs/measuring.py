"""From what the ranks measured to the costs that requests are planned with. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from statistics import fmean
from typing import Any

import msgspec
from msgspec.structs import replace

from ...proto.commands import MeasureCosts
from ...proto.kv import BLOCK_TOKENS, KvFormat
from ...proto.model import ModelSpec
from ...proto.placement.bundles import bundle_bytes
from ...proto.placement.plan import Placement
from ...proto.ranges import LayerRange
from ...proto.reports import CostsMeasured, KindSeconds
from .cost_model import (
    ChunkCost,
    Costs,
    LayerKindCost,
    LayerSeconds,
    LinkCost,
    OverheadCost,
    ShiftCost,
    StepCost,
    fit,
    interpolated,
)
from .measuring_plan import TRANSFER_BYTES, MeasuringPlan, Points

# Of a shift, until real ones are known: a report, a command and the ranks' word for each other. No transfer shows it.
# 1.0 to 1.2 ms between two H200, from 0.6 between processes on a CPU.
COMMIT_SECONDS = 1e-3
# Of a request, until real ones are known: it is checked and planned, and its first tick put together.
PLANNING_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class Measurement:
    """What all ranks answered, put together by rank, and what it was asked of."""

    plan: MeasuringPlan
    placement: Placement
    ranks: tuple[CostsMeasured, ...]
    shift_bytes: int = 0  # of one token's keys and values, that the busiest rank sends or receives in a shift
    hidden: int = 0  # width of the rows that are summed over the ranks
    message_seconds: float = 0.0  # a question to the slowest rank and its answer
    steps_a_tick: int = 1  # decode steps that share its messages
    costs: Costs = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", _completed(self))
        object.__setattr__(self, "costs", _costs(self))

    def stage_seconds(self, rank: int) -> list[float]:
        """Of each chunk point, through the layers of a rank's stage; the first stage looks the tokens up."""
        stage = self.placement.stages[rank]
        layers = _weighted(self.ranks[rank].kinds, lambda kind: kind.whole, lambda kind: _count(kind, stage))
        return _added(layers, self.ranks[0].embeds) if rank == 0 else layers

    def tensor_seconds(self) -> list[float]:
        """Of each tensor chunk point, through all layers, on the slowest rank; every rank looks the tokens up."""
        layers = _slowest([_weighted(one.kinds, lambda kind: kind.together, _all_layers) for one in self.ranks])
        return _added(layers, _slowest([one.embeds for one in self.ranks]))

    def overhead(self) -> OverheadCost:
        """As far as messages and the head show it. Steps that a device runs by itself find the next tick waiting."""
        tails, own_pace = _slowest([one.tails for one in self.ranks]), self.ranks[0].device_steps
        return OverheadCost(
            request_seconds=PLANNING_SECONDS + 2 * self.message_seconds + (tails[0] if tails else 0.0),
            shift_seconds=self.message_seconds,
            chunk_seconds=self.message_seconds,
            step_seconds=0.0 if own_pace else self.message_seconds / self.steps_a_tick,
        )

    def layer_step_seconds(self) -> list[float]:
        """Of each step point: every stage in turn, its hop to all others, and the tail."""
        if self.placement.ranks == 1 and self.ranks[0].device_steps:
            return list(self.ranks[0].device_steps)
        stages = [
            _weighted(one.kinds, lambda kind: kind.whole_steps, lambda kind, of=stage: _count(kind, of))  # type: ignore[misc]
            for one, stage in zip(self.ranks, self.placement.stages, strict=True)
        ]
        hops, tails = _slowest([one.hops for one in self.ranks]), _slowest([one.tails for one in self.ranks])
        busy = sum(1 for stage in self.placement.stages if len(stage))
        return [
            sum(stage[index] for stage in stages if stage) + busy * hops[index] + tails[index]
            for index in range(len(self.plan.steps))
        ]

    def tensor_step_seconds(self) -> list[float]:
        """Of each step point: as the device runs whole steps by itself, else all layers and the tail."""
        if device_steps := _slowest([one.device_steps for one in self.ranks]):
            return device_steps
        layers = _slowest([_weighted(one.kinds, lambda kind: kind.together_steps, _all_layers) for one in self.ranks])
        return [sum(both) for both in zip(layers, _slowest([one.tails for one in self.ranks]), strict=True)]


def times_as_long(found: Measurement, known: Costs) -> tuple[float, ...]:
    """What was found over what `known` says, of as many ranks: of the plan's first chunk and first step.

    Infinite where nothing is known of what was found.
    """
    now, then = first_seconds(found.costs, found.plan), first_seconds(known, found.plan)
    return tuple(new / old if old > 0 else inf for new, old in zip(now, then, strict=True) if new > 0)


def first_seconds(costs: Costs, plan: MeasuringPlan) -> list[float]:
    """Of a chunk on each stage and under tensor parallelism, and of a step in each layout; 0: not known."""
    (chunk, *_), ((cached, batch), *_) = plan.chunks, plan.steps
    chunks = [*costs.stages, costs.tensor_prefill]
    steps = [costs.decode_layer, costs.decode_tensor]
    return [cost.seconds(*chunk) if cost else 0.0 for cost in chunks] + [
        cost.seconds(batch, cached) if cost else 0.0 for cost in steps
    ]


def timed(
    plan: MeasuringPlan,
    ask: Callable[[MeasureCosts], tuple[CostsMeasured, ...]],
    on_part: Callable[[str], None] | None = None,
) -> tuple[CostsMeasured, ...]:
    """Ask all ranks for all of a plan, in its rounds: the best answers, by rank. `on_part` is told what begins."""
    answers: list[tuple[CostsMeasured, ...]] = []
    for words, command in plan.commands():
        if on_part is not None:
            on_part(words)
        rounds = [ask(command) for _ in range(plan.rounds)]
        answers.append(tuple(best(reports) for reports in zip(*rounds, strict=True)))
    return tuple(joined(reports) for reports in zip(*answers, strict=True))


def joined(reports: Sequence[CostsMeasured]) -> CostsMeasured:
    """One rank's answers to several commands as one, points in the order asked."""
    kinds: dict[tuple[int, ...], list[KindSeconds]] = {}
    for report in reports:
        for kind in report.kinds:
            kinds.setdefault(kind.layers, []).append(kind)

    def together(parts: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(value for part in parts for value in part)

    return CostsMeasured(
        reports[0].rank,
        kinds=tuple(
            KindSeconds(
                layers,
                *(together([getattr(one, name) for one in found]) for name in KindSeconds.__struct_fields__[1:]),
            )
            for layers, found in kinds.items()
        ),
        hops=together([one.hops for one in reports]),
        tails=together([one.tails for one in reports]),
        heads=together([one.heads for one in reports]),
        device_steps=together([one.device_steps for one in reports]),
        reduces=together([one.reduces for one in reports]),
        transfers=tuple(transfer for one in reports for transfer in one.transfers),
        host_copies=together([one.host_copies for one in reports]),
        embeds=together([one.embeds for one in reports]),
        past_in_runs=any(one.past_in_runs for one in reports),
    )


def best(rounds: Sequence[CostsMeasured]) -> CostsMeasured:
    """One rank's answers to the same command, given some times: of every figure the least."""
    if len(rounds) == 1:
        return rounds[0]
    same = [msgspec.to_builtins(one) for one in rounds]
    return msgspec.convert(_least(same), CostsMeasured)


def _least(same: Sequence[Any]) -> Any:
    first = same[0]
    if isinstance(first, dict):
        return {key: _least([one[key] for one in same]) for key in first}
    if isinstance(first, list | tuple):
        return [_least(values) for values in zip(*same, strict=True)]
    return min(same) if isinstance(first, float) else first


def shift_bytes_a_token(spec: ModelSpec, placement: Placement, kv_format: KvFormat) -> int:
    """Bytes of one token's keys and values that the busiest rank sends or receives in a shift, either way."""
    ranks = range(placement.ranks)
    size = {
        (stage, part): bundle_bytes(spec, placement, stage, part, kv_format) for stage in ranks for part in ranks
    }
    columns = [sum(size[stage, rank] for stage in ranks if stage != rank) for rank in ranks]
    rows = [sum(size[rank, part] for part in ranks if part != rank) for rank in ranks]
    return max((*columns, *rows)) // BLOCK_TOKENS


def _completed(found: Measurement) -> tuple[CostsMeasured, ...]:
    """Layers that migrate lie in the layer layout as they are timed: parts are judged by their share of the whole.

    That is too little where launches take most of the time, but better than nothing to compare with.
    """
    ranks, plan = found.ranks, found.plan
    unknown = [index for index in range(len(ranks[0].kinds)) if not all(one.kinds[index].part for one in ranks)]
    if not unknown or not plan.tensor_chunks:
        return ranks
    reduces = list(zip(plan.reduce_bytes, _slowest([one.reduces for one in ranks]), strict=True))
    sums = {rows: 2 * interpolated(reduces, 4 * found.hidden * rows) for _, rows in (*plan.chunks, *plan.steps)}
    judged = {
        (rank, index): _judged(plan, sums, share, ranks[rank].kinds[index], [one.kinds[index] for one in ranks])
        for rank, share in enumerate(_tensor_shares(found.placement))
        for index in unknown
    }
    return tuple(
        replace(one, kinds=tuple(judged.get((rank, index), kind) for index, kind in enumerate(one.kinds)))
        for rank, one in enumerate(ranks)
    )


def _judged(
    plan: MeasuringPlan, sums: Mapping[int, float], share: float, kind: KindSeconds, on_all: Sequence[KindSeconds]
) -> KindSeconds:
    """`sums`: seconds of a layer's all-reduces by rows. `on_all`: the same kind on every rank."""
    whole = kind.whole or _slowest([one.whole for one in on_all if one.whole])
    steps = kind.whole_steps or _slowest([one.whole_steps for one in on_all if one.whole_steps])
    part, part_steps = [share * seconds for seconds in whole], [share * seconds for seconds in steps]
    return replace(
        kind,
        part=tuple(part),
        together=tuple(own + sums[rows] for own, (_, rows) in zip(part, plan.chunks, strict=True)),
        part_steps=tuple(part_steps),
        together_steps=tuple(own + sums[rows] for own, (_, rows) in zip(part_steps, plan.steps, strict=True)),
    )


def _costs(found: Measurement) -> Costs:
    plan, link = found.plan, _link(found)
    shift = ShiftCost()
    if link is not None:
        others = found.placement.ranks - 1
        fixed_seconds = COMMIT_SECONDS + link.seconds_per_transfer * others
        shift = ShiftCost(fixed_seconds, found.shift_bytes / link.bytes_per_second)
    tensor_seconds = found.tensor_seconds()
    host = [_line(plan.host_copy_bytes, one.host_copies) for one in found.ranks if one.host_copies]
    return Costs(
        stages=tuple(
            fit_points(plan.chunks, found.stage_seconds(rank), found.ranks[rank].past_in_runs)
            for rank in range(found.placement.ranks)
        ),
        tensor_prefill=fit_points(plan.tensor_chunks, tensor_seconds, any(one.past_in_runs for one in found.ranks))
        if tensor_seconds
        else None,
        decode_layer=_step_cost(plan.steps, found.layer_step_seconds()),
        decode_tensor=_step_cost(plan.steps, found.tensor_step_seconds()) if tensor_seconds else None,
        to_tensor=shift,
        to_layer=shift,
        link=link,
        host_link=min(host, key=lambda one: one.bytes_per_second, default=None),
        layer_seconds=_layer_seconds(found),
        all_reduces=tuple(zip(plan.reduce_bytes, _slowest([one.reduces for one in found.ranks]), strict=True)),
        overhead=found.overhead(),
    )


def fit_points(points: Points, seconds: Sequence[float], past_in_runs: bool = False) -> ChunkCost:
    """Without any seconds: of a stage that has no layers."""
    if not seconds:
        return ChunkCost(0.0, 0.0)
    timed = [(cached, tokens, value) for (cached, tokens), value in zip(points, seconds, strict=True)]
    return fit(timed, past_in_runs)


def _step_cost(points: Points, seconds: Sequence[float]) -> StepCost:
    """A batch's seconds never fall with its size, as noise would have it."""
    timed = dict(zip(points, seconds, strict=True))
    shallow = points[0][0]
    single = {cached: value for (cached, batch), value in timed.items() if batch == 1}
    deepest = max(single)
    slope = max(0.0, single[deepest] - single[shallow]) / (deepest - shallow) if deepest > shallow else 0.0
    batches = [batch for cached, batch in points if cached == shallow]
    flat = [max(timed[shallow, batch] - slope * batch * shallow, 0.1 * timed[shallow, batch]) for batch in batches]
    return StepCost(tuple(zip(batches, accumulate(flat, max), strict=True)), slope)


def _link(found: Measurement) -> LinkCost | None:
    """The slowest pair's; a transfer has ended when both ends say so."""
    ends: dict[tuple[int, int], dict[int, float]] = {}
    for one in found.ranks:
        for transfer in one.transfers:
            way = ends.setdefault((transfer.source, transfer.target), {})
            way[transfer.byte_count] = max(way.get(transfer.byte_count, 0.0), transfer.seconds)
    links = [_line(tuple(way), tuple(way.values())) for way in ends.values()]
    return max(links, key=lambda link: link.seconds(TRANSFER_BYTES[-1]), default=None)


def _line(byte_counts: Sequence[int], seconds: Sequence[float]) -> LinkCost:
    """Through the smallest and the largest transfer."""
    (small, first), *_, (large, last) = sorted(zip(byte_counts, seconds, strict=True))
    speed = (large - small) / (last - first) if last > first else large / max(last, 1e-9)
    return LinkCost(max(0.0, first - small / speed), speed)


def _layer_seconds(found: Measurement) -> LayerSeconds | None:
    """None where a kind's parts could not be timed: they are not at hand in the layer layout."""
    if not all(kind.part and kind.part_steps for one in found.ranks for kind in one.kinds):
        return None
    shares = _tensor_shares(found.placement)
    return LayerSeconds(
        kinds=tuple(_kind_cost(found, index, shares) for index in range(len(found.ranks[0].kinds))),
        tensor_shares=shares,
        head_step_seconds=tuple(one.heads[0] for one in found.ranks),
    )


def _kind_cost(found: Measurement, index: int, shares: Sequence[float]) -> LayerKindCost:
    kinds, points = [one.kinds[index] for one in found.ranks], found.plan.chunks
    in_runs = [one.past_in_runs for one in found.ranks]
    timed = next((rank for rank, kind in enumerate(kinds) if kind.whole), None)
    whole = []
    for rank, kind in enumerate(kinds):
        if kind.whole or timed is None:
            whole.append(fit_points(points, kind.whole, in_runs[rank]))
            continue
        # Not on this rank: as another rank needs for it, times how much slower this one is with its own part.
        parts = zip(kind.part, kinds[timed].part, strict=True)
        slower = fmean(mine / theirs for mine, theirs in parts) * shares[timed] / shares[rank] if shares[rank] else 1.0
        whole.append(fit_points(points, [slower * seconds for seconds in kinds[timed].whole], in_runs[timed]))
    return LayerKindCost(
        layers=kinds[0].layers,
        whole=tuple(whole),
        part_chunk=tuple(fit_points(points, kind.part, runs) for kind, runs in zip(kinds, in_runs, strict=True)),
        part_step_seconds=tuple(kind.part_steps[0] for kind in kinds),
    )


def _tensor_shares(placement: Placement) -> tuple[float, ...]:
    """Each rank's mean share of the layers, by feed-forward columns."""
    widths = [[len(part.feed_forward) for part in cut.parts] for cut in placement.layers]
    return tuple(fmean(parts[rank] / max(1, sum(parts)) for parts in widths) for rank in range(placement.ranks))


def _weighted(
    kinds: Sequence[KindSeconds],
    seconds: Callable[[KindSeconds], tuple[float, ...]],
    count: Callable[[KindSeconds], int],
) -> list[float]:
    """By point: each kind's seconds times how many layers of it there are. Empty where one was not timed."""
    kinds = [kind for kind in kinds if count(kind)]
    columns = [[count(kind) * value for value in seconds(kind)] for kind in kinds]
    return [sum(values) for values in zip(*columns, strict=True)] if all(columns) else []


def _count(kind: KindSeconds, layers: LayerRange) -> int:
    return sum(1 for layer in kind.layers if layer in layers)


def _all_layers(kind: KindSeconds) -> int:
    return len(kind.layers)


def _added(seconds: Sequence[float], more: Sequence[float]) -> list[float]:
    """By point; nothing is added to nothing."""
    return [sum(both) for both in zip(seconds, more, strict=True)] if seconds and more else list(seconds)


def _slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    return [max(values) for values in zip(*by_rank, strict=True)]
