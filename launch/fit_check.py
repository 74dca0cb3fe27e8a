"""Whether a model fits on this machine, as a line of `gearshift doctor`. Pure."""

from collections.abc import Sequence

from ..coordinator.memory_fit import RankNeed, largest_context, rank_needs, shared
from ..coordinator.policy import journeys
from ..proto.ids import ComputeType, KvType
from ..proto.kv import KvFormat
from ..proto.model import ModelSpec
from ..proto.placement.plan import Placement
from ..proto.probe import ProbedDevice
from .diagnosis import GIBIBYTE, Check, Verdict
from .options import Device, GroupSettings, LayoutSettings

NAME = "model"
ELEMENT_BYTES = {ComputeType.F32: 4, ComputeType.BF16: 2}
# All that is neither weights nor KV. CPU: 100 to 200 MiB were seen for Python, torch and buffers of a 2-worker run.
CPU_OTHER_BYTES = 256 << 20
CUDA_OTHER_BYTES = 700 << 20
USUAL_CONTEXT_TOKENS = 4096


def fit_check(
    spec: ModelSpec,
    placement: Placement,
    settings: GroupSettings,
    layouts: LayoutSettings,
    context_tokens: int | None,
    free_memory_bytes: int,
    devices: Sequence[ProbedDevice],
) -> Check:
    """The model on as many workers as `placement` has: on their cards where each has one, else in this memory."""
    wanted = context_tokens or min(USUAL_CONTEXT_TOKENS, spec.trained_context)
    on_cards = settings.device is not Device.CPU and len(devices) >= placement.ranks
    if settings.device is Device.CUDA and not on_cards:
        found = f"{placement.ranks} workers, {len(devices)} CUDA devices"
        return Check(NAME, Verdict.PROBLEM, found, "fewer --workers, or --device cpu")
    if on_cards:
        needs = _needs(spec, placement, settings, layouts, None)
        free = [device.free_bytes for device in devices[: placement.ranks]]
        return _check(spec, needs, free, wanted, "in the file's types")
    return _check_cpu(spec, placement, settings, layouts, wanted, free_memory_bytes)


def _check_cpu(
    spec: ModelSpec,
    placement: Placement,
    settings: GroupSettings,
    layouts: LayoutSettings,
    wanted: int,
    free_bytes: int,
) -> Check:
    """Of the compute types that may be chosen the largest must fit; else the user may choose a smaller one."""
    kinds = [settings.compute_type] if settings.compute_type else [ComputeType.F32, ComputeType.BF16]
    checks = [
        _check(spec, [shared(_needs(spec, placement, settings, layouts, kind))], [free_bytes], wanted, f"in {kind}")
        for kind in kinds
    ]
    first, last = checks[0], checks[-1]
    if first.verdict is Verdict.PROBLEM and last.verdict is Verdict.OK:
        return Check(NAME, Verdict.NOTE, f"{first.found}; {last.found}", f"run it with --compute-type {kinds[-1]}")
    return first


def _needs(
    spec: ModelSpec,
    placement: Placement,
    settings: GroupSettings,
    layouts: LayoutSettings,
    compute_type: ComputeType | None,
) -> tuple[RankNeed, ...]:
    """`compute_type` None: on cards, with the file's weights and an f16 KV."""
    usual = KvType(compute_type) if compute_type else KvType.F16
    return rank_needs(
        spec,
        placement,
        settings.kv_format or KvFormat(usual, usual),
        journeys(placement.ranks, layouts.prefill, layouts.decode),
        element_bytes=ELEMENT_BYTES[compute_type] if compute_type else None,
        other_bytes=CPU_OTHER_BYTES if compute_type else CUDA_OTHER_BYTES,
    )


def _check(
    spec: ModelSpec, needs: Sequence[RankNeed], free_bytes: Sequence[int], wanted: int, how: str
) -> Check:
    most = largest_context(needs, free_bytes, spec.trained_context)
    tightest = min(range(len(needs)), key=lambda one: free_bytes[one] - needs[one].total_bytes(wanted))
    need, free = needs[tightest].total_bytes(wanted), free_bytes[tightest]
    where = f" on rank {tightest}" if len(needs) > 1 else ""
    weights = needs[tightest].weight_bytes
    found = (
        f"{how}: {_size(need)}{where} for {wanted} tokens of context ({_size(weights)} of it weights), "
        f"{_size(free)} free; largest context {most} of {spec.trained_context}"
    )
    if wanted <= most or (wanted > spec.trained_context and need <= free):
        return Check(NAME, Verdict.OK, f"{spec.name} fits {found}")
    advice = f"--context {most} or less" if most else "more --workers on other cards, or a smaller quantisation"
    return Check(NAME, Verdict.PROBLEM, f"{spec.name} does not fit {found}", advice)


def _size(byte_count: int) -> str:
    return f"{byte_count / GIBIBYTE:.2f} GiB"
