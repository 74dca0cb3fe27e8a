"""Where `gearshift plan` has its costs from: a file, an earlier measurement, or workers started for it."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import to_builtins

from ... import __version__
from ...coordinator.chunks.plan import Limits
from ...coordinator.costs.cost_model import Costs
from ...coordinator.costs.files import CostFile, read_cost_file
from ...coordinator.fit.choice import ContextWish
from ...coordinator.model.spec import build_spec
from ...proto.codec import PROTOCOL_VERSION
from ...proto.errors import InputError
from ...proto.ids import ComputeType
from ...proto.model import ModelSpec
from ...proto.placement.cuts import place
from ...proto.words import counted
from ..doctor.card_process import nccl_case
from ..settings.options import Device, GroupSettings, LayoutSettings
from ..settings.settings import Settings
from ..settings.user_folders import costs_folder
from ..start.cost_cache import MEASURED, placement_digest, speed_variables
from ..start.fitting import GroupPlan, names_no_shares
from ..start.models import open_files
from ..start.session_setup import check_kv_format, chosen_context, open_model, open_session
from .fit import CPU, PlannedMemory, plan_memory
from .timed_points import timed_chunks, wanted_chunks

USUAL_MAX_CHUNK_TOKENS = 2048
MOST_CHUNK_TOKENS = (1 << 31) - 1  # as --max-chunk


@dataclass(frozen=True, slots=True)
class FoundCosts:
    """Costs and what else a plan needs to know of the group. `told`: where they are from, in words."""

    costs: Costs
    told: str
    facts: Mapping[str, object]
    limits: Limits
    model: str | None = None
    planned: PlannedMemory | None = None


def costs_of_file(path: Path, workers: int | None, max_chunk_tokens: int | None) -> FoundCosts:
    """Without a model: a file of costs carries all that is needed.

    Of its facts `devices` tells the chunk grid (all "cpu", or cards) and `max_chunk_tokens` what the buffers take.
    """
    file = read_cost_file(path)
    ranks = len(file.costs.stages)
    if workers is not None and workers != ranks:
        raise InputError(f"--workers {workers}: the costs in {path} are of {ranks}")
    named = file.facts.get("max_chunk_tokens")
    sound = isinstance(named, int) and not isinstance(named, bool) and 0 < named <= MOST_CHUNK_TOKENS
    buffers = named if isinstance(named, int) and sound else USUAL_MAX_CHUNK_TOKENS
    limits = Limits.for_device(device_kind(file.facts), max_chunk_tokens or buffers)
    return FoundCosts(file.costs, str(path), file.facts, limits)


def costs_of_model(
    model: str,
    settings: GroupSettings,
    layouts: LayoutSettings,
    tokens: tuple[int, int],
    chosen: Settings,
    costs_file: Path | None,
) -> FoundCosts:
    """For a model on this machine: by a file, else an earlier measurement, else one made now on workers.

    `tokens`: of the prompt and the answer. `chosen`: the context is taken from it.
    """
    files = open_files(model)
    wish = chosen_context(chosen, *tokens, build_spec(files).trained_context)
    plan = GroupPlan(build_spec(files, wish.tokens), settings, layouts, shares_open=names_no_shares(settings))
    check_kv_format(plan.spec, settings.kv_format)
    if costs_file is not None:
        file = read_cost_file(costs_file)
        if len(file.costs.stages) != settings.workers:
            raise InputError(
                f"--workers {settings.workers}: the costs in {costs_file} are of {len(file.costs.stages)}"
            )
        _refuse_another_model(plan.spec, file, costs_file)
        return _planned(plan, wish, file, str(costs_file))
    kept = None if settings.measure else kept_costs(plan.spec, settings, wish.tokens)
    if kept is not None:
        computed = kept[1].facts.get("compute_type")
        return _planned(plan, wish, kept[1], f"measured earlier on this machine, computing in {computed} ({kept[0]})")
    with open_session(open_model(model), settings, layouts, wish, measure=True) as session:
        driver = session.driver
        assert driver.costs is not None
        facts = {
            "devices": [hello.device for hello in session.cluster.hellos],
            "compute_type": str(session.loaded.compute_type),
            "points": to_builtins(driver.measuring_plan()),
        }
        if session.loaded.without_nccl:
            facts["without_nccl"] = True
        file = CostFile(driver.costs, facts)
    return _planned(plan, wish, file, "measured now")


def _refuse_another_model(spec: ModelSpec, file: CostFile, path: Path) -> None:
    """`InputError` where the costs were measured with other files, or name layers that the model has not."""
    measured, own = file.facts.get("files"), [one.fingerprint for one in spec.files]
    kinds = file.costs.layer_seconds.kinds if file.costs.layer_seconds is not None else ()
    layers = sum(len(kind.layers) for kind in kinds)
    if isinstance(measured, list) and measured != own:
        named = file.facts.get("model")
        of = f" ({named})" if isinstance(named, str) and named != spec.name else ""
        raise InputError(f"the costs in {path} were measured with another model's files{of}, not with {spec.name}'s")
    if kinds and layers != len(spec.layers):
        told = f"{counted(layers, 'layer')}, {spec.name} has {len(spec.layers)}"
        raise InputError(f"the costs in {path} are of a model with {told}")


def _planned(plan: GroupPlan, wish: ContextWish, file: CostFile, told: str) -> FoundCosts:
    """With what the group would take of this machine's memory."""
    kind = device_kind(file.facts)
    usual = ComputeType.F32 if kind == CPU else ComputeType.BF16
    named = file.facts.get("compute_type")
    measured = ComputeType(str(named)) if named in tuple(ComputeType) else usual
    found = plan_memory(
        plan, kind, plan.settings.compute_type or measured, wish, free_bytes_there(file.facts),
        without_nccl=file.facts.get("without_nccl") is True,
    )  # fmt: skip
    return FoundCosts(
        costs=file.costs,
        told=told,
        facts=file.facts,
        limits=Limits.for_device(kind, min(found.context_tokens, found.case.max_chunk_tokens)),
        model=plan.spec.name,
        planned=found,
    )


