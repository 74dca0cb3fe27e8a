"""From settings to a group of workers that holds a model: what `run`, `logits` and `perplexity` share."""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import monotonic

from ...coordinator.chunks.plan import Auto, Sqrt
from ...coordinator.driver import Driver
from ...coordinator.driver_settings import DriverSettings
from ...coordinator.fit.choice import ContextWish, Fit
from ...coordinator.fit.device_memory import DeviceMemory, DeviceUse, device_uses, probe_memory
from ...coordinator.fit.memory import RankMemory
from ...coordinator.generation import GenerationRequest, told_cut
from ...coordinator.group.cluster import Cluster
from ...coordinator.group.load_result import LoadResult
from ...coordinator.model.files import ModelFiles
from ...coordinator.model.spec import build_spec
from ...coordinator.tokenizer import Tokenizer
from ...coordinator.trace import Trace
from ...proto.commands import LinkOptions
from ...proto.errors import DoesNotFitError, InputError
from ...proto.ids import Layout
from ...proto.kv import KvFormat, row_bytes
from ...proto.model import ModelSpec
from ...proto.placement.plan import Placement
from ...proto.reports import Hello, MemoryReported
from ...proto.words import counted
from ..console import load_progress, note, warn
from ..processes.local import local_cluster
from ..processes.restarts import RestartingGroup, StartGroup
from ..processes.waiting_agent import AgentAhead
from ..settings.options import GroupSettings, LayoutSettings
from ..settings.settings import Settings
from ..trace_file import trace_file
from .blame import file_is_blamed
from .cost_cache import settle_costs
from .fitting import GroupPlan, fit_group, names_no_shares, settle_activations, settle_compute_type
from .models import open_files, open_tokenizer
from .peers import ProvenPeers
from .sharing import settle_shares, told_differences

USUAL_CONTEXT_TOKENS = (
    4096  # where the user names none: trained lengths of 128K would reserve gigabytes of KV
)
REHEARSED_TOKENS = (128, 2048)
LEAST_CONTEXT_TOKENS = 512  # a group with less is not started, unless it was asked for


@dataclass(frozen=True, slots=True)
class Opened:
    """A model's files, read as far as the coordinator needs them; no worker runs yet."""

    files: ModelFiles
    spec: ModelSpec  # at the trained context
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class RunningModel:
    """A running group that holds a model."""

    driver: Driver
    placement: Placement
    start_seconds: float  # until every worker had joined
    loaded: LoadResult
    cluster: RestartingGroup
    trace: Trace | None = None  # where one is written
    plan: tuple[RankMemory, ...] = ()  # by rank, beside what its process held
    devices: tuple[DeviceMemory, ...] = ()  # before the load

    def device_uses(self, reports: Sequence[MemoryReported]) -> tuple[DeviceUse, ...]:
        """What each rank was planned to hold of its device, and what it holds."""
        return device_uses(self.plan, self.devices, self.cluster.hellos, reports)


def open_model(model: str) -> Opened:
    """Find and check a model's files. Raises `InputError` and its kinds for what cannot be taken."""
    files = open_files(model)
    spec = build_spec(files)
    tokenizer = open_tokenizer(files)
    for warning in tokenizer.warnings:
        warn(warning)
    return Opened(files, spec, tokenizer)


def wish_context(
    asked: int | None, prompt: int, answer: int | None, trained: int, place: str = "--context"
) -> ContextWish:
    """The context wanted for a prompt and an answer (None: as long as it gets). Refuses a prompt that does not fit.

    What was asked for is taken as it is; the answer ends where the context does. Else the memory may allow less, down
    to the prompt and a token. `place`: where the asked one stands.
    """
    if asked is not None and asked > trained:
        warn(f"{place} {asked} is longer than the {counted(trained, 'token')} this model was trained for")
    limit = asked or trained
    if prompt > limit:
        kind = place if asked else "the length this model was trained for"
        beyond = "" if asked else "; --context N goes beyond it"
        raise DoesNotFitError(f"the prompt has {counted(prompt, 'token')}, {kind} is {limit}{beyond}")
    cut = None
    if answer is not None and answer > limit - prompt + 1:  # the last token written is never fed: it needs no cell
        cut = told_cut(prompt, limit, answer)
        warn(cut)
    if asked is not None:
        return ContextWish(asked, asked=True, cut=cut)
    usual = min(trained, max(USUAL_CONTEXT_TOKENS, prompt + (answer or 0)))
    return ContextWish(usual, asked=False, needed=min(usual, max(prompt + 1, LEAST_CONTEXT_TOKENS)), cut=cut)


