"""How a group would lie on this machine's memory, for `gearshift plan`: arithmetic over what is free now, no worker."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...coordinator.costs.cost_model import Costs
from ...coordinator.fit.choice import ContextWish, with_usual_chunk
from ...coordinator.fit.device_memory import RESERVE_BYTES, DeviceMemory, rank_limits
from ...coordinator.fit.memory import FitCase, RankMemory
from ...coordinator.residency.regret import Regret
from ...coordinator.residency.weight_keeper import WeightKeeper
from ...coordinator.residency.weight_prices import regret_now
from ...proto.device_table import CardRow, read_cards
from ...proto.errors import DoesNotFitError, InputError
from ...proto.host_memory import free_memory_bytes
from ...proto.ids import ComputeType, Layout
from ...proto.placement.migration import migration
from ...proto.visible_devices import visible_devices
from ..doctor.card_process import card_process_bytes, nccl_case, told_card_process
from ..doctor.fit_check import CPU_PROCESS_BYTES
from ..settings.options import GroupSettings
from ..start.fitting import GroupPlan, fit_group

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """Where the model lies and what each rank takes. `told`: what had to be given up, or why it does not fit."""

    case: FitCase
    context_tokens: int
    memory: tuple[RankMemory, ...]
    told: tuple[str, ...] = ()

    def regret(self, costs: Costs) -> Regret | None:
        """What moving migrating weights would take at the speed of the links; None where none migrate."""
        case = self.case
        if not case.placement.migrating:
            return None
        ways = {to: migration(case.spec, case.placement, to, case.holding) for to in Layout}
        return regret_now(WeightKeeper(case.placement.ranks, ways), costs, None, idle=True)


def plan_memory(
    plan: GroupPlan,
    device_kind: str,
    compute_type: ComputeType,
    wish: ContextWish,
    elsewhere: tuple[int, ...] = (),
    without_nccl: bool = False,
) -> PlannedMemory:
    """As the group would be started now; where the devices are not there, or it does not fit, as if it did.

    `elsewhere`: what each card of another machine has free, by rank. Cards that are nowhere named are as large as the
    memory limits. `without_nccl`: cards that are known to go so; whether these reach each other is not looked up.
    """
    settled = replace(plan, settings=replace(plan.settings, compute_type=compute_type))
    without_nccl = without_nccl or nccl_case(plan.settings).without
    workers = plan.settings.workers
    none: tuple[int | None, ...] = ()
    on_host = ((_host(),) * workers, none)
    devices, totals = on_host if device_kind == CPU else _card_devices(plan.settings, elsewhere, without_nccl)
    assumed = tuple(dict.fromkeys(told_card_process(total, workers, without_nccl) for total in totals))
    placement = settled.placement()
    told: tuple[str, ...] = ()
    if devices:
        try:
            fit = fit_group(settled, placement, devices, device_kind, wish).fit
            return PlannedMemory(
                fit.case, fit.context_tokens, fit.memory, (*fit.warnings, *fit.notes, *assumed)
            )
        except DoesNotFitError as error:
            told = (str(error),)
    case = settled.case(placement, device_kind, compute_type)
    if not case.max_chunk_tokens:
        process_bytes = CPU_PROCESS_BYTES if device_kind == CPU else card_process_bytes(None, workers, without_nccl)
        held = [one.base_bytes for one in devices] or [process_bytes] * placement.ranks
        case = with_usual_chunk(case, wish.tokens, held, [one.room_bytes for one in devices])
    return PlannedMemory(case, wish.tokens, case.memory(wish.tokens), (*told, *assumed))


def _host() -> DeviceMemory:
    return DeviceMemory("host", "this host", free_memory_bytes(), 0, coming_bytes=CPU_PROCESS_BYTES)


def _card_devices(
    settings: GroupSettings, elsewhere: tuple[int, ...], without_nccl: bool
) -> tuple[tuple[DeviceMemory, ...], tuple[int | None, ...]]:
    """(a device a worker, the memory of their cards in all); nothing where no card is known."""
    workers = settings.workers
    if len(elsewhere) != workers:
        cards = _cards(workers)
        if cards or settings.memory_limits is None:
            return _devices(cards, without_nccl), tuple(card.total_bytes for card in cards)
        reserve = RESERVE_BYTES if settings.reserve_bytes is None else settings.reserve_bytes
        limits = rank_limits(settings.memory_limits, workers)
        elsewhere = tuple(reserve + (limit or 0) for limit in limits)  # so that the limits alone count
    rows = (
        DeviceMemory(
            f"card {rank}", f"rank {rank}", free, 0, coming_bytes=card_process_bytes(free, workers, without_nccl)
        )
        for rank, free in enumerate(elsewhere)
    )
    return tuple(rows), elsewhere


def _cards(workers: int, environment: Mapping[str, str] = os.environ) -> tuple[CardRow, ...]:
    """One a worker; none where the machine has fewer, or does not tell what is free on them."""
    cards = {card.device.uuid: card for card in read_cards()}
    try:
        visible = visible_devices(environment, [card.device for card in cards.values()])
    except InputError:
        return ()
    found = [cards[row.uuid] for row in visible[:workers] if cards[row.uuid].free_bytes is not None]
    return tuple(found) if len(found) == workers else ()


def _devices(cards: Sequence[CardRow], without_nccl: bool) -> tuple[DeviceMemory, ...]:
    return tuple(
        DeviceMemory(
            card.device.uuid, f"cuda:{index}", card.free_bytes or 0, 0, card.display,
            card_process_bytes(card.total_bytes, len(cards), without_nccl),
        )
        for index, card in enumerate(cards)
    )  # fmt: skip
