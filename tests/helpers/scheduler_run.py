"""A scheduler driven over a fake group, without a driver and without a clock."""


from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from gearshift.coordinator.chunks.plan import Fixed, Limits
from gearshift.coordinator.generation import (
    GenerationRequest,
    RequestPlan,
    TokenEvent,
)
from gearshift.coordinator.policy.planning import GroupSnapshot, plan_request
from gearshift.coordinator.schedule.events import Ended, SchedulerEvent
from gearshift.coordinator.schedule.scheduler import Scheduler, SchedulerSettings
from gearshift.coordinator.schedule.session import Session
from gearshift.coordinator.schedule.slots import SlotPool, slots_needed
from gearshift.proto.ids import Layout, RequestId
from gearshift.proto.reports import KvHashed, ShiftCommitted, ShiftDamaged, ShiftPrepared, TickFinished
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.fake_group import FakeGroup

VOCAB = 97
CONTEXT = 400
LAYER, TENSOR = Layout.LAYER, Layout.TENSOR
GREEDY = SamplingParameters(temperature=0)


@dataclass
class Run:
    """A scheduler and a fake group, driven until nothing is left."""

    scheduler: Scheduler
    group: FakeGroup
    pool: SlotPool
    events: list[SchedulerEvent] = field(default_factory=list)

    def send(self) -> None:
        for command in self.scheduler.next_commands():
            self.group.broadcast(command)

    def report(self) -> None:
        report = self.group.receive(1.0)
        match report:
            case TickFinished():
                self.scheduler.tick_finished(report)
            case ShiftPrepared():
                self.scheduler.shift_prepared(report)
            case ShiftCommitted():
                self.scheduler.shift_committed(report)
            case ShiftDamaged():
                self.scheduler.shift_damaged(report)
            case KvHashed():
                self.scheduler.kv_hashed(report)
            case _:
                raise AssertionError(f"nothing comes any more, but the scheduler waits: {report}")
        self.events += self.scheduler.take_events()

    def finish(self) -> None:
        self.send()
        while not self.scheduler.idle:
            self.report()
            self.send()
        self.events += self.scheduler.take_events()

    def sessions(self) -> dict[int, Session]:
        return {event.session.plan.request_id: event.session for event in self.events if isinstance(event, Ended)}

    def tokens(self, request: int) -> list[int]:
        events = [event for event in self.events if isinstance(event, TokenEvent)]
        return [event.token.token for event in events if event.request == request]


def new_run(
    ranks: int,
    *,
    requests_of_context: int = 2,
    seed: int = 0,
    steps: int = 4,
    max_open: int = 8,
    empty: frozenset[tuple[int, int]] = frozenset(),
    declining: frozenset[int] = frozenset(),
    damaging: Mapping[int, int] | None = None,
    failing_after: int | None = None,
) -> Run:
    one = slots_needed(-(-CONTEXT // 64), ranks, empty, [(LAYER, TENSOR), (TENSOR, LAYER)])
    slots = tuple(requests_of_context * count for count in one)
    pool = SlotPool(slots, empty)
    group = FakeGroup(
        ranks, slots, vocab=VOCAB, random=Random(seed), empty=empty, declining=declining, damaging=damaging,
        failing_after=failing_after,
    )  # fmt: skip
    return Run(Scheduler(SchedulerSettings(ranks, max_open, steps), pool), group, pool)


def plan(request_id: int, request: GenerationRequest, ranks: int) -> RequestPlan:
    return plan_request(
        RequestId(request_id),
        replace(request, sampling=GREEDY),
        GroupSnapshot(ranks, VOCAB, CONTEXT, costs=None, limits=Limits(8, 16, 128)),
    )


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt * 31 + index * index * 7 + 3) % VOCAB for index in range(length))


def asked(length: int, max_tokens: int | None, prefill: Layout, decode: Layout, chunk: int = 8) -> GenerationRequest:
    return GenerationRequest(prompt_of(length), max_tokens, prefill=prefill, decode=decode, chunk_rule=Fixed((chunk,)))


def of_type(group: FakeGroup, kind: type) -> list[object]:
    """The commands of a kind in the log, in order."""
    return [command for command in group.log if isinstance(command, kind)]