def chosen_context(chosen: Settings, prompt: int, answer: int | None, trained: int) -> ContextWish:
    """As `wish_context`, by the setting."""
    return wish_context(chosen.whole_number_or_none("context"), prompt, answer, trained, chosen.place("context"))


@contextmanager
def open_session(
    opened: Opened,
    settings: GroupSettings,
    layouts: LayoutSettings,
    context: int | ContextWish,
    *,
    parallel_requests: int = 1,
    gather: StartGroup | None = None,
    trace_path: str | None = None,
    restarts: int = 0,
    measure: bool | None = None,
    ahead: AgentAhead | None = None,
) -> Iterator[RunningModel]:
    """Start the workers, load the model on them, measure what has to be known; on leaving nothing is left of them.

    All that the user can have got wrong is refused before a worker is started. `gather` waits for workers that were
    started elsewhere instead. Where there is a `trace_path`, requests are traced there. A group that is lost under a
    request is started again up to `restarts` times. `measure` what work costs: None where it has to be known, True in
    any case, False where the caller does. `ahead`: an agent that the first group can have.
    """
    wish = ContextWish(context, asked=True) if isinstance(context, int) else context
    spec = build_spec(opened.files, wish.tokens)
    plan = GroupPlan(spec, settings, layouts, parallel_requests, names_no_shares(settings))
    placement = plan.placement()
    check_kv_format(spec, settings.kv_format)
    started = monotonic()
    local = ProvenPeers(partial(_local, settings, ahead), settings.link_options)
    workers: StartGroup = gather or local
    with trace_file(trace_path) as trace, RestartingGroup(workers, restarts) as cluster:
        start_seconds = monotonic() - started
        devices = sorted({hello.device for hello in cluster.hellos})
        note(_told_devices([hello.device for hello in cluster.hellos]))
        device_kind = "cpu" if devices == ["cpu"] else "cuda"
        if gather is None and device_kind == "cpu" and settings.workers > (cores := len(os.sched_getaffinity(0))):
            warn(f"{settings.workers} workers share {counted(cores, 'core')}: slow, and slow to measure")
        settings = replace(settings, link_options=local.options)  # what is measured belongs to these
        if (settled := settle_compute_type(settings, cluster.hellos)) != settings:
            note("compute type: f16, as a card before compute capability 8.0 has no bf16")
            settings = settled
        if (settled := settle_activations(settings, device_kind)) != settings:
            note("activations are exact in any case: on CPU none are in int8")
            settings = settled
        settings = settle_shares(cluster, cluster.hellos, spec, settings, _for_timing(settings, device_kind, wish))
        plan = replace(plan, settings=settings)
        placement = plan.placement()
        memory = probe_memory(cluster, cluster.hellos)
        found = fit_group(plan, placement, memory, device_kind, wish)
        fit, placement = found.fit, found.fit.case.placement
        _tell_fit(fit)
        context_tokens = fit.context_tokens
        spec = build_spec(opened.files, context_tokens)
        driver = Driver(
            cluster,
            spec,
            placement,
            DriverSettings(
                context_tokens=context_tokens,
                max_chunk_tokens=min(context_tokens, fit.case.max_chunk_tokens),
                device=device_kind,
                compute_type=found.compute_type,
                kv_format=settings.kv_format,
                exact_activations=settings.exact_activations,
                prefill=layouts.prefill,
                decode=layouts.decode,
                journeys=fit.case.journeys,
                shift_in_place=fit.case.in_place,
                parallel_requests=parallel_requests,
                token_gap_seconds=settings.token_gap_seconds or inf,
            ),
        )
        with load_progress(settings.workers) as show:
            loaded = driver.load(show)
        _tell_loaded(spec, loaded, context_tokens)
        costs = None
        if costs_are_needed(settings.workers, layouts) if measure is None else measure:
            costs = settle_costs(driver, cluster.now, placement, loaded, settings)
            _tell_differences(driver, cluster.hellos, settings, device_kind)
            if costs.measured and device_kind != "cpu":
                _compare_layouts(driver, layouts)
        driver.restart_by(cluster.regroup)
        if layouts.prefill is None or layouts.prefill is not layouts.decode:
            _time_migration(driver)
        _rehearse(driver)
        if trace is not None:
            driver.follow(trace, cluster.hellos)
        with file_is_blamed(spec):
            yield RunningModel(driver, placement, start_seconds, loaded, cluster, trace, fit.memory, memory)
        if costs is not None:
            costs.learn(driver)