def kept_costs(
    spec: ModelSpec,
    settings: GroupSettings,
    context_tokens: int,
    environment: Mapping[str, str] = os.environ,
) -> tuple[Path, CostFile] | None:
    """What was measured with this model, as many workers and the same settings on this machine.

    Of what was measured in types that a group would not choose by itself nothing is taken, unless they are asked for.
    Timed with chunks like those that a group of this context would time goes first, else with the longest chunks; of
    these where the model lay exactly so goes before where it did not (with cuts or shares that were asked for, alone),
    then the newest.
    """
    wanted = {
        "files": [file.fingerprint for file in spec.files],
        "hosts": [socket.gethostname()] * settings.workers,
        "cores": len(os.sched_getaffinity(0)),
        "threads": settings.threads,
        "gearshift": __version__,
        "protocol": PROTOCOL_VERSION,
        "measured": MEASURED,
        "environment": speed_variables(environment),
        "links": to_builtins(settings.link_options),
    }
    if settings.compute_type is not None:
        wanted["compute_type"] = str(settings.compute_type)
    if settings.kv_format is not None:
        wanted["kv_type"] = [str(settings.kv_format.key), str(settings.kv_format.value)]
    found = [
        one
        for one in _newest_first(costs_folder(environment))
        if _suits(one[1].facts, wanted, settings.device) and _types_could_be_chosen(one[1].facts, settings)
        and _links_could_be_such(one[1].facts, settings)
    ]
    as_placed = placement_digest(
        place(
            spec,
            settings.workers,
            layer_cuts=settings.layer_split,
            layer_shares=settings.layer_shares,
            tensor_shares=settings.tensor_shares,
        )
    )
    exact = [one for one in found if one[1].facts.get("placement") == as_placed]
    if settings.layer_split or settings.layer_shares or settings.tensor_shares:
        found = exact

    def rank(one: tuple[Path, CostFile]) -> tuple[int, int, bool]:
        facts = one[1].facts
        timed = timed_chunks(facts)
        wanted = wanted_chunks(spec, device_kind(facts), settings.workers, context_tokens, settings.max_chunk_tokens)
        reach = (0, 0) if timed.suits(wanted) else (-timed.longest, -timed.deepest)
        return (*reach, one not in exact)

    suiting = [one for one in found if rank(one)[0] == 0]
    return min(suiting or found, key=rank, default=None)


def free_bytes_there(facts: Mapping[str, object]) -> tuple[int, ...]:
    """By rank, where a file's facts tell it (`device_free_bytes`) of cards that need not be here."""
    told = facts.get("device_free_bytes")
    found = told if isinstance(told, list) else []
    sound = all(isinstance(one, int) and not isinstance(one, bool) and 0 < one < 1 << 50 for one in found)
    return tuple(found) if sound else ()


def device_kind(facts: Mapping[str, object]) -> str:
    """`cpu` where all named devices are, else cards."""
    return CPU if set(_devices(facts)) == {CPU} else "cuda"


def _devices(facts: Mapping[str, object]) -> list[str]:
    devices = facts.get("devices")
    return [str(device) for device in devices] if isinstance(devices, list) else []


def _suits(facts: Mapping[str, object], wanted: Mapping[str, object], device: Device) -> bool:
    kinds = {Device.CPU: (CPU,), Device.CUDA: ("cuda",), Device.AUTO: (CPU, "cuda")}
    return device_kind(facts) in kinds[device] and all(
        facts.get(name) == value for name, value in wanted.items()
    )


def _types_could_be_chosen(facts: Mapping[str, object], settings: GroupSettings) -> bool:
    """Whether a group might compute so where types are left open: no CPU in f16, keys and values as all else is."""
    computed = facts.get("compute_type")
    if settings.compute_type is None and computed == str(ComputeType.F16) and device_kind(facts) == CPU:
        return False
    if device_kind(facts) != CPU and bool(facts.get("exact_activations")) != settings.exact_activations:
        return False
    return settings.kv_format is not None or facts.get("kv_type") == [computed, computed]


def _links_could_be_such(facts: Mapping[str, object], settings: GroupSettings) -> bool:
    """Whether such a group might have gone with or without NCCL as this one did; cards that are not asked may."""
    if device_kind(facts) == CPU:
        return True
    ways = {nccl_case(settings, reach).without for reach in (True, False)}
    return bool(facts.get("without_nccl")) in ways


def _newest_first(folder: Path) -> Iterator[tuple[Path, CostFile]]:
    """Files of costs that can be read; the others are for whoever measures to complain about."""
    written: list[tuple[float, Path]] = []
    with suppress(OSError):  # no folder, or none that may be looked into
        for path in folder.glob("*.json"):
            with suppress(OSError):  # it was put away meanwhile, or leads nowhere
                written.append((path.stat().st_mtime, path))
    for _, path in sorted(written, reverse=True):
        try:
            yield path, read_cost_file(path)
        except InputError:
            continue
