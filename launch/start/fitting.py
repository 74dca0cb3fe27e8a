"""What a group is started with, from its settings and the memory that its devices have left. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...coordinator.fit.choice import SHORT_CHUNKS, ContextWish, Fit, candidates, choose_fit, with_usual_chunk
from ...coordinator.fit.device_memory import DeviceMemory, MemoryWish, pools
from ...coordinator.fit.memory import FitCase, Pool
from ...coordinator.policy.policy import journeys
from ...proto.errors import DoesNotFitError
from ...proto.ids import ComputeType, KvType
from ...proto.kv import KvFormat
from ...proto.model import ModelSpec
from ...proto.placement.cuts import place
from ...proto.placement.memory import holding_on
from ...proto.placement.plan import Placement
from ...proto.reports import Hello
from ..settings.options import GroupSettings, LayoutSettings


@dataclass(frozen=True, slots=True)
class GroupFit:
    """`compute_type` None: left to the workers, any fits."""

    fit: Fit
    compute_type: ComputeType | None


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A model on some workers as the settings have it, before anything is known of their memory."""

    spec: ModelSpec
    settings: GroupSettings
    layouts: LayoutSettings
    parallel_requests: int = 1
    shares_open: bool = False  # the user named none: those in the settings may be changed where they do not fit

    def placement(
        self,
        *,
        shares: tuple[float, ...] | None = None,
        whole_layers: frozenset[int] = frozenset(),
        migrating_layers: frozenset[int] = frozenset(),
    ) -> Placement:
        """Where the model lies; with `shares` those of layers and of every layer instead of the settings'.

        A residency that the user names holds unless another is given here.
        """
        settings = self.settings
        if settings.residency is not None and not (whole_layers or migrating_layers):
            named = settings.residency.of(len(self.spec.layers))
            whole_layers, migrating_layers = frozenset(named.whole), frozenset(named.migrating)
        return place(
            self.spec,
            settings.workers,
            layer_cuts=None if shares else settings.layer_split,
            layer_shares=shares or settings.layer_shares,
            tensor_shares=shares or settings.tensor_shares,
            whole_layers=whole_layers,
            migrating_layers=migrating_layers,
        )

    def case(self, placement: Placement, device_kind: str, compute_type: ComputeType) -> FitCase:
        """`device_kind`: "cpu" or "cuda". The longest chunk is the settings', or the longest there is."""
        settings, layouts = self.settings, self.layouts
        usual = KvType(compute_type)
        return FitCase(
            spec=self.spec,
            placement=placement,
            holding=holding_on(device_kind, compute_type),
            kv_format=settings.kv_format or KvFormat(usual, usual),
            journeys=journeys(settings.workers, layouts.prefill, layouts.decode),
            max_chunk_tokens=settings.max_chunk_tokens or 0,
            parallel_requests=self.parallel_requests,
            wide_sums=device_kind == "cuda" and compute_type is ComputeType.F16,
            exact_activations=device_kind == "cuda" and settings.exact_activations,
        )


def names_no_shares(settings: GroupSettings) -> bool:
    """Whether it is left to the program how much of the model each worker has."""
    return settings.layer_split is None and settings.layer_shares is None and settings.tensor_shares is None


def settle_compute_type(settings: GroupSettings, hellos: Sequence[Hello]) -> GroupSettings:
    """Where none is asked for, f16 if one of the workers' cards has no bf16: all compute in the same type."""
    if settings.compute_type is None and any(hello.compute_type is ComputeType.F16 for hello in hellos):
        return replace(settings, compute_type=ComputeType.F16)
    return settings


def settle_activations(settings: GroupSettings, device_kind: str) -> GroupSettings:
    """On a CPU exact ones are nothing that could be asked for."""
    return replace(settings, exact_activations=settings.exact_activations and device_kind != "cpu")


def memory_wish(settings: GroupSettings) -> MemoryWish:
    """What the user wants left free, and the most to be used, in bytes."""
    return MemoryWish(settings.reserve_bytes, settings.memory_limits)


def fit_group(
    plan: GroupPlan, placement: Placement, devices: Sequence[DeviceMemory], device_kind: str, wish: ContextWish
) -> GroupFit:
    """What is to be loaded on these devices. Raises `DoesNotFitError`.

    Where the compute type is the workers' to choose it must fit in the larger one; else the smaller is taken.
    """
    found = pools(devices, memory_wish(plan.settings))
    try_type = partial(fit_type, plan, placement, devices, device_kind, wish, found)
    asked = plan.settings.compute_type
    if asked is not None or device_kind == "cuda":
        return GroupFit(try_type(asked or ComputeType.BF16), asked)
    try:
        full = try_type(ComputeType.F32)
    except DoesNotFitError:
        return GroupFit(_smaller(try_type(ComputeType.BF16)), ComputeType.BF16)
    if full.context_tokens == wish.tokens and not full.warnings:
        return GroupFit(full, None)
    half = try_type(ComputeType.BF16)
    gained = half.context_tokens > full.context_tokens or len(half.warnings) < len(full.warnings)
    return GroupFit(_smaller(half), ComputeType.BF16) if gained else GroupFit(full, ComputeType.F32)


def fit_type(
    plan: GroupPlan,
    placement: Placement,
    devices: Sequence[DeviceMemory],
    device_kind: str,
    wish: ContextWish,
    found: Sequence[Pool],
    compute_type: ComputeType,
) -> Fit:
    """What is to be loaded in one compute type, `found` being the devices' room. Raises `DoesNotFitError`."""
    case = plan.case(placement, device_kind, compute_type)
    chunks: tuple[int, ...] = ()
    if not case.max_chunk_tokens:
        held, room = [one.base_bytes for one in devices], [one.room_bytes for one in devices]
        case = with_usual_chunk(case, wish.tokens, held, room)
        chunks = SHORT_CHUNKS
    ways = candidates(case, found, wish, plan.placement, chunks, plan.shares_open)
    if plan.settings.residency is not None:
        ways = (way for way in ways if way.case.placement == placement)
    return choose_fit(ways, found, wish, plan.placement)


def _smaller(fit: Fit) -> Fit:
    return replace(fit, notes=("compute type: bf16, as f32 would take too much memory", *fit.notes))