def _local(
    settings: GroupSettings, ahead: AgentAhead | None, start: int, links: LinkOptions
) -> AbstractContextManager[Cluster]:
    return local_cluster(
        workers=settings.workers, device=settings.device, threads_per_worker=settings.threads, link_options=links,
        start=start, ahead=ahead,
    )  # fmt: skip


def _rehearse(driver: Driver) -> None:
    """Plan some requests that are not made: the first plan of a process takes twice as long as the others."""
    for tokens in REHEARSED_TOKENS:
        if tokens < driver.settings.context_tokens:
            driver.plan(GenerationRequest((0,) * tokens))


def _compare_layouts(driver: Driver, layouts: LayoutSettings) -> None:
    """A group's first start on cards: on the CPU all layouts run the same code, on the same cores."""
    from .layout_check import check_layouts  # late: NumPy, and rarely

    check_layouts(driver, left_open=layouts.prefill is None and layouts.decode is None)


def _for_timing(settings: GroupSettings, device_kind: str, wish: ContextWish) -> DriverSettings:
    """How some of the model's layers are loaded to time unequal devices with."""
    longest = min(wish.tokens, settings.max_chunk_tokens or wish.tokens)
    return DriverSettings(
        context_tokens=wish.tokens,
        max_chunk_tokens=longest,
        device=device_kind,
        compute_type=settings.compute_type,
        kv_format=settings.kv_format,
        exact_activations=settings.exact_activations,
    )


def _tell_differences(
    driver: Driver, hellos: Sequence[Hello], settings: GroupSettings, device_kind: str
) -> None:
    """On cards alone: on a CPU what else runs there tells more than the cores."""
    if device_kind == "cpu" or not names_no_shares(settings) or driver.costs is None:
        return
    if (told := told_differences(driver.costs, hellos, len(driver.spec.layers))) is not None:
        note(told)


def _time_migration(driver: Driver) -> None:
    try:
        driver.time_migration()
    except DoesNotFitError as error:
        warn(f"{error}: requests stay in the layout they are read in")
        return
    for story in list(driver.weights.stories)[-2:]:
        moved = f"{story.received_bytes / 2**20:,.0f} MiB in {1e3 * story.seconds:.0f} ms"
        note(f"weights to the {story.to} layout: {moved}")


def _tell_fit(fit: Fit) -> None:
    for warning in fit.warnings:
        warn(warning)
    for text in fit.notes:
        note(text)


def _told_devices(devices: Sequence[str]) -> str:
    """Which device each rank has; said once where all have the same."""
    if len(set(devices)) == 1:
        return f"{counted(len(devices), 'worker')} on {devices[0]}"
    return ", ".join(f"rank {rank} on {device}" for rank, device in enumerate(devices))


def check_kv_format(spec: ModelSpec, kv_format: KvFormat | None) -> None:
    """`InputError` where a type's blocks do not fill a head's row."""
    if kv_format is None:
        return
    for layer in spec.layers:
        try:
            row_bytes(kv_format.key, layer.key_width)
            row_bytes(kv_format.value, layer.value_width)
        except ValueError as error:
            raise InputError(f"--kv-type does not suit this model: {error}") from None


def _tell_loaded(spec: ModelSpec, loaded: LoadResult, context_tokens: int) -> None:
    held = sum(loaded.weight_bytes) / 2**20
    kv = f"{loaded.kv_format.key}/{loaded.kv_format.value}"
    file_gigabytes = sum(file.byte_count for file in spec.files) / 1e9
    note(
        f"{spec.name}: {held:,.0f} MiB of weights in {loaded.compute_type}, "
        f"{sum(loaded.kv_bytes) / 2**20:,.0f} MiB of KV in {kv} for {counted(context_tokens, 'token')} of context "
        f"(trained for {spec.trained_context}), loaded in {loaded.seconds:.1f} s "
        f"({file_gigabytes / max(loaded.seconds, 1e-3):.2g} GB/s of its file)"
    )


def costs_are_needed(workers: int, layouts: LayoutSettings) -> bool:
    """Whether the policy has a choice to make, or the chunk rule asks for measured costs."""
    if workers == 1:
        return False
    if layouts.prefill is None or layouts.decode is None:
        return True
    measured_rule = layouts.chunk_rule == Auto() or layouts.chunk_rule == Sqrt(None)
    return layouts.prefill is Layout.LAYER and measured_rule
