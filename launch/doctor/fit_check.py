"""Whether a model fits on this machine, as a line of `gearshift doctor`. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from ...coordinator.fit.choice import ContextWish, ways_to_fit, with_usual_chunk
from ...coordinator.fit.device_memory import DeviceMemory, pools, told_bytes
from ...coordinator.fit.memory import FitCase, Pool, RankMemory, largest_context
from ...proto.errors import DoesNotFitError
from ...proto.ids import ComputeType
from ...proto.model import ModelSpec
from ...proto.placement.memory import Holding
from ...proto.probe import PeerTest, ProbedDevice, usual_compute_type
from ...proto.words import counted
from ..settings.options import Device, GroupSettings, LayoutSettings
from ..start.fitting import GroupPlan, fit_type, memory_wish, names_no_shares
from .card_process import card_process_bytes, nccl_case, told_card_process
from .diagnosis import Check, Verdict, cards_reach

NAME = "model"
# What a worker's process takes before it loads anything. CPU: Python and torch, as measured with a tiny model.
CPU_PROCESS_BYTES = 160 << 20
USUAL_CONTEXT_TOKENS = 4096
LEAST_CONTEXT_TOKENS = 512


def fit_check(
    spec: ModelSpec,
    settings: GroupSettings,
    layouts: LayoutSettings,
    context_tokens: int | None,
    free_memory_bytes: int,
    devices: Sequence[ProbedDevice],
    displays: Collection[str] = (),
    peers: Sequence[PeerTest] = (),
) -> Check:
    """The model on `settings.workers` workers: on their cards where each has one, else in this memory.

    `displays`: uuids of the cards that drive one. `peers`: how devices copy to each other.
    """
    usual = min(USUAL_CONTEXT_TOKENS, spec.trained_context)
    least = min(usual, LEAST_CONTEXT_TOKENS)
    wish = ContextWish(context_tokens or usual, asked=context_tokens is not None, needed=least)
    plan = GroupPlan(spec, settings, layouts, shares_open=names_no_shares(settings))
    on_cards = settings.device is not Device.CPU and len(devices) >= settings.workers
    if settings.device is Device.CUDA and not on_cards:
        found = f"{counted(settings.workers, 'worker')}, {counted(len(devices), 'CUDA device')}"
        return Check(NAME, Verdict.PROBLEM, found, "fewer --workers, or --device cpu")
    if on_cards:
        taken = devices[: settings.workers]
        without_nccl = nccl_case(settings, reach=cards_reach(taken, peers)).without
        cards = [_card(device, displays, settings.workers, without_nccl) for device in taken]
        types = {usual_compute_type(device.capability) for device in taken}
        kind = settings.compute_type or (ComputeType.F16 if ComputeType.F16 in types else ComputeType.BF16)
        check = _check(plan, "cuda", kind, cards, wish)
        assumed = dict.fromkeys(
            told_card_process(device.total_bytes, settings.workers, without_nccl) for device in taken
        )
        return replace(check, found="; ".join((check.found, *assumed)))
    host = DeviceMemory("host", "this host", free_memory_bytes, 0, coming_bytes=CPU_PROCESS_BYTES)
    return _check_cpu(plan, [host] * settings.workers, wish)


def _card(device: ProbedDevice, displays: Collection[str], workers: int, without_nccl: bool) -> DeviceMemory:
    coming = card_process_bytes(device.total_bytes, workers, without_nccl)
    return DeviceMemory(
        device.uuid, f"cuda:{device.index}", device.free_bytes, 0, device.uuid in displays, coming
    )


def _check_cpu(plan: GroupPlan, host: Sequence[DeviceMemory], wish: ContextWish) -> Check:
    """Of the compute types that may be chosen the largest must fit; else the smaller one is taken."""
    asked = plan.settings.compute_type
    if asked is not None:
        return _check(plan, "cpu", asked, host, wish)
    first, last = (_check(plan, "cpu", kind, host, wish) for kind in (ComputeType.F32, ComputeType.BF16))
    if first.verdict is not Verdict.OK and last.verdict is Verdict.OK:
        return Check(NAME, Verdict.NOTE, f"{first.found}; {last.found}", "it is run in bf16")
    if first.verdict is not Verdict.OK:
        return first
    case, found = _case(plan, "cpu", ComputeType.BF16, host, wish), pools(host, memory_wish(plan.settings))
    needed, tight = _tightest(case.memory(wish.tokens), found)
    chosen = "the faster of the two is taken, timed as the model is loaded"
    return replace(first, found=f"{first.found}; in bf16 {told_bytes(needed)} on {tight.name}: {chosen}")


def _case(
    plan: GroupPlan, device_kind: str, compute_type: ComputeType, devices: Sequence[DeviceMemory], wish: ContextWish
) -> FitCase:
    case = plan.case(plan.placement(), device_kind, compute_type)
    if case.max_chunk_tokens:
        return case
    held, room = [one.base_bytes for one in devices], [one.room_bytes for one in devices]
    return with_usual_chunk(case, wish.tokens, held, room)


def _check(
    plan: GroupPlan, device_kind: str, compute_type: ComputeType, devices: Sequence[DeviceMemory], wish: ContextWish
) -> Check:
    """OK as asked for; a note where something gives way; a problem where nothing fits."""
    spec, settings, wanted = plan.spec, plan.settings, wish.tokens
    case = _case(plan, device_kind, compute_type, devices, wish)
    found = pools(devices, memory_wish(settings))
    most = largest_context(case, found, spec.trained_context)
    fits = wanted <= most or (wanted > spec.trained_context and largest_context(case, found, wanted) == wanted)
    how = "in the file's types" if case.holding is Holding.PLANES else f"in {compute_type}"
    told = _told(case, found, wanted, how, most)
    if fits:
        return Check(NAME, Verdict.OK, f"{spec.name} fits {told}")
    try:
        fit = fit_type(plan, plan.placement(), devices, device_kind, wish, found, compute_type)
    except DoesNotFitError:
        ways = list(ways_to_fit(case, found, wish, plan.placement))
        advice = "; or ".join(ways) if ways else "more --workers on other cards, or a smaller quantisation"
        return Check(NAME, Verdict.PROBLEM, f"{spec.name} does not fit {told}", advice)
    given = "; ".join((*fit.warnings, *fit.notes))
    return Check(NAME, Verdict.NOTE, f"{spec.name} does not fit as it is {told}", f"it runs so: {given}")


def _told(case: FitCase, found: Sequence[Pool], wanted: int, how: str, most: int) -> str:
    """The tightest pool's figures."""
    memory = case.memory(wanted)
    needed, tight = _tightest(memory, found)
    weights = sum(memory[rank].weight_bytes for rank in tight.ranks)
    kv = sum(memory[rank].kv_bytes for rank in tight.ranks)
    return (
        f"{how}: {told_bytes(needed)} on {tight.name} for {counted(wanted, 'token')} of context "
        f"({told_bytes(weights)} of it weights, {told_bytes(kv)} KV), {told_bytes(tight.budget_bytes)} to be had "
        f"({tight.why}); largest context {most} of {case.spec.trained_context}"
    )


def _tightest(memory: Sequence[RankMemory], found: Sequence[Pool]) -> tuple[int, Pool]:
    """What the pool with the least to spare is asked for, and that pool."""
    needs = {pool: sum(memory[rank].peak_bytes for rank in pool.ranks) for pool in found}
    tight = min(found, key=lambda pool: pool.budget_bytes - needs[pool])
    return needs[tight], tight
