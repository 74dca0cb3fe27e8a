"""What ranks of made-up speeds would answer to `MeasureCosts`."""

from gearshift.coordinator.costs.measuring import Measurement, joined, shift_bytes_a_token
from gearshift.coordinator.costs.measuring_plan import MeasuringPlan, measuring_plan
from gearshift.proto.commands import MeasureCosts
from gearshift.proto.ids import KvType, Rank
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement.cuts import place
from gearshift.proto.reports import CostsMeasured, KindSeconds, TransferSeconds
from gearshift.tests.helpers.specs import layer_spec, model_spec

SPEC = model_spec([layer_spec()] * 4, vocab=60)
PLAN = measuring_plan("cpu", 2, 4096, 512, 8)

LAYER = (1e-3, 1e-5, 1e-9)  # b, a, q of a whole layer on a rank of speed 1
STEP_SECONDS = 2e-3
STEP_A_REQUEST = 1e-4
STEP_A_CACHED_TOKEN = 1e-7
REDUCE_SECONDS = 1e-5
HOP_SECONDS, TAIL_SECONDS, HEAD_SECONDS = 1e-5, 5e-4, 2e-4
LINK = (1e-4, 1e9)  # seconds of a transfer, bytes a second


def measured_costs(
    rank: Rank, ranks: int, layers: int, command: MeasureCosts, speed: float = 1.0, stage: range | None = None
) -> CostsMeasured:
    """`layers` alike ones; `stage`: those of this rank, None: it has some. Parts are equal. Speeds divide times."""
    b, a, q = (value / speed for value in LAYER)

    def chunk(cached: int, tokens: int) -> float:
        return b + a * tokens + q * tokens * (2 * cached + tokens)

    def step(cached: int, batch: int) -> float:
        return (STEP_SECONDS + STEP_A_REQUEST * batch + STEP_A_CACHED_TOKEN * cached * batch) / speed

    whole = tuple(chunk(*point) for point in command.chunks) if stage is None or len(stage) else ()
    whole_steps = tuple(step(*point) for point in command.steps) if stage is None or len(stage) else ()
    kind = KindSeconds(
        layers=tuple(range(layers)),
        whole=whole,
        part=tuple(chunk(*point) / ranks for point in command.chunks),
        together=tuple(chunk(*point) / ranks + 2 * REDUCE_SECONDS for point in command.tensor_chunks),
        whole_steps=whole_steps,
        part_steps=tuple(step(*point) / ranks for point in command.steps),
        together_steps=tuple(step(*point) / ranks + 2 * REDUCE_SECONDS for point in command.steps),
    )
    neighbours = sorted({(rank + 1) % ranks, (rank - 1) % ranks} - {rank})
    ways = [way for other in neighbours for way in ((rank, Rank(other)), (Rank(other), rank))]
    return CostsMeasured(
        rank,
        kinds=(kind,),
        hops=(HOP_SECONDS,) * len(command.steps),
        tails=(TAIL_SECONDS,) * len(command.steps),
        heads=(HEAD_SECONDS / speed,) * len(command.steps),
        reduces=tuple(REDUCE_SECONDS + size / LINK[1] for size in command.reduce_bytes),
        transfers=tuple(
            TransferSeconds(source, target, size, LINK[0] + size / LINK[1])
            for source, target in ways
            for size in command.transfer_bytes
        ),
    )


def measured(
    speeds: tuple[float, ...] = (1.0, 1.0), plan: MeasuringPlan = PLAN, cuts: tuple[int, ...] = (2,)
) -> Measurement:
    """Ranks of these speeds that hold `SPEC`, as made up above, command by command."""
    placement, ranks = place(SPEC, len(speeds), layer_cuts=cuts), len(speeds)
    answers = []
    for rank, speed in enumerate(speeds):
        stage = range(len(placement.stages[rank]))
        told = (measured_costs(Rank(rank), ranks, 4, command, speed, stage) for _, command in plan.commands())
        answers.append(joined(list(told)))
    shift_bytes = shift_bytes_a_token(SPEC, placement, KvFormat(KvType.F16, KvType.F16))
    return Measurement(plan, placement, tuple(answers), shift_bytes, SPEC.hidden)
