"""Where `gearshift plan` has its costs from: a file, an earlier measurement, or workers started for it."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..coordinator.chunk_plan import Limits
from ..coordinator.cost_files import CostFile, read_cost_file
from ..coordinator.cost_model import Costs
from ..proto.codec import PROTOCOL_VERSION
from ..proto.commands import LinkOptions
from ..proto.errors import DoesNotFitError, InputError
from ..proto.model import ModelSpec
from ..proto.placement.cuts import place
from .cost_cache import placement_digest, speed_variables
from .options import Device, GroupSettings, LayoutSettings
from .plan_report import PhaseBytes
from .session_setup import Opened, open_model, open_session
from .user_folders import costs_folder

CPU = "cpu"
USUAL_CONTEXT_TOKENS = 4096
USUAL_MAX_CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class FoundCosts:
    """Costs and what else a plan needs to know of the group. `told`: where they are from, in words."""

    costs: Costs
    told: str
    facts: Mapping[str, object]
    limits: Limits
    model: str | None = None
    memory: Sequence[PhaseBytes] | None = None
    context_tokens: int | None = None


def costs_of_file(path: Path, workers: int | None, max_chunk_tokens: int | None) -> FoundCosts:
    """Without a model: a file of costs carries all that is needed.

    Of its facts `devices` tells the chunk grid (all "cpu", or cards) and `max_chunk_tokens` what the buffers take.
    """
    file = read_cost_file(path)
    ranks = len(file.costs.stages)
    if workers is not None and workers != ranks:
        raise InputError(f"--workers {workers}: the costs in {path} are of {ranks}")
    named = file.facts.get("max_chunk_tokens")
    buffers = (
        named
        if isinstance(named, int) and not isinstance(named, bool) and named > 0
        else USUAL_MAX_CHUNK_TOKENS
    )
    limits = Limits.for_device(device_kind(file.facts), max_chunk_tokens or buffers)
    return FoundCosts(file.costs, str(path), file.facts, limits)


def costs_of_model(
    model: str,
    settings: GroupSettings,
    layouts: LayoutSettings,
    tokens: tuple[int, int],
    context_tokens: int | None,
    costs_file: Path | None,
) -> FoundCosts:
    """For a model on this machine: by a file, else an earlier measurement, else one made now on workers.

    `tokens`: of the prompt and the answer.
    """
    opened = open_model(model)
    context = _context(context_tokens, tokens, opened.spec.trained_context)
    told, file = "", None
    if costs_file is not None:
        told, file = str(costs_file), read_cost_file(costs_file)
    elif not settings.measure and (kept := kept_costs(opened.spec, settings)) is not None:
        told, file = f"measured earlier on this machine ({kept[0]})", kept[1]
    if file is None:
        told, file = "measured now", _measured_now(opened, settings, layouts, context)
    longest = min(context, settings.max_chunk_tokens or USUAL_MAX_CHUNK_TOKENS)
    limits = Limits.for_device(device_kind(file.facts), longest)
    return FoundCosts(file.costs, told, file.facts, limits, opened.spec.name, None, context)


def kept_costs(
    spec: ModelSpec, settings: GroupSettings, environment: Mapping[str, str] = os.environ
) -> tuple[Path, CostFile] | None:
    """What was measured with this model, as many workers and the same settings on this machine, the newest first.

    Nothing is found for links that were asked to be slow. Where the model lay exactly so goes before where it did not; with cuts or shares that were asked for, alone.
    """
    if settings.link_options != LinkOptions():
        return None
    wanted = {
        "files": [file.fingerprint for file in spec.files],
        "hosts": [socket.gethostname()] * settings.workers,
        "cores": len(os.sched_getaffinity(0)),
        "threads": settings.threads,
        "gearshift": __version__,
        "protocol": PROTOCOL_VERSION,
        "environment": speed_variables(environment),
    }
    if settings.compute_type is not None:
        wanted["compute_type"] = str(settings.compute_type)
    if settings.kv_format is not None:
        wanted["kv_type"] = [str(settings.kv_format.key), str(settings.kv_format.value)]
    found = [
        one
        for one in _newest_first(costs_folder(environment))
        if _suits(one[1].facts, wanted, settings.device)
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
    asked = settings.layer_split or settings.layer_shares or settings.tensor_shares
    return next(iter(exact if asked else exact + found), None)


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


def _newest_first(folder: Path) -> Iterator[tuple[Path, CostFile]]:
    """Files of costs that can be read; the others are for whoever measures to complain about."""
    paths = [path for path in folder.glob("*.json") if path.is_file()] if folder.is_dir() else []
    for path in sorted(paths, key=lambda one: one.stat().st_mtime, reverse=True):
        try:
            yield path, read_cost_file(path)
        except InputError:
            continue


def _measured_now(
    opened: Opened, settings: GroupSettings, layouts: LayoutSettings, context_tokens: int
) -> CostFile:
    with open_session(opened, settings, layouts, context_tokens) as session:
        costs = session.driver.costs or session.driver.measure_costs().costs
        return CostFile(costs, {"devices": [hello.device for hello in session.cluster.hellos]})


def _context(asked: int | None, tokens: tuple[int, int], trained: int) -> int:
    """As a run would have it."""
    prompt, answer = tokens
    if prompt > (asked or trained):
        raise DoesNotFitError(f"a prompt of {prompt} tokens does not fit in a context of {asked or trained}")
    return asked or min(trained, max(USUAL_CONTEXT_TOKENS, prompt + answer))
